"""Collectives that move no data: what each returns, and those of Python objects."""
from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.optim import zero_redundancy_optimizer

from analyzer.cuda.stream import SimulatedEvent, SimulatedStream
from analyzer.errors import InputError
from analyzer.meta import argument as collective_hook
from analyzer.meta.address_space import MetaStorage, new_storage, next_number
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.operator_info import OperatorFacts
from analyzer.meta.state import active_state
from analyzer.meta.tensor import device_of

from .known_content import ContentRule
from .world_state import active_world_state, current_world, find_process_group

# Collectives of Python objects: every rank is assumed to hold what this one does, and nothing is pickled.


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = None, group: Any = None,
                   group_dst: int | None = None) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
                         src: int | None = None, group: Any = None, group_src: int | None = None) -> None:
    given = scatter_object_input_list
    scatter_object_output_list[0] = None if given is None else given[dist.get_rank(group)]


def _recv_object_list(object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
                      group_src: int | None = None, use_batch: bool = False) -> int:
    rank, source = active_world_state().spec.rank, src if group_src is None else group_src
    raise InputError(f"rank {rank} would receive objects from rank {source}, which does not run: give them to it by "
                     f"other means, or broadcast them")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What goes to a rank that does not run; what this rank has is assumed to be what the source of a broadcast has."""


_OF_OBJECTS: dict[str, Callable[..., Any]] = {
    "all_gather_object": _all_gather_object, "gather_object": _gather_object, "broadcast_object_list": _nothing,
    "scatter_object_list": _scatter_object_list, "send_object_list": _nothing, "recv_object_list": _recv_object_list}


_POINT_TO_POINT = ("send", "recv_", "recv_any_source_")


class _Shelf(NamedTuple):
    """What an asynchronous collective keeps, for the allocator's safety, until its `Work` is waited for. Where only its
    future is, a thread that looks every 100 ms finds out that it has ended, and the next collective lets go of it. The
    host launches those of a step before the device has ended the last one: they let go of the one before. Source:
    ``stashed_for_allocator_safety_``, ``shelvesToUnstash_`` of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, from
    PyTorch 2.8 on.
    """

    phases: int                    #: how many of the run had begun when it was launched
    numbers: frozenset[int]        #: of the storages
    storages: list[Any]


#: Collectives of lists of tensors, and which argument they copy to or from one flat tensor, where all are of one size
#: (``newLikeFlat`` in ProcessGroupNCCL.cpp).
_FLATTENED = {"allgather_": "output_tensors", "reduce_scatter_": "input_tensors"}


_NEAR = 24  # frames at most between an operator of c10d and the function of `torch.distributed` that calls it


def _is_called_from_python() -> bool:
    """Whether a function of `torch.distributed` launches a collective; C++, as in DDP, keeps what it launches."""
    frame = sys._getframe(1)
    for _ in range(_NEAR):
        if frame.f_code.co_filename == c10d.__file__:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _is_on_device(tensor: torch.Tensor) -> bool:
    return device_of(tensor).type == "cuda"


def _flatten(tensors: list[torch.Tensor]) -> list[MetaStorage]:
    state = active_state()
    if state.recorder is None or not tensors or not _is_on_device(tensors[0]) or len({t.shape for t in tensors}) > 1:
        return []
    with without_modes():
        flat = new_storage(sum(t.nbytes for t in tensors), device_of(tensors[0]), state.space)
    state.recorder.memory.holds_workspace(flat)
    return [flat]


class Collectives:
    """What communicating operators do in a world; ``contents`` says what other ranks hold (see `world`)."""

    def __init__(self, device_count: int, contents: Callable[..., Any] | None = None) -> None:
        self.device_count = device_count
        self.propagate = ContentRule(contents).propagate
        self.reducers: weakref.WeakSet[Any] = weakref.WeakSet()  #: each `DistributedDataParallel`, whose reducer is C++
        self._made: list[tuple[range, str]] = []  # numbers of storages, and the category of what they were made for
        self._streams: dict[tuple[str, int], SimulatedStream] = {}  # of each group, and of each pair of ranks
        self._ends: dict[int, SimulatedEvent] = {}  # of the last collective that has a storage, by its number
        self._shelves: list[_Shelf] = []

    @contextmanager
    def making(self, category: str) -> Iterator[None]:
        """A block whose new storages are of a category."""
        first = next_number()
        yield
        self._made.append((range(first, next_number()), category))

    def list_made(self) -> list[tuple[int, str]]:
        """Numbers of storages that were made in such blocks, with their category."""
        return [(number, category) for numbers, category in self._made for number in numbers]

    def shape(self, info: OperatorFacts) -> Callable[..., Any] | None:
        return returned_by(info.op)

    def launching(self, info: OperatorFacts, given: dict[str, Any]) -> AbstractContextManager[object]:
        """A block around a call: one that is asynchronous runs on the stream of its group, after what the current one
        was given (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ``collective``); else it runs on the current one.
        """
        recorder = active_state().recorder
        phases = [] if recorder is None else recorder.log.phases
        self._shelves = [shelf for shelf in self._shelves if [
            record.phase for record in phases[shelf.phases:]].count("backward") < 2]
        return nullcontext() if info.op.namespace != "c10d" else self._launching(
            info, given, None if recorder is None else len(phases))

    @contextmanager
    def _launching(self, info: OperatorFacts, given: dict[str, Any], phases: int | None) -> Iterator[None]:
        tensors = tensors_of(list(given.values()))
        flat = _flatten(tensors_of(given[_FLATTENED[info.name]])) if info.name in _FLATTENED else []
        if not given.get("async_op", True):
            yield
            return
        # pairs of ranks have streams of their own: ProcessGroupNCCL.cpp, ``pointToPoint``
        is_message = info.name in _POINT_TO_POINT
        peer = int(given.get("dst", given.get("src", -1))) if is_message else -1
        with self._on_stream(str(find_process_group(given).group_name), peer, tensors):
            yield
        if phases is not None and not is_message and _is_called_from_python():
            self._keep(phases, tensors, flat)

    def _keep(self, phases: int, tensors: list[torch.Tensor], flat: list[MetaStorage]) -> None:
        held = [t.untyped_storage() for t in tensors if _is_on_device(t)]
        self._shelves.append(_Shelf(phases, frozenset(_list_numbers(tensors)), [*held, *flat]))

    @contextmanager
    def _on_stream(self, group: str, peer: int, tensors: list[torch.Tensor]) -> Iterator[None]:
        if not any(map(_is_on_device, tensors)):
            yield
            return
        stream = self._streams.get((group, peer))
        if stream is None:
            stream = self._streams[group, peer] = SimulatedStream()
        stream.wait_stream(torch.cuda.current_stream())
        with stream:
            yield
        end = stream.record_event()
        self._ends.update(dict.fromkeys(_list_numbers(tensors), end))

    def wait(self, work: Any) -> None:
        """The current stream waits for what a `Work` stands for; for all that was launched, where that is not known."""
        value = work.get_future().value()
        is_message = isinstance(value, _HeldMessage)
        numbers = value.release() if is_message else _list_numbers(tensors_of((value,)))
        self._shelves = [shelf for shelf in self._shelves if shelf.numbers.isdisjoint(numbers)]
        ends = [self._ends[number] for number in numbers if number in self._ends]
        is_known = bool(ends) or is_message
        self._wait_for(ends if is_known else [stream.record_event() for stream in self._streams.values()])

    def wait_for_group(self, group: str) -> None:
        self._wait_for([stream.record_event() for (name, _), stream in self._streams.items() if name == group])

    def _wait_for(self, events: list[Any]) -> None:
        for event in {id(event): event for event in events}.values():
            torch.cuda.current_stream().wait_event(event)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.layout is torch.strided else []
    return [t for x in tree for t in tensors_of(x)] if isinstance(tree, (list, tuple)) else []


def _list_numbers(tensors: list[torch.Tensor]) -> list[int]:
    return [s.number for t in tensors if isinstance(s := t.untyped_storage(), MetaStorage)]


class _HeldMessage:
    """What the `Work` of a message holds: its tensor, until the program waits. Source: what is kept for the allocator's
    safety in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, of a batch of messages (``endCoalescing``).
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._numbers = tensors, _list_numbers(tensors)

    def release(self) -> list[int]:
        self._tensors = []
        return self._numbers


def _boxed_work(future: Any) -> Any:
    make: Any = torch._C._distributed_c10d
    return make._create_work_from_future(future).boxed()


def _message_work(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(_HeldMessage(tensors_of(tensors)))
    return _boxed_work(future)


def _work(*args: Any, **kwargs: Any) -> Any:
    """A `Work` that is done, whose future holds the tensors as a list of C++, which DDP's reducer and its hooks read:
    of what Python can make, only the future of a fork holds one (``fork`` in torch/csrc/jit/python/init.cpp), which has
    to hold a tensor: a rank that only gives to `gather` writes none.
    """
    written = tensors_of(args[0])
    return _boxed_work(torch._C.fork(lambda: written)) if written else _message_work(*args[1:])


def _same_memory(given: torch.Tensor) -> torch.Tensor:
    """``AsyncCollectiveTensor(given)`` wraps what it is given; torch's own kernel for meta makes a tensor of its own
    (torch/distributed/_functional_collectives.py, ``_wrap_tensor_autograd``).
    """
    return given.detach()


# By the number of results, of which the last is a Work: torch/csrc/distributed/c10d/Ops.cpp.
_RETURNS: dict[int, Callable[..., Any]] = {
    0: _nothing, 1: _work, 2: lambda *args, **kwargs: (args[0], _work(*args))}


def returned_by(op: Any) -> Callable[..., Any] | None:
    """What an operator of c10d returns: what it wrote and a `Work` that is done; None of another operator."""
    if op._schema.name == "_c10d_functional::_wrap_tensor_autograd":
        return _same_memory
    if op.namespace != "c10d":
        return None
    name = op._schema.name.partition("::")[2]
    return _message_work if name in _POINT_TO_POINT else _RETURNS.get(len(op._schema.returns))


def current_collectives() -> Collectives:
    found = collective_hook.impl
    assert isinstance(found, Collectives)
    return found


def replacements() -> Iterator[Undo]:
    """Let `Work.wait` say that the current stream waits, and objects stay here; each result undoes one replacement."""
    for name, simulated in _OF_OBJECTS.items():
        for owner in (dist, c10d):
            yield answer(owner, name, simulated, where=current_world)
    # states of `ZeroRedundancyOptimizer`: what another rank sends is assumed to be a state of this one's
    yield answer(zero_redundancy_optimizer, "_broadcast_object", lambda obj, *args, **kwargs: obj, where=current_world)
    for name in ("wait", "block_current_stream", "synchronize"):
        if hasattr(dist.Work, name):
            yield answer(dist.Work, name, _wait, passes_original=True, where=current_world)
    yield answer(dist.Work, "_source_rank", _other_rank, where=current_world)


def _wait(original: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
    current_collectives().wait(work)
    return original(work, *args, **kwargs)


def _other_rank(work: Any) -> int:
    source = int(dist.get_rank() == 0)
    active_state().assume(f"a message that is received from any rank is assumed to come from rank {source}")
    return source
