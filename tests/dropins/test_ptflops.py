"""`analyzer.dropins.ptflops` beside ptflops: the same figures and texts, without data."""
from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode
from analyzer.dropins import ptflops as ours
from analyzer.errors import InputError
from tests.dropins.sample_model import make_model

# operators by which a tensor is filled, which count nothing
FILLING = ("aten.lift_fresh", "aten.slice", "aten.fill_", "aten.copy_", "aten.scalar_tensor")


@pytest.fixture
def theirs():
    return pytest.importorskip("ptflops", exc_type=ImportError)


def ask(lib, model, inputs, **options):
    """The result, and what was printed."""
    made = {"input_ids": inputs[0]} if inputs[0].dtype == torch.int64 else {"x": inputs[0], "y": inputs[-1]}
    constructor = None if len(inputs) == 1 and "input_ids" not in made else lambda size: made
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        found = lib.get_model_complexity_info(model, tuple(inputs[0].shape[1:]), input_constructor=constructor,
                                              ost=text, **options)
    return found, text.getvalue()


def test_figures_and_text_are_those_of_ptflops(theirs, evaluated):
    found = [ask(lib, *evaluated, as_strings=False, verbose=True, output_precision=4) for lib in (ours, theirs)]
    assert found[0] == found[1] and min(found[0][0]) > 0


def test_operators_are_those_of_ptflops(theirs, evaluated):
    found = [ask(lib, *evaluated, backend="aten", verbose=True) for lib in (ours, theirs)]
    texts = [[line for line in text.splitlines() if "Warning" not in line] for _, text in found]
    assert (found[0][0], texts[0]) == (found[1][0], texts[1])
    uncounted = [{line for line in text.splitlines() if not any(name in line for name in FILLING)} for _, text in found]
    assert uncounted[0] == uncounted[1]


@pytest.mark.parametrize("options", [
    {"ignore_modules": [nn.Conv2d]}, {"backend_specific_config": {"count_functional": False}},
    {"flops_units": "GMac", "param_units": "K", "output_precision": 6},
    {"custom_modules_hooks": {nn.ReLU: lambda m, x, y: setattr(m, "__flops__", m.__flops__ + 3 * y.numel()),
                              nn.AdaptiveAvgPool2d: lambda m, x, y: setattr(m, "__flops__", 7)}},
    {"backend": "aten", "ignore_modules": [torch.ops.aten.convolution]},
    {"backend": "aten", "custom_modules_hooks": {torch.ops.aten.relu_: lambda inputs, outputs: outputs[0].numel()}},
], ids=["ignored", "no functions", "units", "hooks", "ignored operator", "operator hook"])
def test_options_mean_what_they_mean_there(theirs, options):
    model, inputs = make_model("resnet18")
    model.layer1.requires_grad_(False)
    assert ask(ours, model, inputs, **options) == ask(theirs, model, inputs, **options)


@pytest.mark.parametrize("module", [
    nn.MultiheadAttention(8, 2), nn.GRU(8, 4, 2), nn.LSTMCell(8, 4), nn.Upsample(scale_factor=2), nn.GroupNorm(1, 4),
    nn.ConvTranspose2d(4, 2, 3, 2), nn.ELU(), nn.AvgPool2d(2), nn.Hardtanh()], ids=lambda m: type(m).__name__)
def test_each_layer_counts_as_there(theirs, module):
    shape = (4, 6, 6) if isinstance(module, (nn.Upsample, nn.GroupNorm, nn.ConvTranspose2d, nn.AvgPool2d)) else (
        8, ) if isinstance(module, nn.LSTMCell) else (3, 8)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module

        def forward(self, x):
            return self.layer(*[x] * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))

    found = [lib.get_model_complexity_info(Net(), shape, as_strings=False, print_per_layer_stat=False)
             for lib in (ours, theirs)]
    assert found[0] == found[1]


def test_models_without_data():
    model, inputs = make_model("resnet18")
    expected = ask(ours, model, inputs)
    assert model.training and not hasattr(model.conv1, "__flops__")
    with torch.device("meta"):
        assert ask(ours, make_model("resnet18")[0], inputs) == expected
    with MetaTensorMode():
        model = make_model("resnet18")[0].cuda()
        assert ask(ours, model, [t.cuda() for t in inputs]) == expected


def test_arguments_that_cannot_be_used_and_errors_of_the_model():
    with pytest.raises(InputError, match="tuple of at least one size"):
        ours.get_model_complexity_info(nn.Linear(2, 2), [2])
    with pytest.raises(InputError, match="'pytorch' or 'aten'"):
        ours.get_model_complexity_info(nn.Linear(2, 2), (2, ), backend="jit")
    with pytest.raises(RuntimeError, match="same reduction dim"):
        ours.get_model_complexity_info(nn.Linear(2, 2), (3, ))
