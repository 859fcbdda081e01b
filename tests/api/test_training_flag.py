"""An inference step runs dropout and batch norm as their flags say, says so, and does not where eval=True."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import StochasticDepth

from analyzer import profile
from analyzer.errors import InputError

X = torch.empty(4, 8)


class Functional(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=self.training) * 2


class Attending(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0)


def make():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Dropout(0.1),
                         StochasticDepth(0.2, "row"), Functional())


def figures(p):
    return (p.fwd_flops, p.peak_allocated_bytes, p.phases, [(n.name, n.target) for n in p.nodes],
            {m.path: m.training for m in p.modules.walk()})


def test_what_runs_as_in_training_is_said():
    p = profile(make(), args=(X,), mode="infer")
    assert p.assumptions == (
        "modules are in training mode, which mode='infer' leaves as it is: 1 BatchNorm1d, 2 Dropout, 1 StochasticDepth,"
        " 4 random masks would not be the same after model.eval(), the first module '1'; with eval=True the model "
        "is profiled as after model.eval()",)
    assert {o.operator: o.calls for o in p.operators if "dropout" in o.operator or "bernoulli" in o.operator} == {
        "aten.native_dropout.default": 3, "aten.bernoulli_.float": 1}


@pytest.mark.parametrize("reuse", [True, False])
def test_eval_profiles_as_after_model_eval(reuse):
    model = make()
    model[2].eval()
    flags = [m.training for m in model.modules()]
    p = profile(model, args=(X,), mode="infer", eval=True, reuse=reuse)
    assert [m.training for m in model.modules()] == flags and True in flags
    assert p.assumptions == ()
    assert figures(p) == figures(profile(model.eval(), args=(X,), mode="infer"))
    assert figures(p) != figures(profile(model.train(), args=(X,), mode="infer"))


def test_eval_holds_in_training_too():
    model = make()
    p = profile(model, args=(X,), optimizer="adamw", eval=True)
    assert model.training and model[1].training
    model.eval()
    assert figures(p) == figures(profile(model, args=(X,), optimizer="adamw"))


def test_flags_are_as_they_were_after_an_exception():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Dropout()

        def forward(self, x):
            assert not self.training and not self.inner.training
            raise KeyError("mine")

    model = Failing()
    model.inner.eval()
    with pytest.raises(KeyError, match="mine"):
        profile(model, args=(X,), mode="infer", eval=True)
    assert model.training and not model.inner.training


def test_a_model_may_say_itself_what_eval_does():
    class Merging(nn.Linear):
        def train(self, mode=True):
            with torch.no_grad():
                self.weight.add_(1 if mode else -1)
            self.merged = not mode
            return super().train(mode)

        def forward(self, x):
            return super().forward(x) if not self.merged else x * 2

    model = Merging(8, 8)
    model.merged = False
    weight = model.weight.detach().clone()
    p = profile(model, args=(X,), mode="infer", eval=True)
    assert p.fwd_flops == 32 and not model.merged and model.training
    torch.testing.assert_close(model.weight.detach(), weight)


@pytest.mark.parametrize("model", [
    nn.Dropout(0.0), nn.LayerNorm(8), nn.BatchNorm1d(8, track_running_stats=False), make().eval(),
    StochasticDepth(0.0, "row"), nn.MultiheadAttention(8, 2), nn.LSTM(8, 8, dropout=0.0)])
def test_what_does_not_depend_on_the_flag_is_not_named(model):
    args = (X, X, X) if isinstance(model, nn.MultiheadAttention) else (X,)
    assert [a for a in profile(model, args=args, mode="infer").assumptions if "training mode" in a] == []


@pytest.mark.parametrize(("model", "what"), [
    (Functional(), "1 random mask "), (Attending(), "1 random mask "), (nn.AlphaDropout(0.1), "1 AlphaDropout"),
    (nn.RReLU(), "1 RReLU"), (nn.InstanceNorm1d(8, track_running_stats=True), "1 InstanceNorm1d")])
def test_what_depends_on_the_flag_is_named(model, what):
    (text,) = profile(model, args=(torch.empty(2, 3, 8, 8) if isinstance(model, Attending) else
                                   torch.empty(2, 8, 8),), mode="infer").assumptions
    assert what in text and text.endswith("with eval=True the model is profiled as after model.eval()")


def test_eval_is_a_flag():
    with pytest.raises(InputError, match="eval='yes': must be True or False"):
        profile(make(), args=(X,), eval="yes")
