"""Puts a plan into the blocks of a module."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError

from .block_copy import BlockCopies, CopyEngine, OffloadedTensor, can_wait_on_host
from .kept_result import KeepResults, list_tensors, tracked_norms


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """What becomes of the saved tensors of one block, a module of the model. Where it ``runs_again``, under a
    checkpoint, all but the results it ``keeps``; without, autograd saves what it saves. Results are named as
    `KeepResults` says.
    """

    path: str
    runs_again: bool = False
    keeps: tuple[str, ...] = ()         #: results that stay on the device
    offloads: tuple[str, ...] = ()      #: results that wait on the host
    offloads_input: bool = False        #: the block's input waits there too
    skips: tuple[str, ...] = ()         #: results that are not computed again, as others alone read them
    kept_bytes: int = 0                 #: on the device, its input included
    offloaded_bytes: int = 0
    recompute_seconds: float = 0.0      #: of kernels that run again
    copy_seconds: float = 0.0           #: of copies that nothing hides
    operators: int | None = None        #: `digest_names` of all its results, as planned; None: nothing is skipped

    @property
    def kind(self) -> tuple[Any, ...]:
        """What blocks with the same choice share."""
        return self.runs_again, self.keeps, self.offloads, self.offloads_input, self.skips


class PlannedForward:
    """A block's forward as a plan has it, in the place of ``forward`` on the module; its class and hooks stay."""

    def __init__(self, module: nn.Module, choice: BlockChoice, engine: CopyEngine,
                 around: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
        self.module, self.choice, self.engine, self.around = module, choice, engine, around
        self.before = vars(module).get("forward")  #: what the user had put there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.before or type(self.module).forward.__get__(self.module)
        choice = self.choice
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        copies = BlockCopies(self.engine)
        args, kwargs = tree_map(lambda value: value, (args, kwargs))  # lists that others append to, as of DenseNet
        if not choice.runs_again:
            with nullcontext() if self.around is None else self.around(choice.path):
                output = forward(*args, **kwargs)
        else:
            norms = tracked_norms(self.module.modules())
            skips = () if choice.operators is None else choice.skips
            context = KeepResults((*choice.keeps, *choice.offloads), norms, skips, choice.offloads, copies,
                                  choice.operators)
            with _sending(args, copies) if choice.offloads_input else nullcontext():
                # whose own keywords may have the same names
                output = checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=context)
        copies.end(next((t for t in list_tensors(output) if t.requires_grad), None))
        return output


def _sending(args: tuple[Any, ...], copies: BlockCopies) -> AbstractContextManager[Any]:
    """Let those of ``args`` wait on the host that a checkpoint saves and that have a gradient."""
    storages = {t.untyped_storage()._cdata for t in list_tensors(args) if t.requires_grad}

    def pack(tensor: torch.Tensor) -> Any:
        is_input = tensor.untyped_storage()._cdata in storages
        return copies.send(tensor) if is_input and can_wait_on_host(tensor) else tensor

    return saved_tensors_hooks(pack, lambda saved: saved.take() if isinstance(saved, OffloadedTensor) else saved)


def apply_choices(model: nn.Module, choices: Iterable[BlockChoice], caller: str,
                  around: Callable[[str], AbstractContextManager[Any]] | None = None) -> None:
    """Give the blocks of ``model`` a `PlannedForward`. Raises InputError, and changes none, where one is missing."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{caller}: takes a torch.nn.Module")
    found, engine = [], CopyEngine()
    for choice in choices:
        try:
            module = model.get_submodule(choice.path)
        except AttributeError:
            raise InputError(f"{caller}: {type(model).__name__} has no module {choice.path!r}, which the plan is for"
                             ) from None
        if isinstance(vars(module).get("forward"), PlannedForward):
            raise InputError(f"{caller}: {choice.path} is under a plan already; plan.undo(model) first")
        found.append((module, choice))
    for module, choice in found:
        module.forward = PlannedForward(module, choice, engine, around)


def undo_choices(model: nn.Module, choices: Iterable[BlockChoice], caller: str) -> None:
    for choice in choices:
        module = model.get_submodule(choice.path)
        planned = vars(module).get("forward")
        if not isinstance(planned, PlannedForward):
            raise InputError(f"{caller}: {choice.path} is not under a plan")
        del module.forward
        if planned.before is not None:
            module.forward = planned.before
