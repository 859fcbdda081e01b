"""Files are written whole or not at all, and what cannot be written is said before the work."""
import os
import resource
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest

from analyzer import Profile
from analyzer.cli import main
from analyzer.commands import COMMANDS
from analyzer.errors import InputError, OutputError
from analyzer.on_use import load
from analyzer.output import check_output, write_output
from analyzer.results.info import MemoryEvent, ModuleInfo
from analyzer.tools.generation.generation_profile import GenerationProfile

NET = Profile(name="Net", mode="infer", params=3, modules=ModuleInfo(path="", type="Net", params=3),
              memory_events=tuple(MemoryEvent("alloc", 512 * i, 512, "x" * 50) for i in range(100)))
GENERATION = GenerationProfile(name="Net", device=None, cache="none", batch_size=1, prompt_tokens=1, new_tokens=1,
                               steps=(), prefill=NET)
WRITERS = {
    "json": NET.to_json, "html": NET.to_html, "trace": NET.to_chrome_trace, "snapshot": NET.to_memory_snapshot,
    "deepspeed": lambda path: NET.report("deepspeed", output_file=path), "generation": GENERATION.to_json}


@contextmanager
def small_disk():
    """A block in which no file can grow beyond 100 bytes: pytest's own output may be one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_good_old_file(writer, tmp_path):
    path = tmp_path / "good"
    path.write_text("good")
    with small_disk(), pytest.raises(OutputError, match="good.*could not be written: File too large"):
        WRITERS[writer](path)
    assert path.read_text() == "good" and os.listdir(tmp_path) == ["good"]


@pytest.mark.parametrize("command", [["profile"], ["measure"], ["generate"], ["plan", "--budget", "90%"]])
@pytest.mark.parametrize(("path", "words"), [
    ("", "is a folder; give the name of a file"),
    ("{folder}", "is a folder; give the name of a file"),
    ("{folder}/none/p.json", "none does not exist"),
    ("{folder}/a\0b", "cannot have a NUL"),
    ("{folder}/" + "x" * 300, "File name too long"),
])
def test_what_cannot_be_written_is_said_before_the_work(command, path, words, tmp_path, capsys, monkeypatch):
    load(COMMANDS[command[0]].run)  # a module that is imported first below would keep what is patched
    monkeypatch.setattr("analyzer.zoo.target.load_target", lambda name: pytest.fail("the work had begun"))
    assert main([command[0], "gpt2", *command[1:], "--json", path.format(folder=tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_a_dry_run_looks_at_its_outputs_first(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError")
    assert main(["dryrun", str(script), "--json", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_what_is_no_path():
    with pytest.raises(InputError, match="3: must be the path of a file"):
        NET.to_json(3)


def test_links_that_lead_nowhere_are_refused_before_the_work(tmp_path):
    loop, dangling, fresh = tmp_path / "loop", tmp_path / "dangling", tmp_path / "fresh"
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "absent" / "file")
    fresh.symlink_to(tmp_path / "file")
    for path, problem in ((loop, "is a link that leads to itself"),
                          (dangling, f"the folder {tmp_path / 'absent'} does not exist")):
        with pytest.raises(OutputError) as caught:
            check_output(path)
        assert str(caught.value) == f"{str(path)!r}: {problem}" and path.is_symlink()
    write_output(fresh, "new")
    assert fresh.is_symlink() and (tmp_path / "file").read_text() == "new"


def test_modes_and_links_are_kept(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_output(link, "new")
    assert link.is_symlink() and target.read_text() == "new" and stat.S_IMODE(target.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        write_output(tmp_path / "fresh", b"new")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o640


def test_a_pipe_is_written_to():
    code = "from analyzer.output import write_output; write_output('/dev/stdout', 'text')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "text"


def test_an_interrupt_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        NET.to_json(tmp_path / "p.json")
    assert os.listdir(tmp_path) == []
