"""`Trial`: profiles a variant of a model and its step; the caller's own model stays as it is."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from analyzer.api.argument import argument_names, build_model, copy_without_data
from analyzer.api.profile import profile
from analyzer.fx.trace.tracer import symbolic_trace
from analyzer.hardware import DeviceSpec
from analyzer.hardware.unseen import list_unseen
from analyzer.recipe import Recipe
from analyzer.report.verdict import judge
from analyzer.results.advice import Option
from analyzer.results.profile import Profile
from analyzer.solver.plan import Plan
from analyzer.solver.solve import Planner

from .variant import Variant, fit_inputs


class Trial:
    """What is profiled: a model, what it is called with, and where."""

    def __init__(self, model: nn.Module | Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any],
                 spec: DeviceSpec, mode: str, optimizer: Any, options: dict[str, Any]) -> None:
        # what a factory gives is copied too, for it may be a model that is there already
        self.model = model if isinstance(model, nn.Module) else build_model(model)
        self.args, self.kwargs, self.spec, self.mode = args, kwargs, spec, mode
        self.optimizer, self.options = optimizer, options
        self.batch: int | None = None

    def build(self, recipe: Recipe, plan: Plan | None = None) -> nn.Module:
        """A new model with ``recipe`` and ``plan`` applied."""
        model = build_model(partial(recipe.build, partial(copy_without_data, self.model)))
        return model if plan is None else plan.apply(model)

    def make_planner(self, variant: Variant, found: Profile) -> Planner:
        """What finds a plan for a step, of which ``found`` is the profile."""
        args, kwargs = fit_inputs((self.args, self.kwargs), None, variant, None)
        model = self.build(variant.recipe)
        gm = symbolic_trace(model, meta_args={**dict(zip(argument_names(model, args, kwargs), args)), **kwargs})
        update = [phases["optimizer"].peak_allocated_bytes or 0 for phases in (found.first_step, found.phases)
                  if "optimizer" in phases]
        return Planner(gm, args, kwargs, autocast=variant.autocast, device=self.spec, granularity="module",
                       loss_fn=self.options.get("loss_fn"), held_bytes=found.optimizer_bytes or 0,
                       update_bytes=max(update, default=0))

    @property
    def capacity_bytes(self) -> int:
        """What the allocator may take."""
        return (self.spec.memory_bytes or 0) - sum(unseen.bytes or 0 for unseen in list_unseen(self.spec))

    def run(self, variant: Variant, accumulate: int = 2) -> Profile:
        """The profile of a variant, with so many micro-batches in the place of more: the second is as each further."""
        recipe = variant.recipe
        dtype = recipe.dtype if any(change.axis == "precision" for change in variant.changes) else None
        args, kwargs = fit_inputs((self.args, self.kwargs), self.batch, variant, dtype)
        if variant.parts > 1 and self.mode == "train":
            recipe = replace(recipe, accumulate=accumulate)
        step = recipe.profile_options(self.mode, self.options.get("loss_fn"))
        if self.mode == "train":
            step["optimizer"] = step["optimizer"] or self.optimizer
        return profile(self.build(recipe, variant.plan), args, kwargs, device=self.spec, autocast=variant.autocast,
                       **{**self.options, **step})

    def describe(self, variant: Variant, found: Profile) -> Option:
        """What a profile says of a variant."""
        verdict = judge(found, self.spec, is_brief=True)
        assert verdict is not None  # the profile has a device
        return Option(tuple([change.name for change in variant.changes]), verdict.fits, verdict.needed_bytes,
                      found.peak_allocated_bytes, self._count_seconds(variant, found),
                      all(change.keeps_result for change in variant.changes), variant.flags)

    def _count_seconds(self, variant: Variant, found: Profile) -> float | None:
        if variant.recipe.optimizer == "adamw_offloaded":
            return None  # what the host takes for the update is not known
        if found.step_seconds is None or variant.parts == 1:
            return found.step_seconds
        if self.mode == "infer":
            return variant.parts * found.step_seconds
        first = self.run(variant, accumulate=1).step_seconds  # makes the gradients to which the others add
        return None if first is None else first + (variant.parts - 1) * (found.step_seconds - first)
