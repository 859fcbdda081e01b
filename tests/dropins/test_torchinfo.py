"""`analyzer.dropins.torchinfo` beside torchinfo: the same table to the character, without data."""
from collections import OrderedDict
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from analyzer import MetaTensorMode
from analyzer.dropins import torchinfo as ours
from analyzer.errors import InputError
from tests.dropins.sample_model import make_model

COLUMNS = ("kernel_size", "input_size", "output_size", "num_params", "params_percent", "mult_adds", "trainable")
# total_input is without the size of Python's object
FIGURES = ("total_params", "trainable_params", "total_param_bytes", "total_output_bytes", "total_mult_adds",
           "input_size")
LAYER = ("class_name", "var_name", "depth", "depth_index", "is_leaf_layer", "is_recursive", "executed", "input_size",
         "output_size", "kernel_size", "num_params", "trainable_params", "param_bytes", "output_bytes", "macs",
         "trainable")


@pytest.fixture
def theirs():
    found = pytest.importorskip("torchinfo", exc_type=ImportError)
    ours.clear_cached_forward_pass()
    found.torchinfo.clear_cached_forward_pass()  # it keeps what another test ran, asked for or not
    return found


def same(capsys, theirs, make, **options):
    """Whether all that is printed and found is the same."""
    texts, found = [], []
    for lib in (ours, theirs):
        model, inputs = make()
        stats = lib.summary(model, **inputs, **options)
        # an enumeration prints as its name since Python 3.11
        texts.append(capsys.readouterr().out.replace("Units.MEGABYTES", "M").replace("Units.GIGABYTES", "G"))
        layers = [{name: getattr(layer, name) for name in LAYER} for layer in stats.summary_list]
        inner = [{n: {c.value: v for c, v in row.items()} for n, row in layer.inner_layers.items()}
                 for layer in stats.summary_list]
        found.append(({name: getattr(stats, name) for name in FIGURES}, layers, inner, vars(stats.formatting).keys()))
    assert texts[0] == texts[1] and found[0] == found[1]
    return texts[0]


@pytest.mark.parametrize("name", ["mixed", "resnet18", "mobilenet_v3_small", "vit", "swin", "bert"])
def test_tables_are_those_of_torchinfo(theirs, capsys, name):
    def make():
        model, inputs = make_model(name)
        return model, {"input_data": list(inputs)}

    same(capsys, theirs, make, verbose=1)
    same(capsys, theirs, make, col_names=COLUMNS, depth=9, verbose=2)
    assert same(capsys, theirs, lambda: (make()[0], {}), depth=9)


@pytest.mark.parametrize("options", [
    {"depth": 1, "col_names": COLUMNS, "row_settings": ("var_names", "ascii_only")}, {"mode": "train", "depth": 0},
    {"row_settings": ("hide_recursive_layers", "depth"), "col_width": 12}, {"batch_dim": 0, "device": "cpu"},
    {"row_settings": (), "col_names": ()},
    {"verbose": 2, "col_names": ("num_params", "kernel_size"), "cache_forward_pass": True}],
    ids=["names", "train", "narrow", "batch", "none", "verbose"])
def test_options_mean_what_they_mean_there(theirs, capsys, options):
    def make():
        model, inputs = make_model("mixed" if "row_settings" in options else "resnet18")
        model.requires_grad_(False)
        next(iter(model.children())).requires_grad_(True)
        if "row_settings" in options:
            return model, {"input_data": {"x": inputs[0], "y": inputs[1]}}
        size = (3, 64, 64) if "batch_dim" in options else (2, 3, 64, 64)
        return model, {"input_size": size}

    same(capsys, theirs, make, **options)


class Pruned(nn.Module):
    """A masked layer, a list of layers run twice, parameters of its own, several inputs and a packed sequence."""

    def __init__(self):
        super().__init__()
        self.masked = prune.random_unstructured(nn.Linear(4, 4), "weight", 0.25)
        self.lists = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4, bias=False)])])
        self.gru, self.scale = nn.GRU(4, 3, batch_first=True), nn.Parameter(torch.ones(7))

    def forward(self, x, lengths=None, factor=1):
        for layer in [*self.lists[0], *self.lists[0]]:
            x = layer(x)
        packed = nn.utils.rnn.pack_padded_sequence(self.masked(x) * factor, torch.tensor([2, 1]), batch_first=True)
        return self.gru(packed)[0], self.scale


def test_lazy_layers_have_the_class_that_they_become(theirs, capsys):
    def make():
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2)), {
            "input_size": (2, 3, 8, 8)}

    assert "LazyConv2d" not in same(capsys, theirs, make, col_names=COLUMNS)
    assert "LazyConv2d" in same(capsys, theirs, lambda: (make()[0], {}))


def test_what_models_of_libraries_lack(theirs, capsys):
    torch.manual_seed(0)
    model = Pruned()
    text = same(capsys, theirs, lambda: (model, {"input_size": (2, 3, 4)}), col_names=COLUMNS, depth=5, verbose=2,
                factor=2)
    assert "(recursive)" in text and "│    │    └─weight" in text


class Masked(nn.Module):
    """A mask that is a parameter itself, one that is a plain attribute, and one that is none."""

    def __init__(self, x=None):
        super().__init__()
        self.weight_orig, self.weight_mask = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.eye(4))
        self.bias_orig, self.other_orig = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.bias_mask = torch.tensor([True, False, True, True])

    def forward(self, x):
        return x @ self.weight_orig + self.bias_orig


class Gives(nn.Module):
    """A layer whose result is a tensor in the containers that ``make`` puts it into; torchinfo cannot count the
    multiply-adds of weights where it finds no size.
    """

    def __init__(self, make):
        super().__init__()
        self.make, self.ih_scale = make, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.make(torch.as_tensor(x) * self.ih_scale)


class Scripted(nn.Sequential):
    """Layers of which one is scripted, in a container that does not run itself."""

    def __init__(self):
        inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        super().__init__(nn.Linear(4, 4), nn.ModuleList([inner, nn.Linear(4, 4)]))

    def forward(self, x):
        for layer in (self[0], *self[1]):
            x = layer(x)
        return x


NESTED = [lambda y: {"a": ({"b": [SimpleNamespace(tensors=y)], "c": y[0]},)}, lambda y: {"a": y[0], "b": y},
          lambda y: OrderedDict(a=[[y]]), lambda y: [{"a": [y], "b": y[0]}, y[0]], lambda y: [None, y],
          lambda y: (SimpleNamespace(tensors=[y]),), lambda y: {"a": None}, lambda y: []]


@pytest.mark.parametrize("options", [{"input_size": (3, 4)}, {"input_size": (4,), "batch_dim": 0}])
@pytest.mark.parametrize("make", NESTED)
def test_sizes_of_nested_results(theirs, capsys, make, options):
    same(capsys, theirs, lambda: (nn.Sequential(Gives(make)), {}), col_names=COLUMNS, **options)


@pytest.mark.parametrize("make", [
    lambda: (Masked(), {"input_size": (2, 4)}),
    lambda: (nn.Embedding(9, 3), {"input_size": (2, 4), "dtypes": [torch.LongTensor]}),
    lambda: (nn.Embedding(9, 3), {"input_size": [(2, 4)], "dtypes": ["torch.IntTensor"]}),
    lambda: (Gives(lambda y: y), {"input_data": numpy.ones((3, 4), dtype="float32")}),
    lambda: (Gives(lambda y: y), {"input_data": [numpy.ones((3, 4), dtype="float32")], "batch_dim": 0}),
    lambda: (Gives(lambda y: y), {"input_data": {"x": numpy.ones((3, 4), dtype="float32")}}),
    lambda: (torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), {"input_size": (2, 4)}),
    lambda: (torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), {}),
    lambda: (Scripted(), {"input_size": (2, 4)}), lambda: (Scripted(), {})],
    ids=["mask", "tensor type", "type's name", "array", "arrays", "arrays by name", "script", "script without input",
         "scripted part", "scripted part without input"])
def test_what_is_given_and_how_it_was_made(theirs, capsys, make):
    same(capsys, theirs, make, col_names=COLUMNS if len(make()[1]) else None, verbose=2)


def test_public_names_are_those_of_torchinfo(theirs):
    found = ours.summary(nn.Sequential(nn.Linear(8, 8)), (1, 8), verbose=0)
    expected = theirs.summary(nn.Sequential(nn.Linear(8, 8)), (1, 8), verbose=0)
    for mine, other in ((found, expected), (found.formatting, expected.formatting),
                        (found.summary_list[1], expected.summary_list[1])):
        assert not {name for name in dir(other) if not name.startswith("_")} - {*dir(mine)}
    layer, other = found.summary_list[1], expected.summary_list[1]
    for name, arguments in [("num_params_to_str", (True,)), ("macs_to_str", (False,)), ("params_percent", (100, True)),
                            ("get_param_count", (layer.module, "weight", layer.module.weight)),
                            ("calculate_size", ([torch.ones(2, 3)], 0)), ("leftover_trainable_params", ())]:
        assert getattr(layer, name)(*arguments) == getattr(other, name)(*arguments)
    for form, rows in ((found.formatting, found.summary_list), (expected.formatting, expected.summary_list)):
        assert form.layers_to_str(rows, 72) == "".join(form.layer_info_to_row(row, False, 72) for row in rows)
    assert found.formatting.header_row() == expected.formatting.header_row()
    assert [float(found.to_readable(n)[1]) for n in (5, 10**7, 10**10, 10**13)] == [5e-6, 10, 10, 10]
    assert found.float_to_megabytes(10**6) == 4 and found.to_megabytes(10**6) == 1


def test_formatting_can_be_changed_after(theirs):
    texts = []
    for lib in (ours, theirs):
        model, inputs = make_model("resnet18")
        stats = lib.summary(model, input_data=list(inputs), verbose=0)
        form = stats.formatting
        form.verbose, form.max_depth, form.col_names = 2, 1, (lib.ColumnSettings.NUM_PARAMS, )
        form.macs_units = lib.Units.NONE
        texts.append(str(stats))
    assert texts[0] == texts[1] and "└─weight" in texts[0]


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_models_without_data_on_any_device(device):
    model, _ = make_model("resnet18")
    expected = str(ours.summary(model, (1, 3, 64, 64), verbose=0))
    assert str(ours.summary(model, (1, 3, 64, 64), device=device, verbose=0)) == expected
    assert model.conv1.weight.device.type == "cpu" and model.training
    with torch.device("meta"):
        model = make_model("resnet18")[0]
    assert str(ours.summary(model, (1, 3, 64, 64), device=device, verbose=0)) == expected
    with MetaTensorMode():
        model = make_model("resnet18")[0].cuda()
        assert str(ours.summary(model, (1, 3, 64, 64), verbose=0)) == expected


@pytest.mark.parametrize("arguments", [
    {"input_size": [(3, 4), (3, 1)], "dtypes": [torch.float, torch.int64]},
    {"input_data": [torch.ones(3, 4), torch.ones(3)]}, {"input_data": torch.ones(3, 4), "y": torch.ones(3)},
    {"input_size": (4,), "batch_dim": 0}, {"input_size": (3, 4), "mode": "train"}])
def test_ways_to_give_input(arguments):
    class Adds(nn.Linear):
        def forward(self, x, y=None):
            return super().forward(x)

    model = nn.Sequential(Adds(4, 4))
    model.forward = lambda x, y=None: model[0](x, y)
    stats = ours.summary(model, verbose=0, **arguments)
    assert stats.summary_list[1].output_size == [1 if "batch_dim" in arguments else 3, 4] and model.training


@pytest.mark.parametrize(("options", "says"), [
    ({"col_names": ["size"]}, "'size' must be one of 'kernel_size'"), ({"mode": "test"}, "'train', 'eval'"),
    ({"row_settings": ["deep"]}, "'depth'"), ({"col_names": ["mult_adds"]}, "need input_size"),
    ({"input_size": (0, 4)}, "above 0"),
    ({"input_size": [(3, 4), (1,)], "dtypes": [torch.float]}, "2 inputs need as many dtypes"),
    ({"input_size": (1, 4), "input_data": torch.ones(1, 4)}, "one of them"),
    ({"input_size": (3, 4), "dtypes": ["LongTenser", None]}, "'LongTenser' is no dtype"),
    ({"col_width": 0}, "at least 1"), ({"verbose": 3}, "0, 1 or 2")])
def test_arguments_that_cannot_be_used(options, says):
    with pytest.raises(InputError, match=says):
        ours.summary(nn.Linear(4, 4), **options)
