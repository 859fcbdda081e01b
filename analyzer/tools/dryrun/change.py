"""What is changed in a script without editing it, and the least change with which it fits."""
from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader

from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import current
from analyzer.recipe import Recipe
from analyzer.results.verdict import AdviceOption, Verdict

from .saved_file import assume

#: what begins the assumptions that tell how a change was made
CHECKPOINTED, DIVIDED = "activation checkpointing:", "batches of the script's loaders:"
EXPANDABLE = "expandable_segments:True"
_MOST_PARTS = 256
_LOADER = inspect.signature(DataLoader.__init__)
_MOST_SECONDS = 150.0  # after which no further run of the script begins


@dataclass(frozen=True)
class ScriptChange:
    """What a dry run does otherwise than the script says: its loaders give a batch in so many ``parts``, the repeated
    blocks of models that are trained are checkpointed, the allocator has settings.
    """

    parts: int = 1
    checkpoints: bool = False
    alloc_conf: str | None = None

    def replacements(self) -> Iterator[Undo]:
        """Make the changes; each result undoes one."""
        if self.parts > 1:
            yield answer(DataLoader, "__init__", partial(_divide, self.parts), passes_original=True)
        if self.checkpoints:
            yield torch_module.register_module_forward_pre_hook(_Checkpoints()).remove


AS_IT_IS = ScriptChange()


def _divide(parts: int, original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    bound = _LOADER.bind(loader, *args, **kwargs).arguments
    size = bound.get("batch_size", 1)
    # Accelerate makes its loaders of the script's, whose batches are divided already
    caller = sys._getframe(1)
    while caller.f_globals.get("__name__", "").partition(".")[0] in ("analyzer", "contextlib"):
        assert caller.f_back is not None
        caller = caller.f_back
    is_again = caller.f_globals.get("__name__", "").partition(".")[0] == "accelerate"
    if current() is not None and isinstance(size, int) and size > 1 and not is_again:
        bound["batch_size"] = max(1, size // parts)
        assume(f"{DIVIDED} {bound['batch_size']} in place of {size}")
    original(loader, **{name: value for name, value in bound.items() if name != "self"})


class _Checkpoints:
    """Has each model that is called to be trained checkpoint its blocks, once, where it can."""

    def __init__(self) -> None:
        self._seen: WeakSet[torch.nn.Module] = WeakSet()

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if module in self._seen or not torch.is_grad_enabled() or current() is None:
            return
        self._seen.update(module.modules())
        if not module.training or not any(p.requires_grad for p in module.parameters()):
            return
        whole = next((one for one in module.modules() if callable(getattr(one, "gradient_checkpointing_enable", None))),
                     module)
        with suppress(InputError):  # one without repeated blocks
            Recipe(checkpointing=True).apply(whole)
            assume(f"{CHECKPOINTED} each block of {type(whole).__name__}")


#: Runs the script with a change; None where that failed.
RunChanged = Callable[[ScriptChange], Profile | None]


def find_least_change(found: Profile, run: RunChanged) -> AdviceOption | None:
    """The first of some changes with which the script of a profile fits, the least first: the allocator's settings
    where the cache is what takes too much, checkpoints, smaller batches, both. None where none of them does.
    """
    short = found.first_shortage or found.out_of_memory
    if short is None:
        return None
    end = time.monotonic() + _MOST_SECONDS
    most_parts, can_checkpoint = _MOST_PARTS, True
    needs = _Needs(found)
    for change in _list_changes(found):
        if change.parts > most_parts or change.checkpoints and not can_checkpoint or time.monotonic() > end or (
                needs.rule_out(change)):
            continue
        changed = run(change)
        if change.checkpoints and (changed is None or not _list_told(changed, CHECKPOINTED)):
            can_checkpoint = False
            continue
        divided = [] if changed is None or change.parts == 1 else _list_told(changed, DIVIDED)
        if change.parts > 1 and all(line.startswith("1 ") for line in divided):
            most_parts = change.parts if divided else 1  # there are no smaller batches
        if changed is None or change.parts > most_parts:
            continue
        verdict = needs.note(change, changed)
        if changed.first_shortage is None and changed.out_of_memory is None and verdict is not None and verdict.fits:
            return AdviceOption(tuple(_name(change, changed)), True, verdict.needed_bytes,
                                changed.peak_allocated_bytes, changed.step_seconds, change.parts == 1,
                                _describe_way(change))
    return None


class _Needs:
    """What runs with batches in parts need. The part of it that a batch takes is in proportion to the batch: where two
    runs tell both parts, others that would need too much are not made.
    """

    def __init__(self, found: Profile) -> None:
        self._known: dict[bool, dict[int, int]] = {False: {}, True: {}}
        self._capacity_bytes: int | None = None
        self.note(AS_IT_IS, found)

    def note(self, change: ScriptChange, changed: Profile) -> Verdict | None:
        """The verdict on a run with a change."""
        verdict = changed.verdict
        if verdict is not None and verdict.needed_bytes is not None and change.alloc_conf is None:
            self._known[change.checkpoints][change.parts] = verdict.needed_bytes
            self._capacity_bytes = verdict.capacity_bytes
        return verdict

    def rule_out(self, change: ScriptChange) -> bool:
        known = self._known[change.checkpoints]
        if len(known) < 2 or self._capacity_bytes is None:
            return False
        (one, most), (other, least) = sorted(known.items())[0], sorted(known.items())[-1]
        of_batch = (most - least) / (1 / one - 1 / other)
        return least - of_batch * (1 / other - 1 / change.parts) > self._capacity_bytes


def _list_told(changed: Profile, begin: str) -> list[str]:
    return [line.removeprefix(begin).strip() for line in changed.assumptions if line.startswith(begin)]


def _list_changes(found: Profile) -> Iterator[ScriptChange]:
    short = found.first_shortage or found.out_of_memory
    assert short is not None
    unused = (short.reserved_bytes or 0) - (short.allocated_bytes or 0)
    is_little = (found.peak_allocated_bytes or 0) <= (short.capacity_bytes or 0)  # without gaps it would do
    if unused >= short.short_bytes and is_little and not found.allocator_settings:
        yield ScriptChange(alloc_conf=EXPANDABLE)
    if short.phase == "setup":
        return  # it lacks memory for what no batch and no checkpoint changes
    checkpoints = (False, True) if found.mode == "train" and not found.recompute_flops else (False,)
    if True in checkpoints:
        yield ScriptChange(checkpoints=True)
    for with_checkpoints in checkpoints:
        parts = 2
        while parts <= _MOST_PARTS:
            yield ScriptChange(parts, with_checkpoints)
            parts *= 2


def _name(change: ScriptChange, changed: Profile) -> Iterator[str]:
    if change.alloc_conf is not None:
        yield f"PYTORCH_CUDA_ALLOC_CONF={change.alloc_conf}"
    for begin, is_made in ((CHECKPOINTED, change.checkpoints), (DIVIDED, change.parts > 1)):
        if is_made:
            yield f"{begin.rstrip(':')} ({', '.join(_list_told(changed, begin))})"


def _describe_way(change: ScriptChange) -> str:
    ways = []
    if change.checkpoints:
        ways.append("gradient_checkpointing_enable() of transformers' models, gradient_checkpointing=True of its "
                    "Trainer, else torch.utils.checkpoint around each block")
    if change.parts > 1:
        ways.append(f"the same result by gradients that are accumulated over {change.parts} such batches, for which "
                    "they are held meanwhile")
    return "; ".join(ways)
