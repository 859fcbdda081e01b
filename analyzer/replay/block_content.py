"""What is in a block, and what its arguments tell of it."""
from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.plain_type import ARGUMENTS
from analyzer.meta.storage import MetaStorage

from .cache_slot import CacheLike
from .match import Mismatch
from .state_value import tensor_attributes

LEAF_TYPES = (torch.Tensor, *ARGUMENTS)  #: of arguments that a forward pass cannot change
_UNCHANGING = (*ARGUMENTS, CacheLike)


def are_identical(a: Iterable[Any], b: Collection[Any]) -> bool:
    """Whether the items are the same objects."""
    items = list(a)
    return len(items) == len(b) and all(map(operator.is_, items, b))


class Contents(NamedTuple):
    """What is in a module: the modules, itself first, how many of them are leaves, and the tensors."""

    modules: list[nn.Module]
    leaves: int
    tensors: list[weakref.ref[torch.Tensor]]  #: not kept alive: a forward pass may put others in their place

    def list_tensors(self) -> list[torch.Tensor]:
        """The tensors that still exist."""
        return [tensor for ref in self.tensors if (tensor := ref()) is not None]


def survey(module: nn.Module, found: dict[int, Contents]) -> Contents:
    """The contents of a module and of all below it, by id."""
    known = found.get(id(module))
    if known is not None:
        return known
    found[id(module)] = Contents([], 0, [])  # a module that holds itself
    modules, leaves = [module], 0 if module._modules else 1
    tensors = [weakref.ref(t) for held in (module._parameters, module._buffers) for t in held.values()
               if t is not None]
    for child in module._modules.values():
        if child is not None:
            below = survey(child, found)
            modules += below.modules
            leaves += below.leaves
            tensors += below.tensors
    contents = found[id(module)] = Contents(modules, leaves, tensors)
    return contents
_flat_structures: dict[tuple[int, tuple[str, ...]], pytree.TreeSpec] = {}


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """As `pytree.tree_flatten`, which makes a function anew for each call, and that in a cycle."""
    leaves = [*args, *kwargs.values()]
    if not all([isinstance(x, LEAF_TYPES) for x in leaves]):
        return pytree.tree_flatten((args, kwargs))
    shape = len(args), tuple(kwargs)
    if shape not in _flat_structures:
        _flat_structures[shape] = pytree.tree_flatten((args, kwargs))[1]
    return leaves, _flat_structures[shape]


def input_key(leaves: list[Any]) -> Hashable:
    """What of the arguments decides a block's record. Raises Mismatch where an argument is more than a tensor or a
    plain value.
    """
    key: list[Any] = []
    groups: dict[int, int] = {}
    for x in leaves:
        if isinstance(x, torch.Tensor):
            is_plain = x.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(x)
            storage = x.untyped_storage() if is_plain else None
            attributes = tensor_attributes(x)
            if not isinstance(storage, MetaStorage) or attributes is None:
                raise Mismatch("an argument is a sparse, wrapped or real tensor, or has objects for attributes")
            group = groups.setdefault(storage.number, len(groups))
            contents = storage.known or storage.drawn_from
            known = None if contents is None else (id(contents), contents is storage.known)
            key.append((tuple(x.shape), x.stride(), x.dtype, x.storage_offset(), storage.nbytes(), storage.device,
                        x.requires_grad, group, known, storage.density, attributes))
        elif isinstance(x, _UNCHANGING):
            key.append((type(x), x))
        else:
            raise Mismatch("an argument is an object that its forward pass could change")
    return tuple(key)
