"""The command line as its users run it."""
import dataclasses
import io
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import analyzer
from analyzer import Profile, options, profile
from analyzer.api.prediction import SAVED_OPTIONS
from analyzer.cli import main, make_parser
from analyzer.commands import COMMANDS
from analyzer.facts import read_facts
from analyzer.hardware import find_device
from analyzer.option import Option
from analyzer.recipe.recipe import Recipe
from analyzer.report.progress_bar import ProgressBar
from analyzer.tools.sweep.configuration import Configuration

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("given", "name"), [("AdamW", "adamw"), ("SGD", "sgd"), ("AdamW-8bit", "adamw8bit")])
def test_an_optimizer_is_known_in_any_case(given, name):
    model, x = torch.nn.Linear(64, 64), torch.empty(2, 64)
    found, wanted = (profile(model, args=(x,), optimizer=text) for text in (given, name))
    assert found.optimizer == Recipe(optimizer=given).optimizer == Configuration(optimizer=given).optimizer == name
    assert found.optimizer_bytes == wanted.optimizer_bytes


def test_profile_prints_the_table_and_the_summary_and_saves_files(run, tmp_path):
    code, out, err = run("profile", "resnet18", "--input", "2x3x64x64", "--optimizer", "adamw", "--autocast",
                         "bf16", "--show", "table,summary", "--json", str(tmp_path / "p.json"), "--html",
                         str(tmp_path / "p.html"))
    assert (code, err) == (0, "")
    assert out.splitlines()[1].startswith("Op type")
    assert "11,689,512" in out
    p = Profile.from_json(tmp_path / "p.json")
    assert (p.params, p.optimizer, p.autocast, p.device) == (11_689_512, "adamw", "bfloat16", "h200")
    assert "<html" in (tmp_path / "p.html").read_text()


def test_the_sample_in_the_readme_is_what_make_profile_prints(run):
    command, sample = re.search(r"`make profile` runs `analyzer (.+?)` and prints[^\n]*\n\n```text\n(.*?)```",
                                (ROOT / "README.md").read_text(), re.DOTALL).groups()
    assert f"\t$(BIN)/analyzer {command}\n" in (ROOT / "Makefile").read_text()
    code, out, _ = run(*command.split())
    # versions are the machine's
    shown = [line for line in sample.splitlines() if line.strip() != "..." and not line.startswith("torch ")]
    assert code == 0 and len(shown) > 25
    printed = iter(out.splitlines())
    assert [line for line in shown if line not in printed] == [], "not printed, or not in this order"


@pytest.mark.parametrize(("argv", "text"), [
    (["profile", "vit_b_61"], "did you mean vit_b_16"),
    (["profile", "resnet18", "--device", "h2000"], "h200"),
    (["profile", "resnet18", "--device", "cuda:0"], "give its name, e.g. rtx_4090"),
    (["fit", "resnet18", "--device", "GPU"], "give its name, e.g. rtx_4090"),
    (["profile", "resnet18", "--batch-size", "32"], "--batch-size 32: the batch is the first size of an input; write "
     "--input float32:32x3x224x224\n"),
    (["plan", "gpt2", "--budget", "1GiB", "--bs", "4"], "write --input input_ids=int64:4x1024\n"),
    (["advise", "resnet18", "--input", "8x3x64x64", "--batch", "2"], "write --input float32:2x3x64x64\n"),
    (["profile", "resnet18", "--batch-size", "0"], "--batch-size 0: a batch has at least one sample\n"),
    (["profile", "torch.nn:Identity", "--batch-size", "2"], "e.g. --input 2x3x224x224"),
    (["profile", "resnet18", "--optimizer", "AdamWW"], "did you mean adamw?"),
    (["fit", "resnet18", "--optimizer", "nadam"], "did you mean torch.optim:NAdam?"),
    (["profile", "resnet18", "--show", "everything"], "--show everything: 'everything' is no report; there are "),
    (["profile", "resnet18", "--show", "moduls"], "did you mean modules?"),
    (["profile", "resnet18", "--show", "cost"], "`analyzer show FILE --tokens N` or --samples N says it"),
    (["profile", "resnet18", "--report", "tree"], "--report tree: `analyzer profile` does not take this; it belongs to "
     "`analyzer show`; save the profile with --json FILE for it"),
    (["profile", "resnet18", "--optimiser=adamw"], "--optimiser=adamw: `analyzer profile` does not take this; did you "
     "mean --optimizer?"),
    (["dryrun", "train.py", "--batch", "64"], "after `--`: analyzer dryrun train.py -- --batch 64\n"),
    (["dryrun", "train.py", "--devise", "t4", "--", "--amp"], "did you mean --device?"),
    (["plan", "resnet18", "--budget", "1.5"], "write bytes of the whole step as '24GiB'"),
    (["generate", "gpt2", "--prefill-chunks=8", "x"], "--prefill-chunks=8 x: `analyzer generate` does not take this"),
    (["measure", "resnet18", "--budget", "1GiB"], "does not take this; it belongs to `analyzer plan`\n"),
    (["fits", "resnet18"], "fits: write `analyzer fit`, without --device or with one for each device of a table\n"),
    (["fit", "resnet18", "--device", "t4", "--device", "l4", "--memory", "1GiB"], "--memory: is for one device, "
     "and 2 are given; give one"),
    (["fit", "resnet18", "--device", "t4", "--format", "csv"], "--format csv: is for the table of devices"),
    (["fit", "gpt2", "--device", "t4", "--batch", "--sequence"], "--batch --sequence: give one of them"),
    (["profile", "resnet18", "--input", "images=2x3x64x64"], "images"),
    (["devices", "h2000"], "h2000"),
])
def test_bad_input_exits_with_2_and_says_what_and_how(run, argv, text):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("analyzer: ")
    assert text in err
    assert "Traceback" not in err


def test_devices_lists_the_catalogue_and_the_sources(run):
    code, out, _ = run("devices")
    assert code == 0
    assert all(name in out for name in ("h200", "h100_sxm", "a100_40gb", "a100_80gb", "l4", "t4", "rtx_4090", "cpu"))
    code, out, _ = run("devices", "h200")
    assert code == 0
    assert "memory_bandwidth" in out or "bandwidth" in out


def test_help_says_what_the_package_has():
    """In `facts.json`, which help reads in place of files that import torch."""
    texts = [(ROOT / "analyzer" / name).read_text() for name in ("options.py", "commands.py")]
    runs = {command.run for command in COMMANDS.values()}
    places = {place for text in texts for place in re.findall(r"[\"{](analyzer[\w.]+:\w+)[\"}]", text)} - runs
    assert places == set(read_facts())
    # in a process of its own: reports are in the order in which their files are imported
    script = "from analyzer.facts import read_facts, write_facts; print(write_facts(read_facts()), end='')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "analyzer/facts.json").read_text() == done.stdout, "it must hold what this script prints"


def test_help_teaches_every_form_of_target_on_a_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as exit_:
        main(["profile", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 77
    for word in ("torchvision:NAME", "timm:NAME", "hf:CONFIG.json", "package.module:factory", "examples:",
                 "exit codes"):
        assert word in out
    assert make_parser().prog == "analyzer" and len(COMMANDS["profile"].flags) <= 33


@pytest.mark.parametrize(("tty", "elapsed", "drawn"), [(True, 2.0, True), (True, 0.5, False), (False, 2.0, False)])
def test_the_bar_is_drawn_on_a_terminal_after_a_second(monkeypatch, tty, elapsed, drawn):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: tty)
    bar = ProgressBar(stream)
    now[0] += elapsed
    bar(0.5, "layer4")
    assert ("50%" in stream.getvalue() and "layer4" in stream.getvalue()) == drawn
    bar.clear()
    assert stream.getvalue().endswith("\x1b[K") == drawn


RESNET = ("profile", "resnet18", "--input", "2x3x32x32", "--mode", "infer")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """A saved profile."""
    path = tmp_path_factory.mktemp("saved") / "resnet.json"
    assert main([*RESNET, "--show", "brief", "--json", str(path)]) == 0
    return str(path)


@pytest.mark.parametrize(("words", "expected"), [
    (["deepspeed", "--top-modules", "2", "--module-depth", "1"],
     ["Top 2 modules in terms of", "(conv1): Conv2d(9.41 K = 0.08% Params, "]),
    (["flops-profiler", "--no-detail"], ["params per device:", "11.69 M"]),
    (["torchinfo", "--columns", "num_params,kernel_size", "--depth", "1"],
     ["├─Conv2d: 1-1", "[7, 7]", "Total params: 11,689,512"]),
    (["torchinfo", "--format", "markdown"], ["| ResNet"]),
    (["tids", "--depth", "1"], ["(layer1): Sequential, num_params 147968, "]),
    (["tree", "--depth", "1", "--sort", "params", "--columns", "params_share", "--format", "csv"],
     ["├─layer4,Sequential,8.39 M", "71.81%"]),
])
def test_reports(run, resnet, words, expected):
    code, out, err = run("show", resnet, "--report", *words)
    assert (code, err) == (0, "")
    assert all(text in out for text in expected)
    assert "Op type" not in out


@pytest.mark.parametrize(("words", "text"), [
    (["--report", "tids", "--top-modules", "2"], "--top-modules: --report tids has no such option"),
    (["--report", "deepspeed", "--format", "csv"], "--format: --report deepspeed has no such option"),
    (["--report", "tree", "--columns", "parms"], "did you mean 'params'"),
    (["--report", "tree,tre"], "--report tree,tre: 'tre' is no report; did you mean tree?"),
    (["--report", "nowhere.py:own"], "--report nowhere.py:own: no file 'nowhere.py' in "),
    (["--columns", "zz"], "--columns: --report screen has no such option; these have it: "),
    (["--report", "summary,brief", "--depth", "0"], "--depth: --report summary,brief has no such option"),
    (["--report", ""], "--report '': nothing to print; give some of "),
    (["--report", "modules", "--format", "csv", "--raw"], "--raw: --report modules has no such option"),
])
def test_options_that_a_report_does_not_have(run, resnet, words, text):
    code, out, err = run("show", resnet, *words)
    assert (code, out) == (2, "") and text in err


@pytest.mark.parametrize(("words", "show"), [(RESNET, ""), (RESNET, " , "), (("dryrun", "script.py"), "")])
def test_nothing_to_show_is_refused(run, words, show):
    code, out, err = run(*words, "--show", show)
    assert (code, out) == (2, "") and f"--show {show!r}: nothing to print; give some of " in err


def test_a_depth_is_a_number_of_levels(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["show", "a.json", "--depth", "-2"])
    assert ended.value.code == 2 and "--depth: '-2': must be a number of levels, 0 or more" in capsys.readouterr().err


def test_the_world_of_a_fit_has_at_least_one_process(run):
    assert run("fit", "resnet18", "--device", "t4", "--world", "0") == (
        2, "", "analyzer: world_size=0: must be the number of processes that train together, at least 1\n")


@pytest.mark.parametrize(("words", "text"), [
    (["generate", "gpt2", "--prompt", "5000", "--new-tokens", "4"],
     "profile_generate(prompt_tokens=5000, new_tokens=4): GPT2 has 1,024 positions, and together these take 5,003"),
    (["profile", "gpt2", "--input", "input_ids=int64:1x1025", "--mode", "infer"],
     "input_ids of 1,025 tokens: this model has positions for 1,024; give no more"),
])
def test_more_tokens_than_a_model_has_positions(run, words, text):
    code, out, err = run(*words)
    assert (code, out) == (2, "") and text in err


@pytest.mark.parametrize("option", [["--optimizer", "adamw"], ["--accumulate", "4"]])
@pytest.mark.parametrize("command", ["profile", "measure", "fit"])
def test_inference_excludes_what_training_alone_has(run, command, option):
    code, out, err = run(command, "resnet18", "--input", "2x3x32x32", "--mode", "infer", *option)
    assert (code, out) == (2, "") and f"--mode infer {' '.join(option)}: an inference step has no" in err


def test_options_of_one_flag_have_names_of_their_own():
    names = Counter(option.name for group in vars(options).values() if isinstance(group, tuple) for option in group
                    if isinstance(option, Option))
    assert names == Counter(options.OPTIONS.keys())
    assert make_parser("show").parse_args(["show", "p.json", "--samples", "300M"]).samples == 3e8


def test_a_saved_profile_holds_each_option_of_its_step():
    of_the_output = {"command", "target", "others", "batch_size", "show", "json", "html", "export",
                     "headroom", "no_advice", "quiet", "lengths", "batching", "padding"}
    assert vars(make_parser("profile").parse_args(["profile", "gpt2"])).keys() - of_the_output == set(SAVED_OPTIONS)


def test_what_lacks_is_named_once(capsys):
    with pytest.raises(SystemExit):
        main(["profile"])
    assert capsys.readouterr().err.splitlines() == [
        "usage: analyzer profile [options] TARGET [TARGET ...]",
        "analyzer profile: error: the following arguments are required: TARGET; e.g. analyzer profile vit_b_16 --input "
        "8x3x224x224"]


@pytest.mark.parametrize(("argv", "text"), [
    (["plan", "resnet18"], "are required: --budget; e.g. analyzer plan vit_b_16 --budget 50%\n"),
    (["compare"], "are required: FILE; e.g. analyzer compare before.json after.json\n"),
    (["profil", "vit_b_16"], "did you mean profile? (choose from "),
    (["profile", "resnet18", "--mode", "inference"], "did you mean inference_mode? (choose from "),
    (["profile", "--compile", "resnet18"], "a target goes before it: analyzer profile resnet18 --compile"),
])
def test_what_the_parser_refuses_ends_with_an_example(capsys, argv, text):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_an_error_is_as_wide_as_the_terminal(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = run("profile", "vit_b16")[2]
    monkeypatch.setenv("COLUMNS", "80")
    wrapped = run("profile", "vit_b16")[2]
    assert whole.count("\n") == 1 and max(map(len, wrapped.splitlines())) <= 80
    assert wrapped.split() == whole.split() and wrapped.splitlines()[1].startswith("  ")


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"analyzer {analyzer.__version__}\n"


SCRIPT = """
import torch
model = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("words", [
    RESNET, ("measure", *RESNET[1:], "--steps", "1", "--warm-up", "0"), ("dryrun", "SCRIPT"),
    ("generate", "gpt2", "--prompt", "4", "--new-tokens", "2")])
def test_what_is_saved_is_saved_where_the_reader_of_the_output_has_gone(tmp_path, words, monkeypatch):
    def refuse(*_, file=None, **__):
        if file is None:
            raise BrokenPipeError

    path, script, closed = tmp_path / "p.json", tmp_path / "train.py", []
    script.write_text(SCRIPT)
    monkeypatch.setattr("builtins.print", refuse)  # as `head` does
    monkeypatch.setattr(sys.stderr, "close", lambda: closed.append(True))
    argv = [str(script) if word == "SCRIPT" else word for word in words]
    assert main([argv[0], "--json", str(path), *argv[1:]]) == 0
    assert closed == [True] and json.loads(path.read_text())


def test_a_device_of_a_file_has_verdict_utilization_and_roofline(run, tmp_path):
    path, out = tmp_path / "card.json", tmp_path / "roof.csv"
    spec = dataclasses.replace(find_device("a10"), name="bench_card", aliases=())
    path.write_text(json.dumps(spec.to_dict()))
    code, printed, _ = run(*RESNET, "--device", str(path), "--show", "brief", "--export", f"roofline={out}")
    assert code == 0 and "MFU" in printed and "fits on bench_card" in printed
    assert out.read_text().startswith("name,kind,part,type,flops,bytes,intensity,seconds,")


def test_experts_are_chosen_unevenly_with_a_skew(run, tmp_path):
    """96 choices by Zipf's law of exponent 1 among 4 experts, whose harmonic number is 25/12: 46 fall on the first."""
    (tmp_path / "experts.py").write_text("""
from torch import bincount, nn
class First(nn.Linear):
    def forward(self, x):
        rows, = bincount(nn.functional.linear(x, self.weight).argmax(-1), minlength=4)[:1].tolist()
        return nn.functional.linear(x[:rows], self.weight)
def build():
    return First(8, 4, bias=False)
""")
    for words, rows, saved in ((), 24, None), (("--skew", "1.0"), 46, "1"):
        assert run("profile", f"{tmp_path / 'experts.py'}:build", "--input", "96x8", *words, "--json",
                   str(tmp_path / "p.json"))[0] == 0
        p = Profile.from_json(tmp_path / "p.json")
        assert (p.fwd_macs, p.made_by.options.get("skew")) == ((96 + rows) * 8 * 4, saved)


def test_a_saved_profile_says_which_command_made_it_and_that_makes_it_again(run, tmp_path):
    code, _, _ = run("profile", "resnet18", "--mode", "infer", "--dtype", "bf16", "--device", "a100",
                     "--input", "2x3x64x64", "--json", str(tmp_path / "p.json"))
    saved = Profile.from_json(tmp_path / "p.json")
    command = ("analyzer profile resnet18 --input float32:2x3x64x64 --mode infer --dtype bf16 --accumulate 1 --device "
               "a100 --convention own")
    assert code == 0 and str(saved.made_by) == command and saved.inputs["x"].dtype == "bfloat16"
    code, _, _ = run(*shlex.split(command)[1:], "--json", str(tmp_path / "again.json"))
    again = Profile.from_json(tmp_path / "again.json")
    assert code == 0 and again == saved and again.made_by == saved.made_by
