"""Names are data: none steers the terminal, breaks a table or adds a cell."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer import Profile, profile
from analyzer.results.info import ModuleInfo, UncountedInfo
from analyzer.results.node_info import NodeInfo, TensorInfo

ANSI = "a\x1b[31mb\x9bc\x07\u202ed"
NET = Profile(
    name=ANSI, mode="infer", inputs={ANSI: TensorInfo((1,), "float32", "cpu")}, assumptions=(ANSI,),
    uncounted=(UncountedInfo(ANSI, 1),), nodes=(NodeInfo("call_module", ANSI, module_path=ANSI),),
    modules=ModuleInfo(path="", type=ANSI, fwd_seconds=1.0, children=(
        ModuleInfo(path=ANSI, type=ANSI, depth=1, extra_repr=ANSI, fwd_seconds=1.0),)))
VIEWS = {
    "table": lambda: NET.table(columns=["module_path"], fmt="simple"), "summary": NET.summary, "tree": NET.module_tree,
    "csv": lambda: NET.module_tree(fmt="csv"),
    **{kind: (lambda kind=kind: NET.report(kind)) for kind in
       ("deepspeed", "flops-profiler", "torchinfo", "tids")}}


@pytest.mark.parametrize("view", VIEWS)
def test_no_control_character_reaches_the_terminal(view):
    text = VIEWS[view]()
    assert r"a\x1b[31mb\x9bc\x07\u202ed" in text and text.replace("\n", "").isprintable()


@pytest.mark.parametrize("fmt", ["markdown", "pipe"])
def test_bars_and_line_breaks_stay_in_their_cell(fmt):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("a|b\nc", nn.Linear(2, 2))

        def forward(self, x):
            return getattr(self, "a|b\nc")(x)

    lines = profile(Net(), args=(torch.ones(1, 2),)).module_tree(fmt=fmt).splitlines()
    bars = [line.replace(r"\|", "").count("|") for line in lines]
    assert len(set(bars)) == 1 and any(r"a\|b<br>c" in line for line in lines), lines
