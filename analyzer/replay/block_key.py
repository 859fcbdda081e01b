"""What blocks hold, and when two of them are the same."""
from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.spec import ARGUMENTS, VALUES
from analyzer.record.optimizer_step import has_gradient_hooks
from analyzer.record.tensor_walk import REGISTRIES, walk_modules

from .cache_slot import CacheLike
from .match import Mismatch
from .state_value import MISSING, list_reached, tensor_attributes

LEAF_TYPES = (torch.Tensor, *ARGUMENTS)  #: of arguments that a forward pass cannot change
_UNCHANGING = (*ARGUMENTS, CacheLike)


class Contents(NamedTuple):
    """What is in a module: the modules, itself first, how many of them are leaves, and the tensors."""

    modules: list[nn.Module]
    leaves: int
    tensors: list[weakref.ref[torch.Tensor]]  #: not kept alive: a forward pass may put others in their place

    def list_tensors(self) -> list[torch.Tensor]:
        return [tensor for ref in self.tensors if (tensor := ref()) is not None]


def survey(module: nn.Module, found: dict[int, Contents]) -> Contents:
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
    """What of the arguments decides a block's record. Raises Mismatch for more than tensors and plain values."""
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
            key.append((tuple(x.shape), x.stride(), x.dtype, x.storage_offset(), storage.nbytes(), storage.device,
                        x.requires_grad, group, id(contents), contents is storage.known, storage.density,
                        storage.nonzero_bound, attributes))
        elif isinstance(x, _UNCHANGING):
            key.append((type(x), x))
        else:
            raise Mismatch("an argument is an object that its forward pass could change")
    return tuple(key)


# When two blocks are the same: the same code and specs, and the same values of all that their forward pass read.

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FIXED = (types.FunctionType, staticmethod, classmethod, *VALUES)  # what a class gives to all its modules


def structure_key(module: nn.Module, memo: dict[int, int | None], numbers: dict[Hashable, int]) -> int | None:
    """A number for the class, training flag, parameters and buffers of a module and all below it, the same for the
    same; None where a hook or script makes it one of a kind. ``memo`` is by id(module), ``numbers`` by what they stand
    for.
    """
    if id(module) in memo:
        return memo[id(module)]
    memo[id(module)] = None  # a module that holds itself is one of a kind
    key: list[Any] = [type(module), module.training]
    for name, child in module._modules.items():
        below = None
        if child is not None and (below := structure_key(child, memo, numbers)) is None:
            return None
        key += name, below
    contents = module.__dict__
    if isinstance(module, torch.jit.ScriptModule) or any([contents.get(name) for name in _HOOKS]):
        return None
    for held in (module._parameters, module._buffers):
        key.append(len(held))
        for name, tensor in held.items():
            if tensor is None:
                key += name, None
            elif tensor.layout is not torch.strided or has_gradient_hooks(tensor) or (
                    attributes := tensor_attributes(tensor)) is None:
                return None
            else:
                key += name, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, attributes
    found = memo[id(module)] = numbers.setdefault(tuple(key), len(numbers))
    return found


class ReadValues:
    """The values that a block's forward pass read, to compare with another block's."""

    def __init__(self, root: nn.Module, reads: set[tuple[str, str]]) -> None:
        self.root, self.positions = root, Positions(root)
        modules = dict(root.named_modules())
        index_of = {path: i for i, path in enumerate(modules)}
        self.count = len(modules)
        #: places of modules whose whole ``__dict__`` was read, and the names in it
        self.wholes = [(index_of[path], tuple(modules[path].__dict__)) for path, name in reads if name == "*"]
        self.values: list[tuple[int, str, Any]] = []   # place of a module, name of an attribute of its own, its value
        self.fixed: list[tuple[int, str]] = []         # what its class gives, unless an attribute hides it
        self.computed: list[tuple[int, str, Any]] = []
        for path, name in sorted(reads):
            module, i = modules[path], index_of[path]
            for n in list(module.__dict__) if name == "*" else [name]:
                registered = n in module._parameters or n in module._buffers or n in module._modules
                if n == "__class__" or n in REGISTRIES or registered:
                    continue  # the same by structure
                if n in module.__dict__:
                    value = module.__dict__[n]
                    # a tensor that is not registered is like no other, and is not kept alive
                    self.values.append((i, n, object() if isinstance(value, torch.Tensor) else value))
                elif isinstance(inspect.getattr_static(type(module), n, MISSING), _FIXED):
                    self.fixed.append((i, n))
                else:
                    self.computed.append((i, n, getattr(module, n, MISSING)))
        inside: set[int] = set()  # the ids of modules and of what they register
        for module in modules.values():
            held = module.__dict__
            inside.update(map(id, (module, held, *(held[name] for name in REGISTRIES), *module._parameters.values(),
                                   *module._buffers.values())))
        self.outside: str | None = None  #: an attribute through which more can be reached
        #: whether a value leads back into the block: in another block the same object is something else
        self.leads_inside = False
        looked_at: set[int] = set()
        for _, name, value in (*self.values, *self.computed):
            if type(value) not in VALUES and id(value) not in looked_at:
                looked_at.add(id(value))
                for is_inside in list_reached(value, inside):
                    self.leads_inside = self.leads_inside or is_inside
                    self.outside = self.outside or (None if is_inside else name)

    def hold_for(self, other: nn.Module, its: Sequence[nn.Module]) -> bool:
        """Whether ``other``, of the same structure, with the modules ``its``, would have given the same values."""
        if other is self.root:
            return True
        if len(its) != self.count:
            return False  # one of them holds a module twice
        contents = [m.__dict__ for m in its]
        if any([tuple(contents[i]) != names for i, names in self.wholes]) or any(
                [name in contents[i] for i, name in self.fixed]):
            return False
        where, leads_inside = Positions(other), self.leads_inside
        for i, name, mine in self.values:
            theirs = contents[i].get(name, MISSING)
            is_empty = type(mine) in CONTAINERS and type(mine) is type(theirs) and not mine and not theirs
            if not (is_empty or mine is theirs and not leads_inside or _same(mine, theirs, self.positions, where)):
                return False
        for i, name, mine in self.computed:
            theirs = getattr(its[i], name, MISSING)
            if not (mine is theirs and not leads_inside or _same(mine, theirs, self.positions, where)):
                return False
        return True


CONTAINERS = (dict, OrderedDict, list, tuple, set)


class Positions:
    """Where each module, parameter and buffer stands below ``root``, by id; looked up at the first question."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    @functools.cached_property
    def found(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for path, module in walk_modules(self.root):
            found[id(module)] = path
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        found.setdefault(id(tensor), f"{path}.{name}")
                found[id(held)] = f"{path}.{'p' if held is module._parameters else 'b'}"
            found[id(module._modules)] = f"{path}.m"
        return found

    def of(self, thing: Any) -> str | None:
        return self.found.get(id(thing)) if isinstance(thing, (nn.Module, torch.Tensor, dict)) else None


def _same(a: Any, b: Any, where_a: Positions, where_b: Positions) -> bool:
    if a is b:  # what leads into one block is something else in the other
        return not any(list_reached(a, where_a.found))
    place = where_a.of(a)
    if place is not None:
        return place == where_b.of(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (*VALUES, set, frozenset)):
        return bool(a == b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, where_a, where_b) for x, y in zip(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k], where_a, where_b) for k in a)
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and _same(a.__self__, b.__self__, where_a, where_b)
    if isinstance(a, functools.partial):
        return a.func is b.func and _same((a.args, a.keywords), (b.args, b.keywords), where_a, where_b)
    return False  # objects of their own: what they would have answered is not known
