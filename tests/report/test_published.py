"""Reports that others published, figure by figure: the models of today, profiled without data, in the layouts of those
tools.

The golden files hold what was published, latencies left out (they are of other machines), and where.
"""
import ast
import json
import re

import pytest
import torch

from analyzer import profile
from analyzer.profilers.flops import make_flops_profiler

from .conftest import GOLDEN

DEEPSPEED = {"flops": make_flops_profiler("deepspeed")}
FIGURES = (r"(?P<params>[\d.]+(?: [KM])?) = (?P<params_share>[\d.]+)% Params, "
           r"(?P<macs>[\d.]+ [KMG]?MACs) = (?P<macs_share>[\d.]+)% MACs, ")


def load(name):
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def detailed(report):
    """Path to the class and the text behind it, of each module of a detailed profile."""
    lines = re.split("Detailed Profile per (?:GPU|Device)", report)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith("(") and not line.startswith(" "))
    found, holders = {}, []
    rest = iter(lines[start:])
    for line in rest:
        text = line.strip()
        if text == ")":
            holders.pop()
            continue
        match = re.match(r"(?:\((?P<name>\w+)(?:-\d+)?\): )?(?:\d+ x )?(?P<type>\w*)\((?P<told>.*)$", text)
        if match is None:  # a rule
            continue
        path = ".".join(part for part in [*holders, match["name"]] if part)
        if match["told"]:
            found[path] = match["type"], match["told"].removesuffix(")")
        else:
            found[path] = match["type"], "" if match["type"] == "ModuleList" else next(rest).strip()
            holders.append(match["name"])
    return found


def largest(report):
    """Depth to the rows of the aggregated profile."""
    found, depth = {}, None
    for line in re.split("Aggregated Profile per (?:GPU|Device)", report)[1].split("Detailed Profile")[0].splitlines():
        if line.startswith("depth "):
            depth = line.removeprefix("depth ").removesuffix(":")
            found[depth] = {}
        elif depth is not None and " - {" in line:
            name, _, row = line.partition("- ")
            found[depth][name.strip()] = ast.literal_eval(row)
    return found


def header(report):
    """The figures of the summary by name."""
    lines = report.split("Aggregated Profile")[0].splitlines()
    return {name: value.strip() for name, _, value in (line.rpartition(": ") for line in lines) if name}


def arguments_of(told):
    return re.split(r", (?![^(]*\))", told)


def assert_as_published(report, published, assert_told):
    """The published figures, largest modules, and each module with its arguments; ``assert_told`` compares what else is
    told of a module.
    """
    figures, rows, modules = header(report), largest(report), detailed(report)
    assert published["figures"].items() <= figures.items()
    for depth, row in published["largest"].items():
        assert row.items() <= rows[depth].items()
    for path, row in published["modules"].items():
        kind, told = modules[path]
        assert kind == row["type"], path
        assert_told(told, row, path)
        assert set(arguments_of(row["arguments"])) - {""} <= set(arguments_of(told)), path


@pytest.fixture(scope="module")
def resnet18():
    torchvision = pytest.importorskip("torchvision")
    return profile(lambda: torchvision.models.resnet18().eval(), args=(torch.empty(16, 3, 224, 224, device="meta"), ),
                   mode="infer", profilers=DEEPSPEED)


@pytest.fixture(scope="module")
def bert_base():
    transformers = pytest.importorskip("transformers")
    # attention as transformers computed it when that report was made: two products and a softmax
    return profile(lambda: transformers.BertModel(transformers.BertConfig(attn_implementation="eager")).eval(),
                   kwargs={"input_ids": torch.ones(1, 128, dtype=torch.int64)}, mode="infer", profilers=DEEPSPEED)


def test_resnet18_as_deepspeed_prints_it(resnet18):
    published = load("published_resnet18.json")["deepspeed"]
    published["figures"] = {name.replace("gpu", "GPU"): value for name, value in published["figures"].items()}
    report = resnet18.report("deepspeed")

    def assert_told(told, row, path):
        found = re.match(FIGURES, told).groupdict()
        assert [found[name].lower() for name in ("params", "macs")] == [
            row[name].replace(".0 ", " ").lower() for name in ("params", "macs")], path
        assert all(float(found[name]) == float(row[name].strip("%")) for name in ("params_share", "macs_share")), path

    assert_as_published(report, published, assert_told)
    assert len(published["modules"]) == 68 == len(detailed(report))


def test_bert_base_as_flops_profiler_prints_it(bert_base):
    published = load("published_bert_base.json")

    def assert_told(told, row, path):
        if path == "encoder.layer":  # a list of modules, which says nothing of its own today
            return
        module, functions = re.match(r"module = (\{.*?\}), functionals = (\{.*\}), functionals_duration = ",
                                     told).groups()
        assert row["module"].items() <= ast.literal_eval(module).items(), path
        ours = ast.literal_eval(functions)
        for name, figures in row["functionals"].items():  # those without FLOPs are not told
            assert figures["flops"] == "0" or figures.items() <= ours[name].items(), (path, name)

    assert_as_published(bert_base.report("flops-profiler", top_modules=10), published, assert_told)
    assert len(published["modules"]) == 30


def test_resnet18_as_torchinfo_prints_it(resnet18):
    published = load("published_resnet18.json")["torchinfo"]
    *table, _ = resnet18.report("torchinfo").split("=" * 90)
    rows = [re.split(r"\s{2,}", line.strip(" │├└─")) for line in table[2].strip().splitlines()]
    assert rows == published["rows"]
    totals = dict(line.split(": ") for part in table[3:] for line in part.strip().splitlines())
    assert totals == published["totals"]


def test_resnet18_as_tids_profiler_prints_it(resnet18):
    found, holders = [], []
    for line in resnet18.report("tids").splitlines():
        match = re.match(
            r"(\s*)\((.+?)\): (\w+), num_params (\d+), [\d.]+ms, [\d.]+% latency, input shape (.*), output shape (.*)$",
            line)
        if match is None:
            assert "(own)" in line or line == "latencies are predicted for h200, not measured"
            continue
        indent, name, kind, params, given, returned = match.groups()
        holders = [*holders[:len(indent) // 8], name]
        found.append([".".join(holders[1:]), kind, int(params), given, returned])
    assert found == load("published_resnet18.json")["tids"]


def test_pointnet_as_deepspeed_prints_it():
    from examples.pointnet import pointnet

    report = profile(pointnet, args=(torch.empty(32, 3, 1024),), mode="infer", profilers=DEEPSPEED).report("deepspeed")
    figures = header(report)
    assert [figures[f"{name} per GPU"]
            for name in ("params", "fwd MACs", "fwd flops")] == ["3.46 M", "14.07 GMACs", "29.04 G"]
    transforms = [told for kind, told in detailed(report).values() if kind == "TransformNet"]
    assert [re.match(FIGURES, told)["macs"] for told in transforms] == ["4.59 GMACs", "4.75 GMACs"]
