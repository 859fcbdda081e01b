"""`analyzer.dropins.fvcore` beside fvcore: the same figures and tables, without data."""
import logging
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.sweep(3)
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


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["mixed", "resnet18", "bert"])
def test_tables_are_those_of_fvcore(theirs, name):
    model, inputs = make_model(name)
    counted = [(lib, lib.FlopCountAnalysis(model, inputs), lib.ActivationCountAnalysis(model, inputs))
               for lib in (ours, theirs)]
    for options in ({}, {"max_depth": 1}, {"max_depth": 6, "show_param_shapes": False}):
        texts = [lib.flop_count_table(flops, activations=activations if options else None, **options)
                 for lib, flops, activations in counted]
        assert texts[0] == texts[1]
    assert ours.parameter_count(model) == theirs.parameter_count(model)
    assert ours.parameter_count_table(model, 2) == theirs.parameter_count_table(model, 2)
    texts = [lib.flop_count_str(flops) for lib, flops, _ in counted]
    assert texts[0] == texts[1]


class _Listed(torch.nn.Module):
    """Lists of parameters are modules that are not called; a layer that stands twice."""

    def __init__(self):
        super().__init__()
        self.listed = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(4, 4))])
        self.first = self.second = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x @ self.listed[0]))


@pytest.mark.parametrize("make", [_Listed, lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())],
                         ids=["listed", "small"])
def test_columns_of_small_figures_are_numbers_where_fvcore_has_numbers(theirs, make):
    model, inputs = make(), (torch.rand(2, 4), )
    texts = [lib.flop_count_table(lib.FlopCountAnalysis(model, inputs),
                                  activations=lib.ActivationCountAnalysis(model, inputs)) for lib in (ours, theirs)]
    assert texts[0] == texts[1]


@pytest.mark.sweep(1)
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


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["mixed", "resnet18"])
def test_models_without_data(name):
    model, inputs = make_model(name)
    expected = ours.FlopCountAnalysis(model, inputs).by_module()
    with torch.device("meta"):
        assert ours.FlopCountAnalysis(make_model(name)[0], inputs).by_module() == expected
    with MetaTensorMode():
        model, inputs = make_model(name)
        assert ours.FlopCountAnalysis(model.cuda(), tuple(t.cuda() for t in inputs)).by_module() == expected


@torch.jit.script
def multiply_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) @ w


class Product(torch.autograd.Function):
    """A product of two tensors, which calls another function on the way."""

    @staticmethod
    def forward(ctx, x, w, scale):
        ctx.save_for_backward(x, w)
        return multiply_twice(Doubled.apply(x) if scale else x, w), w.t()

    @staticmethod
    def backward(ctx, grad, other):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad, None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Functions(nn.Module):
    """Functions of its own and of torch, in the model and in a module of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.w = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))
        self.inner = nn.Module()
        self.inner.forward = lambda x: Doubled.apply(x) + Product.apply(x, self.w, True)[0]

    def forward(self, x):
        return self.second(multiply_twice(self.inner(self.first(x)), self.w))


@pytest.mark.parametrize("handles", [{}, {
    "prim::PythonOp.Product": lambda inputs, outputs: sum(inputs[i].type().sizes()[-1] for i in (0, 1)) * len(outputs),
    "prim::CallFunction": lambda inputs, outputs: 1000 * len(inputs)}])
def test_a_function_is_one_operator(theirs, handles):
    found = [lib.FlopCountAnalysis(Functions(), torch.ones(3, 4)).set_op_handle(**handles) for lib in (ours, theirs)]
    for mine, other in [[one.by_module_and_operator() for one in found], [one.unsupported_ops() for one in found],
                        [one.uncalled_modules() for one in found]]:
        assert mine == other
    assert found[0].total() == 2 * 48 + (4 + 4 + 2 * 3000 if handles else 0)


def test_what_fvcore_cannot_trace_counts():
    class Checkpointed(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    assert ours.FlopCountAnalysis(Checkpointed(4, 4), torch.ones(3, 4, requires_grad=True)).total() == 48
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert ours.FlopCountAnalysis(nn.Sequential(nn.Linear(4, 4), scripted), torch.ones(3, 4)).by_module() == {
        "": 96, "0": 48, "1": 48, "1.0": 0, "1.1": 0}
    assert ours.FlopCountAnalysis(scripted, torch.ones(3, 4)).total() == 48


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
    replaced = [vars(torch.autograd.Function)["apply"], vars(torch.jit.ScriptFunction)["__call__"]]
    ours.FlopCountAnalysis(model, inputs).total()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items()) and model.training
    assert torch.equal(torch.get_rng_state(), random) and nn.Module.__call__ is call
    assert replaced == [vars(torch.autograd.Function)["apply"], vars(torch.jit.ScriptFunction)["__call__"]]
    assert not model._forward_hooks and not model._forward_pre_hooks
