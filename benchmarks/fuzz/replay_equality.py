"""Random programs, profiled with replay and without: every field of the two profiles must be equal.

    python -m benchmarks.fuzz.run replay                         # docs/reliability.md: 2,000 programs
    python -m benchmarks.fuzz.run replay --only 100017               # one program; its field by field differences

Exits 1 where a program differs.
"""
from __future__ import annotations

import gc
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402

from analyzer import Profile, ProfileOptions, profile  # noqa: E402
from benchmarks.fuzz.random_program import Program, build, draw_program, list_features  # noqa: E402
from benchmarks.page import Found  # noqa: E402

EQUAL, ALIKE, ROWS, FIGURES, ONE_FAILS = "equal", "both fail alike", "rows differ", "figures differ", "one fails"
KINDS = (EQUAL, ALIKE, ROWS, FIGURES, ONE_FAILS)
ROW_FIELDS = {"holders", "memory_events", "modules", "nodes", "operators", "spans", "timeline"}
"""Fields that are lists of rows; all others are figures."""
ABOUT_REPLAY = {"replay"}
"""Fields that say what was replayed, and differ by that."""
FIELDS = tuple(f.name for f in fields(Profile) if f.name not in ABOUT_REPLAY)
PER_SEED = 100_000


class Failure(NamedTuple):  # what a profile raised: class and message, without addresses
    kind: str
    message: str


class Verdict(NamedTuple):
    """How two profiles of a program compare: one of `KINDS`, and each difference as a field and two values."""

    kind: str
    differences: tuple[tuple[str, Any, Any], ...] = ()


def run_program(program: Program, reuse: bool) -> Profile | Failure:
    """The profile of a program, every field read, or what it raised."""
    try:
        made = build(program)  # features may not go together: then torch raises
        found = profile(made.model, args=(made.input,), mode=program.mode, optimizer=_optimizers.get(
            program.optimizer or "", program.optimizer), loss_fn=_losses.get(program.loss or ""),
                        autocast=program.autocast, device=program.device, reuse=reuse,
                        options=ProfileOptions(steps=program.steps, set_to_none=program.set_to_none,
                                               keep_events=program.keep_events))
        for name in FIELDS:
            getattr(found, name)
        return found
    except Exception as error:  # a model's own too: both runs must raise it
        return Failure(type(error).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(error)))


def compare(program: Program, is_replayed_first: bool = False) -> Verdict:
    """Run a program with replay and without, and compare the results in every field."""
    found = {reuse: run_program(program, reuse) for reuse in (is_replayed_first, not is_replayed_first)}
    run, replayed = found[False], found[True]
    if isinstance(run, Failure) or isinstance(replayed, Failure):
        return Verdict(ALIKE) if run == replayed else Verdict(ONE_FAILS, (("result", run, replayed),))
    different = [name for name in FIELDS if read_field(run, name) != read_field(replayed, name)]
    if not different:
        return Verdict(EQUAL)
    return Verdict(ROWS if ROW_FIELDS.issuperset(different) else FIGURES,
                   tuple((name, getattr(run, name), getattr(replayed, name)) for name in different))


def read_field(found: Profile, name: str) -> Any:
    """A field as it is compared: of spans what they do and how long, for autograd may make calls that allocate nothing
    before or after one another at the edge of a replayed block.
    """
    value = getattr(found, name)
    return Counter((*span[:7], round(span.seconds * 10**12)) for span in value) if name == "spans" else value


def compare_number(number: int) -> Verdict:
    """`compare` the program of a number; every second number is replayed before it is run."""
    return compare(draw_program(number), is_replayed_first=number % 2 == 1)


class _Foreign(torch.optim.Optimizer):
    """An optimizer of nobody's library: a momentum kept in a state, and a step written out."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        average = state.setdefault("average", torch.zeros_like(parameter))
                        average.mul_(0.9).add_(parameter.grad)
                        parameter.sub_(average * group["lr"])


def _groups(parameters: list[Any]) -> torch.optim.Optimizer:
    first: dict[str, Any] = {"params": parameters[:3]}
    return torch.optim.AdamW([first, {"params": parameters[3:], "weight_decay": 0.0}])


def _first_floating(output: Any) -> torch.Tensor:
    leaves = torch.utils._pytree.tree_leaves(output)
    return next(t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point())


_optimizers: dict[str, Any] = {"groups": _groups, "foreign": _Foreign}
_losses: dict[str, Callable[[Any], torch.Tensor]] = {
    "square": lambda output: _first_floating(output).float().square().mean(),
    "first": lambda output: _first_floating(output)[0, 0].sum()}


def show_difference(one: Any, other: Any, length: int = 100) -> str:
    """The first place at which two values differ, both sides cut to ``length``."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(k for k in other if k not in one)]:
            if one.get(key) != other.get(key):
                return f"[{key!r}] {show_difference(one.get(key), other.get(key), length)}"
    if isinstance(one, (list, tuple)) and type(one) is type(other) and not hasattr(one, "_fields"):
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            if a != b:
                return f"[{index}] {show_difference(a, b, length)}"
        return f"length {len(one)} != {len(other)}"
    names = getattr(one, "__dataclass_fields__", ())
    if names and type(one) is type(other):
        for name in names:
            if getattr(one, name) != getattr(other, name):
                return f".{name} {show_difference(getattr(one, name), getattr(other, name), length)}"
    return f"{one!s:.{length}} != {other!s:.{length}}"


def run_programs(numbers: Iterable[int]) -> tuple[Counter[str], dict[int, str]]:
    """Compare programs and print those that differ: how many are of each kind, and the kinds of those that differ."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, different = Counter[str](), dict[int, str]()
    for number in numbers:
        verdict = compare_number(number)
        counts[verdict.kind] += 1
        if verdict.kind not in (EQUAL, ALIKE):
            different[number] = verdict.kind
            print(f"{number}: {verdict.kind}: {draw_program(number)}")
            for name, run, replayed in sorted(verdict.differences, key=lambda d: d[0] in ROW_FIELDS):
                print(f"    {name}: run against replayed: {show_difference(run, replayed)}", flush=True)
        if sum(counts.values()) % 50 == 0:
            gc.collect()
    return counts, different


def measure(count: int | None = None) -> Found:
    """Replayed against run, for docs/reliability.md: ``count`` programs, or 2,000."""
    number = 2000 if count is None else count
    counts, different = run_programs(range(PER_SEED, PER_SEED + number))
    rows = "\n".join(f"| {kind} | {counts[kind]} |" for kind in KINDS)
    return Found({"programs": number, "features": len(list_features())},
                 [f"`{number}`: {kind}: `{draw_program(number)}`" for number, kind in different.items()],
                 f"| {number} programs | |\n|---|---:|\n{rows}")


def show(numbers: Iterable[int]) -> bool:
    """Compare programs, and print those that differ. Returns whether none does."""
    counts, different = run_programs(numbers)
    print(", ".join(f"{counts[kind]} {kind}" for kind in KINDS))
    return not different
