"""Whatever encoding a terminal has, tables are printed: in ASCII where it has no characters to draw with."""
import io
import sys

import pytest
import torch

from analyzer import Profile
from analyzer.cli import main
from analyzer.dropins.torchinfo import summary
from analyzer.results.info import ModuleInfo

INNER = ModuleInfo(path="body", type="Sequential", depth=1, params=3, children=(
    ModuleInfo(path="body.水", type="Linear", depth=2, params=3),))
NET = Profile(name="Net", mode="infer", modules=ModuleInfo(path="", type="Net", params=3, children=(INNER,)))


def terminal(encoding, errors="strict"):
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)


def read(stream):
    stream.flush()
    return stream.buffer.getvalue().decode(stream.encoding)


@pytest.mark.parametrize(("encoding", "errors", "drawn"), [
    ("cp1252", "strict", ["|-body", "|  `-?"]),
    ("ascii", "strict", ["|-body", "|  `-?"]),
    ("cp437", "strict", ["├─body", "│  └─?"]),
    ("utf-8", "strict", ["├─body", "│  └─水"]),
    ("cp1252", "replace", ["??body", "?  ???"]),
])
def test_trees_are_drawn_with_what_the_terminal_has(encoding, errors, drawn, tmp_path, monkeypatch):
    NET.to_json(tmp_path / "net.json")
    stream = terminal(encoding, errors)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["show", str(tmp_path / "net.json"), "--report", "tree"]) == 0
    lines = read(stream).splitlines()
    assert [line[:len(text)] for line, text in zip(lines[-4:-2], drawn)] == drawn
    assert stream.errors == errors  # as it was


def test_drop_ins_print_there_too(monkeypatch):
    stream = terminal("cp1252")
    monkeypatch.setattr(sys, "stdout", stream)
    summary(torch.nn.Sequential(torch.nn.Linear(4, 2)), (3, 4), verbose=1)
    assert "|-Linear: 1-1 " in read(stream)
