"""Switches activation checkpointing on, block by block, in any model."""
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError


def checkpoint_blocks(model: nn.Module) -> None:
    """Let ``model`` recompute its blocks in backward: by its own switch (transformers, timm), else its repeated ones.

    Raises InputError where there is neither.
    """
    name = type(model).__name__
    enable = getattr(model, "gradient_checkpointing_enable", None)
    switch = getattr(model, "set_grad_checkpointing", None)
    try:
        if callable(enable):
            config: Any = getattr(model, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False  # transformers does so too, with a warning, in each forward pass
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return
        if callable(switch):
            switch(True)
            return
    except (ValueError, AssertionError, NotImplementedError) as error:  # how these libraries say that a model cannot
        raise InputError(f"checkpointing: {name} does not support it: {error}") from error
    blocks = list(list_blocks(model))
    if not blocks:
        raise InputError(
            f"checkpointing: {name} has no repeated blocks (two or more modules of one class in a ModuleList or "
            f"Sequential, with modules of their own)")
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def list_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that repeat: they hold modules, in a list or sequence that holds another of their class.

    >>> block = lambda: nn.TransformerEncoderLayer(8, 2)
    >>> blocks = nn.Sequential(block(), block(), block())
    >>> len(list(list_blocks(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), blocks))))
    3
    """
    children = [child for child in model.children()]
    kinds = [type(child) for child in children]
    for child, kind in zip(children, kinds):
        in_list = isinstance(model, (nn.ModuleList, nn.Sequential))
        is_container = issubclass(kind, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        if in_list and not is_container and kinds.count(kind) > 1 and next(child.children(), None) is not None:
            yield child
        else:
            yield from list_blocks(child)
