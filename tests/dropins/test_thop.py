"""`analyzer.dropins.thop` beside thop: the same figures and texts, without data."""
from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode
from analyzer.dropins import thop as ours
from tests.dropins.sample_model import make_model


@pytest.fixture
def theirs():
    warnings.simplefilter("ignore")
    return pytest.importorskip("thop", exc_type=ImportError)


def ask(lib, make, **options):
    """thop leaves counters on layers without a rule, so each gets a model of its own."""
    model, inputs = make()
    return lib.profile(model, inputs=inputs, ret_layer_info=True, **options)


@pytest.mark.parametrize("name", ["mixed", "resnet18", "mobilenet_v3_small", "vit", "bert"])
def test_figures_are_those_of_thop(theirs, name, capsys):
    found, texts = [], []
    for lib in (ours, theirs):
        found.append(ask(lib, lambda: make_model(name)))
        # rules have names of their own here where thop's do the same
        texts.append(re.sub(r"Register \w+\(\)", "", capsys.readouterr().out))
    assert found[0] == found[1] and min(found[0][:2]) > 0 and texts[0] == texts[1]


LAYERS = {"prelu": (nn.PReLU(), 3), "softmax": (nn.Softmax(1), 3), "pool": (nn.AdaptiveAvgPool2d(3), 4),
          "average": (nn.AvgPool2d(2), 4), "bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), 4),
          "bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), 4),
          "nearest": (nn.UpsamplingNearest2d(scale_factor=3), 4),
          "norm": (nn.InstanceNorm2d(6, affine=True), 4), "layer_norm": (nn.LayerNorm(6, bias=False), 3),
          "rnn": (nn.RNN(6, 4, 2, bias=False), 3), "gru": (nn.GRU(6, 4, 3, batch_first=True, bidirectional=True), 3),
          "lstm": (nn.LSTM(6, 4, 2), 3), "gru_cell": (nn.GRUCell(6, 4), 2),
          "rnn_cell": (nn.RNNCell(6, 4, bias=False), 2),
          "lstm_cell": (nn.LSTMCell(6, 4), 2), "transposed": (nn.ConvTranspose2d(6, 4, 3, 2, groups=2), 4)}


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_counts_as_there(theirs, name):
    layer, dims = LAYERS[name]
    x = torch.rand((2, 6, 6, 6)[4 - dims:])
    found = [lib.profile(nn.Sequential(layer), (x, ), verbose=False) for lib in (ours, theirs)]
    assert found[0] == found[1] and found[0][0] > 0


def count_twice(m, x, y):
    m.total_ops += torch.DoubleTensor([2 * x[0].numel() + y.numel()])


def test_rules_of_ones_own(theirs, capsys):
    options = {"custom_ops": {nn.ReLU: count_twice, nn.BatchNorm2d: lambda m, x, y: None}, "report_missing": True}
    found, texts = [], []
    for lib in (ours, theirs):
        found.append(ask(lib, lambda: make_model("resnet18"), **options))
        texts.append(re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out))
    assert found[0] == found[1] and "Customize rule count_twice()" in texts[0]
    assert texts[0] == texts[1]


def test_what_is_one_layer_has_its_parameters():
    assert ours.profile(nn.Linear(4, 5), (torch.ones(2, 4), ), verbose=False) == (40, 25)  # thop says 0


def test_models_without_data():
    expected = ask(ours, lambda: make_model("resnet18"), verbose=False)
    with torch.device("meta"):
        model, inputs = make_model("resnet18")
    assert ask(ours, lambda: (model, inputs), verbose=False) == expected
    assert not model._buffers and "total_ops" not in vars(model.conv1)
    with MetaTensorMode():
        model, inputs = make_model("resnet18")
        assert ask(ours, lambda: (model.cuda(), [t.cuda() for t in inputs]), verbose=False) == expected


def test_numbers_as_thop_prints_them(theirs):
    numbers = [0, 999, 1000, 1001, 1.5e6, 3e9, 7.25e12]
    assert ours.clever_format(numbers, "%.3f") == theirs.clever_format(numbers, "%.3f")
    assert ours.clever_format(5e6) == theirs.clever_format(5e6) == "5.00M"
