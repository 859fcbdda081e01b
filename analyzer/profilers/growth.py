"""Whether steps keep memory: what there is more at the end of a step than at that of the step before."""
from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from analyzer.record.log import GROWS, Log
from analyzer.record.storage_lifetime import StorageLifetime
from analyzer.units import format_bytes

# What an optimizer or the model makes once, in whichever step first needs it, and what is freed where a step begins.
_MADE_ONCE = frozenset({"parameter", "buffer", "gradient", "optimizer state", "workspace", "cast copy"})
_LASTING = frozenset({"parameter", "gradient", "optimizer state", "workspace", "cast copy"})  # none is made longer
_ENDS = 3  # of the last steps, where there are as many: what one step alone makes may be a cache


class StepEnd(NamedTuple):
    """The end of a step: the event with which its last phase ends, what is allocated then, and the first call behind
    it, None where the run ends.
    """

    step: int
    event: int
    allocated_bytes: int
    next_call: int | None = None


def list_growing(log: Log) -> list[StepEnd]:
    """The ends of the last steps, each with more memory than the one before; empty where one has not."""
    ends: dict[int, StepEnd] = {}
    for record in log.phases:
        if 0 <= record.step < log.steps:
            before = ends.get(record.step - 1)
            if record.step not in ends and before is not None:
                ends[record.step - 1] = before._replace(next_call=record.first_call)
            ends[record.step] = StepEnd(record.step, record.end_event, record.allocated_bytes)
    last = [ends[step] for step in sorted(ends)][-_ENDS:]
    grows = all(before.allocated_bytes < after.allocated_bytes for before, after in pairwise(last))
    return last if len(last) > 1 and grows and log.shortage is None else []


class Growth:
    """What the last of some ``ends`` of steps has more than the one before it."""

    def __init__(self, log: Log, ends: list[StepEnd]) -> None:
        self.log, self.ends = log, ends

    def range_of(self, name: str) -> None:
        """It changes no range: peaks are those of the steps that were run."""

    def describe(self) -> str | None:
        """A sentence on it; None where it is what is made once."""
        return self._describe_more(made_once=False) or self._describe_longer() or (
            self._describe_more(made_once=True) if len(self.ends) == _ENDS else None)

    def _describe_more(self, *, made_once: bool) -> str | None:
        """Of more tensors than before, those of states of optimizers among them where what is ``made_once`` counts."""
        held = [self._list_held(end, made_once) for end in self.ends]
        kept_on = [sum([_is_kept(one, end) for one in alive]) for alive, end in zip(held, self.ends)]
        if any(after <= before for counts in ([*map(len, held)], kept_on) for before, after in pairwise(counts)):
            return None
        kept = [one for one in held[-1] if one.born > self.ends[-2].event and one.died is None]
        grown = sum([one.block_bytes for one in held[-1]]) - sum([one.block_bytes for one in held[-2]])
        if grown <= 0 or not kept:
            return None
        cause = ("an optimizer's state has more in each step" if made_once else
                 "something holds results of earlier steps, such as a list of losses (loss.item() keeps no graph)")
        where = f"in {len(held[-1]) - len(held[-2])} more tensors; the largest that it made and kept is of"
        again = self._list_kept_again(held[-1], kept) or kept
        last = self.log.find_line(max(again, key=lambda one: one.born))
        return self._say(grown, where, max(again, key=lambda one: one.block_bytes), cause, last)

    def _list_kept_again(self, held: list[StorageLifetime], kept: list[StorageLifetime]) -> list[StorageLifetime]:
        """What is like something of an earlier step that is held too."""
        def describe(one: StorageLifetime) -> object:
            return one.block_bytes, one.module, self.log.find_line(one)

        before = {describe(one) for one in held if one.born <= self.ends[-2].event}
        return [one for one in kept if describe(one) in before]

    def _describe_longer(self) -> str | None:
        """Of a tensor that each step makes of the one before and more, as ``torch.cat([kept, new])`` does."""
        found: list[tuple[int, StorageLifetime]] = []
        for before, after in pairwise(self.ends):
            longer = [(one.block_bytes - old, one) for one in self._list_alive(after)
                      if one.step == after.step and _is_kept(one, after) and (old := self._made_longer(one, before))]
            if not longer:
                return None
            found.append(max(longer, key=lambda pair: pair[0]))
        grown, one = found[-1]
        return self._say(grown, "in a tensor that each step makes of the one before and more, of", one,
                         "it holds what all steps so far have made")

    def _made_longer(self, one: StorageLifetime, before: StepEnd) -> int:
        """The bytes of what was there at the end of a step and gone after this storage was made of it; else 0."""
        calls = self.log.calls
        if not 0 <= one.born_call < len(calls):
            return 0
        given = {number: self.log.storages[number] for number in calls[one.born_call].inputs
                 if number in self.log.storages}
        return max([old.block_bytes for old in given.values()
                    if old.block_bytes < one.block_bytes and old.category not in _LASTING and old.died is not None
                    and old.born <= before.event < old.died and _is_kept(old, before)], default=0)

    def _say(self, grown: int, where: str, one: StorageLifetime, cause: str, last: str | None = None) -> str:
        number = self.log.steps
        node = self.log.nodes[one.node].name if one.node >= 0 else "an operator outside of modules"
        path, line = self.log.modules[one.module].path, self.log.find_line(one)
        node = one.label or (node if line is None or one.node >= 0 else "")
        place = " ".join([part for part in (node, line and f"at {line}", path and f"(module {path})") if part])
        holds = f"; the last, which may hold the others, at {last}" if last not in (None, line) else ""
        return (f"{GROWS} step {number} ended with {format_bytes(grown)} more than the one before, {where} "
                f"{place}, {format_bytes(one.block_bytes)}{holds}. "
                f"Where each step keeps as much, peaks are those of {number} steps and rise with every further one: "
                f"{cause}")

    def _list_held(self, end: StepEnd, made_once: bool) -> list[StorageLifetime]:
        left_out = _MADE_ONCE - {"optimizer state"} if made_once else _MADE_ONCE
        return [one for one in self._list_alive(end) if one.category not in left_out]

    def _list_alive(self, end: StepEnd) -> list[StorageLifetime]:
        return [one for one in self.log.storages.values() if one.device == self.log.device
                and one.born <= end.event and (one.died is None or one.died > end.event)]


def _is_kept(one: StorageLifetime, end: StepEnd) -> bool:
    """Whether it is still there when a function that is the step has returned, which frees what is its own."""
    return one.died is None or end.next_call is not None and (one.died_call or 0) > end.next_call
