"""``torch.utils.checkpoint.auto_checkpoint``, as pytorch issue 194696 asks for it: checkpoints for a memory budget."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.fx.module_wrapper import uncompiled
from analyzer.record.tensor_walk import list_blocks
from analyzer.tools.solver import BlockChoice, BlockPlan, BlockPlanner, InfeasibleBudgetError
from analyzer.tools.solver.block_step import BlockStep

from .torch_cuda import as_factory, choose_device, split_inputs

__all__ = ["auto_checkpoint", "checkpointed", "find_checkpointable", "undo_checkpoint"]
_PLAN = "checkpoint_plan"  #: attribute of a model


class _ModulePlanner(BlockPlanner):
    """Plans which blocks run again whole: no result within one is kept, so that the plan is as good on a device that
    takes other kernels than the planned one.
    """

    def profile_ends(self) -> tuple[Profile, BlockStep, list[BlockChoice], Profile]:
        plain, step, whole, recomputed = super().profile_ends()
        blocks = tuple(replace(block, results=()) for block in step.blocks)
        return plain, replace(step, blocks=blocks), whole, recomputed


def find_checkpointable(model: nn.Module) -> list[str]:
    """Paths of the modules that a plan may checkpoint, none inside of another: repeated blocks of lists and sequences
    and, outside of them, the smallest modules that hold two others or more.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False)
    >>> find_checkpointable(nn.ModuleDict({"stem": nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "body": encoder}))
    ['stem', 'body.layers.0', 'body.layers.1']
    """
    blocks = set(list_blocks(model))
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, path: str) -> Iterator[str]:
        for name, child in module.named_children():
            if child in seen:
                continue
            seen.add(child)
            if child in blocks or _is_smallest(child):
                yield path + name
            else:
                yield from walk(child, f"{path}{name}.")

    return list(walk(model, ""))


def _is_smallest(module: nn.Module) -> bool:
    children = list(module.children())
    is_called = type(module).forward is not nn.Module.forward  # a ModuleList or ModuleDict is not
    return is_called and len(children) > 1 and not any(True for child in children for _ in child.children())


def auto_checkpoint(model: nn.Module, sample_input: Any = None, *, memory_budget: int | float | str,
                    optimizer: Any = None, device: Any = None, blocks: Sequence[str] | None = None,
                    method: str = "auto", **settings: Any) -> nn.Module:
    """``model``, the modules of which that must run under `torch.utils.checkpoint.checkpoint` for a training step to
    stay within ``memory_budget``, and as few seconds as can be of it, do so until `undo_checkpoint`. What it computes
    is the same: outputs, gradients, buffers, random numbers. ``model.checkpoint_plan`` tells what runs again, peaks and
    seconds before and after. In eager mode; wrap the model in DDP or FSDP afterwards.

    ``memory_budget`` is of what the allocator reserves in the whole step, optimizer included: bytes, text such as
    ``"8GB"``, or a share of the activations' memory (``"50%"``, ``0.5``). The step is profiled, without data, on
    ``device``; that, ``sample_input`` and ``optimizer`` are as of `estimate_memory`. ``blocks`` are paths of modules to
    choose among, by default those of `find_checkpointable`. ``method`` and ``settings`` are those of `plan_blocks`.

    Raises InfeasibleBudgetError, an InputError, which says the least budget there is a plan for, and what `plan_blocks`
    raises; the model is as it was then.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(256, 4, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    >>> model = auto_checkpoint(model, torch.empty(64, 128, 256), memory_budget="1.3GB", device="a100")
    >>> [choice.path for choice in model.checkpoint_plan.choices]
    ['layers.0', 'layers.4']
    >>> undo_checkpoint(model) is model
    True
    """
    caller = f"auto_checkpoint({type(model).__name__})"
    if not isinstance(model, nn.Module):
        raise InputError(f"{caller}: takes a torch.nn.Module")
    if uncompiled(model) is not model:
        raise InputError(f"{caller}: is under torch.compile, which plans by itself: set torch._functorch.config."
                         "activation_memory_budget (`analyzer.tools.solver.find_memory_budget` says to what)")
    if _PLAN in vars(model):
        raise InputError(f"{caller}: the model is under a plan already; undo_checkpoint(model) first")
    if sample_input is None:
        raise InputError(f"{caller}: give sample_input=..., as memory depends on sizes; tensors on 'meta' will do")
    blocks = blocks or find_checkpointable(model)
    if not blocks:
        raise InputError(f"{caller}: no module in it holds two others or more; name those that may be checkpointed "
                         "with blocks=['layers.0', 'layers.1']")
    args, kwargs = split_inputs(sample_input)
    planner = _ModulePlanner(model, args, kwargs, device=choose_device(device), blocks=blocks,
                             optimizer=as_factory(optimizer, model), **settings)
    try:
        found = planner.plan(memory_budget, host_bytes=0, method=method)
    except InfeasibleBudgetError as error:
        said = str(error).partition(": ")[2]  # behind the budget in bytes
        raise InfeasibleBudgetError(f"{caller}: memory_budget={memory_budget!r}: {said}") from None
    again = tuple(choice for choice in found.choices if choice.runs_again)
    replace(found, choices=again).apply(model)
    setattr(model, _PLAN, replace(found, choices=again, profile=None))
    return model


def undo_checkpoint(model: nn.Module) -> nn.Module:
    """``model`` as it was before `auto_checkpoint`. Raises InputError for one that is under no plan."""
    plan = vars(model).get(_PLAN) if isinstance(model, nn.Module) else None
    if not isinstance(plan, BlockPlan):
        raise InputError(f"undo_checkpoint({type(model).__name__}): the model is under no plan of auto_checkpoint")
    plan.undo(model)
    delattr(model, _PLAN)
    return model


@contextmanager
def checkpointed(model: nn.Module, sample_input: Any = None, **settings: Any) -> Iterator[nn.Module]:
    """The same for the length of a ``with``; the arguments are those of `auto_checkpoint`."""
    planned = auto_checkpoint(model, sample_input, **settings)
    try:
        yield planned
    finally:
        undo_checkpoint(model)
