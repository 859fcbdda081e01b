"""A model and its step with changes made, and the trial that profiles it."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from analyzer.api.argument import argument_names, build_model, copy_without_data, without_data
from analyzer.api.profile import profile
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.fx.trace.tracer import symbolic_trace
from analyzer.hardware import DeviceSpec, list_unseen, simulating
from analyzer.meta.structure import children, holds_tensor, replace_tensors, tensors_of
from analyzer.recipe import LoraSpec, Recipe
from analyzer.record.eager import casting
from analyzer.report.verdict import judge
from analyzer.results.verdict import AdviceOption
from analyzer.tools.solver.plan import Plan
from analyzer.tools.solver.planner import Planner
from analyzer.tools.solver.recorded_step import find_optimizer_bytes
from analyzer.zoo.input_spec import InputSpec


@dataclass(frozen=True)
class Variant:
    """A step with changes made: ``parts`` are of the batch, ``plan`` says what is run again in backward."""

    recipe: Recipe
    autocast: torch.dtype | None = None
    parts: int = 1
    plan: Plan | None = None
    changes: tuple[Change, ...] = ()

    def make(self, changes: Iterable[Change]) -> Variant:
        variant = self
        for change in changes:
            variant = replace(change.make(variant), changes=(*variant.changes, change))
        return variant


@dataclass(frozen=True)
class Change:
    """A change, one of several of its ``axis`` of which a variant has one."""

    name: str
    axis: str
    make: Callable[[Variant], Variant] = field(compare=False)
    flag: str = ""
    keeps_result: bool = True


def change_variant(name: str, axis: str, flag: str, keeps_result: bool = True, **settings: Any) -> Change:
    return Change(name, axis, lambda variant: replace(variant, **settings), flag, keeps_result)


def change_recipe(name: str, axis: str, flag: str, keeps_result: bool = True, **settings: Any) -> Change:
    return Change(name, axis, lambda variant: replace(variant, recipe=replace(variant.recipe, **settings)), flag,
                  keeps_result)


_ADAM = ("adam", "adamw", "adamw_fused")
SMALLEST_STATES = "8-bit AdamW"
#: in their place: name, option, and whether the result stays
_OPTIMIZERS = (("fused AdamW", "adamw_fused", True), ("AdamW on the host", "adamw_offloaded", True),
               (SMALLEST_STATES, "adamw8bit", False), ("SGD", "sgd", False))
_LOSS_CHUNKS = 8
_RANK = 16
_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm


def list_changes(base: Profile, variant: Variant, model: torch.nn.Module, spec: DeviceSpec) -> Iterator[Change]:
    """The changes that may help a step of ``model`` on a device, of which ``base`` is the profile."""
    recipe, training = variant.recipe, base.mode == "train"
    if training:
        if not recipe.checkpointing and not base.recompute_flops:
            yield change_recipe("checkpointing", "checkpointing", "--checkpointing", checkpointing=True)
        if recipe.loss_chunks is None and callable(getattr(model, "get_output_embeddings", None)):
            yield change_recipe(f"loss in {_LOSS_CHUNKS} chunks", "loss", f"--loss-chunks {_LOSS_CHUNKS}",
                                loss_chunks=_LOSS_CHUNKS)
        for name, optimizer, keeps_result in _OPTIMIZERS if base.optimizer in _ADAM else ():
            if optimizer != base.optimizer:
                yield change_recipe(name, "optimizer", f"--optimizer {optimizer}", keeps_result, optimizer=optimizer)
    if getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager":
        yield change_recipe("SDPA attention", "attention", "--attention sdpa", attention="sdpa")
    yield from _list_precisions(variant, model, spec)
    if training and recipe.lora is None:
        yield change_recipe(f"LoRA r={_RANK}", "lora", f"--lora r={_RANK}", False, lora=LoraSpec(_RANK))
        if recipe.quantize is None:
            yield change_recipe(f"QLoRA r={_RANK}", "lora", f"--quantize nf4 --lora r={_RANK}", False,
                                lora=LoraSpec(_RANK), quantize="nf4")
    if training and recipe.lora is not None and recipe.quantize is None:
        yield change_recipe("nf4 weights", "quantize", "--quantize nf4", False, quantize="nf4")
    if not training and recipe.quantize is None:
        for name in ("fp8", "int8", "int4"):
            yield change_recipe(f"{name} weights", "quantize", f"--quantize {name}", False, quantize=name)
    yield from _list_parts(base, variant, keeps_result=not any(isinstance(m, _BATCH_NORM) for m in model.modules()))


def _list_precisions(variant: Variant, model: torch.nn.Module, spec: DeviceSpec) -> Iterator[Change]:
    """Formats of 16 bits: bfloat16; where the device lacks it float16, under autocast alone, which keeps parameters in
    float32: gradients in float16 underflow (PyTorch's notes on amp, "Gradient Scaling").
    """
    if not any(p.dtype is torch.float32 and p.requires_grad for p in model.parameters()):
        return
    rates = spec.flops_per_second
    has_bfloat16 = rates.bf16 is not None or rates.fp16 is None
    name, dtype = ("bf16", torch.bfloat16) if has_bfloat16 else ("fp16", torch.float16)
    if variant.autocast is None:
        yield change_variant(f"autocast {name}", "precision", f"--autocast {name}", False, autocast=dtype)
    if variant.recipe.dtype is None and has_bfloat16:
        yield change_recipe("bf16 parameters", "precision", "--dtype bf16", False, dtype=torch.bfloat16)


def _list_parts(base: Profile, variant: Variant, keeps_result: bool) -> Iterator[Change]:
    """Smaller batches in the place of the one, the largest first. Batch norm sees only its own part."""
    batch = base.batch_size
    if batch is None or variant.recipe.accumulate > 1:
        return
    parts = 2
    while parts <= batch and batch % parts == 0:
        size = batch // parts
        if base.mode == "train":
            name, flag = f"{parts} micro-batches of {size}", f"--accumulate {parts} {_write_inputs(base, size)}"
        else:
            name, flag = f"{parts} passes of {size}", _write_inputs(base, size)
        yield change_variant(name, "batch", flag, keeps_result or base.mode == "infer", parts=parts)
        parts *= 2


def _write_inputs(base: Profile, size: int) -> str:
    """The options that give each input in parts of ``size``; in words where one is no argument of its own."""
    if not all(map(str.isidentifier, base.inputs)):
        return f"(--input with a batch of {size})"
    specs = [InputSpec(name, getattr(torch, tensor.dtype), tuple(tensor.shape)) for name, tensor in base.inputs.items()]
    return " ".join([f"--input {spec.resize('batch', size) if spec.shape[:1] == (base.batch_size,) else spec}"
                     for spec in specs])


def fit_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], batch: int | None, variant: Variant,
               dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as a variant takes them: each tensor whose first size is the batch's, and each list of as many samples,
    cut to one of its parts, floating ones in ``dtype``; without data. Raises InputError where a list may be either.
    """
    def cast(item: torch.Tensor) -> torch.Tensor:
        return item.to(dtype) if dtype is not None and item.is_floating_point() else item

    def change(item: torch.Tensor) -> torch.Tensor:
        if variant.parts > 1 and batch is not None and item.ndim and item.shape[0] == batch:
            item = item[:batch // variant.parts].clone()  # in a memory of its size
        return cast(item)

    args, kwargs = without_data(args), without_data(kwargs)
    cut: dict[int, Any] = {}
    if variant.parts > 1 and batch is not None:
        for name, value in [*((f"argument {i + 1}", one) for i, one in enumerate(args)), *kwargs.items()]:
            _cut_lists(name, value, batch, variant.parts, cut)
    cut = {key: replace_tensors(value, cast) for key, value in cut.items()}
    return (tuple([replace_tensors(value, change, cut) for value in args]),
            {name: replace_tensors(value, change, cut) for name, value in kwargs.items()})


def _cut_lists(name: str, value: Any, batch: int, parts: int, cut: dict[int, Any]) -> None:
    """Add to ``cut``, by its id, a part of each list in ``value`` that has an item of each sample."""
    if isinstance(value, (list, tuple)) and len(value) == batch and not hasattr(value, "_fields"):
        if not all(map(holds_tensor, value)) or any(
                t.ndim and t.shape[0] == batch for t in tensors_of([v for v in value if not isinstance(v, dict)])):
            raise InputError(f"{name}: whether a {type(value).__name__} of {batch} has one item of each of the {batch} "
                             "samples is not known, so it was not cut")
        cut[id(value)] = value[:batch // parts]
        return
    for step, child in children(value):
        _cut_lists(f"{name}{step}", child, batch, parts, cut)


class Trial:
    """What is profiled: a model, what it is called with, and where."""

    def __init__(self, model: nn.Module | Callable[[], nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any],
                 spec: DeviceSpec, mode: str, optimizer: Any, options: dict[str, Any]) -> None:
        # what a factory gives is copied too, for it may be a model that is there already
        self.model = model if isinstance(model, nn.Module) else build_model(model, spec=spec)
        self.args, self.kwargs, self.spec, self.mode = args, kwargs, spec, mode
        self.optimizer, self.options = optimizer, options
        self.batch: int | None = None
        self.times_all = True  #: whether steps in parts that do not fit are timed too, which takes a run

    def build(self, recipe: Recipe) -> nn.Module:
        return build_model(partial(recipe.build, partial(copy_without_data, self.model)), spec=self.spec)

    def _trace(self, variant: Variant) -> tuple[fx.GraphModule, tuple[Any, ...], dict[str, Any]]:
        args, kwargs = fit_inputs(self.args, self.kwargs, None, variant, None)
        model = self.build(variant.recipe)
        names = argument_names(model, args, kwargs)
        with casting(self.spec.kind, variant.autocast), simulating(self.spec):  # of which forward may ask
            return symbolic_trace(model, meta_args={**dict(zip(names, args)), **kwargs}), args, kwargs

    def make_plans(self, variant: Variant, found: Profile, budgets: Iterable[int]) -> list[Plan]:
        """Plans for the step of the profile ``found``."""
        gm, args, kwargs = self._trace(variant)
        held, update = find_optimizer_bytes(found)
        planner = Planner(gm, args, kwargs, autocast=variant.autocast, device=self.spec,
                          loss_fn=self.options.get("loss_fn"), held_bytes=held, update_bytes=update)
        return [planner.solve(budget) for budget in budgets]

    @property
    def capacity_bytes(self) -> int:
        """What the allocator may take, a byte where what is taken outside it leaves nothing."""
        return max(1, (self.spec.memory_bytes or 0) - sum(unseen.bytes or 0 for unseen in list_unseen(self.spec)))

    def run(self, variant: Variant, accumulate: int = 2) -> Profile:
        """The profile of a variant, with so many micro-batches in the place of more: the second is as each further."""
        recipe = variant.recipe
        dtype = recipe.dtype if any(change.axis == "precision" for change in variant.changes) else None
        args, kwargs = fit_inputs(self.args, self.kwargs, self.batch, variant, dtype)
        if variant.parts > 1 and self.mode == "train":
            recipe = replace(recipe, accumulate=accumulate)
        step = recipe.profile_options(self.mode, self.options.get("loss_fn"))
        if self.mode == "train":
            step["optimizer"] = step["optimizer"] or self.optimizer
        model = self.build(recipe)
        if (plan := variant.plan) is not None:
            model = plan.apply(self._trace(variant)[0])
        return profile(model, args, kwargs, device=self.spec, autocast=variant.autocast,
                       **{**self.options, **step})

    def describe(self, variant: Variant, found: Profile) -> AdviceOption:
        verdict = judge(found, self.spec, is_brief=True)
        assert verdict is not None  # the profile has a device
        flags = [change.flag for change in variant.changes]
        return AdviceOption(tuple([change.name for change in variant.changes]), verdict.fits, verdict.needed_bytes,
                            found.peak_allocated_bytes,
                            self._count_seconds(variant, found) if verdict.fits or self.times_all else None,
                            all(change.keeps_result for change in variant.changes),
                            " ".join(flags) if all(flags) else "")

    def _count_seconds(self, variant: Variant, found: Profile) -> float | None:
        if variant.recipe.optimizer == "adamw_offloaded":
            return None  # what the host takes for the update is not known
        if found.step_seconds is None or variant.parts == 1:
            return found.step_seconds
        if self.mode == "infer":
            return variant.parts * found.step_seconds
        first = self.run(variant, accumulate=1).step_seconds  # makes the gradients to which the others add
        return None if first is None else first + (variant.parts - 1) * (found.step_seconds - first)
