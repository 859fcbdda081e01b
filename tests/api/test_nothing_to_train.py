"""mode="train" of a model without anything that requires a gradient is its forward pass, and says so."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from analyzer import MetaTensorMode, Profile, profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from tests.small_model import Calls

X = torch.empty(4, 8)
SENTENCE = ("no parameter and no input requires a gradient, so there is nothing to train: only the forward pass is "
            "profiled, without backward pass and optimizer")


class Functions(nn.Module):
    def forward(self, x):
        return F.gelu(x) + 1


def frozen():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).requires_grad_(False)


@pytest.mark.parametrize("make", [nn.ReLU, Functions, frozen])
@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw"}, {"reuse": False}])
def test_what_cannot_be_trained_is_profiled_forward(make, settings):
    model = make()
    p, forward = profile(model, args=(X,), **settings), profile(model, args=(X,), mode="infer")
    assert p.assumptions == (SENTENCE,) and forward.assumptions == ()
    assert p.mode == "infer" and p.optimizer is None
    assert list(p.phases) == list(p.first_step) == ["forward"]
    for name in ("fwd_flops", "bwd_flops", "fwd_macs", "bwd_macs", "optimizer_flops", "model_flops", "bwd_seconds",
                 "optimizer_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "phases", "params",
                 "optimizer_bytes"):
        assert getattr(p, name) == getattr(forward, name), name
    assert [n.backward_bytes for n in p.nodes] == [n.backward_bytes for n in forward.nodes]
    assert SENTENCE in " ".join(p.summary().split())
    assert Profile.from_json(p.to_json()) == p


def test_a_loss_is_part_of_the_forward_pass():
    p = profile(nn.ReLU(), args=(X,), loss_fn=lambda out: out.square().mean())
    assert p.mode == "infer" and p.assumptions == (SENTENCE,)
    assert p.fwd_flops > profile(nn.ReLU(), args=(X,)).fwd_flops
    assert "loss" in [n.name for n in p.nodes]


def test_a_frozen_model_is_in_training_mode_as_asked():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).requires_grad_(False)
    p = profile(model, args=(X,), optimizer="sgd")
    assert p.assumptions == (SENTENCE,)
    assert [o.calls for o in p.operators if o.operator == "aten.native_dropout.default"] == [1]


def test_an_input_may_be_what_is_trained():
    p = profile(nn.ReLU(), args=(X.clone().requires_grad_(),))
    assert p.mode == "train" and "backward" in p.phases and p.assumptions == ()


def test_a_tensor_that_nobody_registered_may_be_what_is_trained():
    with MetaTensorMode():
        scale = torch.ones(8, requires_grad=True, device="cuda")
    for p in (profile(nn.ReLU(), args=(X,), loss_fn=lambda out: (out * scale).sum()),
              profile(Calls(lambda m, x: x * m.scale, scale=torch.ones(8, requires_grad=True)), args=(X,))):
        assert p.mode == "train" and "backward" in p.phases and SENTENCE not in p.assumptions


def test_an_output_without_a_gradient_of_a_model_with_parameters_is_an_error():
    class Detached(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(InputError, match="the model returned .* with no floating tensor that has a gradient: pass "
                                         "loss_fn=, or mode='infer'"):
        profile(Detached(8, 8), args=(X,))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_training_step_is_trained_whatever_is_around_the_call(around):
    """A caller's block without gradients, as around an evaluation, says nothing of the step that is asked about."""
    def step(model, optimizer, x):
        model(x).sum().backward()
        optimizer.step()

    for settings in ({}, {"optimizer": "adamw"}, {"optimizer": "sgd", "step": step}):
        wanted = profile(lambda: nn.Linear(8, 8), args=(X,), **settings)
        assert wanted.bwd_macs == 4 * 8 * 8  # of the weight alone: the input requires no gradient
        with around():
            model = nn.Linear(8, 8)
            for given in model, lambda: nn.Linear(8, 8):
                assert profile(given, args=(torch.rand(4, 8),), **settings) == wanted
            assert not torch.is_grad_enabled() and torch.is_inference_mode_enabled() == (around is torch.inference_mode)
            traced = symbolic_profile(symbolic_trace(model, meta_args={"input": X}), X)
        assert sum(node.meta["info"].bwd_macs for node in traced.graph.nodes) == 4 * 8 * 8
