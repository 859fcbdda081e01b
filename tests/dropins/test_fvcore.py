"""`analyzer.dropins.fvcore` beside fvcore: the same figures and tables, without data."""
import logging
from collections import Counter

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode
from analyzer.dropins import fvcore as ours
from analyzer.errors import DataDependentError, InputError
from tests.dropins.sample_model import make_model

# of what a model computes of sizes, which torch.jit traces as operators on numbers
OF_SIZES = {"aten::add", "aten::mul", "aten::div", "aten::sub", "aten::rsub", "aten::pow", "aten::floor_divide"}
# how tensors are filled
FILLING = {"aten::scalar_tensor", "aten::fill_"}


@pytest.fixture
def theirs():
    logging.getLogger("fvcore").setLevel(logging.ERROR)
    return pytest.importorskip("fvcore.nn", exc_type=ImportError)


def test_figures_are_those_of_fvcore(theirs, evaluated):
    mine, other = ours.FlopCountAnalysis(*evaluated), theirs.FlopCountAnalysis(*evaluated)
    assert mine.by_module_and_operator() == other.by_module_and_operator()
    assert (mine.total(), mine.by_module(), mine.by_operator()) == (other.total(), other.by_module(),
                                                                   other.by_operator())
    assert mine.uncalled_modules() == other.uncalled_modules()
    left = [{name: n for name, n in one.unsupported_ops().items() if name not in OF_SIZES | FILLING}
            for one in (mine, other)]
    assert left[0] == left[1]
    assert all(mine.unsupported_ops()[name] <= n for name, n in other.unsupported_ops().items())
    mine, other = (lib.ActivationCountAnalysis(*evaluated) for lib in (ours, theirs))
    assert mine.by_module_and_operator() == other.by_module_and_operator() and mine.total() > 0


@pytest.mark.parametrize("name", ["mixed", "resnet18", "bert"])
def test_tables_are_those_of_fvcore(theirs, name):
    model, inputs = make_model(name)
    for options in ({}, {"max_depth": 1}, {"max_depth": 6, "show_param_shapes": False}):
        texts = [lib.flop_count_table(lib.FlopCountAnalysis(model, inputs),
                                      activations=lib.ActivationCountAnalysis(model, inputs) if options else None,
                                      **options) for lib in (ours, theirs)]
        assert texts[0] == texts[1]
    assert ours.parameter_count(model) == theirs.parameter_count(model)
    assert ours.parameter_count_table(model, 2) == theirs.parameter_count_table(model, 2)
    texts = [lib.flop_count_str(lib.FlopCountAnalysis(model, inputs)) for lib in (ours, theirs)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("training", [True, False])
def test_training_flags_count_as_they_are(theirs, training):
    model, inputs = make_model("resnet18")
    model.train(training)
    assert ours.flop_count(model, inputs) == theirs.flop_count(model, inputs)
    assert ours.activation_count(model, inputs)[0] == theirs.activation_count(model, inputs)[0]


def test_handles_of_fvcore_count_here(theirs):
    from fvcore.nn import jit_handles

    model, inputs = make_model("mixed")
    handles = {"aten::leaky_relu": jit_handles.elementwise_flop_counter(1, 2),
               "aten::einsum": jit_handles.einsum_flop_jit, "aten::_convolution": jit_handles.conv_flop_jit,
               "aten::softmax": lambda inputs, outputs: 7}
    mine, other = (lib.FlopCountAnalysis(model, inputs).set_op_handle(**handles) for lib in (ours, theirs))
    assert mine.by_operator() == other.by_operator() and mine.by_operator()["softmax"] == 7
    assert mine.copy().total() == mine.total() != mine.copy().clear_op_handles().total() == 0


class Caller(nn.Module):
    """Its second child calls the first, which is not its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Module()
        self.second.forward = lambda x: self.first(x) + self.second.inner(x).sum()
        self.second.inner = nn.Linear(2, 5, bias=False)

    def forward(self, x):
        return self.second(x)


@pytest.mark.parametrize(("mode", "second"), [("owner", 10), ("caller", 16)])
def test_whose_an_operator_is(mode, second):
    found = ours.FlopCountAnalysis(Caller(), torch.ones(1, 2)).ancestor_mode(mode)
    assert found.by_module() == {"": 16, "first": 6, "second": second, "second.inner": 10}
    with pytest.raises(InputError, match="'owner' or 'caller'"):
        found.ancestor_mode("parent")


def test_an_operator_is_ignored_or_named(caplog):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2)).eval()
    found = ours.FlopCountAnalysis(model, torch.ones(3, 4)).set_op_handle("aten::batch_norm", None)
    assert (found.total(), found.by_operator()) == (24, Counter(linear=24))
    assert "aten::gelu ran 1 times" in caplog.text and found.unsupported_ops("1") == {"aten::gelu": 1}
    caplog.clear()
    assert ours.FlopCountAnalysis(model, torch.ones(3, 4)).unsupported_ops_warnings(False).total() == 24 + 24
    assert not caplog.text


def test_modules_that_do_not_run_are_named(caplog):
    model, inputs = make_model("mixed")
    found = ours.FlopCountAnalysis(model, inputs)
    assert found.uncalled_modules() == {"same", "unused"} and "unused" in caplog.text and "same" not in caplog.text
    assert found.canonical_module_name("again") == "up" and found.total("again") == found.total("up")
    with pytest.raises(KeyError, match="'nowhere'"):
        found.total("nowhere")


@pytest.mark.parametrize("name", ["mixed", "resnet18"])
def test_models_without_data(name):
    model, inputs = make_model(name)
    expected = ours.FlopCountAnalysis(model, inputs).by_module()
    with torch.device("meta"):
        assert ours.FlopCountAnalysis(make_model(name)[0], inputs).by_module() == expected
    with MetaTensorMode():
        model, inputs = make_model(name)
        assert ours.FlopCountAnalysis(model.cuda(), tuple(t.cuda() for t in inputs)).by_module() == expected


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.norm, self.drop = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()

    def forward(self, x):
        self.drop(self.norm(x))
        return [self.rows(x) for _ in range(int(self.rows(x)[0].argmax()) + 1)]


def test_code_that_asks_for_contents_runs_on_them():
    model = Branch()
    nn.init.zeros_(model.rows.weight)
    model.rows.bias.data = torch.tensor([0.0, 1.0])
    random = torch.get_rng_state()
    assert ours.FlopCountAnalysis(model, torch.ones(3, 2)).by_operator()["linear"] == 3 * 3 * 4
    assert model.norm.num_batches_tracked == 0 and torch.equal(torch.get_rng_state(), random)
    with pytest.raises(DataDependentError):
        ours.FlopCountAnalysis(model.to("meta"), torch.ones(3, 2)).total()


def test_nothing_is_left_behind():
    model, inputs = make_model("resnet18")
    state = {name: t.clone() for name, t in model.state_dict().items()}
    random, call = torch.get_rng_state(), nn.Module.__call__
    ours.FlopCountAnalysis(model, inputs).total()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items()) and model.training
    assert torch.equal(torch.get_rng_state(), random) and nn.Module.__call__ is call
    assert not model._forward_hooks and not model._forward_pre_hooks
