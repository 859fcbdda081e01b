"""Kernels on several streams begin when they may; expectations are drawn by hand."""
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from analyzer.profilers.schedule import Clock, StreamClock, Stretch, Work

works = st.lists(st.builds(Work, st.integers(0, 50), st.integers(0, 50), st.booleans(), st.integers(0, 9)), max_size=20)


def spans(clock: StreamClock) -> list[tuple[int, int]]:
    clock.settle()
    return list(zip(clock.starts, clock.ends))


@given(works)
def test_one_stream_is_the_clock_of_one_queue(calls: list[Work]) -> None:
    clock, single = StreamClock(), Clock()
    for work in calls:
        single = single.after(work)
        if work.device:
            clock.launch(0, work.host, work.device, "compute")
        else:
            clock.host += work.host
        if work.waits:
            clock.synchronize(clock.record(0), work.notice)
    clock.settle()
    assert (clock.host, clock.latest) == single


def test_streams_run_beside_each_other_where_they_take_no_turns() -> None:
    clock = StreamClock()
    clock.launch(0, 1, 100, "compute")
    clock.launch(1, 1, 100, "nvlink")
    clock.launch(2, 1, 100, None)
    assert spans(clock) == [(1, 101), (2, 102), (3, 103)]


def test_kernels_of_one_turn_follow_each_other_as_they_are_ready() -> None:
    clock = StreamClock()
    gathered = clock.record(1)
    clock.launch(1, 1, 50, "nvlink")     # 1 to 51
    after = clock.record(1)
    clock.wait(0, after)
    clock.launch(0, 1, 10, "compute")    # ready at 51
    clock.launch(2, 1, 60, "compute")    # launched later, at 3, and ready first: 3 to 63
    clock.launch(2, 1, 5, "compute")     # ready at 63, as the other had been since 51
    assert spans(clock) == [(1, 51), (63, 73), (3, 63), (73, 78)]
    assert (gathered.time, after.time) == (0, 51)


def test_an_event_is_what_its_stream_waited_for_too() -> None:
    clock = StreamClock()
    clock.launch(1, 1, 30, None)          # 1 to 31
    clock.wait(2, clock.record(1))
    clock.wait(3, clock.record(2))        # no kernel of stream 2 is between
    clock.launch(3, 1, 4, None)
    assert spans(clock) == [(1, 31), (31, 35)]


def test_the_host_waits_for_what_it_asks_for_alone() -> None:
    clock = StreamClock()
    clock.launch(1, 1, 500, None)
    clock.launch(0, 1, 20, None)          # 2 to 22
    clock.synchronize(clock.record(0), notice=3)
    assert clock.host == 25
    clock.launch(0, 1, 10, None)          # launched at 26
    clock.synchronize(None, notice=0)     # stream 1 ends at 501
    assert clock.host == 501 and spans(clock) == [(1, 501), (2, 22), (26, 36)]


def test_what_is_launched_after_a_wait_could_not_have_been_earlier() -> None:
    clock = StreamClock()
    clock.launch(0, 1, 10, "compute")     # 1 to 11
    clock.synchronize(clock.record(0), notice=1)
    clock.launch(1, 1, 10, "compute")     # launched at 13
    clock.launch(0, 1, 10, "compute")
    assert spans(clock) == [(1, 11), (13, 23), (23, 33)]


# The clock of a step, and stretches of it as one map.

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
