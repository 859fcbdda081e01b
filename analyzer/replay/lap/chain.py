"""The blocks of a sharded model that are alike: which of them are run, and which the log says as if they had been."""
from __future__ import annotations

from collections import OrderedDict
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from analyzer.distributed.fsdp import is_sharding_state, names_prefetched, sharding_settings
from analyzer.meta.spec import LEAVES
from analyzer.record.tensor_walk import walk_modules
from analyzer.replay.match import Mismatch

from ..state_value import look_up

HEAD, TAIL = 4, 3  # blocks that are run before and behind those that are not
REFERENCE = HEAD - 1  #: the last block before them, whose laps are played for each of them
_DEEPEST = 8  # containers and objects in each other that are compared
_FEWEST = 12  # of fewer, running all takes no longer than looking at what some do: docs/performance.md
#: attributes that are compared otherwise, or that no step reads
_LEFT_OUT = frozenset({"_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks",
                       "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"})


class Chain(NamedTuple):
    """Blocks of one list, of which those between `HEAD` and `TAIL` are not run; ``unread`` are attributes of the
    reference (path, name) in which others differ, ``around`` the modules that the blocks are in.
    """

    blocks: list[nn.Module]
    paths: list[str]
    unread: set[tuple[str, str]]
    around: list[nn.Module]

    @property
    def skipped(self) -> range:
        """The places of blocks that are not run."""
        return range(HEAD, len(self.blocks) - TAIL)


def find_chain(root: nn.Module) -> Chain:
    """The longest list of blocks in ``root`` that are alike. Raises Mismatch where there is none."""
    walked = walk_modules(root)
    for _, module in walked:
        if isinstance(module, (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel)):
            raise Mismatch(f"{type(module).__name__} holds the blocks' parameters in buffers of its own")
    lists = [list(m.children()) for _, m in walked if isinstance(m, (nn.ModuleList, nn.ModuleDict, nn.Sequential))]
    longest = max(lists, key=len, default=[])
    if len(longest) < _FEWEST:
        raise Mismatch(f"no list of {_FEWEST} or more blocks")
    path_of = {id(module): path for path, module in walked}
    if len({id(block) for block in longest}) < len(longest):
        raise Mismatch("its blocks are one module")
    unread, below = set[tuple[str, str]](), walk_modules(longest[REFERENCE])
    for block in longest[1:-1]:
        _compare(below, block, unread)
    paths = [path_of[id(block)] for block in longest]
    around = [module for path, module in walked if not path or paths[0].startswith(f"{path}.")]
    return Chain(longest, paths, unread, around)


def _compare(below: list[tuple[str, nn.Module]], block: nn.Module, unread: set[tuple[str, str]]) -> None:
    others = walk_modules(block)
    if [path for path, _ in below] != [path for path, _ in others]:
        raise Mismatch("its blocks have other modules")
    for (path, mine), (_, other) in zip(below, others):
        if type(mine) is not type(other) and type(mine).__mro__[1:] != type(other).__mro__[1:]:
            raise Mismatch(f"its blocks have other modules at {path!r}")
        held, theirs = vars(mine), vars(other)
        if held.keys() != theirs.keys():
            raise Mismatch(f"its blocks have other attributes at {path!r}")
        if _registered(mine) != _registered(other):
            raise Mismatch(f"its blocks have other parameters or buffers at {path!r}")
        for name, value in held.items():
            if name not in _LEFT_OUT and not _same(value, theirs[name]):
                if type(value) not in (int, float) or type(theirs[name]) is not type(value):
                    raise Mismatch(f"its blocks differ in {path + '.' if path else ''}{name}")
                unread.add((path, name))


def _registered(module: nn.Module) -> list[Any]:
    """The specs of a module's parameters and buffers."""
    return [{name: _specs(tensor) for name, tensor in held.items()} for held in (module._parameters, module._buffers)]


def _specs(tensor: Any) -> Any:
    if tensor is None:
        return None
    if own := vars(tensor).keys() - {"_is_param"}:  # torch/nn/parameter.py; others are how a wrapper finds its buffers
        raise Mismatch(f"its parameters have attributes: {', '.join(sorted(own))}")
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    spec = tensor._spec if isinstance(tensor, DTensor) else None
    with torch._C.DisableTorchFunction():
        return (type(tensor), spec, local.shape, local.stride(), local.dtype, tensor.requires_grad,
                len(tensor._backward_hooks or ()), len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()))


def _same(mine: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are the same to code that does not ask for their identity."""
    if mine is other:
        return True
    if type(mine) is not type(other) or depth > _DEEPEST or isinstance(mine, torch.Tensor):
        return False
    if type(mine) in LEAVES and not isinstance(mine, FunctionType):
        return bool(mine == other)
    if isinstance(mine, dict):
        pairs, is_hooks = zip(mine.items(), other.items()), isinstance(mine, OrderedDict)  # by a number of the process
        return len(mine) == len(other) and all(
            (is_hooks and isinstance(a, int) or a == b) and _same(x, y, depth + 1) for (a, x), (b, y) in pairs)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(other) and all(_same(x, y, depth + 1) for x, y in zip(mine, other))
    if isinstance(mine, MethodType):
        return mine.__func__ is other.__func__ and _same_owner(mine.__self__, other.__self__, depth)
    if isinstance(mine, (partial, FunctionType)):
        return _same(_parts(mine), _parts(other), depth + 1)
    return _same_owner(mine, other, depth)


def _parts(function: Any) -> tuple[Any, ...]:
    if isinstance(function, partial):
        return function.func, function.args, function.keywords
    cells = [look_up(cell, "") for cell in function.__closure__ or ()]
    return function.__code__, cells, function.__defaults__


def _same_owner(mine: Any, other: Any, depth: int) -> bool:
    """Modules are compared where they stand; of what FSDP2 keeps, what decides its behaviour is."""
    if isinstance(mine, nn.Module):
        return type(mine).__qualname__ == type(other).__qualname__
    if is_sharding_state(mine):
        if names_prefetched(mine) or names_prefetched(other):
            raise Mismatch("its blocks prefetch blocks that are named")
        settings, groups = zip(sharding_settings(mine), sharding_settings(other))
        return _same(*settings, depth + 1) and len(groups[0]) == len(groups[1]) and all(
            a is b or type(a) is type(b) and bool(a == b) for a, b in zip(*groups))
    if getattr(type(mine), "__eq__", None) is not getattr(object, "__eq__", None):
        return bool(mine == other)
    is_torchs = type(mine).__module__.startswith(("torch.distributed", "torch.utils"))
    return is_torchs and hasattr(mine, "__dict__") and _same(vars(mine), vars(other), depth + 1)
