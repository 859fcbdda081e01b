"""Streams, events and generators of the simulated accelerator: they order nothing, since nothing runs."""
from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from analyzer.meta.state import current

_next_id = itertools.count(1).__next__
ELAPSED_MILLISECONDS = 1.0
"""What `SimulatedEvent.elapsed_time` answers where no time is predicted: a placeholder."""
RESOLUTION_MILLISECONDS = 5e-4
"""Of events: CUDA Runtime API, cudaEventElapsedTime. No program divides by a time of 0."""


def device_index(device: Any = None) -> int:
    """The index that ``device`` names: a number, a device, its name, or None for the current one."""
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return torch.cuda.current_device() if device < 0 else device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


class _Done:
    """What is never left to run: to wait for it takes no time."""

    def query(self) -> bool:
        return True

    def synchronize(self, other: Any = None) -> None:
        pass

    wait = wait_event = wait_stream = synchronize


class SimulatedStream(_Done):
    """Answers as ``torch.cuda.Stream``. Its number decides from which pool of the simulated allocator memory comes."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", device_index(device))
        self.priority = priority
        self.stream_id = kwargs["stream_id"] if "stream_id" in kwargs else _next_id()
        self.cuda_stream = self.native_handle = self.stream_id
        self.device_index = self.device.index
        self.device_type = 1  # c10::DeviceType::CUDA

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return bool(torch.cuda.is_current_stream_capturing())

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, or a new one, on this stream."""
        event = SimulatedEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> SimulatedStream:
        self._before = torch.cuda.current_stream(self.device)
        torch.cuda.set_stream(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *exc: object) -> None:
        torch.cuda.set_stream(self._before)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __repr__(self) -> str:
        return f"<simulated torch.cuda.Stream device={self.device} stream_id={self.stream_id}>"


class SimulatedEvent(_Done):
    """Answers as ``torch.cuda.Event``; the time between two is predicted where the state has a timer."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
                 **kwargs: Any) -> None:
        self.enable_timing = enable_timing
        self.device: torch.device | None = None
        self.mark: Any = None  #: of the timer, where it was recorded

    def record(self, stream: Any = None) -> None:
        """Note the device of ``stream``, and the time."""
        self.device = torch.device("cuda", torch.cuda.current_device()) if stream is None else stream.device
        state = current()
        self.mark = None if state is None or state.timer is None else state.timer.mark()

    def elapsed_time(self, end_event: Any) -> float:
        """Predicted milliseconds; where they are not known a placeholder, `ELAPSED_MILLISECONDS`. The assumptions say
        which.
        """
        state = current()
        if state is None:
            return ELAPSED_MILLISECONDS
        marks = self.mark, getattr(end_event, "mark", None)
        seconds = None if state.timer is None or None in marks else state.timer.seconds(*marks)
        if seconds is None or state.timer is None:
            state.assume(f"torch.cuda.Event.elapsed_time answers {ELAPSED_MILLISECONDS} ms: nothing runs")
            return ELAPSED_MILLISECONDS
        state.assume(f"torch.cuda.Event.elapsed_time answers {state.timer.describe()}")
        return max(1e3 * seconds, RESOLUTION_MILLISECONDS)


class SimulatedDeviceEvent(SimulatedEvent):
    """Answers as ``torch.Event``, which is given a device before all else."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **kwargs: Any) -> None:
        super().__init__(enable_timing)


class SimulatedGenerator(torch.Generator):
    """A generator that says it is on the simulated accelerator. It draws nothing there."""

    device: torch.device = torch.device("cuda")  # shadows torch's property

    def __new__(cls, device: Any = "cuda") -> SimulatedGenerator:
        """Make a generator of the host that says ``device``."""
        made: SimulatedGenerator = torch._C.Generator.__new__(
            cls, "cpu")  # type: ignore[call-arg]  # torch.Generator is replaced
        made.device = torch.device("cuda", device_index(device))
        return made

    def __init__(self, device: Any = "cuda") -> None: ...


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
