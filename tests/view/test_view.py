"""`analyzer view`: who may ask, what a request may say, which code may run; its figures are those of a profile."""
from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from analyzer import profile
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.parallel.rank_row import describe_rank
from analyzer.parallel.rank_table import RankTable
from analyzer.report.comparison.compare import compare
from analyzer.report.page.document import unpack
from analyzer.results.command import CommandInfo
from analyzer.results.node_info import TensorInfo
from analyzer.results.profile import Profile
from analyzer.results.world import WorldInfo
from analyzer.units import format_bytes
from analyzer.view.origin import find_origin
from analyzer.view.server import MOST_BYTES, ViewServer
from analyzer.view.setting import change_settings, list_choices, read_settings
from analyzer.view.viewed import read_files
from analyzer.zoo.target import load_target

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NET = """
import torch
class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 64)
    def forward(self, x):
        if x.shape[0] == 13:
            raise RuntimeError("thirteen")
        return super().forward(x)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file of code, the profile of its model, and one of a model that ships."""
    path = tmp_path_factory.mktemp("view")
    (path / "own.py").write_text(NET)
    for name, target, size in (("own", f"{path}/own.py:Net", "8x64"), ("shipped", "resnet18", "2x3x64x64")):
        assert main(["profile", target, "--input", size, "--optimizer", "adamw", "--device", "t4", "--output",
                     str(path / "table"), "--show", "table", "--format", "csv", "--json", f"{path}/{name}.json"]) == 0
    return path


@pytest.fixture(scope="module")
def server(folder):
    """Of both; the code may run."""
    assert read_files([folder / "own.json"]).profiles[0].origin.command is None
    both = read_files([folder / "own.json", folder / "shipped.json"])
    own = read_files([folder / "own.json"], f"{folder}/own.py:Net")
    with ViewServer(both._replace(profiles=own.profiles + both.profiles[1:])) as running:
        running.worker.start()
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server, path, body=None, headers=(), root=None):
    """Status and text of an answer."""
    url = f"http://127.0.0.1:{server.server_port}{server.root if root is None else root}{path}"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} if data is not None else {}
    try:
        with urlopen(Request(url, data, {**sent, **dict(headers)}), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_changed_settings_give_the_figures_of_a_profile(server):
    status, text = ask(server, "1/run", {"batch": 4, "image": 32, "optimizer": None, "device": "h100"})
    assert status == 200
    target = load_target("resnet18")
    expected = profile(target.build, torch.empty(4, 3, 32, 32), device="h100")
    saved = server.viewed.profiles[1].saved
    peaks = f"Peak allocated {format_bytes(saved.peak_allocated_bytes)} → {format_bytes(expected.peak_allocated_bytes)}"
    answer = json.loads(text)
    assert answer["change"].startswith(peaks) and answer["change"].endswith("fits on t4 → fits on h100_sxm")
    run = server.viewed.profiles[1].runs[1]
    assert replace(run.profile, made_by=None, name=expected.name) == replace(expected)
    assert str(run.command) == ("analyzer profile resnet18 --input float32:4x3x32x32 --mode train --accumulate 1 "
                                "--convention own --device h100")
    status, page = ask(server, answer["page"], root="")
    parts = {part["kind"]: part["data"] for part in unpack(page)}
    assert status == 200 and [part["kind"] for part in unpack(page)][:3] == ["verdict", "what_if", "memory"]
    assert {field["name"]: field["value"] for field in parts["what_if"]["fields"]} == {
        "batch": 4, "image": 32, "device": "h100", "dtype": None, "autocast": None, "optimizer": None,
        "checkpointing": False}
    assert f'<p class="change">{answer["change"]} (<a href="{server.root}1/1/change">' in page
    status, changed = ask(server, "1/1/change")
    assert status == 200 and changed == compare(saved, run.profile).to_html()
    assert "batch size 2 → 4, image size 64 → 32, device t4 → h100, optimizer adamw → none" in page
    assert "connect-src 'self'" in page
    assert 'run 1</a>' in ask(server, "1/")[1]


def test_several_files_make_a_list_with_what_changed(server, folder):
    status, page = ask(server, "")
    assert status == 200 and f'<a href="{server.root}1/">{folder}/shipped.json</a>' in page
    assert f'<a href="{server.root}pages/0">{folder}/own.json → {folder}/shipped.json</a>' in page
    own, shipped = server.viewed.profiles
    assert ask(server, "pages/0") == (200, compare(own.saved, shipped.saved).to_html())


def test_a_table_of_ranks_is_a_page_and_its_ranks_are_others(tmp_path, server):
    profiles = {0: server.viewed.profiles[0].saved, 3: server.viewed.profiles[1].saved}
    rows = tuple([describe_rank(profile, rank, (rank,), f"kind {rank}") for rank, profile in profiles.items()])
    table = RankTable(4, rows, profiles=profiles)
    table.to_json(tmp_path / "ranks.json")
    viewed = read_files([tmp_path / "ranks.json"])
    with pytest.raises(InputError, match="--target x.py:Net: the file is of resnet18; leave --target out"):
        read_files([tmp_path / "ranks.json"], "x.py:Net")
    assert [one.name for one in viewed.profiles] == [f"{tmp_path}/ranks.json, rank {i} (kind {i})" for i in (0, 3)]
    assert [one.saved for one in viewed.profiles] == list(profiles.values())
    assert viewed.pages[0].write() == table.to_html()


@pytest.mark.parametrize(("path", "changes", "status"), [
    ("", {"headers": {"Host": "evil.example"}}, 403),
    ("", {"headers": {"Host": "127.0.0.1:1"}}, 403),
    ("", {"root": "/"}, 404),
    ("", {"root": "/wrong/"}, 404),
    ("1/run", {"root": "/wrong/", "body": {}}, 404),
    ("1/run", {"headers": {"Host": "evil.example"}, "body": {}}, 403),
    ("1/run", {"headers": {"Origin": "http://evil.example"}, "body": {}}, 403),
    ("1/run", {"headers": {"Origin": "null"}, "body": {}}, 403),
    ("1/run", {"headers": {"Content-Type": "text/plain"}, "body": {}}, 415),
    ("1/run", {"body": b"{" + b" " * MOST_BYTES}, 413),
    ("1/run", {"headers": {"Content-Length": "-1"}, "body": {}}, 411),
    ("1/run", {"body": b"[" * 9000}, 400),
    ("1/run", {"body": b"[]"}, 400),
    ("9/", {}, 404), ("x/", {}, 404), ("1/77", {}, 404), ("1/-1", {}, 404), ("1/0/0", {}, 404),
    ("1/../../etc", {}, 404), ("pages/1", {}, 404), ("pages/", {}, 404), ("pages/0/0", {}, 404), ("1/0/x", {}, 404),
    ("1/rm", {"body": {}}, 404), ("9/run", {"body": {}}, 404),
])
def test_others_are_refused(server, path, changes, status):
    before = [one.made for one in server.viewed.profiles]
    found, text = ask(server, path, **changes)
    assert found == status and "<html" not in text
    assert [one.made for one in server.viewed.profiles] == before


def test_it_listens_on_the_loopback_address_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(InputError, match=rf"--port {server.server_port}: Address already in use; give another one"):
        ViewServer(server.viewed, server.server_port)
    with pytest.raises(InputError, match="--port 70000"):
        ViewServer(server.viewed, 70000)
    with urlopen(f"http://localhost:{server.server_port}{server.root}1/", timeout=60) as answer:
        assert answer.headers["Referrer-Policy"] == "no-referrer" and answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(("wanted", "status", "text"), [
    ({"batch": 0}, 400, "Batch size 0: must be a whole number of at least 1"),
    ({"batch": "8"}, 400, "Batch size '8': must be a whole number"),
    ({"batch": True}, 400, "Batch size True: must be a whole number"),
    ({"sequence": 8}, 400, "'sequence': is nothing that can be changed here; these can: batch, device"),
    ({"input": "8x8"}, 400, "'input': is nothing that can be changed here"),
    ({"target": "x.py:Net"}, 400, "'target': is nothing that can be changed here"),
    ({"device": "h1000"}, 400, "Device 'h1000': did you mean"),
    ({"device": "/etc/passwd"}, 400, "Device '/etc/passwd': "),
    ({"device": None}, 400, "Device None: must be a name"),
    ({"optimizer": "os:system"}, 400, "Optimizer 'os:system': must be one of sgd, momentum"),
    ({"dtype": "int8"}, 400, "--dtype int8: no floating dtype"),
    ({"autocast": "--help"}, 400, "argument --autocast: invalid choice: '--help'"),
    ({"checkpointing": "yes"}, 400, "Checkpointing 'yes': must be true or false"),
    ({"checkpointing": True}, 400, "checkpointing: Net has no repeated blocks"),
    ({"batch": 13}, 422, "own.py:Net failed: "),
])
def test_settings_that_cannot_be_say_why(server, wanted, status, text):
    found, answer = ask(server, "0/run", wanted)
    assert found == status and text in json.loads(answer)["error"], answer


def test_a_run_that_is_stopped_says_so_and_the_next_one_runs(server):
    answers = []
    assert json.loads(ask(server, "0/stop", {})[1]) == {"stopped": False}
    asking = threading.Thread(target=lambda: answers.append(ask(server, "1/run", {"batch": 3})))
    asking.start()
    while not server.worker._is_busy:
        assert asking.is_alive() or not answers
    assert json.loads(ask(server, "0/stop", {})[1]) == {"stopped": True}
    asking.join()
    assert answers == [(409, '{"error": "stopped"}')]
    assert ask(server, "0/run", {"batch": 3})[0] == 200


def test_requests_wait_for_each_other(server):
    answers = {}
    asking = [threading.Thread(target=lambda n=n: answers.update({n: ask(server, "0/run", {"batch": n})}))
              for n in (5, 6, 7)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    runs = server.viewed.profiles[0].runs
    for batch, (status, answer) in answers.items():
        assert status == 200 and runs[int(json.loads(answer)["page"].rpartition("/")[2])].profile.batch_size == batch


def saved(target="gpt2", **options):
    return Profile(name="Net", mode="train", made_by=CommandInfo(target, {"input": ("int64:2x64",), **options}))


@pytest.mark.parametrize(("made", "target", "text"), [
    (Profile(name="Net", mode="infer"), None, "The file does not say which command made it"),
    (saved("mynet.py:Net"), None, "mynet.py:Net, code that runs only where a command line names it: analyzer view FILE "
     "--target mynet.py:Net"),
    (saved("os.path:join"), None, "It is of os.path:join, code"),
    (saved(optimizer="os:system"), None, "Its optimizer is os:system, code"),
    (saved("mynet.py:Net", optimizer="os:system"), "mynet.py:Net", "Its optimizer is os:system, code"),
    (saved(**{"optimizer=os:system": True}), None, "'optimizer=os:system' is no name of an option"),
    (saved(optimizer=("sgd", "os:system")), None, "Its optimizer is os:system, code"),
    (saved(attention="evil/kernel"), None, "Its attention is 'evil/kernel'"),
    (saved(json="/etc/passwd"), None, "unrecognized arguments: --json=/etc/passwd"),
    (saved(world=8, rank=9), None, "cannot be read: "),
    (saved(device="h1000"), None, "unknown device 'h1000'"),
    (saved(device="/etc/passwd"), None, "Its device is /etc/passwd, a file that is read only where a command line "
     "names it: analyzer profile --device /etc/passwd"),
    (saved(device="card.json"), "gpt2", "Its device is card.json, a file"),
    (saved(world=8, cluster="hosts.json"), None, "Its cluster is hosts.json, a file"),
    (saved("hf:config.json:GPT2Model"), None, "It is of hf:config.json:GPT2Model, a file that is read only where a "
     "command line names it: analyzer view FILE --target hf:config.json:GPT2Model"),
])
def test_a_file_runs_no_code_of_its_own(made, target, text):
    origin = find_origin(made, target)
    assert origin.command is None and text in origin.refusal


def test_target_names_what_a_file_does_not():
    assert find_origin(saved(optimizer="torch.optim:RAdam")).command.target == "gpt2"
    assert find_origin(saved("mynet.py:Net"), "here/mynet.py:Net").note == "The file is of mynet.py:Net"
    with pytest.raises(InputError, match="--target x.py:Net: the file is of gpt2; leave --target out"):
        find_origin(saved(), "x.py:Net")
    guessed = find_origin(Profile(name="Net", mode="infer", device="t4", optimizer="custom", inputs={
        "x": TensorInfo((2, 8), "float32", "cuda:0"), "n": TensorInfo((), "int64", "cpu")}), "mynet.py:Net")
    assert str(guessed.command) == ("analyzer profile mynet.py:Net --input x=float32:2x8 --input n=int64:scalar --mode "
                                    "infer --device t4")
    assert guessed.note.endswith("it is taken that it was so, without its optimizer, which the program made itself")
    with pytest.raises(InputError, match=r"the file has an input 'batch\[0\]', which no --input can name"):
        find_origin(Profile(name="Net", mode="infer", inputs={"batch[0]": TensorInfo((2,), "int64", "cpu")}), "x:Net")


def test_a_rank_that_python_made_is_taken_to_be_one_of_its_job(tmp_path):
    made = Profile(name="Net", mode="train", device="h100_sxm", optimizer="torch.optim:RAdam",
                   inputs={"x": TensorInfo((2, 8), "float32", "cuda:3")}, world=WorldInfo(16, 3, 8, "dgx_h100"))
    origin = find_origin(made, "mynet.py:build")
    assert str(origin.command) == ("analyzer profile mynet.py:build --input x=float32:2x8 --mode train --device "
                                   "h100_sxm --optimizer torch.optim:RAdam --world 16 --rank 3 --devices-per-host 8 "
                                   "--cluster dgx_h100")
    assert origin.note.endswith("it is taken that it was so")
    assert find_origin(replace(made, optimizer="os:system"), "mynet.py:build").refusal.startswith(
        "Its optimizer is os:system, code that runs only")
    RankTable(16, (describe_rank(made, 3, (3,), "kind"),), profiles={3: made}).to_json(tmp_path / "ranks.json")
    assert read_files([tmp_path / "ranks.json"], "mynet.py:build").profiles[0].origin == origin


def test_settings_of_sequences_and_what_stays():
    command = CommandInfo("gpt2", {"input": ("input_ids=int64:2x64", "labels=int64:2x64"), "device": "NVIDIA L4",
                                   "optimizer": "torch.optim:RAdam", "lora": "r=8"})
    settings = read_settings(command)
    assert settings == {"batch": 2, "sequence": 64, "device": "NVIDIA L4", "dtype": None, "autocast": None,
                        "optimizer": "torch.optim:RAdam", "checkpointing": False}
    assert list_choices("optimizer", settings["optimizer"])[0] == ("torch.optim:RAdam",) * 2
    assert ("h100_sxm", "h100_sxm") in list_choices("device", "NVIDIA L4")
    changed = change_settings(command, {**settings, "batch": 3, "sequence": 32, "checkpointing": True})
    assert str(changed) == ("analyzer profile gpt2 --input input_ids=int64:3x32 --input labels=int64:3x32 --device "
                            "'NVIDIA L4' --optimizer torch.optim:RAdam --lora r=8 --checkpointing")


@pytest.mark.parametrize("argv", [["nope.json"], ["own.py"]])
def test_files_that_are_none(folder, argv, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["view", *argv, "--no-browser"]) == 2
    assert argv[0] in capsys.readouterr().err


def test_the_command_prints_the_address_and_ends_by_ctrl_c(folder):
    command = [sys.executable, "-m", "analyzer", "view", str(folder / "own.json"), "--no-browser"]
    # a shell may have started the tests with SIGINT ignored, and then so are their children
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as running:
        try:
            line = running.stdout.readline()
            url = re.fullmatch(r"(http://127\.0\.0\.1:\d+/\S{24}/)  \(Ctrl-C ends it\)\n", line)[1]
            with urlopen(url, timeout=60) as answer:
                assert "code that runs only where a command line names it" in answer.read().decode()
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (running.returncode, said) == (0, "")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_changes_the_batch(server):
    sync_api = pytest.importorskip("playwright.sync_api")
    expected = profile(load_target(server.viewed.profiles[0].origin.command.target).build, torch.empty(4096, 64),
                       optimizer="adamw", device="t4")
    heard = []
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda said: heard.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda asked: heard.append(asked.url) if not asked.url.startswith(server.url) else None)
        page.goto(f"{server.url}0/")
        page.fill(".what_if input[name=batch]", "4096")
        page.keyboard.press("Enter")
        page.wait_for_selector(".what_if .change")
        assert page.url.startswith(f"{server.url}0/")
        assert format_bytes(expected.peak_allocated_bytes) in page.inner_text(".verdict .tiles")
        assert "batch size 8 → 4096" in page.inner_text(".what_if .runs")
        assert page.input_value(".what_if input[name=batch]") == "4096"
        assert heard == []
        page.select_option(".what_if select[name=dtype]", "fp16")
        page.fill(".what_if input[name=batch]", "13")
        page.click(".what_if .start")
        page.wait_for_selector(".what_if .note.failed")
        assert "thirteen" in page.inner_text(".what_if .note.failed")
        browser.close()
