"""Ctrl-C ends a command with 130 and a line, whenever it is pressed."""
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from analyzer.cli import main

ROOT = Path(__file__).parents[2]
#: The first import of torch is interrupted, in code that swallows that, as C code does: it goes on or fails.
LATE = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Presses(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(10):
                    pass
            except KeyboardInterrupt:
                {then}

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Presses())
from analyzer.cli import main
sys.exit(main(["profile", "gpt2", "--quiet"]))
"""
EARLY = """
import signal, sys
from analyzer.__main__ import run

class Pressed:
    def __getattr__(self, name):
        exec("signal.default_int_handler(signal.SIGINT, None)")

sys.modules["analyzer.cli"] = Pressed()
sys.exit(run())
"""


@pytest.mark.parametrize("then, said", [
    ("pass", "analyzer: interrupted\n"),
    ("raise ImportError('half of it')", "analyzer: interrupted; then ImportError: half of it\n")])
def test_one_that_an_import_swallows_is_heard(then: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", LATE.format(then=then)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_one_before_the_command_line_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "analyzer: interrupted\n")


@pytest.mark.parametrize("handler", [signal.default_int_handler, print])
def test_the_handler_is_put_back(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(_arguments: object) -> int:
        seen.append(signal.getsignal(signal.SIGINT))
        return 0

    monkeypatch.setattr("analyzer.api.models_command.run_devices", run)
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert main(["devices"]) == 0
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (seen[0] is handler) == (handler is print)  # the caller's own stays
