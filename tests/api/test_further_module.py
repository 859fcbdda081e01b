"""Modules that run with a model and are no part of it: as arguments of it or of a step, and in a loss function."""
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.errors import InputError
from analyzer.parallel import world

X = torch.rand(2, 4)


class Trunk(nn.Module):
    """A layer of 20 parameters, and what is done with its output by what it is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, given):
        x = self.layer(x)
        if isinstance(given, nn.Module) and callable(getattr(given, "forward", None)) and not isinstance(
                given, (nn.ModuleList, nn.ParameterList, nn.ParameterDict)):
            return given(x)
        for one in given.values() if hasattr(given, "values") else given:
            x = one(x) if isinstance(one, nn.Module) else x @ one
        return x


#: what is given: how many parameters it has, and their path
GIVEN = {
    "a layer": (lambda: nn.Linear(4, 4), 20, "given"),
    "a list of layers": (lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], 40, "given_0"),
    "a dictionary of layers": (lambda: {"head": nn.Linear(4, 4)}, 20, "given_head"),
    "a ModuleList": (lambda: nn.ModuleList([nn.Linear(4, 4)]), 20, "given"),
    "a ParameterList": (lambda: nn.ParameterList([torch.rand(4, 4)]), 16, "given"),
    "a ParameterDict": (lambda: nn.ParameterDict({"weight": torch.rand(4, 4)}), 16, "given"),
}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_parameters_of_a_module_argument_are_parameters_of_the_run(name, by_name):
    make, count, path = GIVEN[name]
    given = make()
    held = [(p, p.data_ptr()) for one in (given.values() if type(given) is dict else [given] if isinstance(
        given, nn.Module) else given) for p in one.parameters()]
    args, kwargs = ((X,), {"given": given}) if by_name else ((X, given), {})
    found = profile(Trunk(), args, kwargs, optimizer="adam", device="h100")
    assert found.params == 20 + count
    assert found.optimizer_bytes == 2 * 4 * (20 + count)
    assert any(module.path == path for module in found.modules.children)
    assert any(text.startswith(f"{path} (") and text.endswith("the optimizer trains them")
               for text in found.assumptions)
    assert all(p.data_ptr() == address and p.grad is None for p, address in held)


def test_arithmetic_of_a_module_argument_is_counted():
    inside, beside = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    whole = profile(inside, (X,), device="h100")
    parts = profile(Trunk(), (X, beside), device="h100")
    assert (parts.fwd_flops, parts.bwd_flops) == (whole.fwd_flops, whole.bwd_flops)
    assert next(m for m in parts.modules.children if m.path == "given").fwd_macs == 2 * 4 * 4


def test_an_optimizer_that_a_step_is_given_has_the_parameters_of_the_model_alone():
    counts = []

    def step(model, optimizer, x, head):
        counts.append(sum(p.numel() for group in optimizer.param_groups for p in group["params"]))
        head(model(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = profile(nn.Linear(4, 4), (X, nn.Linear(4, 4)), step=step, optimizer="sgd", device="h100")
    assert set(counts) == {20} and found.params == 40
    assert "not of the optimizer that step is given" in " ".join(found.assumptions)


def test_a_module_that_a_loss_function_trains_is_found():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, output):
            return self.head(output).sum()

    loss = Loss()
    for loss_fn in (loss, lambda output: loss(output)):
        found = profile(nn.Linear(4, 4), (X,), loss_fn=loss_fn, optimizer="sgd", device="h100")
        assert found.params == 20 + 10
        assert found.modules.children[-1].path == "Loss"
    assert loss.head.weight.grad is None and loss.head.weight.device.type == "cpu"


def test_a_frozen_model_with_a_head_that_is_given_is_trained():
    found = profile(Trunk().requires_grad_(False), (X, nn.Linear(4, 4)), optimizer="sgd", device="h100")
    assert found.mode == "train" and found.bwd_flops


def test_a_module_of_outside_is_refused_in_a_world():
    outside = nn.Linear(4, 4)
    with world(2), pytest.raises(InputError, match=r"given: a Linear that was built outside of the world"):
        profile(Trunk, (X,), {"given": outside}, device="h100")
