"""What a program asks of its streams is in the log; what would not be replayed rightly then is run."""
import gc

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, ProfileOptions, profile
from analyzer.errors import InputError
from analyzer.meta.state import EVERY_STREAM, StreamAction
from analyzer.profilers.annotation import Annotation
from analyzer.record.log import Log

SWITCH, RECORD, WAIT, SYNCHRONIZE, _ = StreamAction


def log_of(model: nn.Module, **settings: object) -> Log:
    logs: list[Log] = []

    def keep(log: Log) -> Annotation:
        logs.append(log)
        return Annotation()

    profile(model, (torch.empty(8, 8, device="meta"),), device="h100", options=ProfileOptions(steps=1),
            profilers={"log": keep}, **settings)
    return logs[0]


class TwoStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        main, side, event = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = self.a(x)
            event.record()
        z = self.b(x)
        torch.cuda.Event().wait()  # one that was never recorded has happened
        event.wait()
        event.synchronize()
        side.synchronize()
        torch.cuda.synchronize()
        return y + z


def test_the_log_tells_streams_and_waits():
    log = log_of(TwoStreams(), mode="infer")
    marks = log.streams.marks
    begun, done = (mark.event for mark in marks if mark.action is RECORD)
    assert [tuple(mark) for mark in marks] == [
        (0, RECORD, 0, begun), (0, WAIT, 1, begun), (0, SWITCH, 1, 0), (2, RECORD, 1, done), (2, SWITCH, 0, 0),
        (4, WAIT, 0, done), (4, SYNCHRONIZE, EVERY_STREAM, done), (4, SYNCHRONIZE, 1, 0),
        (4, SYNCHRONIZE, EVERY_STREAM, 0)]
    names = [call.signature.op.__name__ for call in log.calls]
    assert names == ["t.default", "addmm.default", "t.default", "addmm.default", "add.Tensor"]
    assert [log.streams.stream_at(i) for i in range(5)] == [1, 1, 0, 0, 0]
    assert log.streams.list_streams() == [0, 1]


def test_a_program_of_one_stream_stores_nothing():
    assert not log_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), optimizer="adamw").streams


@pytest.mark.usefixtures("replaying_torch")
def test_a_step_that_uses_streams_is_not_replayed():
    found = profile(nn.Sequential(TwoStreams()), (torch.empty(8, 8, device="meta"),), device="h100", optimizer="sgd")
    reasons = {row.kind: row.reason for row in found.replay}
    assert reasons["step"] == "it uses streams or events, or waits for the device"


class Waiting(nn.Linear):
    def forward(self, x):
        torch.cuda.synchronize()
        return super().forward(x)


@pytest.mark.usefixtures("replaying_torch")
def test_a_block_that_waits_for_the_device_is_not_replayed():
    blocks = nn.Sequential(*[nn.Sequential(*[Waiting(8, 8) for _ in range(40)]) for _ in range(4)])
    assert len(log_of(blocks, mode="infer").streams) == 160
    found = profile(blocks, (torch.empty(8, 8, device="meta"),), device="h100", mode="infer")
    reasons = {row.reason.rpartition(": ")[2] for row in found.replay if row.kind == "block"}
    assert reasons == {"it uses streams or events, or waits for the device"}


def test_streams_are_handed_out_in_turn():
    with MetaTensorMode():
        low, high = [[torch.cuda.Stream(priority=p) for _ in range(33)] for p in (0, -1)]
        assert low[0] == low[32] and high[0] == high[32]
        assert len({*low, *high}) == 64 and torch.cuda.current_stream() not in low
        assert isinstance(torch.Stream(device="cuda"), torch.Stream)


def test_a_graph_is_replayed_on_the_stream_that_is_current():
    class Graphed(nn.Module):
        def forward(self, x):
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.graph(graph):
                side.wait_stream(torch.cuda.current_stream())
                x + 1
                with torch.cuda.stream(side):
                    x + 2
                torch.cuda.current_stream().wait_stream(side)
                y = x + 3
            graph.replay()
            return y + 4

    log = log_of(Graphed(), mode="infer")
    capturing, side = log.streams.stream_at(0), 1
    assert [log.streams.stream_at(i) for i in range(7)] == [capturing, side, capturing, 0, side, 0, 0]
    assert [(m.call, m.stream) for m in log.streams.marks if m.action is WAIT] == [
        (0, side), (2, capturing), (3, side), (5, 0)]


# CUDA graphs of the simulation: their memory, and what torch says meanwhile.

MIB = 1 << 20


def test_memory_of_a_graph_is_its_own():
    with MetaTensorMode() as mode:
        allocator = mode.space.allocator()
        graph = torch.cuda.CUDAGraph()
        assert isinstance(graph, torch.cuda.CUDAGraph) and not torch.cuda.is_current_stream_capturing()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing() and torch.cuda.current_stream().is_capturing()
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")  # free at once, for the graph alone
            kept = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        assert allocator.reserved_bytes == 64 * MIB and kept.data_ptr() % (2 * MIB) == 0
        other = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        assert allocator.reserved_bytes == 96 * MIB  # not in the half that is free in the graph's
        del other
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 64 * MIB
        del kept
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 64 * MIB  # which a replay writes to
        graph.replay()
        graph.reset()
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 0


def test_graphs_share_a_pool():
    with MetaTensorMode() as mode:
        allocator = mode.space.allocator()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=torch.cuda.graph_pool_handle()):
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.graph(second, pool=first.pool()):
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert first.pool() == second.pool() and allocator.reserved_bytes == 64 * MIB
        del first
        gc.collect()
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 64 * MIB
        second.reset()
        torch.cuda.empty_cache()
        assert allocator.reserved_bytes == 0


def test_wrong_calls_are_named():
    with MetaTensorMode():
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(InputError, match="nothing was captured"):
            graph.replay()
        with pytest.raises(RuntimeError, match="nothing was captured"):
            graph.pool()
        with pytest.raises(RuntimeError, match="without capture_begin"):
            graph.capture_end()
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="being captured already"):
            torch.cuda.CUDAGraph().capture_begin()
        graph.capture_end()
