"""Tables for other programs: paths instead of a drawn tree, numbers unrounded in CSV, one row a model."""
import csv
import io
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from analyzer import profile
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.report.quantity import draw_modules, draw_nodes
from analyzer.report.summary import model_table
from analyzer.results.info import CostInfo
from analyzer.units import format_count

DRAWN = re.compile("[├└│]")

list_nodes, list_modules = partial(draw_nodes, fmt="csv"), partial(draw_modules, fmt="csv")


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_modules_are_rows_with_paths_and_all_costs_unrounded(mlp):
    rows = read(list_modules(mlp))
    assert [row["path"] for row in rows] == ["(model)", "body", "body.0", "body.1", "fc2", "again", "(own)"]
    assert set(rows[0]) == {"path", "type"} | set(CostInfo.__slots__) - {"bwd_read_bytes", "bwd_written_bytes"}
    # 2 x 8 x 16 x 32 and 2 x 8 x 32 x 4, an element of 8 x 32 and one of 8 x 4: the sum is exact, not 10.53 K
    assert rows[0]["fwd_flops"] == str(8192 + 2048 + 256 + 32) and rows[2]["fwd_flops"] == "8192"
    assert rows[0]["fwd_seconds"] == "" and float(rows[2]["fwd_seconds"]) == 2e-6  # unknown is empty


def test_own_rows_stand_under_the_path_of_their_module(mlp):
    rows = read(list_modules(replace(mlp, modules=mlp.modules.children[0]), columns=["params"]))
    assert [row["path"] for row in rows] == ["body", "body.0", "body.1"]
    body = replace(mlp.modules.children[0], own=CostInfo(params=7))
    assert [row["path"] for row in read(list_modules(
        replace(mlp, modules=replace(mlp.modules, children=(body,))), columns=["params"]))] == [
        "(model)", "body", "body.0", "body.1", "body.(own)", "(own)"]


def test_nodes_are_rows_with_all_quantities_unrounded(mlp):
    rows = read(list_nodes(mlp))
    assert [row["name"] for row in rows] == ["x", "fc1", "act", "fc2", "mul", "output"]  # and no totals
    assert (rows[1]["module_path"], rows[1]["param_bytes"], rows[1]["fwd_flops"]) == ("body.0", "2176", "8192")
    assert (rows[1]["buffer_bytes"], rows[3]["buffer_bytes"]) == ("", "0")
    assert [row["name"] for row in read(list_nodes(mlp, sort="fwd_flops", columns=["fwd_flops"]))][:2] == ["fc1", "fc2"]
    # of depth 1: body.0 and body.1 are neighbours
    assert [row["name"] for row in read(list_nodes(mlp, depth=1))] == ["x", "body", "fc2", "mul", "output"]


@pytest.mark.parametrize("fmt", ["markdown", "latex"])
@pytest.mark.parametrize("make", [list_nodes, list_modules])
def test_nothing_is_drawn_in_formats_for_papers(mlp, make, fmt):
    assert "│" in mlp.module_tree()
    text = make(mlp, fmt=fmt)
    assert not DRAWN.search(text) and "body.0" in text


@pytest.mark.parametrize(("call", "text"), [
    (lambda p: list_modules(p, columns=["fwd_flps"]), "did you mean 'fwd_flops'"),
    (lambda p: list_modules(p, sort="calls"), "no column 'calls'"),
    (lambda p: list_modules(replace(p, modules=None)), "has no module tree"),
    (lambda p: list_nodes(p, columns=["parm_bytes"]), "did you mean 'param_bytes'"),
    (lambda p: list_nodes(p, depth=0), "depth=0"),
    (lambda p: model_table([("a", p)], ["fwd_flps"]), "no quantity 'fwd_flps'; did you mean fwd_flops"),
    (lambda p: model_table([("a", p)], "params"), "give names of quantities"),
])
def test_errors(mlp, call, text):
    with pytest.raises(InputError, match=re.escape(text)):
        call(mlp)


def test_a_row_a_model(mlp, bare, read_table):
    rows = read_table(model_table([("one.json", mlp), ("two.json", bare)]))
    # 10,528 and 12,576 FLOPs, 12 KiB, 15 us; of the other nothing is known
    assert rows == [
        {"Model": "one.json", "Mode": "train", "Device": "h200", "Params": "676", "Peak allocated": "12.00 KiB",
         "Hardware FLOPs": "23.10 K", "Step time": "15.00 us"},
        {"Model": "two.json", "Mode": "infer", "Device": "-", "Params": "-", "Peak allocated": "-",
         "Hardware FLOPs": "-", "Step time": "-"}]


def test_the_table_of_several_has_the_flops_that_the_screen_of_each_has(read_table):
    """With a checkpoint a step runs more than it needs: the first product of 2 * 512 * 64 * 64 and the tanh again."""
    class Net(torch.nn.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False).relu().sum()

    Linear = torch.nn.Linear
    p = profile(Net(Linear(64, 64), torch.nn.Tanh(), Linear(64, 64)), args=(torch.empty(512, 64),))
    row, = read_table(model_table([("net", p)]))
    assert p.recompute_flops >= 2 * 512 * 64 * 64
    assert p.hardware_flops == p.phases["forward"].flops + p.phases["backward"].flops > p.model_flops
    assert row["Hardware FLOPs"] == format_count(p.hardware_flops)


def test_columns_by_path_and_figures_unrounded(mlp, bare):
    row, other = read(model_table([("a", mlp), ("b", bare)], ["fwd_flops", "phases.backward.peak_allocated_bytes"],
                                  fmt="csv"))
    assert row == {"model": "a", "mode": "train", "device": "h200", "fwd_flops": "10528",
                   "phases.backward.peak_allocated_bytes": "12288", "out_of_memory": "False"}
    assert other["phases.backward.peak_allocated_bytes"] == ""


def test_of_a_step_that_ran_out_of_memory_the_model_alone_is_known(mlp, out_of_memory, read_table):
    ended = replace(mlp, out_of_memory=out_of_memory)
    first, second = read_table(model_table([("fits", mlp), ("ends", ended)]))
    assert (first["Out of memory"], second["Out of memory"]) == ("no", "yes")
    assert (second["Params"], second["Peak allocated"], second["Hardware FLOPs"]) == ("676", "-", "-")


@pytest.fixture
def files(tmp_path, mlp):
    paths = [str(tmp_path / f"{name}.json") for name in "abc"]
    for i, path in enumerate(paths):
        replace(mlp, params=676 + i).to_json(path)
    return paths


def test_several_saved_profiles_are_a_row_each(run, files, tmp_path):
    code, out, err = run("compare", *files, "--columns", "params", "--format", "csv")
    assert (code, err) == (0, "")
    assert [(row["model"], row["params"]) for row in read(out)] == list(zip(files, ("676", "677", "678")))
    output = tmp_path / "models.tex"
    assert run("compare", *files, "--format", "latex", "--output", str(output)) == (0, "", "")
    assert output.read_text().startswith(r"\begin{tabular}{lllrrrr}")
    two = run("compare", *files[:2], "--by", "model")[1]
    assert two.splitlines()[1].startswith("Model") and len(two.splitlines()) == 5  # headings on two lines


RESNETS = ("profile", "resnet18", "resnet50", "--input", "2x3x32x32", "--mode", "infer")


def test_several_targets_make_one_table(run):
    code, out, err = run(*RESNETS)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.split("\n\n")[0].splitlines()[2:]] == ["resnet18", "resnet50"]
    # published: 11,689,512 and 25,557,032 parameters
    assert "11.69 M" in out and "25.56 M" in out


@pytest.mark.parametrize(("words", "text"), [
    (["--json", "x.json"], "--json x.json: is for one model, and these are 2, which make one table"),
    (["--html", "x.html"], "--html x.html: is for one model"),
    (["--export", "x.csv"], "--export x.csv: is for one model"),
    (["--show", "summary"], "--show summary: is for one model"),
])
def test_options_that_several_targets_do_not_have(run, words, text):
    code, out, err = run(*RESNETS, *words)
    assert (code, out) == (2, "") and text in err


def test_a_wrong_second_target_costs_no_waiting(run, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the first model was profiled")

    monkeypatch.setattr("analyzer.api.prediction.profile", refuse)
    code, out, err = run("profile", "resnet18", "resnet51")
    assert (code, out) == (2, "") and "resnet51: no model of that name" in err


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "resnet.json"
    assert main(["profile", *RESNETS[1:2], *RESNETS[3:], "--show", "brief", "--json", str(path)]) == 0
    return str(path)


@pytest.mark.parametrize(("words", "header", "first"), [
    (["modules", "--format", "csv", "--columns", "params"], "path,type,params", "(model),ResNet,11689512"),
    (["table", "--format", "csv", "--columns", "param_bytes"], "op,name,module_path,param_bytes", "placeholder,x,,0"),
])
def test_one_table_of_one_profile(run, tmp_path, resnet, words, header, first):
    code, out, err = run("show", resnet, "--report", *words)
    assert (code, err) == (0, "") and out.splitlines()[:2] == [header, first]
    path = tmp_path / "table.csv"
    assert run("show", resnet, "--report", *words, "--output", str(path)) == (0, "", "")
    assert path.read_text() == out
