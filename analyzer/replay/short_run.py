"""A run in which the blocks between the ends of a chain only hand on what they are given, and what is noted of it."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer.memory.host_memory import NoRegion
from analyzer.meta.address_space import MetaStorage, next_number
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.state import StreamAction
from analyzer.meta.tensor import META, take_class
from analyzer.record.failure import first_line
from analyzer.record.recorded_run import RunListener
from analyzer.record.recorder import Recorder
from analyzer.record.storage_lifetime import ENDED
from analyzer.record.tensor_walk import is_distributed, local_part
from analyzer.state.fingerprint import StateFingerprint

from .cache_slot import fill_as, list_counting, noting_slots, numbers_held
from .chain import ENDS, Chain, ChainRun, same, watching_reads
from .match import ASKS_MEMORY, CAPTURES, RUNS_OUT, USES_STREAMS, NotRepeated, Output, Spec, list_done

CUT, LEFT, STEP, AGAIN, KEPT, ORDERED = range(ENDED + 1, ENDED + 7)
"""Events beside those of `analyzer.record.storage_lifetime`: CUT with a `Cut`, LEFT where a block was left, STEP with a
`StepMark`, AGAIN where the first step's model runs a second time, KEPT with the number of a workspace that a library
keeps, ORDERED with what was asked of a stream, the stream's number and that of the event.
"""

_NOT_GIVEN = "a block is not given what the one before it gave"
_OTHER_ARGUMENTS = "its blocks are called with other arguments"


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


class ShortRun(RunListener):
    """What is noted of a run of a few blocks of each chain: events in order, stand-ins by number of their storage, and
    of gradients of blocks that are run the block whose parameters they are of. As seen from a block, others within
    ``reach`` are named by their distance, all others absolutely. Where more has to run than was thought, its ``chains``
    change; each keeps its number. The model's ``state`` tells what blocks change; without it, that is not asked.
    """

    def __init__(self, recorder: Recorder, chains: list[Chain], *, reach: int = 1, takes_streams: bool = False,
                 state: StateFingerprint | None = None) -> None:
        self.recorder, self.reach, self.takes_streams, self.state = recorder, reach, takes_streams, state
        self._known: list[tuple[str, Any]] = []  #: what was changed when a reference block was called last
        self.runs = [ChainRun(chain) for chain in chains]
        #: of each member of a block: the chain, the place of the block in it, and its own in the block
        self._place = {id(module): (number, place, i) for number, chain in enumerate(chains)
                       for place, members in enumerate(chain.members) for i, (_, module) in enumerate(members)}
        self.events: list[tuple[int, Any]] = []
        self.stand_ins: dict[int, StandIn] = {}
        self.owners: dict[int, tuple[int, int]] = {}
        self.is_ordered = False  #: whether it uses streams, waits for the device or gives workspaces back
        self.states: Any = None  #: of an optimizer, by parameter, where it steps for the blocks alone that run
        self.dropped: set[int] = set()  #: storages that slots of caches held, and that stand-ins replaced
        self._output = Output(None)  #: of the block that was left last

    @property
    def chains(self) -> list[Chain]:
        return [run.chain for run in self.runs]

    def why_not_written(self) -> str | None:
        """Why the log of this run tells nothing of one of all blocks and steps."""
        log = self.recorder.log
        if log.shortage is not None:
            return RUNS_OUT
        if any(call.cuda_graphs for call in log.compiled_calls):
            return CAPTURES
        return ASKS_MEMORY if self.recorder.mode.state.asks_memory else None

    def list_repeated(self) -> list[tuple[int, ChainRun]]:
        """The chains of which some blocks need not run, each with its number."""
        return [(number, run) for number, run in enumerate(self.runs) if run.chain.skipped]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Note what the recorder hears in a block, in which blocks are skipped. What fails in it may not fail where all
        blocks run: NotRepeated is raised instead.
        """
        recorder = self.recorder
        recorder.mode.state.asks_memory = False
        recorder.run.events = self.events
        recorder.run.listeners.append(self)
        recorder.modules.skipper = self if self.runs else None
        try:
            yield
        except Exception as error:
            if not self.list_repeated():
                raise
            raise NotRepeated(f"with some of its blocks alone it fails: {first_line(error)}") from error
        finally:
            recorder.run.events = recorder.modules.skipper = None
            recorder.run.listeners.remove(self)

    @contextmanager
    def watching_reads(self) -> Iterator[None]:
        """A block in which the model runs. All blocks of a chain that read what they differ in are run; where some were
        skipped already, NotRepeated is raised.
        """
        with ExitStack() as stack:
            runs = [run for _, run in self.list_repeated()]
            for run in runs:
                run.noting = stack.enter_context(ExitStack())
                self._note_slots(run)
            stack.enter_context(watching_reads([(run.chain, partial(self._note_read, run)) for run in runs]))
            yield

    def _note_slots(self, run: ChainRun) -> None:
        blocks, tell = run.chain.blocks, partial(self._note_read, run)
        counting = list_counting(blocks, run.chain.differing, len(run.chain.members[0]))
        run.filled = run.noting.enter_context(noting_slots(blocks[run.chain.reference], counting, tell))

    def _note_read(self, run: ChainRun, path: str, name: str) -> None:
        if run.refusal is None:
            self._give_up(run, f"its blocks read {path}{'.' if path else ''}{name}, in which they differ")

    def _give_up(self, run: ChainRun, reason: str) -> None:
        """Run all blocks of a chain. Raises NotRepeated where some were skipped already."""
        if run.has_skipped:
            raise NotRepeated(reason)
        run.noting.close()
        run.filled.clear()  # what was noted would keep caches and arguments alive
        run.arguments.clear()
        chain, run.refusal = run.chain, reason
        run.chain = chain._replace(head=len(chain.blocks) - chain.tail)
        for members in chain.members:
            for _, module in members:
                del self._place[id(module)]
        self._let_run([module for place in chain.skipped for module in chain.modules[place]])

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
        if self.list_repeated():
            raise NotRepeated(USES_STREAMS)

    def step_begins(self, step: int) -> None:
        log = self.recorder.log
        self.events.append((STEP, StepMark(step, len(log.node_slots), len(log.module_calls))))

    def module_left(self, module: nn.Module, result: Any) -> None:
        found = self._place.get(id(module))
        if found is None or self.recorder.run.phase != "forward":
            return
        chain, place, member = found
        self._output = Output(result)
        self.events.append((LEFT, None))
        members = self.runs[chain].chain.members
        if (place, member) == (len(members) - 1, len(members[0]) - 1):
            log = self.recorder.log
            self.events.append((CUT, Cut(chain, None, 0, len(log.node_slots), len(log.module_calls))))

    def backward_begins(self) -> None:
        if self.recorder.run.stack and any(
                0 < len(run.begun) < len(run.chain.blocks) for _, run in self.list_repeated()):
            raise NotRepeated("a backward pass runs between its blocks")
        self._known = self._list_changes()

    def backward_ended(self) -> None:
        """Note whose the gradients are that there are; give blocks that were not run theirs."""
        if (change := self._change()) is not None:
            raise NotRepeated(change)
        with torch._C.DisableTorchFunction(), torch.no_grad(), self.unheard():
            for number, run in self.list_repeated():
                reference = run.parameters[run.chain.reference]
                for place in run.chain.run:
                    self.owners.update((self._describe(p.grad, False).number, (number, place))
                                       for p in run.parameters[place] if p.grad is not None)
                specs = [None if p.grad is None else self._describe(p.grad, False) for p in reference]
                for place in run.chain.skipped if self.states is None else ():
                    storages: dict[int, torch.Tensor] = {}
                    for mine, theirs, spec in zip(run.parameters[place], reference, specs):
                        if mine.grad is not None:
                            self._check_stand_in(mine.grad, spec)
                        elif spec is not None:
                            mine.grad = self._make_gradient(spec, theirs.grad, number, place, storages)
                            run.has_skipped = True

    # ---- blocks

    def skip(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module is called: one of a block that is not to be run gives what the one before it gave."""
        found = self._place.get(id(module))
        if found is None:
            return NotImplemented
        number, place, member = found
        run = self.runs[number]
        if self.recorder.run.phase != "forward":
            if place in run.chain.skipped:
                raise NotRepeated("a block runs outside of the forward pass")
            return NotImplemented
        given = self._output.find((args, kwargs))
        arguments = self._output.describe((args, kwargs), self.recorder.memory.storage_of)
        why_not = _NOT_GIVEN if given is None else None
        if run.has_skipped and (place, member) == (run.chain.skipped.start, 0):
            why_not = self._change() or why_not
        if place in run.chain.skipped and not same(run.arguments.get(member, arguments), arguments):
            why_not = why_not or _OTHER_ARGUMENTS
        is_skipped = self._decide(run, place, member, why_not)
        if run.refusal is not None:
            return NotImplemented
        if place == run.chain.reference:
            run.arguments[member] = arguments
            self._known = self._known if member else self._list_changes()
        if not member:
            run.begun[place:] = [len(self.events)]
        log, call = self.recorder.log, self.recorder.modules.running_call()
        calls = len(log.module_calls)
        self.events.append((CUT, Cut(number, place, member, len(log.node_slots), calls - (call == calls - 1))))
        if not member:
            self._pass_on(number, place, is_skipped)
        if not is_skipped:
            return NotImplemented
        run.has_skipped = True
        if why_not is not None:
            raise NotRepeated(why_not)
        return given

    def will_skip(self, module: nn.Module, args: Any) -> bool:
        found = self._place.get(id(module))
        if found is None or self.recorder.run.phase != "forward":
            return False
        number, place, member = found
        run, why_not = self.runs[number], _NOT_GIVEN if self._output.find(args) is None else None
        is_skipped = self._decide(run, place, member, why_not)
        run.has_skipped |= is_skipped
        return is_skipped

    def _decide(self, run: ChainRun, place: int, member: int, why_not: str | None) -> bool:
        """Whether a block that is called is skipped. The first that may be decides it for all of its chain."""
        if not member and place in run.chain.skipped and not run.has_skipped:
            self._look_back(run, place, why_not)
        return place in run.chain.skipped

    def _look_back(self, run: ChainRun, place: int, why_not: str | None) -> None:
        """The first block that is to be skipped is called. All blocks run where those before it show that none can be
        skipped. This one runs, as the reference block, where the two blocks before it did not do the same.
        """
        chain, reason = run.chain, self._change() or why_not
        may_differ = len(run.begun) == place < min(ENDS[-1], len(chain.blocks) - chain.tail)
        if reason in (None, _OTHER_ARGUMENTS) and may_differ:
            before, last = (list_done(self.recorder.log, self.events[slice(*span)])
                            for span in pairwise([*run.begun[-2:], len(self.events)]))
            if before != last:
                run.noting.close()
                run.chain = chain._replace(head=chain.head + 1)
                self._let_run(chain.modules[place])
                self._note_slots(run)
                return
        if reason is not None:
            self._give_up(run, reason)

    def _pass_on(self, chain: int, place: int, is_skipped: bool) -> None:
        """Fill the slots of a block that is not run with stand-ins for what the reference block put into its own."""
        run = self.runs[chain]
        held, filled, reference = run.held, run.filled, run.chain.reference
        if place == run.chain.skipped.start:
            held.setdefault(reference, []).extend(number for one in filled for number in one.held.values())
        for one in filled:
            index = one.slot + (place - reference) * len(run.chain.members[0])
            numbers = numbers_held(one.cache, index)
            held.setdefault(place, []).extend(numbers.values())
            if not is_skipped:
                continue
            with torch._C.DisableTorchFunction(), self.unheard():
                fill_as(one, index, lambda tensor: self.make(self._describe(tensor, False), chain, place))
            self.dropped.update({*numbers.values()}.difference(numbers_held(one.cache, index).values()))
        if not is_skipped:
            filled.clear()  # what is in it afterwards is of the reference block

    # ---- state

    def _let_run(self, modules: Sequence[nn.Module]) -> None:
        if self.state is not None:
            with without_modes():
                self.state.add_modules(modules)

    def _list_changes(self) -> list[tuple[str, Any]]:
        """What is changed of what the model's code can reach, and which parameters of reference blocks are trained."""
        if self.state is None or not self.list_repeated():
            return []
        with without_modes(), torch._C.DisableTorchFunction():
            trained = [[p.requires_grad for p in run.parameters[run.chain.reference]] for run in self.runs]
            return [*self.state.note_changes(), ("requires_grad of a parameter", trained)]

    def _change(self) -> str | None:
        """What a reference block changed, or code beside it, since it was called, or since its backward pass began."""
        pairs = zip_longest(self._list_changes(), self._known) if self._known and self.list_repeated() else ()
        return next((f"its blocks change {(now or before)[0]}" for now, before in pairs if now != before), None)

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
            made = storages[spec.number] = self.make(spec, chain, place)
        else:
            made = base.as_strided(spec.shape, spec.stride, spec.offset)
            take_class(made)
        if not is_distributed(like):
            return made
        from torch.distributed.tensor import DTensor  # slow to import, but where there are some

        return DTensor(made, like._spec, requires_grad=False)

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

    def make(self, spec: Spec, chain: int, block: int | None, repetition: int = 0) -> torch.Tensor:
        """A stand-in for what a block would make, or a later ``repetition`` of the step."""
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
