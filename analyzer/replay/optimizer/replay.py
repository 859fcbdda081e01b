"""Replays an optimizer's steps: captured on prototypes, expanded to all parameters, repeated by the allocator."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from analyzer.meta.storage import take_numbers
from analyzer.record.event import BORN, CALLED, OUTSIDE, Event
from analyzer.record.log import Log
from analyzer.record.recorder import Recorder
from analyzer.record.storage_lifetime import StorageLifetime

from ..lazy_block import LazyBlock
from ..match import Mismatch
from ..segment import Segment, Site, replay
from ..unmaterialized_gradient import UnmaterializedGradients
from .capture import PROTOTYPES, Capture
from .expansion import Birth, Expansion
from .parameter import UpdatedParameters
from .pattern import find_pattern

# A capture runs so many prototypes of each kind and has to be read, which takes as long as running four times as many
# parameters: section "When an optimizer is tried out" of docs/performance.md, which benchmarks/speed.py measures.
FEWEST_TIMES = 4
_PHASE, _ROOT = "optimizer", 0


class OptimizerReplay:
    """An optimizer's steps as segments that can be replayed on the memory of a recorder."""

    @staticmethod
    def make(recorder: Recorder, optimizer: torch.optim.Optimizer, groups: Iterable[Iterable[torch.Tensor | LazyBlock]],
             unmaterialized: UnmaterializedGradients, steps: int) -> OptimizerReplay | Mismatch:
        """The replay of an optimizer of known class and settings, or why it has to run.

        ``groups`` are the parameters of its groups, in its order.
        """
        try:
            updated = UpdatedParameters(torch.device(recorder.log.device), unmaterialized, groups)
            if len(updated.infos) <= FEWEST_TIMES * PROTOTYPES * len(updated.kinds):
                return Mismatch("its parameters are so few that running it takes no longer")
            captured = Capture(recorder, optimizer, list(updated.kinds)).run(steps)
            return OptimizerReplay(recorder, updated, Expansion(find_pattern(captured), updated.infos), steps)
        except Mismatch as mismatch:
            return mismatch.with_traceback(None)

    def __init__(self, recorder: Recorder, updated: UpdatedParameters, expansion: Expansion, steps: int) -> None:
        self.recorder = recorder
        self.holders = updated.holders  #: the parameters, or their block where it is not materialized
        self.segments = _Compiler(recorder, expansion).compile(steps)
        self.numbers: list[Sequence[int]] = [updated.numbers]  # of the storages of parameters, and of what is made
        self.slots: list[Any] = [None] * expansion.made        # what the allocator gave, by number in the segments

    def replay(self, unmaterialized: UnmaterializedGradients) -> None:
        """Replay the recorder's present step on gradients that are there."""
        recorder, log = self.recorder, self.recorder.log
        segment, state_bytes = self.segments[recorder.step]
        recorder.begin(_PHASE)
        first = take_numbers()
        self.numbers.append(range(first, first + segment.births))
        parameters, *made = self.numbers
        site = UpdateSite((parameters, unmaterialized.numbers_of(self.holders), *made), state_bytes)
        log.unwritten["optimizer state"] += state_bytes
        replay(recorder, segment, site, self.slots, _keep)
        log.pending.append(site)
        recorder.resume("forward")


def _keep(slot: int) -> None:
    raise AssertionError("an optimizer's step frees what it does not own")


class UpdateSite(Site):
    """Where a step is replayed; the last of it that is written into the log, after its storages."""

    def __init__(self, numbers: Iterable[Sequence[Any]], state_bytes: int) -> None:
        super().__init__(numbers, (), ())
        self.modules, self.state_bytes = (_ROOT,), state_bytes

    def expand(self, log: Log) -> None:
        """The states are in the log now."""
        log.unwritten["optimizer state"] -= self.state_bytes


class _Compiler:
    """Makes segments of an expansion's steps, which share a log: a storage there stands for all that are alike."""

    def __init__(self, recorder: Recorder, expansion: Expansion) -> None:
        self.memory, self.expansion = recorder.memory, expansion
        self.log = Log(device=recorder.log.device)
        self._lives: dict[Any, StorageLifetime] = {}
        count = len(expansion.infos)
        table = self.log.storage_table
        for i, info in enumerate(expansion.infos):
            for number, nbytes in ((i, info.parameter_bytes), (count + i, info.gradient_bytes)):
                table[number] = self._life(Birth(nbytes, self.log.device, "", False))

    def compile(self, steps: int) -> list[tuple[Segment, int]]:
        """A segment of each step, and the bytes of the states that it makes."""
        found = []
        given = 2 * len(self.expansion.infos)
        slot_of = dict(zip(range(given), range(given)))
        elsewhere: dict[int, torch.device] = {}
        for step in range(steps):
            first = self.expansion.made
            events, state_bytes = self._write(step)
            segment = Segment(self.log,
                              events,
                              slot_of,
                              first,
                              set(slot_of),
                              elsewhere,
                              self.memory,
                              takes_workspaces=False)
            found.append((segment, state_bytes))
        return found

    def _write(self, step: int) -> tuple[list[Event], int]:
        events: list[Event] = []
        state_bytes = 0
        calls, table = self.log.call_slots, self.log.storage_table
        for kind, what, *rest in self.expansion.expand(step):
            if kind == CALLED:
                events.append((CALLED, len(calls)))
                calls.append(what, rest[0], rest[1], step, _PHASE, _ROOT, OUTSIDE, None, False)
            else:
                events.append((kind, what))
                if kind == BORN:
                    table[what] = self._life(birth := rest[0])
                    state_bytes += birth.nbytes if birth.category else 0
        return events, state_bytes

    def _life(self, birth: Birth) -> StorageLifetime:
        found = self._lives.get(birth)
        if found is None:
            found = self._lives[birth] = StorageLifetime(self.log.lifetime_table, 0, birth.nbytes, 0, 0, birth.device,
                                                         0, 0, _PHASE, 0, OUTSIDE, _ROOT)
            found.category, found.requires_grad = birth.category, birth.requires_grad
        return found
