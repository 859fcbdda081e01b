"""Plays an optimizer's steps from a trial with a few parameters of each kind: no tensor is made of a state, and no
operator runs.
"""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from analyzer.memory.allocator_replay import Instruction, Opcode, Placements
from analyzer.meta.signature import Signature
from analyzer.record.event import BORN, CALLED, OUTSIDE
from analyzer.record.log import Log
from analyzer.record.op_call import OpCall
from analyzer.record.recorder import Recorder
from analyzer.record.storage_life import StorageLife

from .optimizer_member import Member, Members, Variant
from .optimizer_reading import NotUnderstood
from .optimizer_script import GRADIENT, PARAMETER, Birth, Call, Common, Death, Flush, ListCall, Loop, Part, walk
from .optimizer_steps import OptimizerSteps, Size, key_of, keys
from .optimizer_trial import REPRESENTATIVES, Trial
from .reel import ActWriter, act_on
from .reserved import Reserved, one_by_one
from .unseen_gradient import UnseenGradients

# A trial runs so many representatives of each kind and has to be read, which takes as long as running four times as
# many parameters: section "When an optimizer is tried out" of docs/performance.md, which benchmarks/speed.py measures.
FEWEST_TIMES = 4
_PHASE, _ROOT = "optimizer", 0


class Tail(NamedTuple):
    """What instructions say besides the slot that give a storage its memory and free it; see `allocator_replay`."""

    born: Opcode
    birth: tuple[Any, int]
    died: Opcode
    death: tuple[Any, None]


class OptimizerPlay:
    """Repeats the steps on the memory of a recorder. ``updated`` are the parameters: tensors, and blocks that have
    none.
    """

    def __init__(self, recorder: Recorder, steps: OptimizerSteps, updated: Sequence[torch.Tensor | Reserved]) -> None:
        self.recorder, self.steps, self.updated = recorder, steps, updated
        self.moves = [list(_without_calls(parts)) for parts in steps.parts]  # of memory
        self.slots: list[Any] = [None] * steps.slots  # what the allocator gave
        common = [self._tail(birth, birth.all_bytes) for birth in steps.common]
        made: dict[Variant, list[Tail]] = {}
        self.tails = common  # by slot
        for member in steps.members:
            variant = member.variant
            if variant not in made:
                births = sorted((birth for (kind, _), birth in steps.births.items() if kind == member.kind),
                                key=lambda birth: birth.place)
                made[variant] = [self._tail(birth, variant.bytes_of(birth)) for birth in births]
            self.tails += made[variant]

    @staticmethod
    def make(recorder: Recorder, optimizer: torch.optim.Optimizer, groups: Iterable[Iterable[torch.Tensor | Reserved]],
             unseen: UnseenGradients, steps: int) -> OptimizerPlay | None:
        """None where the optimizer has to run, or where a trial would not pay.

        Its class and settings must be known; ``groups`` are the parameters of its groups, in its order.
        """
        members = Members(torch.device(recorder.log.device), unseen)
        if not all(
                members.add(group, parameter) for group, parameters in enumerate(groups)
                for parameter in one_by_one(parameters)):
            return None
        if len({m.number for m in members.all}) < len(members.all) or len(
                members.all) <= FEWEST_TIMES * REPRESENTATIVES * len(members.kinds):
            return None
        try:
            reading = Trial(recorder, optimizer, list(members.kinds), steps).run()
        except NotUnderstood:
            return None
        return OptimizerPlay(recorder, OptimizerSteps(reading, members.all), members.updated)

    def play(self, unseen: UnseenGradients) -> None:
        """Repeat the recorder's present step of the optimizer on gradients that are there."""
        recorder, log, step = self.recorder, self.recorder.log, self.recorder.step
        recorder.begin(_PHASE)
        acts: list[Instruction] = []
        watched, tails = 0, self.tails
        for code, member, token in walk(self.moves[step], self.steps.members_of):
            slot = token.place.order if member is None else member.first + token.place
            tail = tails[slot]
            if code == BORN:
                acts.append((tail.born, slot, *tail.birth))
                if token.category:
                    log.unwritten[token.category] += tail.birth[1]
            else:
                acts.append((tail.died, slot, *tail.death))
            watched += tail.died is Opcode.FREE
        update = PlayedUpdate(self.steps, self.tails, step, unseen.numbers_of(self.updated), log)
        log.pending.append(update)
        act_on(recorder, _Acts(acts, watched), 0, len(acts), self.slots, update.takings)  # type: ignore[arg-type]
        log.call_slots.leave(self.steps.count_calls(step))
        recorder.resume("forward")

    def _tail(self, birth: Birth, nbytes: int) -> Tail:
        if birth.device == self.recorder.log.device and nbytes:
            return Tail(Opcode.ALLOCATE, (self.recorder.memory.rounded_bytes(nbytes), nbytes), Opcode.FREE, (None, None))
        claim = torch.device(birth.device)
        return Tail(Opcode.ALLOCATE_ELSEWHERE, (claim, nbytes), Opcode.FREE_ELSEWHERE, (claim, None))


def _without_calls(parts: Sequence[Part]) -> Iterator[Part]:
    """What is left of a step for the allocator."""
    for part in parts:
        if isinstance(part, Loop):
            tokens = {kind: [token for token in found if token.code != CALLED] for kind, found in part.tokens.items()}
            if any(tokens.values()):
                yield Loop(tokens, part.descending, part.left)
        elif isinstance(part, (Birth, Death, Flush)):
            yield part


class _Acts(NamedTuple):
    """Acts of the allocator, as `act_on` takes them: each is one event."""

    acts: list[Instruction]
    watched: int

    @property
    def event_counts(self) -> Sequence[int]:
        return range(len(self.acts) + 1)

    @property
    def act_counts(self) -> Mapping[int, int]:
        return {len(self.acts): self.watched, 0: 0}


class PlayedUpdate:
    """One playing of an optimizer's step, to be written into the log; ``gradients`` are the numbers of their storages."""

    def __init__(self, steps: OptimizerSteps, tails: Sequence[Tail], step: int, gradients: Sequence[int],
                 log: Log) -> None:
        self.steps, self.tails, self.step, self.gradients = steps, tails, step, gradients
        self.takings = Placements(log.peak_bytes)
        self.call, self.event, self.act = len(log.call_slots), log.events, len(log.act_slots)

    def parts_played(self) -> Iterator[tuple[int, Any, int, int]]:
        """Each kind of call as a stretch of its own; `key_of` numbers its storages."""
        steps = self.steps
        for part in steps.parts[self.step]:
            if isinstance(part, ListCall):
                list_keys = functools.partial(keys, members=steps.members_of(part.kinds))
                call = self._op_call(steps.signature_of_list(part), chain.from_iterable(map(list_keys, part.reads)),
                                     () if part.gives is None else list_keys(part.gives))
                yield self.step, Alike(call, 1, steps.sizes_of(part)), 0, 1
            elif isinstance(part, Call):
                yield self.step, self._alike(part, None, 1), 0, 1
            elif isinstance(part, Loop):
                for variant, count in Counter(
                    [member.variant for member in steps.members_of(frozenset(part.tokens))]).items():
                    for token in part.tokens[variant.kind]:
                        if isinstance(token, Call):
                            yield self.step, self._alike(token, variant, count), 0, 1

    def _alike(self, call: Call, variant: Variant | None, count: int) -> Alike:
        sizes = {} if variant is None else {
            key_of(p, 1): self.steps.size_of(p, variant) for p in call.reads if not isinstance(p, Common)
        }
        reads, gives = ((key_of(p, 1) for p in places) for places in (call.reads, call.gives))
        return Alike(self._op_call(self.steps.signature_of(call, variant), reads, gives), count, sizes)

    def _op_call(self, signature: Signature, inputs: Iterable[int], outputs: Iterable[int]) -> OpCall:
        return OpCall(signature, tuple(inputs), tuple(outputs), self.step, _PHASE, _ROOT, OUTSIDE, None, False)

    def expand(self, log: Log) -> None:
        """Write it into the log."""
        steps, step, call, event = self.steps, self.step, self.call, self.event
        writer = ActWriter(log, self.takings, self.act)
        gradient_of = dict(zip(steps.members, self.gradients))

        def number(place: Any, member: Member | None) -> int:
            if member is None or isinstance(place, Common):
                return steps.first_number + int(place.order)
            return gradient_of[
                member] if place == GRADIENT else member.number if place == PARAMETER else steps.first_number + member.first + int(
                    place)

        def numbers(places: Any, members: Sequence[Member]) -> list[int]:
            return [number(places, None)] if isinstance(
                places, Common) else [number(places.by_kind[m.kind], m) for m in members]

        for code, whose, token in walk(steps.parts[step], steps.members_of):
            if code == CALLED:
                if isinstance(token, ListCall):
                    signature = steps.signature_of_list(token)
                    inputs = [n for places in token.reads for n in numbers(places, whose)]
                    outputs = [] if token.gives is None else numbers(token.gives, whose)
                else:
                    signature = steps.signature_of(token, whose and whose.variant)
                    inputs, outputs = ([number(place, whose) for place in places]
                                       for places in (token.reads, token.gives))
                log.call_slots.write(call, signature, inputs, outputs, step, _PHASE, _ROOT, OUTSIDE, None, False)
                call += 1
                continue
            event += 1
            mine = number(token.place, whose)
            if code == BORN:
                # for the watched memory; else it told its own
                rounded_bytes, nbytes = self.tails[mine - steps.first_number].birth[:2]
                address, block_bytes = writer.born(token.device, rounded_bytes, call)
                life = StorageLife(log.life_table, mine, nbytes, block_bytes, address, token.device, event, call,
                                   _PHASE, step, OUTSIDE, _ROOT)
                life.category, life.requires_grad = token.category, token.requires_grad
                log.add_life(life)
                if token.category:
                    log.unwritten[token.category] -= nbytes
            else:
                life = log.storage_table[mine]
                life.died, life.died_call = event, call
                writer.died(life, call)
        writer.finish(call)


class Alike:
    """Calls that are alike, as a stretch of a `Reel` tells them."""

    def __init__(self, call: OpCall, count: int, sizes: Mapping[int, Size]) -> None:
        self.call, self.count, self.sizes = call, count, sizes

    def tally(self, start: int, stop: int, into: Log) -> list[tuple[OpCall, Mapping[int, Size], int]]:
        """One call, the sizes of what it speaks of, and how many there are."""
        return [(self.call, self.sizes, self.count)]
