"""What tables, pages and readers say of rare records: unknown figures, very many rows, values of a wrong type."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest

from analyzer import Profile
from analyzer.errors import InputError
from analyzer.report.comparison.text import list_structure_lines
from analyzer.report.fits import find_least_need
from analyzer.report.holder_group import HolderGroup, print_groups
from analyzer.report.module_tree import module_tree
from analyzer.report.page import part as lanes
from analyzer.results.comparison import ModuleChange
from analyzer.results.info import OutOfMemoryInfo
from analyzer.results.lane import SpanInfo


def test_each_kind_of_module_that_changed() -> None:
    rows = [ModuleChange(kind="renamed", module="b", type="Linear", modules=2, before="a"),
            ModuleChange(kind="replaced", module="c", type="GELU", before="ReLU"),
            *[ModuleChange(kind="added", module=f"d{i}", type="Norm") for i in range(6)]]
    assert list_structure_lines(rows) == [
        ("renamed", ["a -> b (2)"]), ("replaced", ["c: ReLU -> GELU"]),
        ("added", ["d0: Norm", "d1: Norm", "d2: Norm", "d3: Norm", "2 more"])]


def test_the_least_need_of_a_step_that_ran_out() -> None:
    """Without a capacity: what was reserved and what was asked for beside it, or the parameters where they are more."""
    oom = OutOfMemoryInfo("aten.mm", "forward", requested_bytes=6, short_bytes=4, reserved_bytes=10)
    ran_out = Profile(name="net", mode="infer", out_of_memory=oom)
    assert find_least_need(replace(ran_out, out_of_memory=None)) is None
    assert find_least_need(ran_out) == 16 and find_least_need(replace(ran_out, param_bytes=20)) == 20
    assert find_least_need(replace(ran_out, out_of_memory=replace(oom, reserved_bytes=None))) is None


def test_the_smallest_of_many_holders_are_one_line() -> None:
    groups = [HolderGroup("Linear", "activation", 1, 100 - i) for i in range(13)]
    *shown, last = print_groups(groups).splitlines()
    assert len(shown) == 10 and last == "3 more: 267 B"


def test_facts_of_modules_stand_in_columns(mlp: Profile) -> None:
    assert mlp.modules is not None
    timed = replace(mlp, modules=replace(mlp.modules, fwd_seconds=2e-3))
    table = module_tree(timed, columns=["flops_per_second", "calls", "kernel_size"],
                        only=True, fmt="csv", as_string=False)
    assert float(table.splitlines()[1].split(",")[-3]) == 10528 / 2e-3


def test_a_page_of_very_many_spans_has_one_for_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of one module become one from where the first begins to where the last ends; another lane and phase stay."""
    spans = (SpanInfo("compute", "kernel", "mm", "aten.mm", None, "fc", "forward", 1.0, 0.5),
             SpanInfo("compute", "kernel", "add", "aten.add", None, "fc", "forward", 2.0, 0.5),
             SpanInfo("compute", "kernel", "mm", "aten.mm", None, "fc", "backward", 3.0, 0.5),
             SpanInfo("host", "launch", "mm", "aten.mm", None, "fc", "forward", 0.0, 0.25))
    profile = Profile(name="net", mode="train", spans=spans)
    whole = lanes.describe_lanes(profile)
    monkeypatch.setattr(lanes, "_MOST_SPANS", 3)
    found = lanes.describe_lanes(profile)
    assert whole is not None and not whole["merged"] and len(whole["start"]) == 4
    assert found is not None and found["merged"]
    assert [(start / 10**12, seconds / 10**12) for start, seconds in zip(found["start"], found["seconds"])] == [
        (1.0, 1.5), (3.0, 0.5), (0.0, 0.25)]
    assert [found["texts"]["name"][place] for place in found["columns"]["name"]] == ["fc", "mm", "mm"]
    assert lanes.describe_lanes(replace(profile, spans=())) is None


def test_arguments_of_a_wrong_type(mlp: Profile) -> None:
    with pytest.raises(InputError, match=re.escape("from_json(3): give the path of a saved profile, or its text")):
        Profile.from_json(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=re.escape("table(): columns='fwd_macs': give names of columns, as")):
        mlp.table(columns="fwd_macs")
