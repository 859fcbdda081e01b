"""`profile_training`: what a step costs that a configuration asks for, on a device, as one rank of its job."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer.api.profile import profile
from analyzer.api.result import Profile
from analyzer.hardware import ClusterSpec, DeviceSpec
from analyzer.parallel import make_engine, world
from analyzer.recipe.optimizer import find_optimizer
from analyzer.results.verdict import Verdict
from analyzer.zoo.target import load_target, model_errors

from .build import DTYPES, load_model, make_model, share_model
from .document import Files
from .model_name import find_model
from .picture import load_pictures, load_preparations
from .plan import TrainingPlan
from .rollout import Rollout, sample_rollout, wait
from .vision import show_pictures

#: Passes of a step that are run: the second adds to gradients, as each further one does.
MOST_PASSES = 2


@dataclass(frozen=True)
class TrainedJob:
    """The profile of one rank's step with at most `MOST_PASSES` passes, and the time of the whole step."""

    plan: TrainingPlan
    profile: Profile
    assumptions: tuple[str, ...]
    preparations: tuple[Profile, ...] = ()   #: of what is encoded before the first step
    rollout: Rollout | None = None

    @property
    def fullest(self) -> Profile:
        """Of the step and what comes before it, the one whose memory decides."""
        return max((self.profile, *self.preparations), key=lambda found: found.peak_reserved_bytes or 0)

    @property
    def verdict(self) -> Verdict | None:
        found = self.profile
        own = self.fullest.verdict
        return own if own is None or self.rollout is None else self.rollout.judge(
            own, (found.param_bytes or 0) + (found.buffer_bytes or 0), found.optimizer_bytes or 0)

    @property
    def step_seconds(self) -> float | None:
        """Of all passes: those that were not run take as long as the mean of those that were; with the rollout."""
        return wait(self.rollout, self._scale(self.profile.step_seconds))

    @property
    def step_range(self) -> tuple[float, float] | None:
        """The range of `step_seconds`."""
        ends = self.profile.step_seconds_range
        if ends is None:
            return None
        low, high = (self._scale(end) for end in ends)
        low, high = (wait(self.rollout, end) for end in (low, high))
        return None if low is None or high is None else (low, high)

    def _scale(self, seconds: float | None) -> float | None:
        found = self.profile
        if seconds is None or self.plan.accumulate <= MOST_PASSES or not found.step_seconds:
            return seconds
        passes = (found.fwd_seconds or 0.0) + (found.bwd_seconds or 0.0)
        whole = found.step_seconds + passes * (self.plan.accumulate / MOST_PASSES - 1)
        return seconds * whole / found.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks, padding counted."""
        return self.plan.tokens / self.step_seconds if self.step_seconds else None


def profile_training(plan: TrainingPlan, device: str | DeviceSpec = "h200", *, files: Files | None = None,
                     cluster: str | ClusterSpec | None = None, rank: int = 0) -> TrainedJob:
    """Predict a step of the plan. Raises InputError where its model cannot be what it asks for, JobError for a model
    that is not found, and MissingExtraError where DeepSpeed's own code is run and is not installed.
    """
    files = files or Files()
    step = prepare_step(plan, files)
    said, settings = step.assumptions, step.settings
    ranks = max(plan.ranks, 1)
    if ranks > 1 or "optimizer" not in settings:
        settings["world"] = world(ranks, rank, plan.ranks_per_host, cluster)
    with model_errors(plan.model):
        found = profile(step.model, (), step.inputs, device=device, **settings)
    if plan.accumulate > MOST_PASSES:
        said.append(f"of the {plan.accumulate} passes of a step {MOST_PASSES} are run; memory is that of all, and the "
                    "others take as long")
    return TrainedJob(plan, found, tuple(said), tuple(
        profile(make, (), given, device=device, mode="infer") for make, given in load_preparations(plan, files)),
        sample_rollout(plan, device, files))


class PreparedStep(NamedTuple):
    """What is profiled of a plan: what builds the model, the inputs of a pass, arguments of `profile`, and sentences on
    what was taken for granted. An engine of DeepSpeed's has no ``optimizer`` in the settings.
    """

    model: Callable[[], nn.Module]
    inputs: dict[str, Any]
    settings: dict[str, Any]
    assumptions: list[str]


def prepare_step(plan: TrainingPlan, files: Files) -> PreparedStep:
    build, inputs, said = load_pictures(plan, files) if plan.picture is not None else _load_texts(plan, files)
    said += plan.assumptions
    passes = min(plan.accumulate, MOST_PASSES)
    if plan.sharding is not None and plan.sharding.kind == "deepspeed":
        return PreparedStep(partial(_make_engine, plan, build, passes), inputs, {}, said)
    make = find_optimizer(plan.optimizer)
    if make and plan.projected is not None:
        make = partial(make, rank=plan.projected[0], decomposes=plan.projected[1])
    if make and plan.picture is not None and plan.picture.text_adapter is not None:
        make = partial(_make_for_updated, make)
    return PreparedStep(partial(_make_rank, plan, build), inputs, {
        "optimizer": partial(make_for_backward, make) if make and plan.updates_in_backward else make,
        "step": partial(_take_step, passes, plan.clips and plan.optimizer is not None,
                        None if plan.autocast is None or plan.picture else DTYPES[plan.autocast],
                        _to_host if plan.checkpoints in ("offloaded", "saved_offloaded") else nullcontext,
                        plan.updates_in_backward)}, said)


def _load_texts(plan: TrainingPlan, files: Files) -> tuple[Callable[[], nn.Module], dict[str, Any], list[str]]:
    """What builds the model, the rows of tokens that a pass gets, and sentences on what was taken for granted."""
    build, said = load_model(plan, files)
    teach, more = (None, []) if plan.teacher is None else load_model(replace(plan, model=plan.teacher), files)
    said += more
    rows = torch.zeros(plan.sequences, plan.length, dtype=torch.int64, device="meta")
    inputs: dict[str, Any] = {"input_ids": rows}
    if plan.pixels is not None and plan.task in ("classify", "reward"):
        said.append("rows are text alone")
    elif plan.pixels is not None:
        inputs, seen = show_pictures(load_target(find_model(plan.model, files).target).build, plan.sequences,
                                     plan.length, plan.pixels)
        rows = inputs["input_ids"]
        said.append(seen)
    if plan.task == "sft":
        inputs["labels"] = rows.clone()
    elif plan.task == "classify":
        dtype = torch.int64 if plan.classes > 1 else torch.float32  # of one class a number: transformers' "regression"
        inputs["labels"] = torch.zeros(plan.sequences, dtype=dtype, device="meta")
    return partial(make_model, plan, build, teach), inputs, said


def _make_rank(plan: TrainingPlan, build: Callable[[], nn.Module]) -> nn.Module:
    model = share_model(build(), plan)
    if plan.compiles:
        model = torch.compile(model)  # type: ignore[assignment]
    return model


def _make_engine(plan: TrainingPlan, build: Callable[[], nn.Module], passes: int) -> nn.Module:
    assert plan.sharding is not None
    config = {**plan.sharding.config, "gradient_accumulation_steps": passes,
              "train_micro_batch_size_per_gpu": plan.micro_batch}
    config.pop("train_batch_size", None)
    for name in ("bf16", "fp16"):  # accelerate/utils/dataclasses.py, `DeepSpeedPlugin.set_mixed_precision`
        section = config.get(name) or {}
        if section.get("enabled", "auto") == "auto" and (section or plan.autocast == name):
            config[name] = {**section, "enabled": plan.autocast == name}
    optimizer = None if "optimizer" in config else find_optimizer(plan.optimizer)
    if config.get("optimizer"):
        config["optimizer"] = {**config["optimizer"], "params": {}}
    return make_engine(build(), config, optimizer)


def _make_for_updated(make: Callable[..., torch.optim.Optimizer], params: Any) -> torch.optim.Optimizer:
    """An optimizer of all but those that have a gradient for the sake of others (`picture.py`)."""
    return make([parameter for parameter in params if getattr(parameter, "is_updated", True)])


def make_for_backward(make: Callable[..., torch.optim.Optimizer], params: Any) -> torch.optim.Optimizer:
    """An optimizer that updates each parameter as soon as its gradient is there, and frees that (torchtune,
    training/memory.py, `OptimizerInBackwardWrapper`; LOMO). Its ``step`` is never called.
    """
    optimizer = make(list(params))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(partial(_update_alone, optimizer, group))
    return optimizer


def _update_alone(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    groups, parameters = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, group["params"] = groups, parameters
    parameter.grad = None


def _take_step(passes: int, clips: bool, autocast: torch.dtype | None, saving: Callable[[], Any], is_updated: bool,
               model: nn.Module, optimizer: torch.optim.Optimizer, **inputs: torch.Tensor) -> None:
    """As transformers' `Trainer` takes it: passes, of which the last communicates, the norm clipped, the update.

    ``saving`` makes the context of a forward pass. Code that reaches torch's hooks on saved tensors lets no blocks be
    repeated: so `_to_host` is reached only where it is given.
    """
    for number in range(passes):
        with _without_communication(model) if number < passes - 1 else nullcontext():
            with nullcontext() if autocast is None else torch.autocast("cuda", autocast):
                with saving():
                    loss = _find_loss(model(**inputs), autocast is not None)
            (loss / passes).backward()
            del loss
    if clips:
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    if not is_updated:
        optimizer.step()
        optimizer.zero_grad()  # gradients of what no optimizer updates stay


def _to_host() -> Any:
    """What is saved for backward lies on the host until then, but for parameters and tensors of less than a KiB
    (torchtune, training/_activation_offloading.py, `OffloadActivations`).
    """
    def pack(x: torch.Tensor) -> Any:
        moves = x.is_cuda and not isinstance(x, nn.Parameter) and x.nbytes >= 1024
        if not moves:
            return x
        return x.device, torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)

    def unpack(saved: Any) -> torch.Tensor:
        found: torch.Tensor = saved[1].to(saved[0], non_blocking=True) if isinstance(saved, tuple) else saved
        return found

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _find_loss(output: Any, casts: bool) -> torch.Tensor:
    """The loss, behind a copy of all outputs in float32 (accelerate/accelerator.py, `prepare_model`:
    ``convert_outputs_to_fp32`` around a forward pass under autocast).
    """
    if isinstance(output, torch.Tensor):
        return output.float() if casts else output
    if casts:
        kept = [value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                for value in output.values()]
        return next(value for name, value in zip(output, kept) if name == "loss")
    loss: torch.Tensor = output.loss
    return loss


class _without_communication:
    """Passes whose gradients are not reduced yet: accelerate/accelerator.py, `no_sync`."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.inner: Any = model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else nullcontext()

    def __enter__(self) -> None:
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(False)
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        if hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(True)
