"""The node table: its ten columns, what is in them, and that they add up."""
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.report.node_table import COLUMNS, merge_modules, node_table
from analyzer.results.node_info import NodeInfo

HEADINGS = [
    "Op type", "Op", "Accumulate size", "Incremental size", "Output size", "Temp size", "Param size", "Backward size",
    "Fwd FLOPs", "Bwd FLOPs"
]
SUMMED = [column.field for column in COLUMNS.values() if column.unit != "text" and column.field != "accumulate_bytes"]


def headings(text):
    return re.split(r"\s{2,}", text.splitlines()[0].strip())


def test_vit_rows_print_as_published_in_the_layout_of_that_tool(vit_rows, check_golden):
    profile = Profile(name="vit", mode="train", nodes=tuple(vit_rows))
    text = profile.report("colossalai")
    check_golden("node_table_vit.txt", text)
    assert headings(text) == HEADINGS
    by_size = profile.report("colossalai", sort="param_bytes").splitlines()
    assert by_size[2].split()[1] == max(vit_rows, key=lambda row: row.param_bytes or 0).name


def test_extra_columns_stand_after_the_ten(mlp, read_table):
    text = mlp.table(columns=("fwd_macs", "Bwd MACs", "fwd_seconds", "source"), fmt="simple")
    assert headings(text) == [*HEADINGS, "Fwd MACs", "Bwd MACs", "Fwd time", "Source"]
    fc1 = next(row for row in read_table(text) if row["Op"] == "fc1")
    assert (fc1["Fwd MACs"], fc1["Fwd time"], fc1["Source"]) == ("4.10 K", "2.00 us", "net.py:12")


def test_sort_is_largest_first_and_unknown_last(mlp, read_table):
    assert [row["Op"] for row in read_table(mlp.table(sort="Fwd FLOPs"))][:3] == ["fc1", "fc2", "act"]
    # equal values keep the order of the graph
    by_time = [row["Op"] for row in read_table(mlp.table("fwd_seconds"))]
    assert by_time == ["fc1", "fc2", "act", "x", "mul", "output", "6 nodes"]
    assert [row["Op"]
            for row in read_table(mlp.table("name"))] == ["act", "fc1", "fc2", "mul", "output", "x", "6 nodes"]


def test_unknown_is_a_dash_and_its_total_a_lower_bound(read_table):
    rows = [
        NodeInfo("call_module", "a", fwd_flops=1500, temp_bytes=0),
        NodeInfo("call_module", "b", fwd_flops=None, temp_bytes=512)
    ]
    _, b, total = read_table(node_table(rows))
    assert b["Fwd FLOPs"] == "-" and b["Temp size"] == "512 B"
    assert (total["Fwd FLOPs"], total["Temp size"], total["Bwd FLOPs"], total["Accumulate size"]) == (">= 1.50 K",
                                                                                                      "512 B", "-", "-")


def test_depth_merges_neighbours_of_a_module(mlp, read_table):
    rows = read_table(mlp.table(depth=1))
    assert [(row["Op type"], row["Op"]) for row in rows[:3]] == [("placeholder", "x"), ("module", "body"),
                                                                 ("call_module", "fc2")]
    assert (rows[1]["Accumulate size"], rows[1]["Incremental size"], rows[1]["Fwd FLOPs"]) == ("1.50 KiB", "1.00 KiB",
                                                                                               "8.45 K")


def test_depth_keeps_a_module_that_is_visited_twice_apart():
    rows = [NodeInfo("call_function", name, module_path=path) for name, path in
            (("a", "m.x"), ("b", "m.y"), ("c", "n"), ("d", "m.x"), ("e", "m.x"))]
    assert [row.name for row in merge_modules(rows, 1)] == ["m", "c", "m"]
    assert [row.name for row in merge_modules(rows, 2)] == ["a", "b", "c", "m.x"]


@given(st.lists(st.tuples(st.sampled_from(["", "a", "a.b", "a.b.c", "d.e"]), st.integers(0, 2**40)), max_size=12),
       st.integers(1, 4))
def test_merging_keeps_every_sum(rows, depth):
    nodes = [
        NodeInfo("call_function", f"n{i}", module_path=path, **dict.fromkeys(SUMMED, value))
        for i, (path, value) in enumerate(rows)
    ]
    merged = merge_modules(nodes, depth)
    for field in SUMMED:
        assert sum(getattr(row, field) for row in merged) == sum(value for _, value in rows)


def test_no_rows_and_other_formats(mlp, bare, check_golden):
    assert "0 nodes" in bare.table() and headings(bare.table(fmt="simple")) == HEADINGS
    check_golden("node_table_mlp.md", mlp.table(fmt="github"))


@pytest.mark.parametrize(("options", "words"), [
    ({"sort": "fwd_flop"}, ["sort", "'fwd_flop'", "did you mean 'fwd_flops'", "accumulate_bytes"]),
    ({"columns": ("colour",)}, ["columns", "'colour'", "columns are"]),
    ({"depth": 0}, ["depth=0", "1 or more"]),
    ({"fmt": "word"}, ["'word'", "github", "latex"]),
])
def test_errors_name_the_input_and_the_way_out(mlp, options, words):
    with pytest.raises(InputError) as caught:
        mlp.table(**options)
    assert all(word in str(caught.value) for word in ["table(", *words]), caught.value
