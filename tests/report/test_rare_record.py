"""What tables, pages and readers say of rare records, of names that steer a terminal, and records by themselves."""
import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import Profile, profile
from analyzer.report.comparison.text import list_structure_lines
from analyzer.report.fits import find_least_need
from analyzer.report.holder_group import HolderGroup, print_groups
from analyzer.report.module_tree import module_tree
from analyzer.report.page import part as lanes
from analyzer.results.comparison import ModuleChange
from analyzer.results.info import ModuleInfo, OutOfMemoryInfo, PhaseInfo, UncountedInfo
from analyzer.results.lane import SpanInfo
from analyzer.results.node_info import NodeInfo, TensorInfo
from tests.small_model import Calls


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
    net = Calls(lambda m, x: getattr(m, "a|b\nc")(x), **{"a|b\nc": nn.Linear(2, 2)})
    lines = profile(net, args=(torch.ones(1, 2),)).module_tree(fmt=fmt).splitlines()
    bars = [line.replace(r"\|", "").count("|") for line in lines]
    assert len(set(bars)) == 1 and any(r"a\|b<br>c" in line for line in lines), lines


CONTRACT = """params param_bytes buffer_bytes optimizer_bytes fwd_flops bwd_flops fwd_macs bwd_macs uncounted
    peak_allocated_bytes peak_reserved_bytes peak_by_category first_step phases fwd_seconds bwd_seconds
    optimizer_seconds step_seconds kernel_seconds nodes modules assumptions""".split()
NODE_CONTRACT = """op name target module_path accumulate_bytes incremental_bytes output_bytes temp_bytes param_bytes
    buffer_bytes backward_bytes fwd_flops bwd_flops fwd_macs bwd_macs fwd_comm_bytes bwd_comm_bytes fwd_seconds
    bwd_seconds inputs outputs aliases region""".split()


def test_shapes():
    scalar, empty = TensorInfo((), "float32", "cpu"), TensorInfo((3, 0), "int64", "cuda:0")
    assert (scalar.numel, scalar.nbytes, empty.nbytes) == (1, 4, 0)
    assert str(TensorInfo((8, 3), "bfloat16", "cuda:0")) == "bfloat16[8, 3]" and str(scalar) == "float32[]"


def test_contract_fields_exist():
    assert set(CONTRACT) <= {field.name for field in dataclasses.fields(Profile)}
    assert set(NODE_CONTRACT) <= {field.name for field in dataclasses.fields(NodeInfo)}
    assert {"allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "flops", "comm_bytes", "seconds"} <= {
        field.name for field in dataclasses.fields(PhaseInfo)}


def test_nodes_can_be_annotated_and_profiles_cannot_change(bare):
    node = NodeInfo("call_function", "add")
    node.fwd_flops = 3
    assert node.fwd_flops == 3
    with pytest.raises(AttributeError):
        node.colour = "red"
    with pytest.raises(dataclasses.FrozenInstanceError):
        bare.params = 1


def test_unknown_by_default(bare):
    given = {"name", "mode", "torch_version", "analyzer_version", "seconds_method", "flop_convention"}
    values = {field.name: getattr(bare, field.name) for field in dataclasses.fields(bare) if field.name not in given}
    assert all(value is None or value in ((), {}) for value in values.values()), values
