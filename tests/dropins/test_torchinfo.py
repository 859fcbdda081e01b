"""`analyzer.dropins.torchinfo` beside torchinfo: the same table to the character, without data."""
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
    {"verbose": 2, "col_names": ("num_params", "kernel_size"), "cache_forward_pass": True}],
    ids=["names", "train", "narrow", "batch", "verbose"])
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


def test_what_models_of_libraries_lack(theirs, capsys):
    torch.manual_seed(0)
    model = Pruned()
    text = same(capsys, theirs, lambda: (model, {"input_size": (2, 3, 4)}), col_names=COLUMNS, depth=5, verbose=2,
                factor=2)
    assert "(recursive)" in text and "│    │    └─weight" in text


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
    ({"col_width": 0}, "at least 1"), ({"verbose": 3}, "0, 1 or 2")])
def test_arguments_that_cannot_be_used(options, says):
    with pytest.raises(InputError, match=says):
        ours.summary(nn.Linear(4, 4), **options)
