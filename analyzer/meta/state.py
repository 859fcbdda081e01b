"""What a mode knows while it is active: its options, the device that it simulates, its state."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch

from analyzer.errors import InputError, is_count
from analyzer.memory.allocator import AllocatorOptions

from .address_space import AddressSpace, tell_settings
from .source_line import user_line
from .value.known_value import Known


@dataclass(frozen=True)
class MetaOptions:
    """Settings of `MetaTensorMode`.

    ``unknown_size`` decides how many rows a data-dependent operator gives (``nonzero``, ``masked_select``, routing):
    ``"balanced"`` expects every element to be as likely as its neighbours (experts get equal shares),
    ``"worst"`` takes the most there can be, an integer is the user's own bound, ``"error"`` refuses.
    Numbers that a model computes from data and uses as lengths, such as the sum of predicted durations, follow it too:
    ``"balanced"`` counts 1 per element, an integer is their value, ``"worst"`` refuses, for nothing bounds them.
    ``skew`` makes classes that are counted, as routers count the tokens of each expert, uneven where they are
    ``"balanced"``: the exponent of Zipf's law, by which the first class is chosen most, or below 0 the last. Each rank
    of a job counts the same, so the rank that holds the first experts is the busiest, whose step and memory are those
    of the job; what one rank holds lies between its profiles with an exponent and with the negative one.
    ``devices`` is how many devices of one kind the process has, cuda:0, cuda:1 and so on: as many as
    ``torch.cuda.device_count()`` says. In a world of ranks that number is how many a host has.
    ``allocator`` are the settings of PyTorch's caching allocator; None: those that the environment has where the device
    is used first (``PYTORCH_CUDA_ALLOC_CONF``, from torch 2.10 on also ``PYTORCH_ALLOC_CONF``).
    ``unknown_condition`` decides ``if`` and ``while`` on unknown data: ``"false"`` or ``"true"``, where a condition
    that only ends a loop is never met (the loop runs to its own bound); ``"error"`` refuses.
    ``unknown_value`` is ``"error"``, or ``"placeholder"`` to answer ``.item()`` of unknown data with a finite number,
    or ``"expected"`` to answer it where it follows from what is known (anchors, positions) once the unknown that is
    added to it is taken as zero. All are listed in the profile's assumptions when used.
    """

    unknown_size: Literal["balanced", "worst", "error"] | int = "balanced"
    unknown_value: Literal["error", "expected", "placeholder"] = "error"
    unknown_condition: Literal["false", "true", "error"] = "error"
    allocator: AllocatorOptions | None = None
    capacity_bytes: int | None = None
    skew: float = 0.0
    devices: int = 1

    def __post_init__(self) -> None:
        size = self.unknown_size
        if not (is_count(self.devices, 1) and self.devices <= MOST_DEVICES):
            raise InputError(f"devices={self.devices!r}: must be how many devices the process has, 1 to "
                             f"{MOST_DEVICES}")
        if not (isinstance(self.skew, (int, float)) and abs(self.skew) < float("inf")):
            raise InputError(f"skew={self.skew!r}: must be 0, for classes chosen evenly, or an exponent of Zipf's "
                             "law, negative where the last class is chosen most")
        if not (size in ("balanced", "worst", "error") or (type(size) is int and size >= 0)):
            raise InputError(f"unknown_size={size!r}: must be 'balanced', 'worst', 'error' or a number of rows")
        if self.unknown_value not in ("error", "expected", "placeholder"):
            raise InputError(f"unknown_value={self.unknown_value!r}: must be 'error', 'expected' or 'placeholder'")
        if self.unknown_condition not in ("false", "true", "error"):
            raise InputError(f"unknown_condition={self.unknown_condition!r}: must be 'false', 'true' or 'error'")


class Restart(BaseException):
    """The run begins again, for a ``reason``. No handler of the user's code takes it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NewBreaks(Restart):
    """The run begins again, as it was to be, with what it told of where graphs of compiled functions break."""


NO_EVENT = 0
EVERY_STREAM = -1  #: of the first device; of the one after it -2, and so on


class StreamAction(IntEnum):
    """One request. The default stream has the number 0; `AddressSpace.stream_number` has those of several devices."""

    SWITCH = 0       #: what is launched from now on is on ``stream``
    RECORD = 1       #: ``event`` happens when ``stream`` has done what it was given until now
    WAIT = 2         #: what ``stream`` is given from now on waits for ``event``
    SYNCHRONIZE = 3  #: the host waits for ``event``, or for all that ``stream`` (`EVERY_STREAM`: each) was given
    USE = 4          #: ``record_stream``: memory of another stream is used on ``stream``


class StreamMark(NamedTuple):
    """A request made before the call number ``call`` of the log. An event that it lacks happened before it begins."""

    call: int
    action: StreamAction
    stream: int
    event: int = NO_EVENT


CPU = torch.device("cpu")
MOST_DEVICES = 64  #: of one process: c10/cuda/CUDAMacros.h has room for 120, and no host holds as many


class DeviceOrdinalError(InputError, torch.AcceleratorError):
    """A device whose index is beyond the number of devices; CUDA raises AcceleratorError, which is a RuntimeError."""

    def __init__(self, device: object, count: int) -> None:
        super().__init__(f"CUDA error: invalid device ordinal: {device} where torch.cuda.device_count() is {count}. "
                         f"Way out: name one of the {count}, or give more devices: profile(devices=N), --devices N, "
                         "MetaTensorMode(MetaOptions(devices=N)); in a world of ranks, devices_per_host=N")
        self.device, self.count, self.error_code = device, count, 101  # cudaErrorInvalidDevice

    def __reduce__(self) -> tuple[type[DeviceOrdinalError], tuple[object, int]]:
        return type(self), (self.device, self.count)


class NoCudaError(InputError, RuntimeError):
    """A CUDA device, where the machine that is simulated has none; torch raises a RuntimeError."""

    def __init__(self, device: object, simulated: str) -> None:
        super().__init__(f"No CUDA GPUs are available: {device} is asked for, and the device that is simulated is "
                         f"{simulated}. Way out: profile for an accelerator (device=), or leave the move to the device "
                         "to a condition, as torch.cuda.is_available()")
        self.device, self.simulated = device, simulated

    def __reduce__(self) -> tuple[type[NoCudaError], tuple[object, str]]:
        return type(self), (self.device, self.simulated)


@dataclass
class MetaState:
    """The mode's state between ``__enter__`` and ``__exit__``."""

    options: MetaOptions
    space: AddressSpace
    adopted_device: torch.device = CPU          #: what tensors with data, met on the way, are assumed to be on
    pending_device: torch.device | None = None  #: set by the function mode for the factory that it is about to call
    device_of_options: torch.device | None = None  #: of the tensor whose options C++ makes a new one with
    arguments: tuple[Any, ...] = ()  #: positional ones of the torch function that runs
    recorder: Any = None  #: is told operator calls, workspaces, streams: `record.recorder.Recorder`
    tape: Any = None      #: sees torch functions as the user's code calls them: `fx.trace.tape.Tape`
    graph: Any = None     #: the graph that is being made of a compiled function: `compiled.graph_tape.GraphTape`
    tracing: Any = None   #: the call of that function, of which it is a part: `compiled.trace.FunctionTrace`
    #: calls a function that is under ``torch.compile``, with its arguments and the compiler's configuration, and
    #: whether Dynamo looks at that function's own frame: `Frames.calling`
    compile: Callable[..., Any] = lambda function, args, kwargs, config, is_bare=False: function(*args, **kwargs)
    timer: Any = None     #: tells the time that a simulated device takes: `mark`, `seconds`, `describe`
    #: in a step of the caller's own numbers that only data could tell are placeholders where no module asks
    answers_numbers: bool = False
    assumptions: dict[str, None] = field(default_factory=dict)
    scalars: dict[tuple[torch.dtype, str], Known] = field(default_factory=dict)  #: contents of one number
    fills: dict[tuple[Any, ...], Known] = field(default_factory=dict)  #: contents full of one, by it and specs
    fakes: dict[int, tuple[Any, Callable[[], torch.UntypedStorage | None]]] = field(default_factory=dict)
    #: of tensors that C++ knows to be zero, such as tangents of forward-mode derivatives, while they live
    zeros: WeakValueDictionary[int, torch.UntypedStorage] = field(default_factory=WeakValueDictionary)
    #: numbers of storages that the model keeps on meta, and the devices that they are on once an operator uses them
    templates: dict[int, torch.device] = field(default_factory=dict)
    lists: Any = None  #: a `dispatch.call.ListMemo`, while an optimizer steps that changes no shape, storage or device
    random_seed: int = 0
    conditions: dict[tuple[str, int], int] = field(default_factory=dict)  #: asked whether a loop ends, by line
    meets_data: bool = False      #: whether a tensor with data was met on the way
    asks_memory: bool = False     #: whether the code asked for, or gave back, memory of the accelerator as such
    has_plain_tensors: bool = False #: whether tensors have the classes that they have in a real run, no `MetaTensor`
    is_this_machine: bool = False #: whether torch's own answers about the machine hold: all is on the host of this one
    lacks_cuda: str | None = None               #: the name of the simulated device, where that has no CUDA
    unknown_sizes: int = 0        #: how often a size or a value that only data could give was answered by a policy
    placeholder: int = 1          #: what an unknown scalar is taken as, where it is
    expects_contents: bool = True #: whether contents that a policy expects may be read as if they were known
    device_count: int = 1         #: what ``torch.cuda.device_count()`` answers where there is an accelerator
    failure: BaseException | None = None  #: raised while a storage died, or in a thread of forward's
    join: Callable[[MetaState], AbstractContextManager[Any]] = nullcontext  #: lets another thread belong to it
    follows_expected: bool = field(init=False)  #: whether the unknown that meets known contents is taken as zero

    def __post_init__(self) -> None:
        self.follows_expected = self.options.unknown_value == "expected"

    @property
    def repeats(self) -> bool:
        """Whether a call runs again with other answers to what is unknown, so that what depends on them shows."""
        return self.placeholder != 1

    def call_on(self, device: torch.device | None, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self.space.turn:  # what another thread calls meanwhile is not meant for this device
            before, self.pending_device = self.pending_device, device
            try:
                return function(*args, **kwargs)
            finally:
                self.pending_device = before

    @contextmanager
    def meaning(self, device: torch.device | None) -> Iterator[None]:
        """A block in which C++ code that makes a tensor like one on meta means ``device``."""
        before, self.device_of_options = self.device_of_options, device
        try:
            yield
        finally:
            self.device_of_options = before

    def raise_failure(self, kind: Any, error: Any, traceback: Any) -> None:
        """Raise what Python swallowed, unless ``error`` is another; what a thread of forward's did comes first."""
        if self.failure is not None and (error is None or isinstance(self.failure, InputError)
                                         and str(self.failure) not in str(error)):
            raise self.failure from error

    def assume(self, text: str) -> None:
        self.assumptions.setdefault(text)

    def where(self) -> str:
        place = user_line()
        module = "" if self.recorder is None else self.recorder.modules.where()
        return " ".join(filter(None, [f"in module {module!r}" if module else "", f"at {place}" if place else ""]))


class _Active(threading.local):
    """What is active in this thread; nested activations share the two modes that it has pushed."""

    state: MetaState | None = None
    function_mode: Any = None  #: the `MetaFunctionMode`
    dispatch_mode: Any = None  #: the `MetaDispatchMode`
    device_index = 0           #: what ``torch.cuda.current_device()`` answers
    is_device_asked = False    #: whether the program asked for the current device, or set it
    generator_moves = 0        #: how often torch's generator of the host was set


active = _Active()


def set_state(state: MetaState | None) -> None:
    active.state = state
    if active.dispatch_mode is not None:
        active.function_mode.state = active.dispatch_mode.state = state


def indexed_device(device: Any) -> torch.device:
    """The device that is named, the current one where no index is. Raises DeviceOrdinalError, NoCudaError."""
    device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    if device.type == "cpu":
        return CPU
    if device.type == "cuda" and active.state is not None and active.state.lacks_cuda is not None:
        raise NoCudaError(device, active.state.lacks_cuda)
    if device.index is None:
        return device if device.type == "meta" else torch.device(device.type, active.device_index)
    return check_ordinal(device)


def never_pinned(state: MetaState) -> bool:
    """That tensors without data are in no pinned memory. Raises NoCudaError where PyTorch could pin none."""
    is_absent = state.is_this_machine and not torch.accelerator.is_available()
    if state.lacks_cuda is not None or is_absent:
        raise NoCudaError("memory that is pinned for one", state.lacks_cuda or "this machine's processor")
    return False


def check_ordinal(device: torch.device) -> torch.device:
    """``device``. Raises DeviceOrdinalError where the active mode has no device of that index."""
    state = active.state
    if device.index and state is not None and device.index >= state.device_count and device.type != "cpu":
        raise DeviceOrdinalError(device, state.device_count)
    return device


def place_among(state: MetaState, own: torch.device, usual: torch.device) -> torch.device:
    """The device of a tensor that is on ``own``: that one if it is one of several devices, else ``usual``."""
    return check_ordinal(own) if state.options.devices > 1 and own.type == usual.type != "cpu" else usual


@contextmanager
def mode_in_force() -> Iterator[None]:
    """Push the function mode again inside its own handler, where torch has taken it off."""
    mode = active.function_mode
    is_on = mode is None or mode in torch.overrides._get_current_function_mode_stack()
    with nullcontext() if is_on else mode:
        yield


def current() -> MetaState | None:
    return active.state


def simulated_machine() -> MetaState | None:
    """The state that answers for the machine; None where this machine answers for itself."""
    state = active.state
    return None if state is None or state.is_this_machine else state


def active_state() -> MetaState:
    state = active.state
    assert state is not None
    return state


def _assume_settings(said: str) -> None:
    if (state := current()) is not None:
        state.assume(said)


tell_settings.append(_assume_settings)
