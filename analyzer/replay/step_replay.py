"""Replays the first step's forward and backward pass: later ones do the same, from another state of memory."""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from analyzer.memory.allocator_segment import Placements, Span
from analyzer.meta.address_space import take_numbers
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.structure import tensors_of
from analyzer.meta.tensor import revive, template
from analyzer.record.eager import EagerStep, default_loss
from analyzer.record.log import Log, Pending, PlacedPart
from analyzer.record.recorder import Recorder
from analyzer.record.storage_lifetime import BEGAN, BORN, CALLED, DIED, ENDED, HELD, OUTSIDE, TAKEN, Event

from .block_key import LEAF_TYPES
from .captured_block import number_of
from .match import CAPTURES, USES_STREAMS
from .segment import START, EventWriter, Mark, Names, Place, Segment, placed_part, play
from .state_fingerprint import StateFingerprint


class StepReplay:
    """The events of a recorded stretch, to be replayed: older storages keep their numbers, born ones get new ones."""

    def __init__(self, recorder: Recorder, events: list[Event], first_node: int) -> None:
        self.recorder, self.events = recorder, events
        self.nodes = range(first_node, len(recorder.log.node_slots))
        self._left: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensors like gradients, and the parameters
        self._survivors: set[int] = set()
        self._closed = True  # nothing that was there before died, and all that is left has a storage of its own
        self._live: Segment | None = None
        self._parts: list[Part] = []
        self._slot_of: dict[int, int] = {}
        self._slot_count = 0
        born: set[int] = set()
        for kind, what in events:
            if kind == BORN:
                self._closed = self._closed and what not in born  # else it was resized
                born.add(what)
                self._survivors.add(what)
            for number in [what] if kind == DIED else [n for _, n in what.freed] if kind == TAKEN else ():
                self._closed = self._closed and number in self._survivors
                self._survivors.discard(number)
            if kind == TAKEN:
                self._survivors.update(*[numbers for _, numbers in what.survivors])

    def leave(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Let the stretch leave parameters' gradients; whether all that outlives it are these, each by itself."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                if gradient.layout is not torch.strided:  # a sparse gradient is several tensors
                    return False
                number = number_of(gradient)
                self._closed = self._closed and number not in self._left
                self._left[number] = template(gradient), parameter
        return self._closed and self._survivors == self._left.keys()

    def replay(self) -> None:
        recorder, log, space = self.recorder, self.recorder.log, self.recorder.space
        if self._live is None:
            self._live = self._compile()
        again = Repetition(self._parts, self.nodes, log, recorder.step, take_numbers())
        log.pending.append(again)
        log.node_slots.extend([None] * len(self.nodes))
        slots: list[Any] = [None] * self._slot_count
        blocks: dict[int, list[Any]] = {}  # of each replayed block's place
        numbers: dict[int, int] = {}
        births = 0
        for part in self._parts:
            if part.kind == BEGAN:
                recorder.begin(part.what)
                continue
            if part.kind == ENDED:
                recorder.end()
                continue
            segment, start, stop = part.span()
            mine = slots
            if part.kind == TAKEN:
                site = part.what.site
                mine = blocks.setdefault(id(site), [None] * len(site.numbers))
                for slot, number in part.what.freed:
                    mine[slot] = slots[self._slot_of[number]]
            again.placements.append(play(recorder, segment, start, stop, mine))
            first = again.first_number + births - start.birth - segment.first_slot
            for theirs, olds, place in part.survivors:
                numbers.update(zip(olds, [first + slot for slot in theirs]))
                if place is not None:
                    slots[place:place + len(theirs)] = [mine[slot] for slot in theirs]
            births += stop.birth - start.birth
        with without_modes():
            for number, (like, parameter) in self._left.items():
                held = slots[self._slot_of[number]]  # a span of the accelerator's allocator, or another memory's block
                claim = self._live.claim_of(self._slot_of[number])
                log.expect(numbers[number], like.untyped_storage().nbytes(), str(claim))
                block = recorder.memory.block_of(held, space.stream) if isinstance(held, Span) else held
                parameter.grad = revive(like, claim, numbers[number], block, space)

    def _compile(self) -> Segment:
        """Make the parts to replay: live events, whose segment this gives, and blocks that were replayed."""
        slot_of = self._slot_of
        elsewhere: dict[int, torch.device] = {}
        count = sum([kind == BORN for kind, _ in self.events])  # the slots of what is born live come first
        others: list[Part] = []
        for kind, what in self.events:
            if kind <= HELD:
                continue
            survivors: list[tuple[Sequence[int], Sequence[int], int | None]] = []
            for slots, numbers in what.survivors if kind == TAKEN else ():
                places = range(count, count + len(slots))
                slot_of.update(zip(numbers, places))
                elsewhere.update((place, claim) for slot, place in zip(slots, places)
                                 if (claim := what.segment.elsewhere.get(slot)) is not None)
                survivors.append((slots, numbers, count))
                count = places.stop
            others.append(Part(kind, what, survivors))
        self._slot_count = count
        segment = Segment(self.recorder.log, self.events, slot_of, 0, set(slot_of), elsewhere, self.recorder.memory,
                          takes_workspaces=False)
        segment.log = None
        left = {slot_of[number]: number for number in self._left}
        start = START
        for stop, other in zip((*segment.breaks, segment.end), (*others, None)):
            if stop.event > start.event:
                mine = [slot for slot in range(start.birth, stop.birth) if slot in left]
                self._parts.append(Part(CALLED, (segment, start, stop), [(mine, [left[slot] for slot in mine], None)]))
            if other is not None:
                self._parts.append(other)
                start = stop._replace(event=stop.event + 1)
        return segment


class Part(NamedTuple):
    """A piece of a step: live events (their segment and its marks around them), an `Instance` of a replayed block, or
    the begin or end of a phase. ``survivors`` are those born in it that outlive the replay, by lots: slots, numbers in
    the first step, and of those born in a block the first slot among the live storages.
    """

    kind: int
    what: Any
    survivors: list[tuple[Sequence[int], Sequence[int], int | None]]

    def span(self) -> tuple[Segment, Mark, Mark]:
        """The segment that is repeated, and the marks between which it is; not of the begin or end of a phase."""
        return (self.what.segment, self.what.start, self.what.stop) if self.kind == TAKEN else self.what

    def events(self) -> list[Event]:
        """What happens in it, in terms of the first step's log."""
        segment, start, stop = self.span()
        return list(self.what.events()) if self.kind == TAKEN else segment.events[start.event:stop.event]


class Repetition(Pending):
    """One replay of a step, to be written into the log."""

    def __init__(self, parts: list[Part], nodes: range, log: Log, step: int, first_number: int) -> None:
        self.parts, self.nodes, self.first_number = parts, nodes, first_number
        self.placements: list[Placements] = []
        self.place, self.node = Place.at_end(log, step), len(log.node_slots)

    def placed_parts(self) -> Iterator[PlacedPart]:
        first = self.place.call
        for part in self.parts:
            if part.kind in (CALLED, TAKEN):
                segment, start, stop = part.span()
                yield placed_part(first, self.place.step, segment, start, stop)
                first += stop.call - start.call

    def expand(self, log: Log) -> None:
        offset, places = self.node - self.nodes.start, range(self.node, self.node + len(self.nodes))
        parts = [part for part in self.parts if part.kind in (CALLED, TAKEN)]
        events = [part.events() for part in parts]
        every = list(itertools.chain.from_iterable(events))
        names = Names(lambda number: number)  # what was there before keeps its own
        names.update(zip([what for kind, what in every if kind == BORN], itertools.count(self.first_number)))
        first_call = next((what for kind, what in every if kind == CALLED), 0)
        writer = EventWriter(log, log, self.place, names, range(len(log.modules)),
                             {OUTSIDE: OUTSIDE, **dict(zip(self.nodes, places))},
                             (self.place.call - first_call).__add__)
        for part, mine, placements in zip(parts, events, self.placements):
            segment, start, stop = part.span()
            writer.write(mine, segment.sizes[start.birth:stop.birth], placements)
        for row, place in zip(self.nodes, places):
            node = log.node_slots[row]
            assert node is not None
            log.node_slots[place] = replace(
                node, name="", outputs=tuple([(names[n], spec) for n, spec in node.outputs]),
                inputs=tuple([i + offset for i in node.inputs]), reads=tuple([names[n] for n in node.reads]),
                step=self.place.step)


class ReplayedStep(EagerStep):
    """A step with ``set_to_none`` whose model runs once where a later run would do the same; its optimizer always."""

    step_reason: str | None = None  #: why steps after the first are run
    replay: StepReplay | None = None

    @property
    def runs_model(self) -> bool:
        return self.replay is None

    def run_step(self, index: int) -> None:
        if self.replay is not None:
            self.replay.replay()
        elif index == 0 and self.options.steps > 1:
            self.replay = self._run_watched()
        else:
            super().run_step(index)

    def _run_watched(self) -> StepReplay | None:
        """Run the model once; the result replays it, None where a later step could differ from this one."""
        recorder, marks = self.recorder, len(self.recorder.log.streams)
        functions = () if self.loss_fn is default_loss else (self.loss_fn,)
        before = StateFingerprint(recorder.modules(), functions, values=(self.args, self.kwargs))
        events: list[Event] = []
        recorder.events = events
        try:
            self.run_model()
            recorder.end()
        except BaseException:  # the run may begin again: what it changed would be changed twice
            before.put_back()
            raise
        finally:
            recorder.events = None
        replay = StepReplay(recorder, events, first_node=recorder.first_node)
        is_whole = replay.leave(self.parameters)
        self.step_reason = USES_STREAMS if len(recorder.log.streams) > marks else self._why_run_again(before)
        if self.step_reason is None and not is_whole:
            self.step_reason = "something that it makes outlives it, or something older dies in it"
        return replay if self.step_reason is None else None

    def _why_run_again(self, before: StateFingerprint) -> str | None:
        if any(call.cuda_graphs for call in self.recorder.log.compiled_calls):
            return CAPTURES
        if not all(isinstance(leaf, LEAF_TYPES) for leaf in pytree.tree_leaves((self.args, self.kwargs))):
            return "an argument is an object that its forward pass could change"
        if before.unreadable:
            return before.unreadable
        if (change := before.change()) is not None:
            return f"it changes {change}"
        groups = () if self.optimizer is None else self.optimizer.param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        if any(t.grad is not None and id(t) not in updated for t in (*self.parameters, *tensors_of(self.args))
               if t.is_leaf):  # as where a forward pass runs a backward pass of its own: the next one adds to it
            return "a gradient stays that the optimizer does not know"
        return None
