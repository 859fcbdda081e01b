"""Streams, events, generators and graphs of the simulated device. Nothing runs: the recorder is told their order."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.cuda.graphs

from analyzer.errors import InputError
from analyzer.hardware.catalogue import simulated_kind
from analyzer.meta.intercept.replacement import Undo, answer, replace, supply
from analyzer.meta.state import (
    EVERY_STREAM,
    NO_EVENT,
    MetaState,
    StreamAction,
    active,
    active_state,
    check_ordinal,
    current,
    simulated_machine,
)

_next_event = itertools.count(NO_EVENT + 1).__next__
# c10/cuda/CUDAStream.cpp: kStreamsPerPool, max_compile_time_stream_priorities
_STREAMS_PER_POOL = 32
_PRIORITIES = 4
_RANDOM_STATE_BYTES = 16  # seed and offset of Philox: CUDAGeneratorImpl::get_state
ELAPSED_MILLISECONDS = 1.0
"""What `SimulatedEvent.elapsed_time` answers where no time is predicted: a placeholder."""
RESOLUTION_MILLISECONDS = 5e-4
"""Of events: CUDA Runtime API, cudaEventElapsedTime. No program divides by a time of 0."""


def device_index(device: Any = None) -> int:
    """The index that ``device`` names: a number, a device, its name, or None for the current one. Raises
    DeviceOrdinalError.
    """
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    if index is None or index < 0:
        return active.device_index
    check_ordinal(torch.device("cuda", index))
    return index


def random_state() -> torch.Tensor:
    return torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)


def mark_stream(action: StreamAction, stream: int, event: int = NO_EVENT) -> None:
    state = current()
    if state is not None and state.recorder is not None:
        state.recorder.memory.ordered(action, stream, event)


def synchronize(device: Any = None) -> None:
    index = device_index(device)
    mark_stream(StreamAction.SYNCHRONIZE, EVERY_STREAM - (index if active_state().space.devices > 1 else 0))


def set_stream(stream: Any) -> None:
    state = current()
    if state is not None and state.space.set_stream(number := _number_of(stream)):
        mark_stream(StreamAction.SWITCH, number)


def _take_stream(priority: int, index: int) -> int:
    """The id of a new stream of a device: PyTorch hands out 32 of each priority in turn (getStreamFromPool)."""
    state = current()
    level = min(max(-priority, 0), _PRIORITIES - 1)
    taken = 0 if state is None else state.space.streams_taken[index, level]
    if state is not None:
        state.space.streams_taken[index, level] += 1
    return 1 + level * _STREAMS_PER_POOL + taken % _STREAMS_PER_POOL


class SimulatedStream:
    """Answers as ``torch.cuda.Stream``. Its number decides about the allocator's pool and the order of kernels."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", device_index(kwargs.get("device_index", device)))
        self.priority = priority
        self.stream_id = kwargs["stream_id"] if "stream_id" in kwargs else _take_stream(priority, self.device.index)
        self.cuda_stream = self.native_handle = self.stream_id
        self.device_index = self.device.index
        self.device_type = 1  # c10::DeviceType::CUDA

    def is_capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        mark_stream(StreamAction.SYNCHRONIZE, _number_of(self))

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = SimulatedEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> SimulatedStream:
        self._before = torch.cuda.current_device(), torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *exc: object) -> None:
        device, stream = self._before
        torch.cuda.set_stream(stream)
        torch.cuda.set_device(device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __repr__(self) -> str:
        return f"<simulated torch.cuda.Stream device={self.device} stream_id={self.stream_id}>"


class SimulatedEvent:
    """Answers as ``torch.cuda.Event``; the time between two is predicted where the state has a timer."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
                 **kwargs: Any) -> None:
        self.enable_timing = enable_timing
        self.device: torch.device | None = None
        self.mark: Any = None  #: of the timer, where it was recorded
        self.number = NO_EVENT  #: of its last recording

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.number != NO_EVENT:
            mark_stream(StreamAction.SYNCHRONIZE, EVERY_STREAM, self.number)

    def wait(self, stream: Any = None) -> None:
        if self.number != NO_EVENT:
            mark_stream(StreamAction.WAIT, _number_of(stream), self.number)

    def record(self, stream: Any = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if stream is None else stream.device
        self.number = _next_event()
        mark_stream(StreamAction.RECORD, _number_of(stream), self.number)
        state = current()
        self.mark = None if state is None or state.timer is None else state.timer.mark()

    def elapsed_time(self, end_event: Any) -> float:
        """Predicted milliseconds; where they are not known a placeholder. The assumptions say which."""
        state = current()
        if state is None:
            return ELAPSED_MILLISECONDS
        marks = self.mark, getattr(end_event, "mark", None)
        seconds = None if state.timer is None or None in marks else state.timer.seconds(*marks)
        if seconds is None or state.timer is None:
            state.assume(f"torch.cuda.Event.elapsed_time answers {ELAPSED_MILLISECONDS} ms: nothing runs")
            return ELAPSED_MILLISECONDS
        state.assume(f"torch.cuda.Event.elapsed_time answers {state.timer.describe()}")
        return max(1e3 * float(seconds), RESOLUTION_MILLISECONDS)


def _number_of(stream: Any) -> int:
    """The number of a stream, None being the current one of the current device."""
    state = current()
    if state is None:
        return 0 if stream is None else int(stream.stream_id)
    if stream is None:
        return state.space.current_stream(active.device_index)
    return state.space.stream_number(stream.device.index, int(stream.stream_id))


class SimulatedDeviceEvent(SimulatedEvent):
    """Answers as ``torch.Event``, which is given a device before all else."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **kwargs: Any) -> None:
        super().__init__(enable_timing)


class SimulatedGenerator(torch.Generator):
    """A generator that says it is on the simulated accelerator. It draws nothing there."""

    device: torch.device = torch.device("cuda")  # shadows torch's property

    def __new__(cls, device: Any = "cuda") -> SimulatedGenerator:
        made: SimulatedGenerator = torch._C.Generator.__new__(
            cls, "cpu")  # type: ignore[call-arg]  # torch.Generator is replaced
        made.device = torch.device("cuda", device_index(device))
        return made

    def __init__(self, device: Any = "cuda") -> None: ...

    def get_state(self) -> torch.Tensor:
        return random_state()

    def set_state(self, new_state: torch.Tensor) -> SimulatedGenerator:
        """Nothing: what is drawn is not known."""
        return self


class DefaultGenerators(Sequence[torch.Generator]):
    """``torch.cuda.default_generators``: one a device, simulated under the mode."""

    def __init__(self, original: Sequence[torch.Generator]) -> None:
        self._original = original

    def __len__(self) -> int:
        return torch.cuda.device_count() if is_simulated() else len(self._original)

    def __getitem__(self, index: Any) -> Any:
        if not is_simulated():
            return self._original[index]
        if isinstance(index, slice):
            return tuple(self)[index]
        if not -len(self) <= index < len(self):
            raise IndexError(f"default_generators[{index}]: there are {len(self)} devices")
        return SimulatedGenerator(torch.device("cuda", index % len(self)))


@functools.cache  # a class is in a cycle with itself, and costs as much to make as a hundred calls
def simulated_class(original: type[Any], simulated: type[Any], applies: Any) -> type[Any]:
    """A class of ``simulated`` objects, made where ``applies(*args, **kwargs)``, and ``original`` ones, made else."""
    class Both(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (simulated if applies(*args, **kwargs) else original)(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, simulated))

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, (original, simulated))

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)
    return Both(original.__name__, (), {"__doc__": original.__doc__})


# CUDA graphs: what is captured runs in the simulation, in a pool of memory of its own, and is logged once more with
# each replay. Source: torch/cuda/graphs.py, c10/cuda/CUDACachingAllocator.cpp (private pools).

_next_handle = itertools.count(1).__next__


def make_pool_handle() -> tuple[int, int]:
    return 0, _next_handle()


class SimulatedGraph:
    """Answers as ``torch.cuda.CUDAGraph``. Its memory is kept, and used by nothing else, as long as the graph lives."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._state: Any = None  # of the mode that it was captured under
        self._handle: tuple[int, int] | None = None
        self._calls: tuple[int, int] | None = None
        self._begin = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global",
                      check_input_liveness: bool = False) -> None:
        state = active_state()
        if state.space.capture is not None:
            raise RuntimeError("a CUDA graph is being captured already: end it before another begins")
        self.reset()
        self._state, self._handle = state, pool or make_pool_handle()
        state.space.begin_capture(self._handle)
        self._begin = 0 if state.recorder is None else state.recorder.calls.count()
        state.assume("a CUDA graph is logged as it is captured, and again with each replay; its memory is a pool that "
                     "it keeps. Give --steps more than the steps that warm it up")

    def capture_end(self) -> None:
        if self._state is None:
            raise RuntimeError("capture_end() without capture_begin()")
        self._state.space.capture = None
        recorder = self._state.recorder
        self._calls = (self._begin, self._begin if recorder is None else recorder.calls.count())

    def replay(self) -> None:
        if self._calls is None:
            raise InputError("CUDAGraph.replay(): nothing was captured; capture with torch.cuda.graph(g) first")
        state = current()
        if state is not None and state is self._state and state.recorder is not None:
            state.recorder.repeat_calls(*self._calls)

    def reset(self) -> None:
        state, self._state, self._calls = self._state, None, None
        if state is not None and self._handle is not None:
            state.space.leave_pool(self._handle)

    def pool(self) -> tuple[int, int]:
        if self._handle is None:
            raise RuntimeError("CUDAGraph.pool(): nothing was captured yet")
        return self._handle

    def instantiate(self, debug_path: str = "") -> None:
        """Nothing to do, nor to dump."""

    enable_debug_mode = debug_dump = instantiate

    def __del__(self) -> None:
        self.reset()


class SimulatedMemPool:
    """Answers as ``torch.cuda.MemPool``: segments of its own, which are kept for as long as it lives."""

    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        state = active_state()
        self.allocator, self.id = allocator, make_pool_handle()
        self._space, self._is_used = state.space, False
        self.streams = state.space.join_pool(self.id, not no_split)
        state.asks_memory = True
        if allocator is not None:
            state.assume("torch.cuda.MemPool: an allocator of its own gets its memory as PyTorch's does")

    def use_count(self) -> int:
        return 1 + self._is_used

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        return [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == self.id]

    @contextmanager
    def used(self) -> Iterator[None]:
        """What is allocated in the block is taken from this pool."""
        space = self._space
        allocators = [space.allocator(index) for index in range(space.devices)]
        before = space.pooled, [allocator.is_diverted for allocator in allocators]
        space.pooled, self._is_used = self.streams, True
        for allocator in allocators:
            allocator.is_diverted = True
        try:
            yield
        finally:
            space.pooled, self._is_used = before[0], False
            for allocator, was_diverted in zip(allocators, before[1]):
                allocator.is_diverted = was_diverted

    def __del__(self) -> None:
        if hasattr(self, "streams"):
            self._space.leave_pool(self.id)


def _use_mem_pool(original: Any, pool: Any, device: Any = None) -> Any:
    return pool.used() if isinstance(pool, SimulatedMemPool) else original(pool, device)


def _external_stream(stream_ptr: int, device: Any = None, **kwargs: Any) -> SimulatedStream:
    """A stream that another library made: a pointer of one of ours names that."""
    return SimulatedStream(device, stream_id=stream_ptr)


def replacements() -> Iterator[Undo]:
    graphs: Any = torch.cuda.graphs
    for owner in (torch.cuda, torch.cuda.memory):
        yield replace(owner, "MemPool", lambda f: simulated_class(f, SimulatedMemPool, is_simulated))
        yield answer(owner, "use_mem_pool", _use_mem_pool, passes_original=True, where=simulated_cuda)
    for owner in (torch.cuda, torch.cuda.streams):
        yield replace(owner, "ExternalStream", lambda f: simulated_class(f, _external_stream, is_simulated))
    for owner in (torch.cuda, graphs):
        yield replace(owner, "CUDAGraph", lambda f: simulated_class(f, SimulatedGraph, is_simulated))
        yield answer(owner, "graph_pool_handle", make_pool_handle, where=simulated_cuda)
        yield answer(owner, "is_current_stream_capturing", lambda: active_state().space.capture is not None,
                     where=simulated_cuda)
    yield supply(torch._C, "_host_emptyCache", lambda: None)
    # a stream that the class keeps for all captures
    kept, graphs.graph.default_capture_stream = graphs.graph.default_capture_stream, None
    yield partial(setattr, graphs.graph, "default_capture_stream", kept)


def simulated_cuda() -> MetaState | None:
    """The state that answers for the machine, where that has a CUDA device; else torch's own functions answer."""
    state = simulated_machine()
    return state if state is not None and simulated_kind() == "cuda" else None


def is_simulated(*args: Any, **kwargs: Any) -> bool:
    return simulated_cuda() is not None
