"""The two clocks."""
import torch

from analyzer.tools.runtime.clock import EventClock, HostClock, choose_clock


def test_the_host_clock_leaves_out_what_runs_between_pause_and_go():
    now = [0.0]
    clock = HostClock(lambda: now[0])
    start = clock.pause()
    now[0] += 5  # the profiler's own
    clock.go()
    now[0] += 2  # the model's
    middle = clock.pause()
    now[0] += 1
    inside = clock.pause()  # nested: no time goes by
    now[0] += 1
    clock.go()
    now[0] += 1
    clock.go()
    now[0] += 4
    end = clock.pause()
    assert (clock.seconds(start, middle), clock.seconds(middle, inside), clock.seconds(
        middle, end), clock.seconds(start, end)) == (2, 0, 4, 6)


def test_events_are_recorded_at_once_and_read_after_the_device_is_done(stream):
    clock = stream.clock()
    start = clock.pause()
    clock.go()
    stream.work(3)
    end = clock.pause()
    stream.work(100)  # the host does not wait: a mark is where it was recorded
    clock.settle()
    assert stream.synchronized == 1
    assert clock.seconds(start, end) == 0.003


def test_a_model_on_the_cpu_is_timed_by_the_host_and_any_other_by_events():
    assert isinstance(choose_clock(torch.device("cpu")), HostClock)
    assert isinstance(choose_clock(torch.device("cuda", 0)), EventClock)  # makes no event yet, so it needs no GPU
