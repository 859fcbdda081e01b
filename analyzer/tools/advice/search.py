"""`advise`: profiles a step with each change that may help, and its command."""
from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from analyzer.api.argument import as_arguments, as_keywords
from analyzer.api.profile import read_request
from analyzer.api.result import Profile
from analyzer.errors import AnalyzerError, InputError
from analyzer.fx.surroundings import leaves_no_tensor
from analyzer.hardware import DeviceSpec, find_device
from analyzer.recipe import Recipe
from analyzer.record.failure import describe_defect, first_line
from analyzer.record.progress import progress_part
from analyzer.report.verdict import describe_step
from analyzer.results.verdict import Advice, AdviceOption
from analyzer.zoo.command_option import choose_inputs, find_autocast, make_inputs, read_recipe
from analyzer.zoo.target import load_target, model_errors

from .variant import SMALLEST_STATES, Change, Trial, Variant, change_variant, list_changes

WANTED = 3          #: combinations that fit
MOST_MISSES = 4     #: combinations that are profiled in vain before the search ends
LONGEST = 4         #: changes of a combination
#: axes in the order in which a quick search adds their changes up, what keeps the result first
ADDED_UP = "checkpointing", "loss", "attention", "optimizer", "quantize", "lora", "batch"
PLANNED = "planned checkpointing"
PLANNED_SHARES = 0.95, 0.85  #: of the memory, as a step also takes what is cached in pieces of wrong sizes


@leaves_no_tensor
def advise(model: nn.Module | Callable[[], nn.Module], args: tuple[Any, ...] | Any = (),
           kwargs: dict[str, Any] | None = None, *, device: str | DeviceSpec = "h200",
           mode: Literal["train", "infer"] = "train", recipe: Recipe | None = None,
           autocast: torch.dtype | None = None, quick: bool = False, baseline: Profile | None = None,
           **profile_options: Any) -> Advice:
    """What to change so that a step of ``model`` fits on ``device``, or takes less time or memory there.

    Checkpointing, parts of the loss, the optimizer, precision, adapters, the attention kernel and micro-batches are
    each profiled alone and, as long as fewer than three fit, in combinations; what each takes is a profile of its own,
    not an estimate. A plan of checkpoints is solved too where those of all blocks would do. With ``quick`` the search
    ends at the first change with which the step fits, those first that keep the result, without plans. ``recipe`` is
    what is done to the model as it is now, ``baseline`` the profile of that step, where there is one. Other arguments
    are those of `analyzer.profile`. ``model`` stays as it is: changes are made to copies without data.

    Raises what `profile` raises for the step as it is; a change that a model cannot take is in `Advice.skipped`.

    >>> x = torch.empty(4096, 1024, device="meta")
    >>> make = lambda: nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    >>> advice = advise(make, x, optimizer="adamw", device="t4")
    >>> advice.baseline.fits, len(advice.options) > 3
    (True, True)
    """
    if "step" in profile_options and profile_options["step"] is not None:
        raise InputError("advise(step=...): a step of your own cannot be changed; give the model and its loss_fn")
    args, kwargs = as_arguments(args), as_keywords(kwargs)
    recipe = recipe or Recipe()
    optimizer = profile_options.pop("optimizer", None)
    if isinstance(optimizer, str):
        recipe, optimizer = replace(recipe, optimizer=optimizer), None
    trial = Trial(model, args, kwargs, find_device(device), mode, optimizer, profile_options)
    base = Variant(recipe, autocast)
    found = trial.run(base) if baseline is None else baseline
    trial.batch = found.batch_size
    search = _ChangeSearch(trial, base, found)
    trial.times_all = not quick
    if quick:
        search.run_quickly()
    else:
        search.run()
    return Advice(describe_step(found), trial.spec.name, trial.spec.memory_bytes, search.baseline,
                  tuple(search.options), tuple(search.skipped), found.assumptions)


class _ChangeSearch:
    def __init__(self, trial: Trial, base: Variant, found: Profile) -> None:
        self.trial, self.base, self.found = trial, base, found
        self.baseline = trial.describe(base, found)
        self.changes = list(list_changes(found, base, trial.build(base.recipe), trial.spec))
        self.alone: dict[Change, AdviceOption] = {}
        self.combined: dict[frozenset[Change], AdviceOption] = {}
        self.skipped: list[tuple[str, str]] = [] if found.batch_size is not None else [
            ("smaller batches", "it is not known how many samples the inputs hold")]

    @property
    def options(self) -> list[AdviceOption]:
        """Each change alone, and the combinations that fit; where nothing fits, the one that needs the least."""
        found = [*self.alone.values(), *(option for option in self.combined.values() if option.fits)]
        if not any(option.fits for option in found) and self.combined:
            found.append(min(self.combined.values(), key=lambda option: option.needed_bytes or 0))
        return sorted(found, key=_rank)

    def run(self) -> None:
        total = len(self.changes) + (0 if self.baseline.fits else 2 * WANTED)
        for i, change in enumerate(self.changes):
            if change.axis == "batch" and any(c.axis == "batch" and o.fits for c, o in self.alone.items()):
                continue  # larger parts fit already
            with progress_part(i / total, (i + 1) / total, change.name):
                if (option := self._try((change,))) is not None:
                    self.alone[change] = option
        if self.baseline.fits is not False:
            return
        self._try_plan()
        with progress_part(len(self.changes) / total, 1.0, "combinations"):
            self._combine(WANTED)
            if not any(option.fits for option in self.options):
                self._combine_all()

    def run_quickly(self) -> None:
        """End at the first change that fits, those first that keep the result; else add changes up until they do."""
        parts = [change for change in self.changes if change.axis == "batch"]
        alone = sorted([change for change in self.changes if change not in parts[:-1]
                        and not self._is_too_little([change])], key=lambda change: not change.keeps_result)
        for i, change in enumerate(alone):
            with progress_part(i / (len(alone) + 1), (i + 1) / (len(alone) + 1), change.name):
                # the smallest parts tell whether any would do, of which then the largest are sought
                if self._fits_alone(change) and (change.axis != "batch" or any(map(self._fits_alone, parts))):
                    return
        chosen: list[Change] = []
        for axis in ADDED_UP:
            last = [change for change in self.changes if change.axis == axis and (
                axis != "optimizer" or change.name == SMALLEST_STATES)][-1:]
            changes = frozenset([*chosen, *last])
            if last and chosen and not self._is_too_little(changes):
                if self._fits(changes):
                    return
                if changes not in self.combined:
                    continue  # the model cannot take the last one
            chosen += last

    def _fits_alone(self, change: Change) -> bool:
        if change not in self.alone and (option := self._try((change,))) is not None:
            self.alone[change] = option
        return change in self.alone and bool(self.alone[change].fits)

    def _is_too_little(self, changes: Iterable[Change]) -> bool:
        """Whether what changes leave as it is, weights or also the optimizer's states, needs more than the device has:
        they are not worth a profile.
        """
        found, before, now = self.found, self.base.recipe, self.base.make(changes).recipe
        if (before.quantize, before.dtype) != (now.quantize, now.dtype):
            return False
        held = [found.param_bytes, found.buffer_bytes]
        if (before.optimizer, before.lora) == (now.optimizer, now.lora):
            held.append(found.optimizer_bytes)
        return sum(nbytes or 0 for nbytes in held) > self.trial.capacity_bytes

    def _try_plan(self) -> None:
        """Checkpoints of some blocks only, where those of all are enough; of what suits where no block repeats."""
        if not any(change.axis == "checkpointing" and (change not in self.alone or self.alone[change].fits)
                   for change in self.changes):
            return
        try:
            plans = self.trial.make_plans(
                self.base, self.found, [int(share * self.trial.capacity_bytes) for share in PLANNED_SHARES])
        except Exception as error:  # a model that cannot be traced, or no plan
            self.skipped.append((PLANNED, _describe(error)))
            return
        for plan in plans:
            change = change_variant(PLANNED, "checkpointing", "(analyzer plan --granularity operator "
                                    f"--budget {plan.budget_bytes})", plan=plan)
            option = self._try((change,))
            if option is not None and (option.fits or plan is plans[-1]):
                self.alone[change] = option
                return

    def _combine(self, wanted: int) -> None:
        """Combinations of changes that do not fit alone, each without those of its changes that it can do without."""
        found: list[frozenset[Change]] = []
        misses = 0
        for changes in self._list_combinations():
            fitting = len(found) + sum(bool(option.fits) for option in self.alone.values())
            if fitting >= wanted or misses == MOST_MISSES:
                return
            if any(fewer <= changes for fewer in found) or any(
                    changes <= more and not option.fits for more, option in self.combined.items()):
                continue
            if self._fits(changes):
                found.append(self._shrink(changes))
            else:
                misses += 1

    def _combine_all(self) -> None:
        """Of each axis the change that needs the least: one may save much only beside what lowers another peak."""
        known = {change: option.needed_bytes for change in self.changes
                 if (option := self.alone.get(change)) is not None and option.needed_bytes is not None}
        most_first = sorted(known, key=lambda change: (known[change], not change.keeps_result), reverse=True)
        least = {change.axis: change for change in most_first}
        if len(least) > 1 and self._fits(changes := frozenset(least.values())):
            self._shrink(changes)

    def _fits(self, changes: frozenset[Change]) -> bool:
        if changes not in self.combined:
            option = self._try([change for change in self.changes if change in changes])
            if option is None:
                return False
            self.combined[changes] = option
        return bool(self.combined[changes].fits)

    def _shrink(self, changes: frozenset[Change]) -> frozenset[Change]:
        """The fewest of ``changes`` that fit: without those first that change the result, then without the slowest."""
        for change in sorted(changes, key=lambda change: (change.keeps_result, -self._count_extra(change))):
            fewer = changes - {change}
            if len(fewer) > 1 and self._fits(fewer):
                del self.combined[changes]
                changes = fewer
        return changes

    def _try(self, changes: Sequence[Change]) -> AdviceOption | None:
        variant = self.base.make(changes)
        try:
            return self.trial.describe(variant, self.trial.run(variant))
        except Exception as error:  # of a model that cannot be run so, e.g. code of its own that wants float32
            self.skipped.append((" + ".join(change.name for change in changes), _describe(error)))
            return None

    def _count_extra(self, change: Change) -> float:
        """Seconds that a change adds to the step; 0 where they are not known."""
        seconds = self.alone[change].step_seconds
        return 0.0 if seconds is None else seconds - (self.baseline.step_seconds or 0.0)

    def _list_combinations(self) -> list[frozenset[Change]]:
        """Changes of different axes, those first that should fit if savings added up, of these the cheapest."""
        need, capacity = self.baseline.needed_bytes, self.trial.spec.memory_bytes
        if need is None or capacity is None:
            return []
        saved = {change: need - option.needed_bytes for change, option in self.alone.items()
                 if not option.fits and option.needed_bytes is not None and option.needed_bytes < need}

        def rank(chosen: tuple[Change, ...]) -> tuple[Any, ...]:
            short = max(0, need - sum(saved[change] for change in chosen) - capacity)
            return (short, not all(change.keeps_result for change in chosen), len(chosen),
                    sum(map(self._count_extra, chosen)))

        combinations = [chosen for size in range(2, LONGEST + 1) for chosen in itertools.combinations(saved, size)
                        if len({change.axis for change in chosen}) == size]
        return [frozenset(chosen) for chosen in sorted(combinations, key=rank)]


def _describe(error: Exception) -> str:
    if isinstance(error, AnalyzerError):
        return next(iter(str(error).splitlines()), "")
    return describe_defect(error) or f"the model fails: {first_line(error)}"


def _rank(option: AdviceOption) -> tuple[Any, ...]:
    """What fits first, of that what keeps the result, of that the fastest."""
    unknown = option.step_seconds is None
    return (not option.fits, not option.keeps_result if option.fits else False,
            (unknown, option.step_seconds or 0.0) if option.fits else (False, option.needed_bytes or 0),
            len(option.changes))


def advise_on(found: Profile, device: str | DeviceSpec | None = None) -> Advice:
    """What `Profile.advise` gives. Raises InputError for a profile that was not made by `profile` in this process."""
    request = read_request(found, "advise()")
    return advise(**{**request, "device": device or request["device"]})


def run_advise(arguments: argparse.Namespace) -> int:
    find_device(arguments.device)  # before any work: a wrong name costs no waiting
    found = find_advice(arguments)
    print(found if arguments.format == "text" else found.table(arguments.format))
    return 0 if found.baseline.fits or found.cheapest else 3


def find_advice(arguments: argparse.Namespace, quick: bool = False, baseline: Profile | None = None) -> Advice:
    target, train = load_target(arguments.target), arguments.mode == "train"
    recipe = read_recipe(arguments)
    args, kwargs = make_inputs(choose_inputs(target, arguments.input, train, recipe.dtype))
    with model_errors(arguments.target):
        return advise(lambda: target.build().train(train), args, kwargs, device=arguments.device, mode=arguments.mode,
                      recipe=recipe, autocast=find_autocast(arguments), quick=quick,
                      baseline=baseline)
