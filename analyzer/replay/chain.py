"""Neighbouring modules that are alike: which ones there are in a model, and in what they differ all the same."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from analyzer.meta.intercept.compiled_function import COMPILER_ATTRIBUTES, compiled_from
from analyzer.meta.spec import LEAVES
from analyzer.meta.structure import is_plain_object
from analyzer.record.tensor_walk import is_distributed, walk_modules
from analyzer.state.value import look_up, watch_attribute

from .cache_slot import Filled, Index

#: blocks that are run at each end of a chain: at first, and where those beside the ones that are not run differ
ENDS = 2, 3
FEWEST = 8   # of fewer, running all takes no longer than looking at what some do
LONGEST = 6  #: neighbours that take turns, as five layers with a sliding window and one without (Gemma 3)
_CONTAINERS = frozenset((dict, OrderedDict, list, set))
_DEEPEST = 8  # containers and objects in each other that are compared
#: attributes that are compared otherwise, or that no step reads
_LEFT_OUT = COMPILER_ATTRIBUTES | {"_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks",
                                   "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
#: attributes that every call of a module reads (``Module.__call__``, ``Module.train``)
_ALWAYS_READ = frozenset({*vars(nn.Module()), "_compiled_call_impl"}) - _LEFT_OUT

Place = tuple[str, str]
"""An attribute of a module in a block: the module's path in the block, and the attribute's name."""


Outline = list[tuple[str, nn.Module, Any]]
"""The modules of a block with their paths in it, and what each registers."""


class Chain(NamedTuple):
    """Blocks of one list of modules that are alike: neighbours, or groups of neighbours that take turns. ``differing``
    are attributes in which they are not: blocks are alike to a step that reads none of these.
    """

    blocks: list[nn.Module]                      #: a group is a ModuleList of its members
    members: list[list[tuple[str, nn.Module]]]   #: of each block, with their paths in the model: itself, or several
    differing: set[Place]
    modules: list[list[nn.Module]]               #: of each block: its members, each with what is below it
    head: int = ENDS[0]                          #: blocks that are run before those that are not
    tail: int = ENDS[0]                          #: blocks that are run behind them

    @property
    def reference(self) -> int:
        """The place of the last block that is run before those that are not: its part of the log is theirs too."""
        return self.head - 1

    @property
    def skipped(self) -> range:
        """The places of the blocks that need not run."""
        return range(self.head, len(self.blocks) - self.tail)

    @property
    def run(self) -> list[int]:
        """The places of the others."""
        skipped = self.skipped
        return [place for place in range(len(self.blocks)) if place not in skipped]


def find_chains(walked: Sequence[tuple[str, nn.Module]]) -> list[Chain]:
    """The chains among a model's modules with their paths, in order; one inside a block of another is left out.

    >>> layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    >>> [len(chain.blocks) for chain in find_chains(walk_modules(layers))]
    [9]
    """
    path_of = {id(module): path for path, module in walked}
    chains: list[Chain] = []
    inside: set[int] = set()
    for _, module in walked:
        if len(module._modules) >= FEWEST and isinstance(
                module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and id(module) not in inside:
            for chain in _split([child for child in module._modules.values() if child is not None], path_of):
                chains.append(chain)
                inside.update(id(module) for modules in chain.modules for module in modules)
    return [chain for chain in chains if not _is_shared(chain, walked)]


def _split(neighbours: list[nn.Module], path_of: dict[int, str]) -> list[Chain]:
    """The longest runs of alike blocks in a list of modules; none of modules that hold nothing."""
    found: list[Chain] = []
    outlines = [outline(module) for module in neighbours]
    first = 0
    while len(neighbours) - first >= FEWEST:
        rest = outlines[first:]
        alone = _count_alike(rest, 1)
        behind = first + alone[0]
        for period in _list_periods(neighbours[first:], *alone):
            count, differing = alone if period == 1 else _count_alike(rest, period)
            if count < FEWEST or not any(held for mine in rest[:period] for _, _, both in mine for held in both):
                continue
            behind = first + count * period
            groups = [neighbours[at:at + period] for at in range(first, behind, period)]
            found.append(Chain(
                [group[0] if period == 1 else nn.ModuleList(group) for group in groups],
                [[(path_of[id(module)], module) for module in group] for group in groups], differing,
                [[module for each in outlines[at:at + period] for _, module, _ in each]
                 for at in range(first, behind, period)]))
            break
        first = behind
    return found


def _list_periods(neighbours: Sequence[nn.Module], count: int, differing: set[Place]) -> list[int]:
    """How many neighbours may make a block, the likeliest first. The first ``count`` are alike but for ``differing``:
    likely are numbers after which these attributes are the same again, as in layers that look far and near by turns.
    """
    if count < FEWEST:
        return list(range(1, LONGEST + 1))
    held = [[vars(module.get_submodule(path))[name] for module in neighbours[:count]] for path, name in differing]
    again = {period: sum(all(map(same, values, values[period:])) for values in held)
             for period in range(2, count // FEWEST + 1) if period <= LONGEST}
    return sorted([1, *again], key=lambda period: (-again.get(period, 0), period))


def _count_alike(outlines: Sequence[Outline], period: int) -> tuple[int, set[Place]]:
    """How many groups of ``period`` neighbours are as the first one is, itself counted, and in what they differ."""
    differing = set[Place]()
    groups = (_join_outlines(outlines[at:at + period]) for at in range(0, len(outlines) - period + 1, period))
    first = next(groups, None)
    if first is None:
        return 1, differing
    return 1 + sum(1 for _ in takewhile(lambda other: compare_blocks(first, other, differing), groups)), differing


def _join_outlines(members: Sequence[Outline]) -> Outline:
    """The outline of a group, with the paths that its modules have in a ModuleList of its members."""
    if len(members) == 1:
        return members[0]
    return [(f"{place}.{path}" if path else str(place), module, registered)
            for place, member in enumerate(members) for path, module, registered in member]


def _is_shared(chain: Chain, walked: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether a module or a parameter of one of the blocks is somewhere else in the model too."""
    block_of: dict[int, int] = {}
    modules: set[int] = set()
    for place, below in enumerate(chain.modules):
        for module in below:
            if id(module) in modules:
                return True
            modules.add(id(module))
            for parameter in module._parameters.values():
                if parameter is not None and block_of.setdefault(id(parameter), place) != place:
                    return True
    return any(id(parameter) in block_of for _, module in walked if id(module) not in modules
               for parameter in module._parameters.values())


def are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks have the same modules, parameters and buffers as `compare_blocks` says, so that one costs what
    another does. What a wrapper or an optimizer reads of a parameter's attributes makes no difference to that.

    >>> are_alike([nn.Linear(4, 4), nn.Linear(4, 4)]), are_alike([nn.Linear(4, 4), nn.Linear(4, 5)])
    (True, False)
    """
    first, *others = [outline(block, reads_attributes=False) for block in blocks]
    return all(compare_blocks(first, other, set()) for other in others)


def outline(block: nn.Module, *, reads_attributes: bool = True) -> Outline:
    """What `compare_blocks` looks at; attributes of parameters too, unless these are not read."""
    with torch._C.DisableTorchFunction():
        return [(path, module, _registered(module, reads_attributes)) for path, module in walk_modules(block)]


def compare_blocks(mine: Outline, other: Outline, differing: set[Place]) -> bool:
    """Whether a step could take one block for the other if it does not read in what they differ, which is added to
    ``differing``.
    """
    if [path for path, _, _ in mine] != [path for path, _, _ in other]:
        return False
    found = set[Place]()
    for (path, module, registered), (_, its, theirs) in zip(mine, other):
        held, others = vars(module), vars(its)
        is_kind = type(module) is type(its) or type(module).__mro__[1:] == type(its).__mro__[1:]
        if not is_kind or held.keys() != others.keys() or registered != theirs:
            return False
        for name, value in held.items():
            another = others[name]
            if value is another or type(value) is type(another) and type(value) in _CONTAINERS and not (
                    value or another):
                continue  # most are, and this is faster than the question below
            if name not in _LEFT_OUT and (path, name) not in differing and not same(value, another):
                if name in _ALWAYS_READ:
                    return False
                found.add((path, name))
    differing |= found
    return True


def _registered(module: nn.Module, reads_attributes: bool) -> list[Any]:
    return [{name: _specs(tensor, reads_attributes) for name, tensor in held.items()} if held else None
            for held in (module._parameters, module._buffers)]


def _specs(tensor: Any, reads_attributes: bool) -> Any:
    if tensor is None:
        return None
    local, spec = (tensor._local_tensor, tensor._spec) if is_distributed(tensor) else (tensor, None)
    found = (type(tensor), spec, local.shape, local.stride(), local.dtype, tensor.requires_grad,
             len(tensor._backward_hooks or ()), len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()))
    if not reads_attributes:
        return found
    # _is_param: torch/nn/parameter.py
    own = {name: _spec_of(value) for name, value in vars(tensor).items() if name != "_is_param"}
    return *found, own


def _spec_of(value: Any, depth: int = 0) -> Any:
    """What is compared of an attribute of a parameter: a mark, or how it is quantized (`Params4bit.quant_state` of
    bitsandbytes). Others are like none: a wrapper finds its buffers by them.
    """
    kind = type(value)
    if kind in LEAVES and not isinstance(value, FunctionType):
        return kind, value
    if isinstance(value, torch.Tensor):
        return _specs(value, True)
    if isinstance(value, nn.Module):  # compared where it stands
        return kind
    if depth < _DEEPEST and isinstance(value, tuple):
        return kind, [_spec_of(held, depth + 1) for held in value]
    if depth < _DEEPEST and is_plain_object(value):
        return kind, {key: _spec_of(held, depth + 1) for key, held in vars(value).items()}
    return object()


def same(mine: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are the same to code that does not ask for their identity."""
    if mine is other:
        return True
    if type(mine) is not type(other) or depth > _DEEPEST or isinstance(mine, torch.Tensor):
        return False
    if type(mine) in LEAVES and not isinstance(mine, FunctionType):
        return _equal(mine, other)
    if isinstance(mine, dict):
        pairs, is_hooks = zip(mine.items(), other.items()), isinstance(mine, OrderedDict)  # by a number of the process
        return len(mine) == len(other) and all(
            (is_hooks and isinstance(a, int) or a == b) and same(x, y, depth + 1) for (a, x), (b, y) in pairs)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(other) and all(same(x, y, depth + 1) for x, y in zip(mine, other))
    if isinstance(mine, MethodType):
        return mine.__func__ is other.__func__ and _same_owner(mine.__self__, other.__self__, depth)
    if isinstance(mine, partial):
        return same((mine.func, mine.args, mine.keywords), (other.func, other.args, other.keywords), depth + 1)
    compiled = compiled_from(mine), compiled_from(other)
    if None not in compiled:
        return same(*compiled, depth + 1)
    if isinstance(mine, FunctionType):  # equal code of another file may find other globals
        return mine.__code__ is other.__code__ and same(
            _cells(mine), _cells(other), depth + 1) and same(mine.__defaults__, other.__defaults__, depth + 1)
    return _same_owner(mine, other, depth)


def _equal(mine: Any, other: Any) -> bool:
    """Whether two values say that they are equal; what answers with a tensor, as weak references to two do, is not."""
    try:
        answer = mine == other
    except RuntimeError:  # it asks for contents of tensors, which are not there, as bitsandbytes' `QuantState` does
        return False
    return isinstance(answer, (bool, np.bool_)) and bool(answer)


def _cells(function: FunctionType) -> tuple[Any, ...]:
    return tuple([look_up(cell, "") for cell in function.__closure__ or ()])


def _same_owner(mine: Any, other: Any, depth: int) -> bool:
    """Modules are compared where they stand; of what FSDP2 keeps, what decides its behaviour is."""
    if isinstance(mine, nn.Module):
        return type(mine).__qualname__ == type(other).__qualname__
    if hasattr(mine, "_fsdp_param_groups"):
        from analyzer.distributed.fsdp import names_prefetched, sharding_settings  # slow to import, but where it was
        if names_prefetched(mine) or names_prefetched(other):
            return False
        settings, groups = zip(sharding_settings(mine), sharding_settings(other))
        return same(*settings, depth + 1) and len(groups[0]) == len(groups[1]) and all(
            a is b or type(a) is type(b) and bool(a == b) for a, b in zip(*groups))
    if getattr(type(mine), "__eq__", None) is not getattr(object, "__eq__", None):
        return _equal(mine, other)
    is_torchs = type(mine).__module__.startswith(("torch.distributed", "torch.utils"))
    is_plain = is_plain_object(mine) and type(mine).__basicsize__ == _Plain.__basicsize__ and not any(
        "__slots__" in vars(base) for base in type(mine).__mro__[:-1])
    return (is_plain or is_torchs and hasattr(mine, "__dict__")) and same(vars(mine), vars(other), depth + 1)


class _Plain:
    """An object whose whole state is its ``__dict__``: one with state in C is larger."""


class ChainRun:
    """A chain while some of its blocks run, and what is noted of them."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.refusal: str | None = None  #: why all of its blocks are run
        self.parameters = [[p for module in modules for p in module._parameters.values() if p is not None]
                           for modules in chain.modules]
        self.noting = ExitStack()       #: while slots that the reference block fills are noted
        self.filled: list[Filled] = []  #: slots of caches, by the reference block
        #: by the place of a block: storages of what its slots of caches held before, as it was filled
        self.held: dict[int, list[int]] = {}
        self.arguments: dict[int, Any] = {}  #: of each member of the reference block: what it was called with
        self.begun: list[int] = []      #: of blocks in this forward pass: how many events came before
        self.has_skipped = False  #: or there are stand-ins for gradients of blocks that are to be


@contextmanager
def watching_reads(tell_of: Iterable[tuple[Chain, Callable[[str, str], object]]]) -> Iterator[None]:
    """A block in which what is given with a chain is called with path and name where its reference block, or the next
    one, which may become it, reads what the blocks differ in. Other threads may watch the same classes.
    """
    told: dict[tuple[type, str], dict[int, Callable[[Any], object]]] = {}
    for chain, tell in tell_of:
        for block in chain.blocks[chain.reference:ENDS[-1]]:
            below = dict(walk_modules(block))
            for path, name in chain.differing:
                told.setdefault((type(below[path]), name), {})[id(below[path])] = partial(_tell_read, tell, path, name)
    with ExitStack() as undo:
        for (cls, name), tell_at in told.items():
            undo.callback(watch_attribute(cls, name, tell_at))
        yield


def _tell_read(tell: Callable[[str, str], object], path: str, name: str, value: Any) -> None:
    if type(value) is not Index:
        tell(path, name)
