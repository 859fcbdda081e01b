"""Work over a second shows on a terminal how far it is, whatever the command, and leaves its output as it is."""
import gc
import io
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from analyzer.cli import main
from analyzer.record import progress
from analyzer.record.progress import progress_part, report_progress, watch_progress
from analyzer.report import progress_bar
from analyzer.report.progress_bar import ProgressBar

NET = """
import torch
from analyzer.zoo.gpt2 import GPT2

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(*[torch.nn.Linear(8, 8) for _ in range(4)])

class Language(GPT2):
    def __init__(self):
        super().__init__(vocabulary=64, positions=64, hidden=32, layers=2, heads=2)

def train():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        print("step", i, end=" ")
        model(torch.rand(2, 8))
        print("looked at")  # a bar is drawn below finished lines alone
        model(torch.rand(2, 8)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    train()
"""
COMMANDS = {
    "profile": ["profile", "{net}:Net", "--input", "4x8"],
    "several": ["profile", "{net}:Net", "{net}:Net", "--input", "4x8"],
    "devices of fit": ["fit", "{net}:Net", "--input", "4x8"],
    "fit": ["fit", "{net}:Net", "--input", "4x8", "--device", "t4", "--at-most", "8"],
    "plan": ["plan", "{net}:Net", "--input", "4x8", "--budget", "90%", "--frontier", "90%,80%"],
    "generate": ["generate", "{net}:Language", "--prompt", "4", "--new-tokens", "4"],
    "dryrun": ["dryrun", "{net}", "--steps", "3"],
    "measure": ["measure", "{net}:Net", "--input", "4x8", "--steps", "2", "--show", "summary"],
    "sweep": ["sweep", "{net}:Net", "--input", "4x8", "--batch", "1,2", "--workers", "0"],
    "compare": ["compare", "{saved}", "{saved}"]}
BAR = re.compile(r"\r\x1b\[K\[([#.]{30})\] +(?:(\d+)%)? +\d+ s ([^\r\x1b]*)")
# of two runs these differ: times that are measured or that work took
TIMES = re.compile(r"[\d.]+ [mnu]?s\b|[\d.]+ [KMGT]?FLOP(?:S|/s)|samples(?:/| a )second .*|\s+|-+|0x\w+|[\d.]+ *%")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(progress_bar, "_REDRAW_SECONDS", 0.001)


def run(words: list[str], monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> tuple[str, str]:
    """What a command prints on a terminal, and on one of its own for errors."""
    stdout = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        assert main(words) == 0
        assert sys.stdout is stdout and sys.stderr is stderr
    return stdout.getvalue(), stderr.getvalue()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_how_far_it_is(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (net := tmp_path / "net.py").write_text(NET)
    saved = tmp_path / "saved.json"
    if command == "compare":
        assert main(["profile", f"{net}:Net", "--input", "4x8", "--json", str(saved)]) == 0
    words = [word.format(net=net, saved=saved) for word in COMMANDS[command]]
    plain, quiet = run(words, monkeypatch, io.StringIO())
    shown, drawn = run(words, monkeypatch, Terminal())
    assert TIMES.sub("", shown) == TIMES.sub("", plain) and not BAR.search(quiet)
    shares = [int(share) for _, share, _ in BAR.findall(drawn) if share]
    assert shares == sorted(shares) and all(0 <= share < 100 for share in shares)
    assert shares, "something was drawn, with how far it is"
    assert drawn.endswith("\r\x1b[K"), "and nothing is left of it"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("command", ["profile", "devices of fit", "sweep", "dryrun"])
def test_a_log_has_a_line_now_and_then(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_LINE_SECONDS", 0.0)
    (net := tmp_path / "net.py").write_text(NET)
    words = [word.format(net=net) for word in COMMANDS[command]]
    _, told = run(words, monkeypatch, io.StringIO())
    lines = [line for line in told.splitlines() if line.startswith("analyzer: ")]
    assert lines and all(re.fullmatch(rf"analyzer: {words[0]}(, \d+%)?(, .+)?, \d+ s", line) for line in lines)
    assert not any(", 100%" in line for line in lines)
    assert main(["profile", f"{net}:Net", "--input", "4x8"]) == 0  # the name is of its command alone
    for stream in (io.StringIO(), Terminal()):
        _, told = run(["--quiet", *words] if command == "sweep" else [*words, "--quiet"], monkeypatch, stream)
        assert "analyzer: " not in told and not BAR.search(told)


def test_silent_work_shows_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_REDRAW_SECONDS", 0.01)
    with ProgressBar(stream := Terminal()):
        deadline = time.monotonic() + 10
        while not BAR.search(stream.getvalue()) and time.monotonic() < deadline:
            time.sleep(0.01)
    found = BAR.search(stream.getvalue())
    assert found is not None and found[2] is None and stream.getvalue().endswith("\r\x1b[K")
    assert not any(thread.name == "analyzer progress" for thread in threading.enumerate())


def test_nothing_is_drawn_over_a_line_that_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = Terminal()
    monkeypatch.setattr(sys, "stdout", stdout)
    with ProgressBar(stream := Terminal(), among_output=True, ticks=False) as bar:
        print("loss", end=" ")
        time.sleep(0.002)
        bar(0.5, "layer1")
        assert stream.getvalue() == ""
        print("0.5")
        time.sleep(0.002)
        bar(0.6, "layer2")
        assert "60%" in stream.getvalue()
        print("next")
        assert stream.getvalue().endswith("\r\x1b[K")
    assert stdout.getvalue() == "loss 0.5\nnext\n"


def test_a_result_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    with ProgressBar(stream := Terminal(), ticks=False) as bar:
        print("the table")
        time.sleep(0.002)
        bar(0.9, "late")
    assert stream.getvalue() == ""


def test_no_watcher_is_left_where_work_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (net := tmp_path / "net.py").write_text("import torch\nclass Net(torch.nn.Linear):\n"
                                            "    def __init__(self):\n        super().__init__(8, 8)\n"
                                            "    def forward(self, x):\n        raise RuntimeError('own')\n")
    monkeypatch.setattr(sys, "stderr", Terminal())
    for command in (["profile", f"{net}:Net", f"{net}:Net"], ["fit", f"{net}:Net"]):
        assert main([*command, "--input", "4x8"]) == 1
    gc.collect()  # of what a traceback held
    assert progress._watched.watcher is None


def test_parts_of_parts() -> None:
    seen: list[tuple[float, str]] = []
    with watch_progress(lambda share, what: seen.append((share, what))):
        with progress_part(0.5, 1.0, "second"), progress_part(0.0, 0.5, "its first"):
            report_progress(1.0, "layer")
    assert seen == [(0.5, "second"), (0.5, "second: its first"), (0.75, "second: its first: layer")]
