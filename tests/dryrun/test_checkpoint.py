"""Checkpoints of safetensors under a dry run, and threads that read them."""
import json
import textwrap
from contextlib import ExitStack

import pytest

from analyzer.tools.dryrun.script import dry_run

safetensors = pytest.importorskip("safetensors")


@pytest.fixture
def run(tmp_path):
    def run(text, **options):
        path = tmp_path / "script.py"
        path.write_text("import sys, torch\nfrom torch import nn\n" + textwrap.dedent(text))
        return dry_run(path, [str(tmp_path)], **options)
    return run


@pytest.fixture
def header(tmp_path):
    """A file that ends behind its header."""
    def write(entries, name="w.safetensors"):
        text = json.dumps(entries).encode()
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") + text)
    return write


ENTRIES = {"__metadata__": {"format": "pt"}, "b": {"dtype": "BF16", "shape": [4, 6], "data_offsets": [0, 48]},
           "a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [48, 56]}}


def test_a_checkpoint_is_read_by_its_header(run, header, capsys):
    header(ENTRIES)
    found = run("""
    import safetensors, safetensors.torch
    path = sys.argv[1] + "/w.safetensors"
    with safetensors.safe_open(path, framework="pt", device="cuda") as f:
        print(f.keys(), f.offset_keys(), f.metadata())
        part = f.get_slice("b")
        print(part.get_shape(), part.get_dtype(), part[1:3, ::2].shape, part[...].device, part[:].is_contiguous())
        print(f.get_tensor("a").dtype, list(f.get_tensors()))
        try:
            f.get_tensor("c")
        except safetensors.SafetensorError as error:
            print(error)
    loaded = safetensors.torch.load_file(path)
    print({name: (t.dtype, tuple(t.shape), t.device.type) for name, t in loaded.items()})
    """)
    assert found.error is None, found.format_error()
    assert capsys.readouterr().out.splitlines() == [
        "['a', 'b'] ['b', 'a'] {'format': 'pt'}",
        "[4, 6] BF16 torch.Size([2, 3]) cuda:0 True",
        "torch.float8_e4m3fn ['b', 'a']",
        "File does not contain tensor c",
        "{'b': (torch.bfloat16, (4, 6), 'cpu'), 'a': (torch.float8_e4m3fn, (8,), 'cpu')}"]
    assert "checkpoints of safetensors were read for names, shapes and dtypes alone" in found.profile.assumptions


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0\0\0\0\0[1,2]", b"\x02\0\0\0\0\0\0\0{a"])
def test_a_file_without_a_header_is_named(run, tmp_path, content):
    (tmp_path / "w.safetensors").write_bytes(content)
    found = run("""
    import safetensors
    safetensors.safe_open(sys.argv[1] + "/w.safetensors", "pt")
    """)
    assert isinstance(found.error, safetensors.SafetensorError) and "w.safetensors" in str(found.error)


def test_nothing_is_written_over_a_checkpoint(run, header, tmp_path):
    header(ENTRIES)
    before = (tmp_path / "w.safetensors").read_bytes()
    found = run("""
    from safetensors.torch import save_file, save_model
    save_file({"a": torch.randn(4, device="cuda")}, sys.argv[1] + "/w.safetensors")
    save_model(nn.Linear(2, 2), sys.argv[1] + "/v.safetensors")
    """)
    assert found.error is None, found.format_error()
    assert (tmp_path / "w.safetensors").read_bytes() == before and not (tmp_path / "v.safetensors").exists()
    assert any("save_file" in a and "wrote nothing" in a for a in found.profile.assumptions)


ROUND_TRIPS = {
    "path": """torch.save(net.state_dict(), path); back = torch.load(path)""",
    "pathlib": """torch.save(net.state_dict(), Path(path)); back = torch.load(Path(path), map_location="cuda")""",
    "trusted": """torch.save(net.state_dict(), path); back = torch.load(path, weights_only=False, mmap=True)""",
    "buffer": """file = io.BytesIO(); torch.save(net.state_dict(), file); file.seek(0); back = torch.load(file)""",
    "open file": """
    with open(path, "wb") as file:
        torch.save(net.state_dict(), file)
    with open(path, "rb") as file:
        back = torch.load(file)""",
    "whole module": """torch.save(net, path); back = torch.load(path, weights_only=False).state_dict()""",
    "nested": """
    torch.save({"epoch": 3, "net": net.state_dict(), "optimizer": best.state_dict()}, path)
    found = torch.load(path); best.load_state_dict(found["optimizer"]); back = found["net"]
    assert found["epoch"] == 3""",
    "renamed": """
    torch.save(net.state_dict(), path + ".tmp"); os.replace(path + ".tmp", path)
    assert os.path.exists(path) and not os.path.exists(path + ".tmp"); back = torch.load(path)""",
    "best": """
    torch.save(net.state_dict(), path); shutil.copyfile(path, path + ".best"); os.remove(path)
    assert not Path(path).exists() and os.path.isfile(path + ".best"); back = torch.load(path + ".best")""",
    "listed": """
    import glob
    folder = Path(path).parent / "kept"
    for step in (1, 2):
        os.makedirs(folder, exist_ok=True)
        torch.save(net.state_dict(), folder / f"step_{step}.pt")
    names = ["step_1.pt", "step_2.pt"]
    assert sorted(os.listdir(folder)) == names == sorted(p.name for p in folder.glob("*.pt"))
    assert names == sorted(p.name for p in folder.iterdir()) == sorted(os.walk(folder).__next__()[2])
    with os.scandir(folder) as entries:
        assert sorted(e.name for e in entries if e.is_file() and e.stat().st_size) == names
    latest = max(glob.glob(str(folder / "*.pt")), key=os.path.getmtime)
    assert latest == str(folder / "step_2.pt") and glob.glob(latest) == [latest]
    back = torch.load(latest)
    shutil.rmtree(folder)
    assert not os.path.exists(latest) and os.listdir(folder.parent).count("kept") == 0""",
    "safetensors": """
    save_file(net.state_dict(), path); back = load_file(path, device="cuda")""",
    "safetensors of a model": """
    save_model(net, path); assert load_model(net, path, device="cuda") == (set(), []); back = net.state_dict()""",
    "elsewhere": """
    torch.save(net.state_dict(), path); back = torch.load(path, map_location="cpu")
    assert not any(t.is_cuda for t in back.values()); back = {n: t.cuda() for n, t in back.items()}""",
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("way", ROUND_TRIPS)
def test_a_script_reads_what_it_saved(run, tmp_path, way):
    """What is read is on the device as long as its name lives: one matrix of 1024 x 1024 more."""
    peaks = {}
    for name, text in {"nothing": "back = None", way: ROUND_TRIPS[way]}.items():
        found = run("""
    import io, os, shutil
    from pathlib import Path
    from safetensors.torch import load_file, load_model, save_file, save_model
    path = sys.argv[1] + "/last.pt"
    net = nn.Linear(1024, 1024, bias=False).cuda()
    best = torch.optim.SGD(net.parameters(), .1)
    """ + text.strip("\n ") + """
    if back is not None:
        net.load_state_dict(back)
    for _ in range(4):
        net(torch.rand(2, 1024, device="cuda")).mean().backward()
        best.step()
        best.zero_grad()
    """)
        assert found.error is None, found.format_error()
        peaks[name] = found.profile.peak_allocated_bytes
    if "model" in way:  # which keeps nothing else
        assert peaks[way] == peaks["nothing"]
    else:
        assert peaks[way] - peaks["nothing"] == 2**22
    left = {p.name: p.stat().st_size for p in tmp_path.iterdir() if p.name != "script.py"}
    assert left == ({"last.pt": 0} if way == "open file" else {})  # which the script itself makes


def test_a_file_of_another_run_is_read_to_the_device_asked_for(run, tmp_path):
    import torch

    torch.save({"weight": torch.rand(512, 512), "counts": torch.arange(3)}, tmp_path / "last.pt")
    before = (tmp_path / "last.pt").read_bytes()
    found = run("""
    path = sys.argv[1] + "/last.pt"
    found = torch.load(path, map_location="cuda")
    assert torch.cuda.memory_allocated() == 512 * 512 * 4 + 512
    assert found["counts"].tolist() == [0, 1, 2] and found["weight"].device == torch.device("cuda", 0)
    torch.save(found["weight"][:2], path)
    assert torch.load(path).shape == (2, 512)
    torch.set_rng_state(torch.get_rng_state())
    torch.save(torch.get_rng_state(), path)
    torch.set_rng_state(torch.load(path))
    """)
    assert found.error is None, found.format_error()
    assert (tmp_path / "last.pt").read_bytes() == before


def test_safetensors_is_as_it_was(run, header, tmp_path):
    import safetensors.torch
    import torch

    import_by_name = safetensors.torch.safe_open
    header(ENTRIES)
    run("import safetensors.torch\nfrom safetensors import safe_open\nfrom safetensors.torch import save_file\n")
    assert safetensors.safe_open is import_by_name is safetensors.torch.safe_open
    safetensors.torch.save_file({"x": torch.arange(3)}, tmp_path / "x.safetensors")
    assert safetensors.torch.load_file(tmp_path / "x.safetensors")["x"].tolist() == [0, 1, 2]


def test_tasks_of_a_pool_make_their_tensors_in_turn(run):
    text = """
    from concurrent.futures import ThreadPoolExecutor
    def make(i):
        return torch.empty(i + 1, 1 << 18, device="cuda")
    def refuse():
        return torch.empty(2, 3) @ torch.empty(2, 3)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(make, i) for i in range(6)]
        failed = pool.submit(refuse)
    made = [f.result() for f in futures]
    addresses = [t.data_ptr() for t in made]
    assert torch.cuda.memory_allocated() == sum(t.nbytes for t in made)
    assert isinstance(failed.exception(), RuntimeError), failed.exception()
    print([a - addresses[0] for a in addresses])
    """
    first, second = run(text), run(text)
    assert first.error is None, first.format_error()
    assert first.profile.peak_allocated_bytes == second.profile.peak_allocated_bytes == 21 * 2**20


def test_a_thread_of_the_scripts_own_runs_under_the_mode(run, capsys):
    """It waits for the main thread, as one that makes text while the other prints it."""
    found = run("""
    import queue, threading
    model = nn.Linear(64, 64).cuda()
    asked, answers = queue.Queue(), queue.Queue()
    def serve():
        while (x := asked.get()) is not None:
            answers.put(model(x))
    thread = threading.Thread(target=serve)
    thread.start()
    for rows in (3, 5):
        asked.put(torch.randn(rows, 64, device="cuda"))
        y = answers.get()
        print(tuple(y.shape), y.device)
    asked.put(None)
    thread.join()
    """)
    assert found.error is None, found.format_error()
    assert capsys.readouterr().out == "(3, 64) cuda:0\n(5, 64) cuda:0\n"
    assert found.profile.fwd_macs == 8 * 64 * 64


def test_threads_of_other_programs_are_left_alone(run):
    import threading
    from concurrent.futures import ThreadPoolExecutor

    before = threading.Thread.start, ThreadPoolExecutor.submit
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(int, "3").result() == 3
        run("print(1)")
        assert pool.submit(int, "4").result() == 4
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == before


def test_what_was_replaced_is_put_back_where_the_next_replacement_fails(monkeypatch):
    import torch

    from analyzer.tools.dryrun import patch

    def fail(files, everywhere):
        raise MemoryError

    names = [(torch.distributed, "init_process_group"), (torch.multiprocessing, "spawn")]
    before = [getattr(owner, name) for owner, name in names]
    monkeypatch.setattr(patch, "read_headers_alone", fail)
    with pytest.raises(MemoryError), ExitStack() as until, patch.scripted(until):
        pass
    assert [getattr(owner, name) for owner, name in names] == before
