"""The clock of a step, and stretches of it as one map."""
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from analyzer.profilers.schedule import Clock, Stretch, Work

works = st.lists(st.builds(Work, st.integers(0, 50), st.integers(0, 50), st.booleans(), st.integers(0, 9)), max_size=20)


def run(clock: Clock, calls: list[Work]) -> Clock:
    for work in calls:
        clock = clock.after(work)
    return clock


def fold(calls: list[Work]) -> Stretch:
    stretch = Stretch()
    for work in calls:
        stretch = stretch.then(work)
    return stretch


@given(st.integers(0, 1000), st.integers(0, 1000), works)
def test_a_stretch_ends_where_its_calls_do(host: int, device: int, calls: list[Work]) -> None:
    clock = Clock(host, device)
    assert fold(calls).end(clock) == run(clock, calls)


def test_a_slow_host_leaves_the_device_waiting_and_a_fast_one_runs_ahead() -> None:
    launches, kernels = [Work(10, 1)] * 3, [Work(1, 10)] * 3
    assert run(Clock(), launches) == Clock(30, 31)  # each kernel waits for its launch; the last ends one after
    assert run(Clock(), kernels) == Clock(3, 31)    # the first is launched at 1, then one follows the other


def test_a_wait_lets_the_host_go_on_when_the_device_is_done() -> None:
    assert run(Clock(), [Work(1, 100), Work(1, 0, True, 5), Work(1, 10)]) == Clock(107, 117)
