"""Which of a model's blocks are run again in backward, what is kept of them meanwhile, and where."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from analyzer.errors import InputError
from analyzer.recipe import list_blocks

from .plan import TrainingPlan

_ATEN = torch.ops.aten
#: torchtitan 0.2.2, distributed/activation_checkpoint.py and models/llama3/infra/parallelize.py: results that are kept.
_KEPT = frozenset([_ATEN._scaled_dot_product_flash_attention.default,
                   _ATEN._scaled_dot_product_efficient_attention.default,
                   _ATEN._scaled_dot_product_cudnn_attention.default, _ATEN.max.default])
_PRODUCTS = frozenset([_ATEN.mm.default, _ATEN.addmm.default])


def checkpoint_some(model: nn.Module, plan: TrainingPlan) -> None:
    """Let a model of transformers keep results of attention and of every second product ("operators"), and checkpoint
    every n-th block alone. Raises InputError for a model that has no checkpoints of its own.
    """
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    if not callable(enable):
        raise InputError(f"{type(model).__name__} has no checkpoints of its own, of which some could be left out")
    settings: dict[str, Any] = {"use_reentrant": False}
    if plan.checkpoints == "operators":
        settings["context_fn"] = _keep_some
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    enable(gradient_checkpointing_kwargs=settings)
    for number, block in enumerate(list_blocks(model), 1):
        if number % plan.checkpoint_every:
            block.gradient_checkpointing = False  # type: ignore[assignment]


def _keep_some() -> Any:
    return create_selective_checkpoint_contexts(_make_policy())


def _make_policy() -> Callable[..., CheckpointPolicy]:
    """Every second product is run again, counted in each of both runs; attention never is."""
    counts = {True: 0, False: 0}

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in _PRODUCTS:
            counts[context.is_recompute] += 1
            return (CheckpointPolicy.MUST_SAVE if counts[context.is_recompute] % 2
                    else CheckpointPolicy.PREFER_RECOMPUTE)
        return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def offload_inputs(model: nn.Module) -> None:
    """Keep what checkpointed blocks are given on the host until backward (axolotl 0.18, monkeypatch/
    gradient_checkpointing/offload_cpu.py; torch's own `save_on_cpu` does the same around each block).
    """
    def run(checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(*args, **kwargs)

    for module in model.modules():
        checkpoint: Any = getattr(module, "_gradient_checkpointing_func", None)  # transformers/modeling_layers.py
        if checkpoint is not None:
            setattr(module, "_gradient_checkpointing_func", partial(run, checkpoint))  # noqa: B010
