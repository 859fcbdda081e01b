"""A step on several streams, by a device on which each kernel takes as long as the test says."""
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import _functional_collectives as collectives

from analyzer import ProfileOptions, profile
from analyzer.hardware import find_device
from analyzer.hardware.cluster_spec import HostSpec
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime
from analyzer.parallel import world
from analyzer.profilers import call_sequence, host_time
from analyzer.profilers.kernel_time import find_share
from analyzer.profilers.schedule import COMMUNICATION, DEALT, FreeAt, StreamClock, Task
from tests.call import Call
from tests.profilers.test_lane import replicated, sharded

US = 1e-6
#: of the kernels below, in microseconds, and what bounds them
TIMES = {"sin": (40, "arithmetic"), "cos": (100, "arithmetic"), "tan": (30, "latency"), "neg": (10, "memory"),
         "mul": (5, "memory"), "mm": (100, "arithmetic"),
         "all_reduce": (200, "communication"), "allreduce_": (200, "communication"),
         "_allgather_base_": (200, "communication"), "_reduce_scatter_base_": (200, "communication")}


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Kernels take the times above, other calls none; the host launches in no time and sees at once what is done.
    Collectives leave all multiprocessors to others, but where a test says so.
    """
    def time(call, spec, log):
        name = call.signature.op.__name__.partition(".")[0]
        seconds, bound = TIMES.get(name, (0, ""))
        return KernelTime(seconds * US, 0.0, bound) if seconds else NO_TIME

    zero = HostSpec(**{name: 0.0 for name in HostSpec.__dataclass_fields__})
    monkeypatch.setattr(call_sequence, "kernel_time", time)
    monkeypatch.setattr(host_time, "host_of", lambda spec: zero)
    monkeypatch.setattr(call_sequence, "find_share", lambda *given: 0.0)


def run(forward, **settings):
    return profile(Call(lambda m, x: forward(x)), (torch.empty(8),), device="h100", mode="infer",
                   options=ProfileOptions(steps=1), **settings)


def microseconds(value):
    return round(value / US, 6)


def test_two_streams_and_an_event():
    def forward(x):
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        y = x.sin()               # 0 to 40
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = y.tan()           # 40 to 70, too small to fill the device
        w = y.cos()               # 40 to 140
        main.wait_stream(side)
        return w.neg(), z         # 140 to 150

    p = run(forward)
    assert microseconds(p.step_seconds) == 150 and microseconds(p.kernel_seconds) == 180
    assert p.phases["forward"].launch_seconds == 0 and p.phases["forward"].exposed_comm_seconds == 0


def test_large_kernels_of_two_streams_take_turns():
    def forward(x):
        with torch.cuda.stream(torch.cuda.Stream()):
            y = x.cos()
        return x.sin(), y

    assert microseconds(run(forward).step_seconds) == 140


def test_the_host_waits_for_a_stream():
    def forward(x):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            y = x.tan()           # 0 to 30
        z = x.cos()               # 0 to 100
        side.synchronize()        # 30
        with torch.cuda.stream(torch.cuda.Stream()):
            w = x.tan()           # 30 to 60
        torch.cuda.synchronize()  # 100
        return y, z, w, x.neg()   # 100 to 110

    p = run(forward)
    assert microseconds(p.step_seconds) == 110


def test_a_functional_collective_runs_beside_what_does_not_wait_for_it(group):
    def forward(x):
        y = x.sin()                                                  # 0 to 40
        reduced = collectives.all_reduce(y, "sum", dist.group.WORLD) # 40 to 240
        z = y.cos()                                                  # 40 to 140
        return reduced.view(2, 4).tan(), z.neg()                     # waits for 240: 240 to 270, 270 to 280

    p = run(forward)
    phase = p.phases["forward"]
    assert microseconds(phase.seconds) == 280 and microseconds(phase.communication_seconds) == 200
    assert microseconds(phase.exposed_comm_seconds) == 100 and phase.launch_seconds == 0
    assert sum(module.own.exposed_comm_seconds for module in p.modules.walk()) == pytest.approx(100 * US)
    assert [microseconds(n.exposed_comm_seconds) for n in p.nodes if n.exposed_comm_seconds] == [100]


def test_a_result_that_is_read_twice_is_waited_for_once(group):
    def forward(x):
        reduced = collectives.all_reduce(x, "sum", dist.group.WORLD)  # 0 to 200
        return reduced * reduced                                      # 200 to 205

    assert microseconds(run(forward).step_seconds) == 205


def test_a_step_begins_on_an_idle_device(group):
    def forward(m, x):
        with torch.cuda.stream(torch.cuda.Stream()):
            dist.all_reduce(x.sin())
        return x.cos()

    p = profile(Call(forward), (torch.empty(8),), device="h100", mode="infer", options=ProfileOptions(steps=3))
    # cos takes its turn after sin: 40 to 140; all_reduce: 40 to 240
    assert {microseconds(step["forward"].seconds) for step in (p.first_step, p.phases)} == {240}
    assert microseconds(p.phases["forward"].exposed_comm_seconds) == 100


def test_lanes_are_the_streams_of_the_last_step(group):
    def forward(x):
        y = x.sin()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dist.all_reduce(y)
        return collectives.all_reduce(x.cos(), "sum", dist.group.WORLD)

    p = run(forward)
    shown: dict[str, list] = {}
    for span in p.spans:
        shown.setdefault(span.lane, []).append(
            (span.kind, span.operator, *map(microseconds, (span.start_seconds, span.end_seconds))))
    # both collectives take turns for NVLink: the first to be ready, at 40, goes first; 40 to 140 is beside cos
    assert shown == {
        "compute": [("kernel", "aten.sin.default", 0, 40), ("kernel", "aten.cos.default", 40, 140)],
        "world all_reduce (stream 1)": [("collective", "c10d.allreduce_.default", 40, 240)],
        f"world all_reduce ({dist.group.WORLD.group_name})": [
            ("collective", "_c10d_functional.all_reduce.default", 240, 440)]}
    assert [microseconds(row.exposed_seconds) for row in p.comm] == [100, 200]


@pytest.mark.filterwarnings("ignore")
def test_gradients_are_reduced_beside_the_backward_pass_but_for_the_last():
    with world(8):
        p = profile(replicated, (torch.rand(4, 512),), optimizer="sgd", device="h100")
    # of a layer the gradients of weight and input, 100 each, and the division of its bucket by 8, 5; of the first layer
    # the weight's gradient alone: layers at 0 to 205, 205 to 410, 410 to 515. Reduced one after the other as they are
    # there: 205 to 405, 410 to 610, 610 to 810
    assert [microseconds(p.phases[phase].seconds) for phase in ("forward", "backward")] == [300, 810]
    assert microseconds(p.phases["backward"].exposed_comm_seconds) == 810 - 515
    assert [microseconds(row.exposed_seconds) for row in p.comm] == [0, 610 - 515, 200]


@pytest.mark.filterwarnings("ignore")
def test_parameters_are_gathered_a_layer_ahead():
    with world(8):
        p = profile(sharded, (torch.rand(4, 512),), optimizer="sgd", device="h100")
    # Forward: the first gathering is exposed, of each later one what the layer before it, 100, does not hide: 0 to 200,
    # 200 to 400, 400 to 600, layers 100 from there on. That of the last layer for backward waits for none: 600 to 800.
    # Layers run 800 to 1000, 1000 to 1200, and, as the third gathering had to let the first scattering go first (both
    # are over NVLink; ready at 1000, it was launched first), 1400 to 1500. The others scatter at 1400 and 1600.
    assert [(row.kind, microseconds(row.exposed_seconds)) for row in p.comm] == [
        ("all_gather", 200), ("all_gather", 100), ("all_gather", 100),
        ("all_gather", 100), ("all_gather", 0), ("reduce_scatter", 0), ("all_gather", 200), ("reduce_scatter", 100),
        ("reduce_scatter", 200)]
    assert [microseconds(p.phases[phase].seconds) for phase in ("forward", "backward")] == [700, 1800 - 700]


def test_a_collective_holds_multiprocessors_that_others_lack(group, monkeypatch):
    monkeypatch.setattr(call_sequence, "find_share", find_share)

    def forward(x):
        y = x.sin()                                                  # 0 to 40
        reduced = collectives.all_reduce(y, "sum", dist.group.WORLD) # 40 to 240: 24 of 132 multiprocessors
        z = y.cos()                                                  # 40 to 140, were it alone: 100 x 132 / 108
        return reduced.view(2, 4).tan(), z.neg()                     # 240 to 280

    p = run(forward)
    phase = p.phases["forward"]
    assert microseconds(phase.seconds) == 280 and phase.launch_seconds == 0
    assert microseconds(phase.exposed_comm_seconds) == pytest.approx(200 - 100 * 132 / 108, abs=1e-4)


@pytest.mark.parametrize(("operator", "kind", "turn", "name", "share"), [
    ("sin", COMMUNICATION, "nvlink", "h100_sxm", 24 / 132), ("sin", COMMUNICATION, "infiniband", "a100_80gb", 16 / 108),
    ("sin", COMMUNICATION, "pcie", "l40s", 2 / 142), ("sin", COMMUNICATION, None, "h100_sxm", 0.0),
    ("sin", "compute", "compute", "h200", 1.0), ("mm", "compute", "compute", "h100_sxm,power=500", DEALT),
    ("mm", "compute", "compute", "a100_80gb", 1.0), ("mm", "compute", "compute", "b200", 1.0),
    ("mm", "compute", None, "h200", 0.0), ("sin", "copy to host", "copy to host", "h200", 0.0),
    ("mm", "compute", "compute", "cpu", 0.0)])
def test_what_a_kernel_holds_of_the_device(operator, kind, turn, name, share):
    """Channels by the links, one multiprocessor each; kernels too small to fill the device, and copies, hold none."""
    signature = SimpleNamespace(op=getattr(torch.ops.aten, operator).default)
    assert find_share(signature, kind, turn, find_device(name)) == share


# Kernels on several streams begin when they may; expectations are drawn by hand.

works = st.lists(st.builds(Task, st.integers(0, 50), st.integers(0, 50), st.booleans(), st.integers(0, 9)), max_size=20)


def spans(clock: StreamClock) -> list[tuple[int, int]]:
    clock.settle()
    return list(zip(clock.starts, clock.ends))


@given(works)
def test_one_stream_is_the_clock_of_one_queue(calls: list[Task]) -> None:
    clock, single = StreamClock(), FreeAt()
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


def test_an_event_is_what_its_stream_waited_for_too() -> None:
    clock = StreamClock()
    clock.launch(1, 1, 30, None)          # 1 to 31
    clock.wait(2, clock.record(1))
    clock.wait(3, clock.record(2))        # no kernel of stream 2 is between
    clock.launch(3, 1, 4, None)
    assert spans(clock) == [(1, 31), (31, 35)]


@pytest.mark.parametrize(("launches", "spans_"), [
    # stream, length, turn, holds. A fifth is held all the time: 100 on four fifths
    ([(1, 500, "links", 0.2), (0, 100, "all", 1)], [(0, 500), (0, 125)]),
    # until 40: 32 of 100 are done by then, 68 are left
    ([(1, 40, "links", 0.2), (0, 100, "all", 1)], [(0, 40), (0, 108)]),
    # a second collective begins when the first ends, at 40: 32 done, then 68 on half of the device
    ([(1, 40, "links", 0.2), (1, 500, "links", 0.5), (0, 100, "all", 1)], [(0, 40), (40, 540), (0, 176)]),
    # collectives over several kinds of links that would hold all of it leave a tenth
    ([(1, 5000, "links", 0.5), (2, 5000, "network", 0.5), (0, 100, "all", 1)], [(0, 5000), (0, 5000), (0, 1000)]),
    # dealt out, blocks that find no room run after the others, or when the collective is done; not beside a later one
    ([(1, 500, "links", 0.2), (0, 100, "all", DEALT)], [(0, 500), (0, 200)]),
    ([(1, 40, "links", 0.2), (0, 100, "all", DEALT)], [(0, 40), (0, 140)]),
    ([(0, 100, "all", DEALT), (1, 40, "links", 0.2)], [(0, 100), (0, 40)]),
    # what holds nothing is as it was, and so is a kernel alone
    ([(1, 40, "links", 0.2), (2, 30, None, 0.0)], [(0, 40), (0, 30)]), ([(0, 100, "all", 1)], [(0, 100)])])
def test_a_kernel_that_would_hold_all_runs_on_what_collectives_leave(launches, spans_) -> None:
    clock = StreamClock()
    for stream, length, turn, holds in launches:
        clock.launch(stream, 0, length, turn, holds)
    assert spans(clock) == spans_
    assert [end - start - launch[1] for (start, end), launch in zip(spans_, launches)] == clock.delays


def test_a_slow_host_leaves_the_device_waiting_and_a_fast_one_runs_ahead() -> None:
    launches, kernels = [Task(10, 1)] * 3, [Task(1, 10)] * 3
    assert FreeAt().after(*launches) == FreeAt(30, 31)  # each kernel waits for its launch; the last ends one after
    assert FreeAt().after(*kernels) == FreeAt(3, 31)    # the first is launched at 1, then one follows the other


def test_a_wait_lets_the_host_go_on_when_the_device_is_done() -> None:
    assert FreeAt().after(Task(1, 100), Task(1, 0, True, 5), Task(1, 10)) == FreeAt(107, 117)
