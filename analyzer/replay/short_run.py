"""A run in which the blocks between the ends of a chain only hand on what they are given, and what is noted of it."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import getattr_static
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from analyzer.memory.host_memory import NoRegion
from analyzer.meta.address_space import MetaStorage, next_number
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.state import Restart, StreamAction
from analyzer.meta.tensor import META, take_class
from analyzer.record.failure import first_line
from analyzer.record.recorder import Recorder
from analyzer.record.run_listener import RunListener
from analyzer.record.storage_lifetime import ENDED
from analyzer.record.tensor_walk import local_part, tensors_in, walk_modules

from .cache_slot import Filled, Index, fill_as, list_counting, noting_slots, numbers_held
from .chain import Chain
from .match import USES_STREAMS, Mismatch
from .state_fingerprint import StateRecord
from .state_value import MISSING

CUT, LEFT, STEP, AGAIN, KEPT, ORDERED = range(ENDED + 1, ENDED + 7)
"""Events beside those of `analyzer.record.storage_lifetime`: CUT with a `Cut`, LEFT where a block was left, STEP with a
`StepMark`, AGAIN where the first step's model runs a second time, KEPT with the number of a workspace that a library
keeps, ORDERED with what was asked of a stream, the stream's number and that of the event.
"""


class NotRepeated(Restart):
    """The run begins again with all blocks: ``reason`` says why some of them do not tell what all do."""


class BlocksDiffer(NotRepeated):
    """The blocks beside those that were not run did different things, as a second block may that the first prepares
    something for: more blocks at the ends of chains may tell.
    """


class Cut(NamedTuple):
    """A member of a block is called, or the last block was left, behind so many nodes and calls of modules."""

    chain: int
    block: int | None  #: its place in the chain; None: the last one was left
    member: int        #: the place in the block
    nodes: int
    module_calls: int


class StepMark(NamedTuple):
    """A step begins: how many nodes and calls of modules there were before."""

    step: int
    nodes: int
    module_calls: int


class StandIn(NamedTuple):
    """A storage in the place of one that a block would make: which storage it is like, of which chain and block, or of
    which repetition of the step.
    """

    like: int
    chain: int
    block: int | None
    repetition: int


class Spec(NamedTuple):
    """What a stand-in is made of: the number of a storage, its size, and how a tensor lies in it."""

    number: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class _Output(NamedTuple):
    """What a block gave: a tensor, or a tuple of tensors and None."""

    items: list[weakref.ref[torch.Tensor] | None]
    is_tuple: bool


class ShortRun(RunListener):
    """What is noted of a run of a few blocks of each chain: events in order, stand-ins by number of their storage, and
    of gradients of blocks that are run the block whose parameters they are of. As seen from a block, others within
    ``reach`` are named by their distance, all others absolutely.
    """

    def __init__(self, recorder: Recorder, chains: Sequence[Chain], *, reach: int = 1,
                 takes_streams: bool = False) -> None:
        self.recorder, self.chains, self.reach, self.takes_streams = recorder, chains, reach, takes_streams
        self.events: list[tuple[int, Any]] = []
        self.stand_ins: dict[int, StandIn] = {}
        self.owners: dict[int, tuple[int, int]] = {}
        self.is_ordered = False  #: whether it uses streams, waits for the device or gives workspaces back
        #: of each member of a block: the chain, the place of the block in it, and its own in the block
        self._place = {id(module): (number, place, i) for number, chain in enumerate(chains)
                       for place, members in enumerate(chain.members) for i, (_, module) in enumerate(members)}
        self._parameters = [[[p for module in modules for p in module._parameters.values() if p is not None]
                             for modules in chain.modules] for chain in chains]
        self._filled: list[list[Filled]] = [[] for _ in chains]
        #: of each chain, by the place of a block: storages of what its slots of caches held before, as it was filled
        self.held: list[dict[int, list[int]]] = [{} for _ in chains]
        self.dropped: set[int] = set()  #: of these, those that stand-ins replaced
        self._output: _Output | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note what the recorder hears in a block, in which blocks are skipped. What fails in it may not fail where all
        blocks run: NotRepeated is raised instead.
        """
        recorder = self.recorder
        recorder.mode.state.asks_memory = False
        recorder.run.events = self.events
        recorder.run.listeners.append(self)
        recorder.modules.skip_block = self._enter if self.chains else None
        try:
            yield
        except Exception as error:
            if not self.chains:
                raise
            raise NotRepeated(f"with some of its blocks alone it fails: {first_line(error)}") from error
        finally:
            recorder.run.events = recorder.modules.skip_block = None
            if self in recorder.run.listeners:
                recorder.run.listeners.remove(self)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which the model runs; NotRepeated is raised where its blocks read what they differ in, or change
        what they hold.
        """
        held = [StateRecord() for _ in self.chains]
        before = self._list_trained()
        for chain, record in zip(self.chains, held):
            for module in chain.modules[chain.reference]:
                record.capture_module(module, own=True)
        with self.watching_reads():
            yield
        for record in held:
            for what, _, _ in record.list_changes():
                raise NotRepeated(f"its blocks change {what}")
        if self._list_trained() != before:
            raise NotRepeated("its blocks change requires_grad of a parameter")

    @contextmanager
    def watching_reads(self) -> Iterator[None]:
        """A block in which the model runs; NotRepeated is raised where its blocks read what they differ in."""
        with ExitStack() as stack:
            for number, chain in enumerate(self.chains):
                counting = list_counting(chain.blocks, chain.differing, len(chain.members[0]))
                _, self._filled[number] = stack.enter_context(noting_slots(
                    chain.blocks[chain.reference], counting, refuse_read))
                stack.enter_context(refusing_reads(chain))
            yield

    def _list_trained(self) -> list[bool]:
        """What `requires_grad` says of the parameters of reference blocks."""
        with torch._C.DisableTorchFunction():
            return [p.requires_grad for chain, parameters in zip(self.chains, self._parameters)
                    for p in parameters[chain.reference]]

    # ---- what the recorder tells

    def kept(self, number: int) -> None:
        self.events.append((KEPT, number))

    def ordered(self, action: StreamAction, stream: int, event: int) -> None:
        if self.takes_streams and action is not StreamAction.USE:
            self.events.append((ORDERED, (action, stream, event)))
        else:
            self.gave_back()

    def gave_back(self) -> None:
        self.is_ordered = True
        if self.chains:
            raise NotRepeated(USES_STREAMS)

    def step_begins(self, step: int) -> None:
        log = self.recorder.log
        self.events.append((STEP, StepMark(step, len(log.node_slots), len(log.module_calls))))

    def module_left(self, module: nn.Module, result: Any) -> None:
        found = self._place.get(id(module))
        if found is None or self.recorder.run.phase != "forward":
            return
        chain, place, member = found
        items = result if isinstance(result, tuple) else (result,)
        self._output = None
        if all(x is None or isinstance(x, torch.Tensor) for x in items):
            self._output = _Output([None if x is None else weakref.ref(x) for x in items], isinstance(result, tuple))
        self.events.append((LEFT, None))
        members = self.chains[chain].members
        if (place, member) == (len(members) - 1, len(members[0]) - 1):
            log = self.recorder.log
            self.events.append((CUT, Cut(chain, None, 0, len(log.node_slots), len(log.module_calls))))

    def backward_ended(self) -> None:
        """Note whose the gradients are that there are; give blocks that were not run theirs."""
        with torch._C.DisableTorchFunction(), torch.no_grad(), self.unheard():
            for number, (chain, parameters) in enumerate(zip(self.chains, self._parameters)):
                reference = parameters[chain.reference]
                for place in chain.run:
                    self.owners.update((self._describe(p.grad, False).number, (number, place))
                                       for p in parameters[place] if p.grad is not None)
                specs = [None if p.grad is None else self._describe(p.grad, False) for p in reference]
                for place in chain.skipped:
                    storages: dict[int, torch.Tensor] = {}
                    for mine, theirs, spec in zip(parameters[place], reference, specs):
                        if mine.grad is not None:
                            self._check_stand_in(mine.grad, spec)
                        elif spec is not None:
                            mine.grad = self._make_gradient(spec, theirs.grad, number, place, storages)

    # ---- blocks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module is called: one of a block that is not to be run gives what the one before it gave."""
        found = self._place.get(id(module))
        if found is None:
            return NotImplemented
        number, place, member = found
        is_skipped = place in self.chains[number].skipped
        if self.recorder.run.phase != "forward":
            if is_skipped:
                raise NotRepeated("a block runs outside of the forward pass")
            return NotImplemented
        log, call = self.recorder.log, self.recorder.modules.running_call()
        calls = len(log.module_calls)
        is_own = call is not None and call == calls - 1
        self.events.append((CUT, Cut(number, place, member, len(log.node_slots), calls - is_own)))
        if not member:
            self._pass_on(number, place, is_skipped)
        if not is_skipped:
            return NotImplemented
        given = self._output
        mine = tensors_in((args, kwargs))
        before = [] if given is None else [None if item is None else item() for item in given.items]
        output = next((t for t in before if t is not None and any(t is other for other in mine)), None)
        if given is None or output is None:
            raise NotRepeated("a block is not given what the one before it gave")
        items = [None if item is None else output if t is None else t for item, t in zip(given.items, before)]
        return tuple(items) if given.is_tuple else output  # what is gone was of no use to what surrounds the blocks

    def _pass_on(self, chain: int, place: int, is_skipped: bool) -> None:
        """Fill the slots of a block that is not run with stand-ins for what the reference block put into its own."""
        filled, reference = self._filled[chain], self.chains[chain].reference
        held = self.held[chain]
        if place == self.chains[chain].skipped.start:
            held.setdefault(reference, []).extend(number for one in filled for number in one.held.values())
        for one in filled:
            index = one.slot + (place - reference) * len(self.chains[chain].members[0])
            numbers = numbers_held(one.cache, index)
            held.setdefault(place, []).extend(numbers.values())
            if not is_skipped:
                continue
            try:
                with torch._C.DisableTorchFunction(), self.unheard():
                    fill_as(one, index, lambda tensor: self._make(self._describe(tensor, False), chain, place))
            except Mismatch as mismatch:
                raise NotRepeated(str(mismatch)) from None
            self.dropped.update({*numbers.values()}.difference(numbers_held(one.cache, index).values()))
        if not is_skipped:
            filled.clear()  # what is in it afterwards is of the reference block

    # ---- stand-ins

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """A block in which the recorder does not hear of what is made."""
        state, space = self.recorder.mode.state, self.recorder.memory.space
        state.recorder = space.listener = None
        try:
            with without_modes():
                yield
        finally:
            state.recorder, space.listener = self.recorder, self.recorder.memory

    def _check_stand_in(self, gradient: torch.Tensor, spec: Spec | None) -> None:
        """A gradient of a block that was not run stays where the reference block's does."""
        storage = self.recorder.memory.storage_of(local_part(gradient))
        known = None if storage is None else self.stand_ins.get(storage.number)
        if known is not None and (spec is None or known.like != spec.number):
            raise NotRepeated("a gradient is dropped or replaced before the step ends")

    def _make_gradient(self, spec: Spec, like: Any, chain: int, place: int, storages: dict[int, torch.Tensor]) -> Any:
        """A stand-in for a gradient; those of one storage are in one, of those made for the block."""
        base = storages.get(spec.number)
        if base is None:
            made = storages[spec.number] = self._make(spec, chain, place)
        else:
            made = base.as_strided(spec.shape, spec.stride, spec.offset)
            take_class(made)
        return DTensor(made, like._spec, requires_grad=False) if isinstance(like, DTensor) else made

    def describe(self, tensor: torch.Tensor, whole: bool = True) -> Spec | None:
        """What a stand-in for a tensor is made of; None where it has no storage, or is not the ``whole`` of it."""
        tensor = local_part(tensor)
        storage = self.recorder.memory.storage_of(tensor) if tensor.layout is torch.strided else None
        if storage is None or whole and storage.nbytes() != tensor.numel() * tensor.itemsize:
            return None
        return Spec(storage.number, storage.nbytes(), tensor.shape, tensor.stride(), int(tensor.storage_offset()),
                    tensor.dtype, storage.device)

    def _describe(self, tensor: torch.Tensor, whole: bool = True) -> Spec:
        spec = self.describe(tensor, whole)
        if spec is None:
            raise NotRepeated("a gradient, or what is in a cache, has no storage of its own")
        return spec

    def make_again(self, spec: Spec, step: int) -> torch.Tensor:
        """A stand-in for what a later step makes in the place of what it is like."""
        return self._make(spec, -1, None, repetition=step)

    def _make(self, spec: Spec, chain: int, block: int | None, repetition: int = 0) -> torch.Tensor:
        create: Any = torch._C._VariableFunctions.empty_strided
        if spec.nbytes == spec.shape.numel() * spec.dtype.itemsize:
            made = create(spec.shape, spec.stride, dtype=spec.dtype, device=META)
        else:
            made = create((spec.nbytes // spec.dtype.itemsize,), (1,), dtype=spec.dtype, device=META).as_strided(
                spec.shape, spec.stride, spec.offset)
        storage = made.untyped_storage()
        storage.__class__ = MetaStorage
        number = next_number()
        storage.__dict__ = {"device": spec.device, "number": number, "space": self.recorder.memory.space,
                            "region": NoRegion(0, storage.nbytes())}
        take_class(made)
        self.stand_ins[number] = StandIn(spec.number, chain, block, repetition)
        return made  # type: ignore[no-any-return]


def refuse_read(path: str, name: str) -> None:
    raise NotRepeated(f"its blocks read {path}{'.' if path else ''}{name}, in which they differ")


@contextmanager
def refusing_reads(chain: Chain) -> Iterator[None]:
    """A block in which the reference block may not read what the blocks differ in: NotRepeated is raised then. An
    attribute of a class that has the `property` protocol comes before what an instance holds, so nothing else of an
    instance changes, and modules elsewhere find what they hold.
    """
    below = dict(walk_modules(chain.blocks[chain.reference]))
    watched: dict[tuple[type, str], dict[int, str]] = {}
    for path, name in chain.differing:
        watched.setdefault((type(below[path]), name), {})[id(below[path])] = path
    undo: list[Callable[[], None]] = []
    try:
        for (cls, name), paths in watched.items():
            default = getattr_static(cls, name, MISSING)
            if hasattr(type(default), "__set__"):
                continue  # such a default comes before what instances hold already
            undo.append(partial(delattr, cls, name) if name not in vars(cls) else partial(setattr, cls, name, default))
            setattr(cls, name, _refusing(name, paths, default))
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def _refusing(name: str, paths: dict[int, str], default: Any) -> property:
    def read(module: Any) -> Any:
        held = module.__dict__
        if name not in held:
            if default is MISSING:
                raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
            return default.__get__(module, type(module)) if hasattr(default, "__get__") else default
        if id(module) in paths and type(held[name]) is not Index:
            refuse_read(paths[id(module)], name)
        return held[name]

    def write(module: Any, value: Any) -> None:
        module.__dict__[name] = value

    def remove(module: Any) -> None:
        del module.__dict__[name]

    return property(read, write, remove)
