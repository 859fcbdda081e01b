"""Whatever ends a recording, and wherever: torch, the model, gradients and random numbers are as they were."""
import pytest
import torch
from torch import nn

from analyzer.memory.host_memory import HostMemory
from analyzer.tools.runtime import FlopsProfiler, measure
from tests.meta.test_mode import assert_unchanged, observable_torch


@pytest.fixture(scope="module", autouse=True)
def optimizer_used():
    """Whatever torch imports or lists at an optimizer's first step is there."""
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()


class Interrupted(BaseException):
    """As a KeyboardInterrupt."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Interrupted


class Model(nn.Module):
    """Raises where it is told to."""

    def __init__(self, point=None):
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)
        self.point = point

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)))
        if self.point == "forward":
            raise Interrupted
        if self.point == "backward":
            x = FailingBackward.apply(x)
        if self.point == "inside":
            self.last(x[:, :1])
        return self.last(x)


class FailingSGD(torch.optim.SGD):
    def step(self, closure=None):
        raise Interrupted


def state_of(model):
    hooks = [[len(v) for k, v in vars(m).items() if k.endswith("_hooks")] for m in model.modules()]
    return {"tensors": {k: v.clone() for k, v in model.state_dict().items()}, "hooks": hooks,
            "names": [sorted(vars(m)) for m in model.modules()], "training": [m.training for m in model.modules()],
            "grads": [p.grad for p in model.parameters()], "random": torch.get_rng_state()}


def assert_same(before, after):
    for name in before["tensors"]:
        assert torch.equal(before["tensors"][name], after["tensors"][name])
    assert torch.equal(before["random"], after["random"])
    assert [g is h for g, h in zip(before["grads"], after["grads"])] == [True] * len(before["grads"])
    assert all(before[key] == after[key] for key in ("hooks", "names", "training"))


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_measuring_a_step_changes_nothing(optimizer):
    model, x = Model(), torch.rand(3, 4)
    model(x).sum().backward()
    torch_before, before = observable_torch(), state_of(model)
    copies = [p.grad.clone() for p in model.parameters()]
    measure(model, (x,), optimizer=optimizer)
    assert_unchanged(torch_before)
    assert_same(before, state_of(model))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), copies))


@pytest.mark.parametrize("point", ["forward", "backward", "inside"])
def test_a_step_that_fails_changes_nothing(point):
    model, x = Model(point), torch.rand(3, 4)
    torch_before, before = observable_torch(), state_of(model)
    with pytest.raises(RuntimeError if point == "inside" else Interrupted):
        measure(model, (x,), optimizer="sgd")
    assert_unchanged(torch_before)
    assert_same(before, state_of(model))


@pytest.mark.parametrize("point", ["forward", "backward", "inside"])
def test_a_loop_that_fails_ends_the_recording_though_nobody_ends_it(point):
    model, x = Model(point), torch.rand(3, 4)
    torch_before, attributes = observable_torch(), state_of(model)["names"]
    prof = FlopsProfiler(model)
    prof.start_profile()
    with pytest.raises(RuntimeError if point == "inside" else Interrupted):
        model(x).sum().backward()
    assert_unchanged(torch_before)
    assert state_of(model)["names"] == attributes
    assert prof.profile.modules.children[0].fwd_flops > 0  # what ran until then can be read
    prof.end_profile()
    prof.start_profile()  # and it can begin again
    model.point = None
    model(x)
    prof.end_profile()
    assert_unchanged(torch_before)


def test_a_failing_optimizer_leaves_no_mode_behind():
    model = Model()
    prof = FlopsProfiler(model)
    before = observable_torch()
    prof.start_profile()
    model(torch.rand(3, 4)).sum().backward()
    with pytest.raises(Interrupted):
        FailingSGD(model.parameters(), lr=0.1).step()
    assert observable_torch()["modes"] == before["modes"]
    prof.end_profile()
    assert_unchanged(before)


def test_a_loop_that_is_measured_computes_what_it_would_have():
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, optimizer = Model(), None
        optimizer = torch.optim.AdamW(model.parameters())
        prof = FlopsProfiler(model)
        if watched:
            prof.start_profile()
        for _ in range(3):
            model(torch.rand(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        prof.end_profile()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_ending_in_the_middle_of_a_call_and_ending_twice_leaves_nothing():
    model, before = Model(), observable_torch()
    prof = FlopsProfiler(model)
    model.drop.register_forward_hook(lambda *_: prof.end_profile())
    prof.start_profile()
    model(torch.rand(3, 4))
    prof.end_profile()
    assert_unchanged(before)


def test_compiled_functions_are_compiled_again_afterwards():
    runs = []

    def backend(graph, inputs):
        def run(*args):
            runs.append(1)
            return graph.forward(*args)
        return run

    model, x = torch.compile(Model().eval(), backend=backend), torch.rand(3, 4)
    with FlopsProfiler(model) as prof:
        model(x)
    assert not runs and prof.get_total_flops() > 0
    model(x)
    assert runs


def test_too_little_memory_when_a_storage_is_freed_ends_the_run(monkeypatch):
    """Python prints what the callback of a weak reference raises, and goes on."""
    free, freed = HostMemory.free, []

    def run_out(self, region):
        freed.append(region)
        if len(freed) == 5:
            raise MemoryError
        free(self, region)

    model, x = Model(), torch.rand(3, 4)
    torch_before, right = observable_torch(), measure(model, (x,)).peak_allocated_bytes
    monkeypatch.setattr(HostMemory, "free", run_out)
    with pytest.raises(MemoryError):
        measure(model, (x,))
    assert_unchanged(torch_before)
    assert measure(model, (x,)).peak_allocated_bytes == right
