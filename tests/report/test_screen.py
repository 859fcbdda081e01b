"""The first screen: 40 lines of 120 columns, with the figures of the profile."""
import io
import os
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import Profile, profile
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.report.screen.layout import find_width, takes_color
from analyzer.report.screen.screen import choose_groups
from analyzer.report.text_width import measure_width
from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.units import format_bytes, format_count, format_seconds

WIDTH, HEIGHT = 120, 40
RANK = """
import torch
from torch.distributed.fsdp import fully_shard
from analyzer.zoo.gpt2 import GPT2

def build():
    model = GPT2(vocabulary=50257, positions=1024, hidden=768, layers=4, heads=12).cuda()
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)
"""
MODELS = {
    "fits": ["vit_b_16", "--input", "8x3x224x224"],
    "does_not_fit": ["resnet18", "--input", "2048x3x224x224", "--optimizer", "sgd", "--device", "t4"],
    "inference": ["resnet50", "--input", "64x3x224x224", "--mode", "infer", "--device", "t4"],
    "rank": ["{folder}/rank.py:build", "--input", "input_ids=int64:8x1024", "--optimizer", "adamw", "--autocast",
             "bf16", "--world", "64", "--rank", "9", "--cluster", "dgx_h100", "--device", "h100"],
    "lora": ["gpt2", "--input", "input_ids=int64:2x1024", "--lora", "r=16", "--checkpointing", "--optimizer",
             "adamw", "--device", "l4"]}
VARIABLES = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "TERM")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", MODELS)
def test_screens_of_models(case, tmp_path, capsys, check_golden):
    (tmp_path / "rank.py").write_text(RANK)
    words = [word.format(folder=tmp_path) for word in MODELS[case]]
    code = main(["profile", *words, "--json", str(tmp_path / "p.json")])
    text, p = capsys.readouterr().out, Profile.from_json(tmp_path / "p.json")
    assert code == (3 if case == "does_not_fit" else 0)
    check_golden(f"screen_{case}.txt", text.rstrip("\n"))
    check_size(text, WIDTH)
    check_figures(text, p)
    shown, asked = p.screen().split("\nmore: ")[0], text.split("\nmore: ")[0]
    assert shown == asked
    assert "\x1b" not in text
    for width in (80, 100):
        check_size(p.screen(width), width)
    assert re.sub(r"\x1b\[\d+m", "", p.screen(color=True)) == p.screen()


def check_size(text, width):
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= HEIGHT and max(map(measure_width, lines)) <= width
    assert [line for line in lines if line != line.rstrip()] == []


def check_figures(text, p):
    """The figures of the screen are those of the profile, each in its row."""
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert str(p.verdict).splitlines()[0] in text and p.verdict.devices[0] in text
    assert f"time: {format_seconds(p.step_seconds)} predicted (" in text
    for name, phase in p.phases.items():
        sizes = [phase.allocated_bytes, phase.peak_allocated_bytes]
        comm = [format_bytes(phase.comm_bytes)] if any(other.comm_bytes for other in p.phases.values()) else []
        expected = [name, *map(format_bytes, sizes), format_count(phase.flops), *comm, format_seconds(phase.seconds)]
        assert expected in [row[:len(expected)] for row in rows]
    assert f"{format_bytes(p.peak_allocated_bytes)} allocated, {format_bytes(p.peak_reserved_bytes)} reserved" in text
    for name, size in sorted(p.peak_by_category.items(), key=lambda item: -item[1])[:4]:
        assert [name, format_bytes(size), f"{size / p.peak_allocated_bytes:.1%}".replace("%", " %")] in [
            row[:3] for row in rows]
    groups = choose_groups(p.modules, lambda costs: costs.fwd_seconds)
    for field in ("params", "saved_bytes", "activation_bytes", "fwd_flops"):
        assert sum(getattr(group.costs, field) for group in groups) == getattr(p.modules, field)


def test_times_of_modules_add_up_to_the_kernels_and_to_all_of_the_update_where_these_are_not_known():
    p = profile(nn.Sequential(nn.Linear(64, 64)), torch.empty(8, 64), optimizer="adamw")  # bound by launch
    untold = replace(p, phases={**p.phases, "optimizer": replace(p.phases["optimizer"], kernel_seconds=None)})
    passes = p.phases["forward"].kernel_seconds + p.phases["backward"].kernel_seconds
    for one, expected in ((p, p.kernel_seconds), (untold, passes + p.optimizer_seconds)):
        rows = re.findall(r"^\S+ +\w+ +\S+(?: K)? +0 B +([\d.]+) us", one.screen(), re.MULTILINE)
        assert len(rows) == 2 and sum(map(float, rows)) == pytest.approx(1e6 * expected, abs=0.02)


def test_what_is_unknown_is_left_out_or_said(bare, mlp):
    # nothing but a name and a mode
    assert bare.screen().splitlines()[-2] == "nothing was assumed"
    assert "\nnothing was assumed, and every operator was counted\n" in replace(bare, fwd_flops=0).screen()
    assert bare.screen().startswith(f"{bare.name}: one {bare.mode} step\n")
    text = mlp.screen()
    # its time is not known of all modules, so FLOPs tell which take most: 10,528 + 12,576 of all
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["Module", "Class", "Parameters", "Saved", "FLOPs", "Share"] in rows
    assert ["body.0", "Linear", "544", "0 B", "16.38 K", "70.9 %"] in [row[:6] for row in rows]  # 16,384 of 23,104
    assert f"{len(mlp.assumptions)} assumptions and 2 operators without known FLOPs, listed in the summary" in text
    only = replace(mlp, assumptions=("x",), uncounted=()).screen()
    assert "\n1 assumption, listed in the summary\n" in only


def test_memory_that_ran_out_is_told(mlp, out_of_memory):
    text = replace(mlp, device="h100_sxm", out_of_memory=out_of_memory).screen()
    wide = replace(mlp, out_of_memory=replace(out_of_memory, module_path="\u6c34" * 200)).screen(80)
    assert max(map(measure_width, wide.splitlines())) <= 80
    assert "Memory ran out: aten.mm in backward, node fc1, module body.0 asks for 2.00 GiB" in text
    assert "does NOT fit on h100_sxm: at least " in text


def test_the_peak_of_the_first_step_is_said_to_be(mlp):
    assert "of the first step" not in mlp.screen()
    phases = {name: replace(phase, peak_allocated_bytes=1) for name, phase in mlp.phases.items()}
    first = replace(mlp, phases=phases, first_step=mlp.phases, timeline=())
    assert "reserved, in backward of the first step" in first.screen()


LONG = ModuleInfo(path="encoder." + "very_" * 40 + "long", type="Module" * 30, params=3, fwd_flops=3)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["n" * 300, "\u6c34" * 100, "a\nb\x1b[2J\t" * 20], ids=["long", "wide", "steering"])
def test_no_line_is_wider_than_the_terminal(mlp, width, name):
    modules = ModuleInfo(path="", type="Net", params=3, fwd_flops=3, bwd_flops=0, children=(
        replace(LONG, bwd_flops=0, type=name),), own=CostInfo(fwd_flops=0, bwd_flops=0))
    p = replace(mlp, name=name, modules=modules, optimizer=name, inputs={name: mlp.inputs["x"]},
                peak_by_category={name: 512, "parameter": 256})
    text = p.screen(width)
    assert max(map(measure_width, text.split("\n"))) <= width and "\x1b" not in text and "..." in text


def test_a_width_that_cannot_be(mlp):
    with pytest.raises(InputError, match=r"screen\(width=79\): must be a number of columns, 80 or more"):
        mlp.screen(79)


def block(path, params=4, type_="Block", flops=10):
    return ModuleInfo(path=path, type=type_, params=params, fwd_flops=flops, own=CostInfo(fwd_flops=flops))


@pytest.mark.parametrize(("children", "names"), [
    ([block(f"h.{i}") for i in range(3)], ["h.* (3)"]),
    # as of a mixture of experts whose first layers are dense
    ([block("h.0", 9, flops=50), *(block(f"h.{i}") for i in range(1, 4))], ["h.0", "h.1-3 (3)"]),
    ([block("h.0"), block("h.1", 9), block("h.2")], ["h.* (2)", "h.1"]),
    ([block("h.layer0"), block("h.layer1"), block("h.norm", 2, "Norm", 1)], ["h.layer0-1 (2)", "h.norm"]),
    ([block("h.a"), block("h.b")], ["h.a", "h.b"])])
def test_alike_siblings_are_one_row(children, names):
    body = ModuleInfo(path="h", type="List", fwd_flops=sum(c.fwd_flops for c in children), children=tuple(children),
                      own=CostInfo(fwd_flops=0))
    # the model does 5 FLOPs itself
    root = ModuleInfo(path="", type="Net", fwd_flops=body.fwd_flops + 5, children=(body, ), own=CostInfo(fwd_flops=5))
    groups = choose_groups(root, lambda costs: costs.fwd_flops)
    assert sorted(group.name for group in groups) == sorted([*names, "(own)"])
    assert sum(group.costs.fwd_flops for group in groups) == root.fwd_flops


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 1


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 100 columns."""
    monkeypatch.setattr(os, "get_terminal_size", lambda stream: os.terminal_size((100, 40)))
    return Terminal()


@pytest.mark.parametrize(("environment", "on_terminal", "in_pipe"), [
    ({"TERM": "xterm"}, True, False),
    ({}, True, False),
    ({"TERM": "dumb"}, False, False),
    ({"NO_COLOR": "1", "TERM": "xterm"}, False, False),
    ({"NO_COLOR": "0"}, False, False),  # any value
    ({"NO_COLOR": ""}, True, False),    # none
    ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
    ({"FORCE_COLOR": "0"}, True, False),
    ({"CLICOLOR_FORCE": "1"}, True, True),
    ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False)])
def test_which_streams_take_colors(terminal, monkeypatch, environment, on_terminal, in_pipe):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (takes_color(terminal), takes_color(io.StringIO())) == (on_terminal, in_pipe)


@pytest.mark.parametrize(("columns", "on_terminal"), [(None, 100), ("90", 90), ("40", 80), ("300", 120), ("x", 100)])
def test_how_wide_a_screen_is(terminal, monkeypatch, columns, on_terminal):
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert (find_width(terminal), find_width(io.StringIO())) == (on_terminal, 120)


NET = "import torch\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n        super().__init__(" \
      "*[torch.nn.Linear(8, 8) for _ in range(4)])\n"


def test_a_terminal_gets_colors_and_its_own_width(terminal, tmp_path, monkeypatch, capsys):
    (net := tmp_path / "net.py").write_text(NET)
    words = ["profile", f"{net}:Net", "--input", "4x8", "--json", str(tmp_path / "p.json")]
    assert main(words) == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(words) == 0
    shown = terminal.getvalue()
    assert "\x1b" not in piped and "\x1b[32m\x1b[1mfits on h200: " in shown and "\x1b[36m█" in shown
    assert re.sub(r"\x1b\[\d+m", "", shown).split("\nmore: ")[0] == Profile.from_json(
        tmp_path / "p.json").screen(100).split("\nmore: ")[0]
    assert "│" not in shown
