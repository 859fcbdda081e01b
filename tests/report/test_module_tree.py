"""The module tree: every parent is its children plus its own row."""
from dataclasses import replace

import pytest

from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.results.info import CostInfo, ModuleInfo


def test_golden(mlp, check_golden):
    check_golden("module_tree_mlp.txt", mlp.module_tree(columns=("bwd_macs", "saved_bytes", "bwd_seconds")))


def test_depth_and_sort(mlp, read_table):
    assert [row["Module"] for row in read_table(mlp.module_tree(depth=0))] == ["Net"]
    assert [row["Module"]
            for row in read_table(mlp.module_tree(1, "fwd_flops"))] == ["Net", "├─body", "├─fc2", "├─again", "├─(own)"]
    assert [row["Module"] for row in read_table(mlp.module_tree(depth=1, sort="Fwd time"))][1:3] == ["├─body", "├─fc2"]


def test_siblings_of_unknown_cost_come_last(mlp, read_table):
    body, fc2, again = mlp.modules.children
    tree = replace(mlp.modules, children=(replace(body, params=None), fc2, again))
    rows = read_table(replace(mlp, modules=tree).module_tree(depth=1, sort="params"))
    assert [row["Module"] for row in rows] == ["Net", "├─fc2", "├─again", "├─body", "├─(own)"]
    assert rows[3]["Params"] == "-"


def test_shared_module_is_marked_and_own_row_of_nothing_left_out(mlp, read_table):
    rows = read_table(mlp.module_tree())
    again = next(row for row in rows if row["Module"] == "├─again")
    assert (again["Type"], again["Params"], again["Fwd FLOPs"]) == ("ReLU (same as body.1)", "0", "0")
    assert [row["Module"] for row in rows].count("├─(own)") == 1 and "│  └─(own)" not in [row["Module"] for row in rows]


def test_own_of_unknown_cost_is_shown(read_table):
    leaf = ModuleInfo(path="a", type="Leaf", depth=1, params=1)
    root = ModuleInfo(path="", type="Root", params=1, children=(leaf,))
    tree = Profile(name="Root", mode="infer", modules=root).module_tree()
    assert [(row["Module"], row["Params"]) for row in read_table(tree)] == [
        ("Root", "1"), ("├─a", "1"), ("├─(own)", "-")]


@pytest.mark.parametrize(("options", "words"), [
    ({"sort": "flops"}, ["sort", "'flops'", "did you mean 'fwd_flops'"]),
    ({"columns": ("x",)}, ["columns", "'x'", "saved_bytes"]),
    ({"depth": -1}, ["depth=-1", "0 or more"]),
    ({"fmt": "word"}, ["'word'"]),
])
def test_errors(mlp, options, words):
    with pytest.raises(InputError) as caught:
        mlp.module_tree(**options)
    assert all(word in str(caught.value) for word in ["module_tree(", *words]), caught.value


def test_walk_gives_parents_first(mlp):
    assert [module.path for module in mlp.modules.walk()] == ["", "body", "body.0", "body.1", "fc2", "again"]


def test_costs_add_and_unknown_stays_unknown():
    total = CostInfo(params=1, fwd_flops=2, fwd_seconds=0.5) + CostInfo(params=3, fwd_flops=None, fwd_seconds=0.25)
    assert (total.params, total.fwd_flops, total.fwd_seconds, total.bwd_flops) == (4, None, 0.75, None)
