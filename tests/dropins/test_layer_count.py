"""`ptflops`, `thop` and `calflops` of `analyzer.dropins` beside the packages: the same figures, without data."""
from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode
from analyzer.dropins import calflops, ptflops, thop
from analyzer.errors import InputError
from tests.dropins.sample_model import make_model


def load(name):
    """The package itself."""
    warnings.simplefilter("ignore")
    return pytest.importorskip(name, exc_type=ImportError)


def ask_ptflops(lib, model, inputs, **options):
    made = {"input_ids": inputs[0]} if inputs[0].dtype == torch.int64 else {"x": inputs[0], "y": inputs[-1]}
    constructor = None if len(inputs) == 1 and "input_ids" not in made else lambda size: made
    with contextlib.redirect_stdout(io.StringIO()):
        return lib.get_model_complexity_info(model, tuple(inputs[0].shape[1:]), False, input_constructor=constructor,
                                             **options)


def ask_thop(lib, model, inputs):
    return lib.profile(model, inputs=inputs, verbose=False, ret_layer_info=True)


def test_figures_are_those_of_ptflops(evaluated):
    found = [ask_ptflops(lib, *evaluated, as_strings=False) for lib in (ptflops, load("ptflops"))]
    assert found[0] == found[1] and min(found[0]) > 0


@pytest.mark.parametrize("options", [
    {"ignore_modules": [nn.Conv2d]}, {"backend_specific_config": {"count_functional": False}},
    {"flops_units": "GMac", "param_units": "K", "output_precision": 6}], ids=["ignored", "no functions", "units"])
def test_options_mean_what_they_mean_in_ptflops(options):
    model, inputs = make_model("resnet18")
    model.layer1.requires_grad_(False)
    assert ask_ptflops(ptflops, model, inputs, **options) == ask_ptflops(load("ptflops"), model, inputs, **options)


@pytest.mark.parametrize("module", [
    nn.MultiheadAttention(8, 2), nn.GRU(8, 4, 2), nn.LSTMCell(8, 4), nn.Upsample(scale_factor=2), nn.GroupNorm(1, 4),
    nn.ConvTranspose2d(4, 2, 3, 2), nn.ELU(), nn.AvgPool2d(2), nn.Hardtanh()], ids=lambda m: type(m).__name__)
def test_each_layer_counts_as_in_ptflops(module):
    shape = (4, 6, 6) if isinstance(module, (nn.Upsample, nn.GroupNorm, nn.ConvTranspose2d, nn.AvgPool2d)) else (
        8, ) if isinstance(module, nn.LSTMCell) else (3, 8)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module

        def forward(self, x):
            return self.layer(*[x] * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))

    found = [lib.get_model_complexity_info(Net(), shape, as_strings=False, print_per_layer_stat=False)
             for lib in (ptflops, load("ptflops"))]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["mixed", "resnet18", "mobilenet_v3_small", "vit", "bert"])
def test_figures_are_those_of_thop(name):
    # thop leaves counters on layers without a rule, so each gets a model of its own
    found = [ask_thop(lib, *make_model(name)) for lib in (thop, load("thop"))]
    assert found[0] == found[1] and min(found[0][:2]) > 0


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
def test_each_layer_counts_as_in_thop(name):
    layer, dims = LAYERS[name]
    x = torch.rand((2, 6, 6, 6)[4 - dims:])
    found = [lib.profile(nn.Sequential(layer), (x, ), verbose=False) for lib in (thop, load("thop"))]
    assert found[0] == found[1] and found[0][0] > 0


def test_what_is_one_layer_has_its_parameters():
    assert thop.profile(nn.Linear(4, 5), (torch.ones(2, 4), )) == (40, 25)  # thop says 0


def test_numbers_as_thop_prints_them():
    numbers = [0, 999, 1000, 1001, 1.5e6, 3e9, 7.25e12]
    assert thop.clever_format(numbers, "%.3f") == load("thop").clever_format(numbers, "%.3f")
    assert thop.clever_format(5e6) == "5.00M"


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "swin"])
def test_figures_are_those_of_calflops_where_no_attention_kernel_runs(name):
    model, inputs = make_model(name)
    found = [lib.calculate_flops(model.eval(), args=list(inputs), output_as_string=False, print_results=False)
             for lib in (calflops, load("calflops"))]
    assert found[0] == found[1] and min(found[0]) > 0


def test_products_of_attention_count_under_calflops():
    """Which calflops itself leaves out: it knows no function of them."""
    class Attends(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    found = calflops.calculate_flops(Attends(), (1, 2, 8, 4), print_results=False, output_as_string=False)
    assert found == (4 * 2 * 8 * 8 * 4, 2 * 2 * 8 * 8 * 4, 0)


def test_the_forward_pass_and_backward_by_calflops_factor(capsys):
    found = calflops.calculate_flops(nn.Linear(10, 10), (2, 10), include_backPropagation=True, compute_bp_factor=2.0)
    assert found == ("1.2 KFLOPS", "600 MACs", "110")
    assert "params of model" in capsys.readouterr().out


def count(model, inputs):
    model = model.eval()
    return (ask_ptflops(ptflops, model, inputs), ask_thop(thop, model, inputs)[:2],
            calflops.calculate_flops(model, args=list(inputs), print_results=False))


def test_models_without_data():
    model, inputs = make_model("resnet18")
    expected = count(model, inputs)
    with torch.device("meta"):
        assert count(make_model("resnet18")[0], [t.to("meta") for t in inputs]) == expected
    with MetaTensorMode():
        assert count(make_model("resnet18")[0].cuda(), [t.cuda() for t in inputs]) == expected
    assert not hasattr(model.conv1, "__flops__") and "total_ops" not in vars(model.conv1)


def test_arguments_that_cannot_be_used_and_errors_of_the_model():
    info = ptflops.get_model_complexity_info
    with pytest.raises(InputError, match="tuple of at least one size"):
        info(nn.Linear(2, 2), [2])
    with pytest.raises(InputError, match=r"backend='aten'.*`analyzer.profile` counts every operator"):
        info(nn.Linear(2, 2), (2, ), backend="aten")
    with pytest.raises(InputError, match="custom_modules_hooks=.*Linear"):
        info(nn.Linear(2, 2), (2, ), custom_modules_hooks={nn.Linear: print})
    with pytest.raises(InputError, match="custom_ops=.*hooks are not run here"):
        thop.profile(nn.Linear(2, 2), (torch.ones(2), ), custom_ops={nn.Linear: print})
    with pytest.raises(InputError, match="calculate_flops.*give input_shape"):
        calflops.calculate_flops(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="same reduction dim"):
        info(nn.Linear(2, 2), (3, ))


@pytest.mark.parametrize("broken", [
    'raise RuntimeError("operator torchvision::nms does not exist")',
    "def __getattr__(name): raise OSError(name)", "import torchvision.models", None])
def test_tools_need_no_torchvision(broken, tmp_path):
    # a torchvision built for another torch cannot be imported, or fails later: the figures are those of the layers
    if broken is None:
        start = "import sys; sys.modules['torchvision'] = None\n"
    else:
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text(broken)
        start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code = start + (
        "import torch\nfrom analyzer.dropins import calflops, ptflops, thop\n"
        "model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())\n"
        "print(ptflops.get_model_complexity_info(model, (3, 32, 32), False, as_strings=False)[0],\n"
        "      thop.profile(model, (torch.empty(1, 3, 32, 32), ), verbose=False)[0],\n"
        "      calflops.calculate_flops(model, (1, 3, 32, 32), print_results=False, output_as_string=False)[1])\n")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    products = 8 * 30 * 30 * 3 * 9
    # ptflops: biases, the layer and the function of the activation besides
    assert found.stdout.split() == [str(products + 3 * 8 * 30 * 30), f"{products}.0", str(products)], found.stderr
