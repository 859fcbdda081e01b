"""The reports in the layouts of other tools: options, order, marks, errors, files, notebooks."""
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.errors import InputError
from analyzer.report.compat.deepspeed import list_functions, name_function
from analyzer.results.info import ModuleInfo, OperatorInfo
from analyzer.results.node_info import TensorInfo
from analyzer.results.view import register_report
from tests.small_model import Calls


def test_goldens(mlp, check_golden):
    check_golden("deepspeed_mlp.txt", mlp.report("deepspeed", top_modules=2))
    check_golden("flops_profiler_mlp.txt", mlp.report("flops-profiler", module_depth=1))
    columns = ("input_size", "output_size", "num_params", "params_percent", "kernel_size", "mult_adds", "trainable",
               "output_bytes", "fwd_seconds")
    check_golden(
        "torchinfo_mlp.txt",
        mlp.report("torchinfo", col_names=columns, row_settings=("depth", "var_names"), verbose=2, col_width=16))
    check_golden("tids_mlp.txt", mlp.report("tids"))


@pytest.mark.parametrize("kind", list(register_report))
def test_reports_of_a_profile_without_modules(bare, kind):
    whole = {"summary": bare.summary(), "screen": bare.screen(), "table": bare.table(),
             "communication": "what ranks communicate is unknown", "replay": "What was replayed is not saved."}
    parts = {"brief": bare.name, "colossalai": "0 nodes", "compile": "nothing is under torch.compile",
             "devices": "The process has one device", "cycle": "no cycle was seen"}
    if kind in whole:
        assert bare.report(kind) == whole[kind]
    elif kind in parts:
        assert parts[kind] in bare.report(kind)
    else:
        with pytest.raises(InputError, match="how much is trained on" if kind == "cost" else "has no module tree"):
            bare.report(kind)


@pytest.mark.parametrize(("kind", "options", "words"), [
    ("deepsped", {}, ["'deepsped'", "'deepspeed'", "'torchinfo'"]),
    ("tids", {"top_modules": 2}, ["top_modules", "depth"]),
    ("deepspeed", {"top_modules": 0}, ["top_modules=0", "at least one"]),
    ("deepspeed", {"module_depth": -2}, ["module_depth=-2"]),
    ("deepspeed", {"ignore_modules": ["ReLu"]}, ["'ReLu'", "below Net"]),
    ("deepspeed", {"ignore_modules": ["Net"]}, ["'Net'"]),
    ("torchinfo", {"col_names": ["params"]}, ["'params'", "num_params"]),
    ("torchinfo", {"row_settings": ["names"]}, ["'names'", "var_names"]),
    ("torchinfo", {"verbose": 3}, ["verbose=3"]),
    ("torchinfo", {"mult_adds": "flops"}, ["mult_adds='flops'"]),
    ("torchinfo", {"fmt": "word"}, ["'word'", "markdown"]),
])
def test_errors_say_what_and_how(mlp, kind, options, words):
    with pytest.raises(InputError) as caught:
        mlp.report(kind, **options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_ignored_modules_count_as_their_parents_own(mlp):
    tree = mlp.module_tree(ignore_modules=[nn.ReLU], fmt="csv").splitlines()
    assert [row.split(",")[0] for row in tree[1:]] == ["Net", "├─body", "│  └─0", "│  └─(own)", "├─fc2", "├─(own)"]
    own = next(row for row in tree if "│  └─(own)" in row)
    assert ",256," in own  # the FLOPs of the ReLU that is left out
    report = mlp.report("deepspeed", ignore_modules=["body"])
    assert "(body)" not in report and "'Sequential'" not in report and report.count(
        "(fc2): Linear(132 = 19.53% Params") == 1


def test_what_is_not_detailed_ends_with_the_largest(mlp):
    report = mlp.report("deepspeed", detailed=False, module_depth=2)
    assert "depth 1:" in report and "depth 2:" not in report and "Detailed Profile" not in report
    measured = replace(mlp, seconds_method="measured on a CPU", profile_step=5, measured_steps=3)
    assert "Profile Summary at step 5:" in measured.report("deepspeed")


@pytest.mark.parametrize(("operator", "expected"), [
    ("aten.native_layer_norm.default", "layer_norm"), ("aten._softmax.default", "softmax"),
    ("aten.bmm.default", "matmul"),
    ("aten.cudnn_batch_norm.default", "batch_norm"),
    ("aten._native_batch_norm_legit_no_training.default", "batch_norm"),
    ("aten.max_pool2d_with_indices.default", "max_pool2d"),
    ("aten._adaptive_avg_pool2d.default", "adaptive_avg_pool2d"),
    ("aten._scaled_dot_product_cudnn_attention.default", "scaled_dot_product_attention"),
    ("aten.upsample_nearest2d.vec", "interpolate"),
    ("aten.add_.Tensor", "add"), ("aten.mm.default", "matmul"),
    ("scaled_dot_product_attention", "scaled_dot_product_attention"),
])
def test_names_of_functions(operator, expected):
    assert name_function(operator) == expected


def test_a_product_is_a_linear_layer_where_there_is_a_matrix():
    weight = {"weight": TensorInfo((3, 4), "float32", "cpu")}
    assert name_function("aten.mm.default", ModuleInfo(path="fc", type="Linear", parameters=weight)) == "linear"
    conv = ModuleInfo(path="c", type="ConvTranspose1d", kernel_size=(3,))
    assert name_function("aten.convolution.default", conv) == "conv_transpose1d"


def test_functions_add_up_by_name_and_unknown_stays_unknown():
    rows = (OperatorInfo("aten.add.Tensor", 1, 10, 0, 1e-6), OperatorInfo("aten.add_.Tensor", 2, None, None, 2e-6),
            OperatorInfo("aten.view.default", 5, 0, 0,
                         0.0), OperatorInfo("aten.mul.Tensor", 1, 7, 0, None, phase="backward"))
    leaf = ModuleInfo(path="a", type="A", operators=(OperatorInfo("softmax", 1, 4, 0, 5e-6),))
    root = ModuleInfo(path="", type="R", operators=rows, children=(leaf,))
    assert {name: (f.calls, f.flops, f.seconds) for name, f in list_functions(root).items()} == {"add": (3, None, 3e-6)}
    assert list(list_functions(*root.walk())) == ["softmax", "add"]


def test_every_operator_of_a_model_is_timed_where_it_runs():
    net = Calls(lambda m, x: torch.softmax(m.fc(x) @ x.transpose(0, 1), -1), fc=nn.Linear(8, 8))
    p = profile(net, args=(torch.empty(4, 8),), mode="infer")
    root = p.modules
    assert set(list_functions(root)) == {"matmul", "softmax"} and set(list_functions(root.children[0])) == {"linear"}
    assert sum(f.seconds for f in list_functions(*root.walk()).values()) == pytest.approx(p.kernel_seconds)


class Shared(nn.Module):
    """A layer in two places, a layer that does not run, a parameter of its own, containers that are not called."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.again = self.body[0]
        self.scale = nn.Parameter(torch.zeros(3))
        self.unused = nn.Linear(4, 4)
        self.list = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.body[0].bias.requires_grad = False

    def forward(self, x):
        x = self.list[0](self.body(x))
        return self.body(self.list[1](self.again(x))) + self.scale.sum()


@pytest.fixture(scope="module")
def shared():
    return profile(Shared(), args=(torch.empty(2, 8),), mode="infer")


def rows_of(text):
    return [re.split(r"\s{2,}", line.strip(" │├└─")) for line in text.split("=\n")[2].splitlines() if line.strip("=")]


def test_shared_modules_are_marked_and_counted_once(shared):
    rows = rows_of(
        shared.report("torchinfo", row_settings=("var_names", ), col_names=("num_params", "mult_adds", "trainable")))
    linear = str(2 * 8 * 8)  # of each run; a row for each, in the order of the runs
    assert rows == [
        ["Shared (Shared)", "23", "--", "Partial"],  # its own 3, and the 20 of the layer that does not run
        ["Sequential (body)", "--", "--", "Partial"],
        ["Linear (0)", "72", linear, "Partial"],
        ["ReLU (1)", "--", "--", "--"],
        ["ModuleList (list)", "--", "--", "True"],
        ["Linear (0)", "64", linear, "True"],
        ["Linear (again)", "(recursive)", linear, "Partial"],
        ["ModuleList (list)", "(recursive)", "--", "True"],
        ["Linear (1)", "64", linear, "True"],
        ["Sequential (body)", "(recursive)", "--", "Partial"],
        ["Linear (0)", "(recursive)", linear, "Partial"],
        ["ReLU (1)", "--", "--", "--"]
    ]
    totals = shared.report("torchinfo").split("=\n")[3]
    assert "Total params: 223\nTrainable params: 215\nNon-trainable params: 8\n" in totals


def test_recursive_rows_can_be_hidden_and_depth_sums_what_is_below(shared):
    hidden = rows_of(
        shared.report("torchinfo", row_settings=("var_names", "hide_recursive_layers"), col_names=("num_params", )))
    assert [row[0] for row in hidden] == [
        "Shared (Shared)", "Sequential (body)", "Linear (0)", "ReLU (1)", "ModuleList (list)", "Linear (0)",
        "Linear (1)"
    ]
    flat = rows_of(shared.report("torchinfo", depth=1, col_names=("num_params",)))
    assert flat == [["Shared", "23"], ["Sequential: 1-1", "72"], ["ModuleList: 1-2", "128"],
                    ["Linear: 1-3", "(recursive)"], ["ModuleList: 1-4", "(recursive)"],
                    ["Sequential: 1-5", "(recursive)"]]


def test_runs_of_other_shapes_count_in_the_first():
    twice = Calls(lambda m, x: m.fc(m.fc(x)[:1]), fc=nn.Linear(4, 4, bias=False))
    p = profile(twice, args=(torch.empty(3, 4),), mode="infer")
    rows = rows_of(p.report("torchinfo", col_names=("output_size", "mult_adds")))
    assert [row[1:] for row in rows[1:]] == [["[3, 4]", "64"], ["[1, 4]", "--"]] and p.fwd_macs == 64
    theirs = rows_of(p.report("torchinfo", col_names=("mult_adds",), mult_adds="torchinfo"))
    assert [row[1] for row in theirs[1:]] == ["48", "16"]


def test_bert_under_torchinfos_way_of_counting():
    """Published for BERT-base at 2×512 with a head of two classes (README of ruipeterpan/torch_profiler): 218.57 M, of
    each weight once a sample.
    """
    transformers = pytest.importorskip("transformers")
    p = profile(lambda: transformers.BertForSequenceClassification(transformers.BertConfig()).eval(),
                kwargs={"input_ids": torch.ones(2, 512, dtype=torch.int64)}, mode="infer")
    text = p.report("torchinfo", mult_adds="torchinfo")
    assert "Total params: 109,483,778\n" in text and "Params size (MB): 437.94" in text
    rows = {row[0]: row[1:] for row in rows_of(text)}
    assert rows["ModuleList: 3-6"] == ["--", "85,054,464"] and rows["BertPooler: 2-3"] == ["[2, 768]", "--"]
    # it sees the position embeddings once, as they are computed for one sample
    assert "Total mult-adds (M): 218.57" in text


def test_table_without_known_runs_is_the_tree(mlp):
    rows = rows_of(replace(mlp, module_calls=()).report("torchinfo"))
    assert [row[0] for row in rows] == ["Net", "Sequential: 1-1", "Linear: 2-1", "ReLU: 2-2", "Linear: 1-2"]
