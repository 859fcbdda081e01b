"""What a step of post-training costs, as plain data and as a screen."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from analyzer.output import write_output
from analyzer.report.text_table import print_rows
from analyzer.results.run_cost import SECONDS_PER_HOUR
from analyzer.units import format_bytes, format_count, format_ends, format_percent, format_seconds

_WIDTH = 118
_STEPS = 1000  # whose dollars are told


@dataclass(frozen=True)
class PosttrainPhase:
    """A phase of a step. ``cards``: on which it runs, ``all``, ``trainer`` or ``engines``; ``card_bytes``: of one card
    at most, None where it is unknown; ``host_bytes``: of one host, pinned memory among it; ``bound``: what most of the
    seconds are spent on; ``said``: how it was computed.
    """

    name: str
    cards: str
    seconds: float
    low: float
    high: float
    bound: str
    card_bytes: int | None
    host_bytes: int
    said: str = ""


@dataclass(frozen=True)
class PosttrainChange:
    """Something to change: the seconds of a step then, and whether it fits."""

    name: str
    step_seconds: float
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class PosttrainProfile:
    """A step of post-training.

    - ``step_seconds`` and its range: of all phases in turn; where engines sample while the trainer learns, of the
      slower side, which ``waits_for`` names.
    - ``tail_seconds``: of the rollout after nine in ten answers; ``idle_share``: of all cards' time that nothing uses,
      in the tail or while the others work.
    - ``room_tokens``: the most tokens of a micro-batch that fit, ``room_sequences``: sequences that an engine's cache
      has room for, None where they were not looked for.
    """

    name: str
    algorithm: str
    devices: int
    device: str
    trainer: str
    engine: str
    sequences: int
    prompt_tokens: int
    answer_tokens: float
    longest_tokens: int
    phases: tuple[PosttrainPhase, ...]
    step_seconds: float
    step_range: tuple[float, float]
    waits_for: str
    tail_seconds: float
    idle_share: float
    capacity_bytes: int | None
    host_capacity_bytes: int | None = None
    price: float | None = None
    room_tokens: int | None = None
    room_sequences: int | None = None
    micro_batch_tokens: int = 0
    changes: tuple[PosttrainChange, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def needed_bytes(self) -> int | None:
        """Of the card that needs most; None where that of a phase is unknown."""
        found = [phase.card_bytes for phase in self.phases]
        return None if None in found else max((nbytes for nbytes in found if nbytes is not None), default=0)

    @property
    def fits(self) -> bool | None:
        """Whether each phase fits on its cards; None where a figure is unknown."""
        needed = self.needed_bytes
        return None if needed is None or self.capacity_bytes is None else needed <= self.capacity_bytes

    @property
    def fullest(self) -> PosttrainPhase:
        """The phase that needs most of a card."""
        return max(self.phases, key=lambda phase: phase.card_bytes or 0)

    @property
    def tokens_per_second(self) -> float:
        """Of prompts and answers that are learned of, by all cards together."""
        return self.sequences * (self.prompt_tokens + self.answer_tokens) / self.step_seconds

    @property
    def dollars(self) -> float | None:
        """Of 1,000 steps, on all cards."""
        if self.price is None:
            return None
        return _STEPS * self.step_seconds * self.devices * self.price / SECONDS_PER_HOUR

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``json.dumps`` takes."""
        return {**asdict(self), "fits": self.fits, "needed_bytes": self.needed_bytes,
                "tokens_per_second": self.tokens_per_second, "dollars_per_1000_steps": self.dollars}

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as JSON text, also written to ``path`` if given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            write_output(Path(path), text)
        return text

    def table(self, fmt: str = "text") -> str:
        """A row for each phase."""
        rows = []
        for phase in self.phases:
            seconds = format_seconds(phase.seconds)
            rows.append([phase.name, phase.cards, seconds,
                         format_ends(seconds, map(format_seconds, (phase.low, phase.high))),
                         format_percent(phase.seconds / self.step_seconds), phase.bound,
                         format_bytes(phase.card_bytes), format_bytes(phase.host_bytes) if phase.host_bytes else "-"])
        return print_rows(("Phase", "Cards", "Time", "Range", "Of step", "Bound by", "A card", "A host"), rows,
                          left=(0, 1, 5), fmt=fmt)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (f"{self.algorithm.upper()} of {self.name} on {self.devices} x {self.device}: {self.sequences:,} answers "
               "a step" if self.engine else f"{self.algorithm.upper()} of {self.name} on {self.devices} x "
               f"{self.device}: {self.sequences:,} sequences a step")
        yield from _fold(f"prompts of {self.prompt_tokens:,} tokens, answers of {self.answer_tokens:,.0f} in the mean; "
                         f"the longest sequence has {self.longest_tokens:,}")
        yield from _fold(f"trainer: {self.trainer}")
        if self.engine:
            yield from _fold(f"engines: {self.engine}")
        yield ""
        yield self.table()
        yield ""
        seconds = format_seconds(self.step_seconds)
        yield (f"a step: {seconds} ({format_ends(seconds, map(format_seconds, self.step_range))}), "
               f"{format_count(self.tokens_per_second)} tokens a second, "
               f"{format_count(self.tokens_per_second / self.devices)} a card; {self.waits_for}")
        if self.engine:
            yield (f"the longest answers: {format_seconds(self.tail_seconds)} of the rollout after nine in ten are "
                   f"there; {format_percent(self.idle_share)} of all cards' time is idle")
        if self.dollars is not None:
            yield f"1,000 steps: ${self.dollars:,.0f}"
        yield self._verdict()
        yield from (line for text in self.assumptions for line in _fold(f"assumed: {text}"))

    def _verdict(self) -> str:
        needed, capacity = self.needed_bytes, self.capacity_bytes
        if needed is None or capacity is None:
            return f"whether it fits on {self.device} is not known"
        at = f"at the peak of {self.fullest.name}"
        if needed <= capacity:
            return (f"fits on {self.device}: {format_bytes(needed)} of {format_bytes(capacity)} {at}, "
                    f"{format_bytes(capacity - needed)} left")
        return (f"does NOT fit on {self.device}: {format_bytes(needed)} needed {at}, {format_bytes(capacity)} there: "
                f"{format_bytes(needed - capacity)} too much")

    def advice(self) -> str:
        """The room that is left, and what to change first."""
        return "\n".join(self._advise())

    def _advise(self) -> Iterator[str]:
        said = []
        if self.room_tokens is not None:
            said.append(f"a micro-batch of the update may have {self.room_tokens:,} tokens (it has room for "
                        f"{self.micro_batch_tokens:,})")
        if self.room_sequences is not None:
            said.append(f"the cache of an engine has room for {self.room_sequences:,} of the longest sequences")
        if said:
            yield from _fold("room: " + "; ".join(said))
        for place, change in enumerate(self.changes, 1):
            fits = "" if change.fits else ", which does not fit" if change.fits is False else ""
            yield from _fold(f"change {place}: {change.name}: {format_seconds(change.step_seconds)} a step{fits}")


def _fold(text: str) -> list[str]:
    return wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
