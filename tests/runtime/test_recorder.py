"""Who gets the time: every lap belongs to one module, and all laps of a phase are its length."""
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError
from analyzer.tools.runtime import FlopsProfiler, dispatch, measure
from tests.runtime.conftest import Busy, Stream, own_milliseconds
from tests.small_model import Calls

X = torch.ones(2)


def test_modules_take_over_from_each_other_forward_and_backward(stream, busy):
    p = measure(busy, (X,), clock=stream.clock(), optimizer="sgd")
    assert own_milliseconds(p, "fwd_seconds") == {"": 5, "inner.0": 1, "inner.1": 3, "inner.1.inner.0": 7}
    assert own_milliseconds(p, "bwd_seconds") == {"": 10, "inner.0": 2, "inner.1": 6, "inner.1.inner.0": 14}
    assert (p.fwd_seconds, p.bwd_seconds, p.step_seconds) == (0.016, 0.032, 0.048)
    assert p.optimizer_seconds == 0  # the optimizer does no work on this stream
    assert [round(1e3 * c.fwd_seconds, 6) for c in p.module_calls] == [16, 1, 10, 7]
    assert "device events" in p.seconds_method and p.measured_steps == 3


def test_a_loop_is_measured_between_start_and_stop_and_what_runs_outside_the_model_is_nobodys(stream, busy):
    prof = FlopsProfiler(busy, clock=stream.clock())
    loss = busy(X).sum()  # before: not seen
    prof.start_profile()
    stream.work(1000)  # loading data
    loss = busy(X).sum()
    stream.work(1000)
    loss.backward()
    stream.work(1000)
    prof.stop_profile()
    busy(X).sum().backward()  # after: not seen
    p = prof.profile
    assert own_milliseconds(p, "fwd_seconds") == {"": 5, "inner.0": 1, "inner.1": 3, "inner.1.inner.0": 7}
    assert own_milliseconds(p, "bwd_seconds") == {"": 10, "inner.0": 2, "inner.1": 6, "inner.1.inner.0": 14}
    assert (p.mode, p.fwd_seconds, p.bwd_seconds, p.step_seconds) == ("train", 0.016, 0.032, 0.048)


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        self.stream.work(8)
        return super().step(closure)


def test_the_optimizers_step_is_shared_out_by_parameters(stream, busy):
    busy.inner[0].weight = nn.Parameter(torch.ones(5))  # 5 of 8 elements
    busy.inner[0].forward = lambda x: x * busy.inner[0].weight.sum()
    optimizer = SlowSGD(busy.parameters(), lr=0.0)
    optimizer.stream = stream
    with FlopsProfiler(busy, clock=stream.clock()) as prof:
        busy(X).sum().backward()
        optimizer.step()
    p = prof.profile
    assert p.optimizer_seconds == pytest.approx(0.008)
    assert own_milliseconds(p, "optimizer_seconds") == {"": 1, "inner.0": 5, "inner.1": 1, "inner.1.inner.0": 1}


def test_without_steps_all_that_runs_is_added_up_as_deepspeed_does(stream, busy):
    with FlopsProfiler(busy, clock=stream.clock()) as prof:
        for _ in range(3):
            busy(X)
    assert prof.get_total_duration() == pytest.approx(0.048)
    assert prof.profile.modules.calls == 3


def test_steps_are_averaged_from_start_step_to_end_step(stream):
    model = Busy(stream, 1, 2, Busy(stream, 0, 0))
    prof = FlopsProfiler(model, start_step=2, end_step=4, clock=stream.clock())
    prof.start_profile()
    for step in range(8):
        model.fwd = 10 ** step  # steps 2, 3 and 4: 100, 1000, 10000
        model.inner[0].fwd = step
        model(X).sum().backward()
        prof.step()
    p = prof.profile
    assert own_milliseconds(p, "fwd_seconds") == {"": 3700, "inner.0": 3}
    assert own_milliseconds(p, "bwd_seconds") == {"": 2, "inner.0": 0}
    assert (p.measured_steps, p.modules.calls) == (3, 1)
    assert not prof._recorder.is_running  # it ended by itself
    prof.end_profile()


def test_every_step_so_far_counts_where_no_last_one_is_given(stream, busy):
    with FlopsProfiler(busy, clock=stream.clock(), convention="own") as prof:
        for _ in range(4):
            busy(X).sum().backward()
            prof.step()
    assert (prof.profile.measured_steps, prof.get_total_duration()) == (4, pytest.approx(0.016))
    assert prof.get_total_flops() == 4 * 2 * 2  # two products of two elements in each of four modules: of one step


def test_reset_drops_what_was_recorded_and_goes_on_only_where_it_ran(stream, busy):
    prof = FlopsProfiler(busy, clock=stream.clock())
    prof.start_profile()
    busy(X)
    prof.reset_profile()
    busy(X)
    prof.stop_profile()
    assert prof.profile.modules.calls == 1
    prof.reset_profile()
    busy(X)
    with pytest.raises(InputError, match="nothing is recorded"):
        prof.get_total_flops()


class Noisy(nn.Module):
    def forward(self, x, generator):
        return x.bernoulli(0.5, generator=generator)


def test_calls_with_objects_of_the_models_are_remembered_in_no_table():
    prof = FlopsProfiler(Noisy())
    for generator, remembered in ((None, 1), (torch.Generator(), 0)):
        dispatch._signatures.clear()
        with prof:
            prof.model(X, generator)
        assert [row.operator for row in prof.profile.operators] == ["aten.bernoulli.p"]
        assert len(dispatch._signatures) == remembered


def test_a_module_that_stands_in_two_places_is_measured_at_the_first(stream):
    part = Busy(stream, 2, 4)
    p = measure(Busy(stream, 1, 2, part, part), (X,), clock=stream.clock())
    first, second = p.modules.children[0].children
    assert (first.calls, first.fwd_seconds, first.bwd_seconds) == (2, 0.004, 0.008)
    assert (second.shared_with, second.fwd_seconds) == ("inner.0", 0)
    assert p.fwd_seconds == pytest.approx(p.modules.fwd_seconds) == pytest.approx(0.005)


class Recursive(nn.Module):
    """Calls itself, and a part of its own in between."""

    def __init__(self, stream):
        super().__init__()
        self.stream, self.part = stream, Busy(stream, 2, 1)

    def forward(self, x, depth=3):
        self.stream.work(1)
        x = self.part(x)
        return self(x, depth - 1) if depth else x


def test_a_module_that_calls_itself_is_counted_once(stream):
    p = measure(Recursive(stream), (X,), clock=stream.clock())
    assert (p.modules.calls, p.modules.own.fwd_seconds, p.modules.children[0].fwd_seconds) == (4, pytest.approx(0.004),
                                                                                               pytest.approx(0.008))
    assert [round(1e3 * c.fwd_seconds) for c in p.module_calls if c.path == ""] == [12, 9, 6, 3]


# the other one ends, by an exception, with the last tensor that it needs: what follows in the inner module does not run
@pytest.mark.parametrize(("reentrant", "inner"), [(True, 2 + 4), (False, 4)])
def test_what_checkpointing_runs_again_is_part_of_the_modules_backward(stream, reentrant, inner):
    model = Calls(lambda m, x: checkpoint(m.block, x, use_reentrant=reentrant), block=Busy(
        stream, 3, 5, Busy(stream, 2, 4)))
    x = torch.ones(2, requires_grad=True)
    with FlopsProfiler(model, clock=stream.clock(), convention="own") as prof:
        model(x).sum().backward()
        assert prof._recorder.is_running  # that exception is no failure
    for p in (prof.profile, measure(model, (x,), clock=stream.clock())):
        assert own_milliseconds(p, "fwd_seconds") == {"block": 3, "block.inner.0": 2}
        assert own_milliseconds(p, "bwd_seconds") == {"block": 8, "block.inner.0": inner}
        assert p.recompute_flops > 0


def test_ignored_modules_are_part_of_whoever_calls_them(stream):
    class Ignored(Busy):
        pass

    model = Busy(stream, 1, 2, Ignored(stream, 5, 6, Busy(stream, 3, 4)))
    prof = FlopsProfiler(model, clock=stream.clock(), convention="own")
    prof.start_profile(ignore_list=[Ignored])
    model(X).sum().backward()
    prof.stop_profile()
    assert own_milliseconds(prof.profile, "fwd_seconds") == {"": 6, "inner.0.inner.0": 3}
    assert own_milliseconds(prof.profile, "bwd_seconds") == {"": 8, "inner.0.inner.0": 4}
    assert prof.get_total_flops() == 4 * 3


def test_a_method_that_is_not_forward_counts_through_the_modules_that_it_calls(stream):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Busy(stream, 4, 1)

        def encode(self, x):
            stream.work(50)
            return self.part(x * 3)

    model = Encoder()
    with FlopsProfiler(model, clock=stream.clock(), convention="own") as prof:
        model.encode(X)
    assert (prof.get_total_duration(), prof.get_total_flops()) == (0.004, 4)


class InPlace(nn.Module):
    """What full backward hooks refuse: its input is changed in place, its output is a view."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return x.mul_(2).view(-1)[2:].add_(1)


def test_in_place_operators_and_views_run_as_ever():
    torch.manual_seed(0)
    model, x = nn.Sequential(InPlace(), nn.ReLU(inplace=True)), torch.randn(3, 4)
    model(x).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with FlopsProfiler(model) as prof:
        model(x).sum().backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    assert prof.profile.modules.children[0].bwd_seconds > 0


def test_operators_under_inference_mode_are_counted_as_under_no_grad():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Conv1d(2, 3, 3), nn.LayerNorm(6)), torch.rand(2, 2, 4)
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        with FlopsProfiler(model, convention="own") as prof, context():
            model(x)
        found.append([(m.fwd_flops, m.activation_bytes) for m in prof.profile.modules.walk()])
    assert found[0] == found[1] and found[0][0][0] > 0


def test_other_threads_are_not_recorded(stream, busy):
    import threading

    other = Busy(Stream(), 1, 1)
    with FlopsProfiler(busy, clock=stream.clock()) as prof:
        thread = threading.Thread(target=lambda: (busy(X), other(X)))
        thread.start()
        thread.join()
        busy(X)
    assert prof.profile.modules.calls == 1
