"""`plan_blocks`: for each block of a model what it keeps, runs again or sends to the host, under a budget of memory."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from analyzer.api.argument import call_factory
from analyzer.api.profile import profile
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, find_device
from analyzer.recipe.layer import blocks_of
from analyzer.record.options import ProfileOptions
from analyzer.record.progress import progress_part
from analyzer.report.export.json_format import read_record, write_record
from analyzer.report.page.document import summary_part, write_page
from analyzer.report.text_table import print_rows
from analyzer.saved_format import Fields, SavedFormat
from analyzer.units import format_bytes, format_seconds, parse_bytes

from .block_choice import BlockChoice, apply_choices, undo_choices
from .block_option import CopyRate, account, choose, least_bytes
from .block_step import BlockStep, StepReader
from .budget import InfeasibleBudgetError, read_share
from .call_memory import HELD_BEFORE
from .kept_result import take_name
from .solver_registry import register_solver

_ROUNDS = 5       # profiles of plans, of limits that close in on the budget
_CLOSE = 0.003    # of the budget: a plan that leaves less than this unused is not sought to be improved


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What `analyzer.profile` says of a step; peaks are those of the whole step, the optimizer's states included."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    step_seconds: float | None
    recompute_flops: int | None

    @classmethod
    def of(cls, found: Profile) -> PlannedStep:
        return cls(found.peak_allocated_bytes or 0, found.peak_reserved_bytes, found.step_seconds,
                   found.recompute_flops)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What `plan_blocks` returns. All three steps were profiled: without a plan, with every block run again whole, and
    with this plan. ``profile`` is that of the last one; it is not saved.
    """

    format_version: ClassVar[int] = 2  #: of the JSON text; a change of any field below raises it

    model: str
    device: str
    budget_bytes: int
    plain: PlannedStep
    recomputed: PlannedStep
    planned: PlannedStep
    choices: tuple[BlockChoice, ...]
    assumptions: tuple[str, ...] = ()
    profile: Profile | None = None

    @property
    def overhead(self) -> float:
        """Seconds more than the step without a plan."""
        return _seconds(self.planned) - _seconds(self.plain)

    @property
    def offloaded_bytes(self) -> int:
        """What waits on the host when the backward pass begins, of one device."""
        return sum(choice.offloaded_bytes for choice in self.choices)

    def apply(self, model: nn.Module) -> nn.Module:
        """``model``, whose blocks run as planned until `undo`; wrap it in FSDP or others before. That is for eager
        mode: for a block under torch.compile give `context_fn` to its checkpoint.

        Raises InputError where a block is missing or under a plan already.
        """
        apply_choices(model, self.choices, f"plan.apply({type(model).__name__})")
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        """Take the plan away from the blocks of ``model``."""
        undo_choices(model, self.choices, f"plan.undo({type(model).__name__})")
        return model

    def context_fn(self, path: str) -> Callable[[], Any]:
        """For ``torch.utils.checkpoint.checkpoint(..., context_fn=...)`` of the block at ``path``: the choice as a
        policy of PyTorch's `create_selective_checkpoint_contexts`. Its eager mode runs again what is to wait on the
        host (MUST_CPU_OFFLOAD). Raises InputError for a block that the plan does not run again.
        """
        choice = next((choice for choice in self.choices if choice.path == path and choice.runs_again), None)
        if choice is None:
            raise InputError(f"context_fn({path!r}): the plan has no checkpoint there; it has them at "
                             f"{', '.join(c.path for c in self.choices if c.runs_again) or 'no block'}")
        return partial(_make_contexts, choice)

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON text, which is also written to ``path`` if one is given."""
        return write_record(replace(self, profile=None), _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> BlockPlan:
        """The plan in JSON text or in a file. Raises ProfileFormatError for a damaged one, InputError for no file."""
        kind: Any = cls
        return cast(BlockPlan, read_record(kind, source, "BlockPlan.from_json", _FORMAT))

    def to_html(self, path: str | Path | None = None) -> str:
        """A page of the plan as text, also written to ``path`` if one is given."""
        return write_page(f"Blocks of {self.model}", [summary_part(f"{self}")], path)

    def table(self, fmt: str = "text") -> str:
        """One row for neighbours with the same choice; bytes and seconds are those of one block."""
        rows = []
        for _, run in groupby(self.choices, key=lambda choice: choice.kind):
            first, *rest = run
            name = first.path if not rest else f"{first.path} to {rest[-1].path.rpartition('.')[2]}"
            sent = ["input"] * first.offloads_input + _shorten(first.offloads)
            kept = _shorten(first.keeps) if first.runs_again else ["all"]
            rows.append((name, str(1 + len(rest)), ", ".join(kept), format_bytes(first.kept_bytes), ", ".join(sent),
                         format_bytes(first.offloaded_bytes),
                         format_seconds(first.recompute_seconds) if first.runs_again else "-",
                         format_seconds(first.copy_seconds) if sent else "-"))
        return print_rows(("Blocks", "Number", "Kept", "Bytes", "On the host", "Bytes", "Run again", "Waits"), rows,
                          left=(0, 2, 4), fmt=fmt)

    def summary(self) -> str:
        """What the plan gives, beside the step without it and with every block run again."""
        rows = [(name, format_bytes(step.peak_allocated_bytes),
                 "-" if step.peak_reserved_bytes is None else format_bytes(step.peak_reserved_bytes),
                 format_seconds(step.step_seconds), _compare(step.step_seconds, self.recomputed.step_seconds))
                for name, step in (("without a plan", self.plain), ("every block run again", self.recomputed),
                                   ("with the plan", self.planned))]
        return "\n".join([
            f"{self.model} on {self.device}: {len(self.choices)} blocks within {format_bytes(self.budget_bytes)}",
            f"on the host: {format_bytes(self.offloaded_bytes)} of one device",
            print_rows(("Step", "Peak allocated", "Peak reserved", "Seconds", "To run all again"), rows, left=(0,)),
            *(f"assumed: {text}" for text in self.assumptions)])

    def __str__(self) -> str:
        return f"{self.summary()}\n\n{self.table()}"




def _without_operators(plan: Fields) -> Fields:
    """A saved plan of version 1, which did not say for which operators its names are."""
    return {**plan, "choices": [{**choice, "operators": None} for choice in plan["choices"]]}


_FORMAT = SavedFormat("analyzer.block_plan", BlockPlan.format_version, "plan of blocks", "plan again",
                      {1: _without_operators})


def _make_contexts(choice: BlockChoice) -> Any:
    met: Counter[str] = Counter()
    keeps, offloads = frozenset(choice.keeps), frozenset(choice.offloads)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = take_name(op, met)
        if name in keeps:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_CPU_OFFLOAD if name in offloads else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _compare(seconds: float | None, other: float | None) -> str:
    return "-" if seconds is None or not other else f"{seconds / other - 1:+.1%}"


def _shorten(names: Sequence[str]) -> list[str]:
    """Results by operator: ``product 0,2,3``."""
    places: dict[str, list[str]] = {}
    for name in names:
        key, _, place = name.partition("#")
        places.setdefault(key.removeprefix("aten.").removesuffix(".default"), []).append(place)
    return [f"{key} {','.join(row)}" for key, row in places.items()]


def plan_blocks(model: nn.Module | Callable[[], nn.Module], args: Any = (), kwargs: dict[str, Any] | None = None, *,
                budget: int | float | str, device: str | DeviceSpec, host_bytes: int | str | None = None,
                method: str = "auto", **settings: Any) -> BlockPlan:
    """A plan that keeps a training step within ``budget``, and takes as little time as is found.

    ``model``, ``args``, ``kwargs``, ``options`` and ``settings`` (``optimizer``, ``loss_fn``, ``autocast``, ``step``)
    are as of `analyzer.profile`; in an `analyzer.parallel.world` the plan is for the rank that it runs. ``budget`` is
    bytes of the whole step on the device, as an int or as text such as ``"70GiB"`` (or a share of the activations', as
    of `solve`): what the allocator reserves stays within it, or where only its cache would not, a step in so much
    memory does not run out of it; with ``budget_of="allocated"`` what tensors take does. ``host_bytes`` is as much as
    one device may send to the host. ``blocks`` are paths of modules, by default those of one class in a ModuleList or
    Sequential. ``method`` is that of `solve`.

    For each block, each result of an operator is kept, run again in the backward pass or copied to the host and back.
    `solve` plans the graph of a model, of one device, and may find a faster plan: compare the ``overhead`` of both, as
    ``analyzer plan`` does.
    The profile of the planned step is what is reported; where it takes more than the budget, or leaves much of it, the
    limit moves and the choice is made again.

    Raises InfeasibleBudgetError, an InputError, where no plan stays within the budget, InputError where the model has
    no repeated blocks or the time of its kernels on the device is not known, and what `analyzer.profile` raises.

    >>> import torch
    >>> layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    >>> plan = plan_blocks(model, torch.empty(64, 128, 256), budget="1GiB", device="a100")
    >>> plan.planned.peak_reserved_bytes <= 2**30, plan.planned.step_seconds < plan.recomputed.step_seconds
    (True, True)
    """
    return BlockPlanner(model, args, kwargs, device=device, **settings).plan(budget, host_bytes, method)


def _read_bytes(name: str, given: int | str) -> int:
    try:
        return parse_bytes(given)
    except InputError:
        raise InputError(f"{name}={given!r}: write bytes, as an int or as text such as '70GiB'") from None


class BlockPlanner:
    """Profiles the step of a model with one choice after the other; keep one to ask for several budgets."""

    def __init__(self, model: nn.Module | Callable[[], nn.Module], args: Any = (),
                 kwargs: dict[str, Any] | None = None, *, device: str | DeviceSpec, blocks: Sequence[str] | None = None,
                 budget_of: str = "reserved", options: ProfileOptions | None = None, **settings: Any) -> None:
        if budget_of not in ("reserved", "allocated"):
            raise InputError(f"budget_of={budget_of!r}: must be 'reserved' or 'allocated'")
        if blocks is not None and (isinstance(blocks, str) or not blocks):
            raise InputError(f"blocks={blocks!r}: must be a list of paths of modules, such as ['layers.0', 'layers.1']")
        self.model, self.arguments, self.device, self.paths = model, (args, kwargs), find_device(device), blocks
        self.budget_of = budget_of
        self.options, self.settings = options or ProfileOptions(), settings
        self._known: tuple[Profile, BlockStep, list[BlockChoice], Profile] | None = None

    def plan(self, budget: int | float | str, host_bytes: int | str | None = None, method: str = "auto") -> BlockPlan:
        """The plan for ``budget``; see `plan_blocks`."""
        register_solver.look_up(method, f"method={method!r}")
        most_sent = None if host_bytes is None else _read_bytes("host_bytes", host_bytes)
        budget = self._read_budget(budget)
        plain, step, whole, recomputed = self.profile_ends()

        def result(choices: list[BlockChoice], found: Profile) -> BlockPlan:
            return BlockPlan(found.name, self.device.name, budget, PlannedStep.of(plain), PlannedStep.of(recomputed),
                             PlannedStep.of(found), tuple(choices), found.assumptions, found)

        if (fitting := self._fit(plain, None, budget)) is not None:
            return result([BlockChoice(b.path, kept_bytes=b.saved_bytes) for b in step.blocks], fitting)
        best: tuple[list[BlockChoice], Profile] | None = None
        if (fitting := self._fit(recomputed, whole, budget)) is not None:
            best = whole, fitting
        smallest = self._peak(recomputed)
        rate, fails = CopyRate.of(self.device), None
        # what the account lacks: workspaces inside of calls, and what the allocator keeps in its cache
        limit = budget - max(0, smallest - account(step, whole))
        for i in range(_ROUNDS):
            with progress_part(0.3 + 0.7 * i / _ROUNDS, 0.3 + 0.7 * (i + 1) / _ROUNDS, f"plan {i + 1}"):
                choices = choose(step, rate, limit, method, most_sent)
                if is_last := choices is None:
                    if best is not None:
                        break
                    choices = choose(step, rate, least_bytes(step, rate), "chain", most_sent) or whole
                found = self._profile(choices)
                fitting = self._fit(found, choices, budget)
            peak = self._peak(fitting or found)
            smallest = min(smallest, peak)
            if fitting is not None:
                if best is None or _seconds(fitting) <= _seconds(best[1]):
                    best = choices, fitting
                spare = budget - peak
                if is_last or spare <= _CLOSE * budget:
                    break
                limit += spare if fails is None else min(spare, (fails - limit) // 2)
            elif is_last:
                break
            else:
                fails = limit
                limit -= max(peak - budget, budget // 200)
        if best is None:
            raise InfeasibleBudgetError(
                f"budget={budget:,}: no plan of {plain.name} stays within {format_bytes(budget)}; the least that one "
                f"takes is {smallest:,} bytes ({format_bytes(smallest)})")
        return result(*best)

    def _read_budget(self, budget: int | float | str) -> int:
        """In bytes of the whole step; a share is one of what was neither there before it nor is a gradient."""
        if not isinstance(budget, float) and not str(budget).strip().endswith("%"):
            return _read_bytes("budget", budget)
        share = read_share(budget)
        plain = self.profile_ends()[0]
        activations = sum(nbytes for name, nbytes in plain.peak_by_category.items()
                          if name not in (*HELD_BEFORE, "gradient"))
        return (plain.peak_allocated_bytes or 0) - int((1 - share) * activations)

    def profile_ends(self) -> tuple[Profile, BlockStep, list[BlockChoice], Profile]:
        """The step without a plan, what its blocks take, and the step with every block run again."""
        if self._known is None:
            with progress_part(0.0, 0.2, "the step without a plan"):
                plain, step = self._read()
            whole = [BlockChoice(b.path, True, kept_bytes=b.input_bytes, recompute_seconds=b.again_seconds)
                     for b in step.blocks]
            with progress_part(0.2, 0.3, "every block run again"):
                recomputed = self._profile(whole)
            again = _seconds(recomputed) - _seconds(plain) - sum(choice.recompute_seconds for choice in whole)
            step = replace(step, checkpoint_seconds=max(0.0, again) / len(whole))
            self._known = plain, step, whole, recomputed
        return self._known

    def _fit(self, found: Profile, choices: list[BlockChoice] | None, budget: int) -> Profile | None:
        """The profile of a step that stays within the budget, where ``found`` does; None where it does not. What only
        the allocator's cache takes beyond it, a step with so much memory gives back; of a rank none is run.
        """
        if self._peak(found) <= budget:
            return found
        if (found.peak_allocated_bytes or 0) > budget or found.world is not None:
            return None
        limited = self._profile(choices, replace(self.options, capacity_bytes=budget, limit_to_device=False))
        return limited if limited.out_of_memory is None else None

    def _peak(self, found: Profile) -> int:
        reserved = found.peak_reserved_bytes if self.budget_of == "reserved" else None
        return max(found.peak_allocated_bytes or 0, reserved or 0)

    def _read(self) -> tuple[Profile, BlockStep]:
        """The profile of the step without a plan, and what its blocks take."""
        reader = StepReader(self.device)

        def list_plain(module: nn.Module) -> list[BlockChoice]:
            names = {inner: path for path, inner in module.named_modules()}
            reader.paths = tuple(self.paths or [names[block] for block in blocks_of(module, "plan_blocks")])
            return [BlockChoice(path) for path in reader.paths]

        found = self._run(list_plain, self.options, reader.noting, profilers=[reader])
        if found.step_seconds is None or reader.step is None:
            raise InputError(f"plan_blocks({found.name}): the time of the step on {self.device.name} is not known, "
                             "so nothing says what running again costs")
        return found, reader.step

    def _profile(self, choices: list[BlockChoice] | None, options: ProfileOptions | None = None) -> Profile:
        return self._run(lambda module: choices or [], options or self.options)

    def _run(self, choices_of: Callable[[nn.Module], list[BlockChoice]], options: ProfileOptions,
             around: Callable[[str], AbstractContextManager[Any]] | None = None, **more: Any) -> Profile:
        model, (args, kwargs) = self.model, self.arguments
        settings = {**self.settings, **more, "device": self.device, "options": options}

        def put_on(module: nn.Module) -> list[BlockChoice]:
            choices = choices_of(module)
            apply_choices(module, choices, f"plan_blocks({type(module).__name__})", around)
            return choices

        def build() -> nn.Module:
            module = call_factory(self.model)
            put_on(module)
            return module

        if not isinstance(model, nn.Module):
            return profile(build, args, kwargs, **settings)
        choices = put_on(model)
        try:
            return profile(model, args, kwargs, **settings)
        finally:
            undo_choices(model, choices, "plan_blocks()")


def _seconds(found: Profile | PlannedStep) -> float:
    return float("inf") if found.step_seconds is None else found.step_seconds
