"""Blocks that are made like an earlier one, found before the model runs: what is known of the first need not be looked up again."""
from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .block_key import CONTAINERS, getter

_MOST = 2  # kinds that look alike, with which a block is compared
_LEAVES = frozenset({str, int, float, bool, type(None), complex, bytes, type, type(len), type(lambda: 0), torch.dtype, torch.device, torch.Size})
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class HeldTensor(NamedTuple):
    """A parameter or buffer of a block: the place of its module in the block, its name there, and its specs. It fills its storage."""

    module: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    numel: int
    nbytes: int

    def storage_of(self, tensor: Any, kind: Any) -> int | None:
        """The address of the storage of ``tensor``; None where it has other specs, or something about it besides these matters."""
        if (type(tensor) is not kind or tensor.layout is not torch.strided or tensor.shape != self.shape or tensor.dtype is not self.dtype
                or tensor.requires_grad is not self.requires_grad or not tensor.is_contiguous() or tensor.storage_offset()
                or tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
            return None
        storage: Any = tensor.untyped_storage()
        return storage._cdata if type(storage) is torch.UntypedStorage and storage.nbytes() == self.nbytes else None


class _Odd(Exception):
    """A module that only its own run can tell of."""


class Layout:
    """What one module of a pattern is, to be compared with others."""

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module, self.type = module, type(module)
        if isinstance(module, (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)):
            raise _Odd
        if module._buffers and not type(module).extra_repr.__module__.startswith("torch.nn."):
            raise _Odd  # it may tell the contents of its buffers
        contents = module.__dict__
        self.keys = tuple(contents)
        plain, shared, empty = [], [], []
        for at, (name, value) in enumerate(contents.items()):
            kind = type(value)
            if name in _REGISTRIES:
                continue
            if kind in CONTAINERS and not value:
                empty.append(at)
            elif name != "training" and (kind in _LEAVES or kind is tuple and all(type(x) in _LEAVES for x in value)):
                plain.append(at)
            elif kind is tuple or isinstance(value, (torch.Tensor, nn.Module)) or kind.__module__ == "weakref" or name == "_compiled_call_impl":
                raise _Odd  # what a borrowed module holds in its place
            else:
                shared.append(at)
        values = tuple(contents.values())
        self.plain_names = [self.keys[at] for at in plain]
        self.get_plain, self.get_shared, self.get_empty = getter(plain), getter(shared), getter(empty)
        self.plain, self.shared = self.get_plain(values), self.get_shared(values)
        self.empty_types = tuple(map(type, self.get_empty(values)))
        self.get_registries = operator.itemgetter(*map(self.keys.index, _REGISTRIES))
        self.parameters = _describe(module._parameters, index, nn.Parameter)
        self.buffers = _describe(module._buffers, index, torch.Tensor)


def _describe(held: Mapping[str, Any], index: int, kind: Any) -> list[tuple[str, HeldTensor | None]]:
    found: list[tuple[str, HeldTensor | None]] = []
    for name, t in held.items():
        spec = None
        if t is not None:
            if type(t) is not kind or not t.numel():
                raise _Odd
            spec = HeldTensor(index, name, t.shape, t.dtype, t.requires_grad, t.numel(), t.numel() * t.itemsize)
            if spec.storage_of(t, kind) is None:
                raise _Odd
        found.append((name, spec))
    return found


class Pattern:
    """A block that later ones are compared with."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.layouts: list[Layout] = []      #: of its modules, each before those that it holds
        self.children: list[list[tuple[str, int | None]]] = []  #: of each, names and places of those that it holds
        self.is_odd = False

    def _look(self) -> None:
        """Describe the block, when the first other one is there to compare with."""
        seen: set[int] = set()
        waiting: list[tuple[nn.Module, list[tuple[str, int | None]], int]] = [(self.block, [], 0)]
        while waiting:
            module, above, position = waiting.pop()
            if id(module) in seen:
                raise _Odd  # a module in two places
            seen.add(id(module))
            index = len(self.layouts)
            if above:
                above[position] = (above[position][0], index)
            children: list[tuple[str, int | None]] = [(name, None) for name in module._modules]
            self.layouts.append(Layout(module, index))
            self.children.append(children)
            waiting += [(child, children, at) for at, child in reversed(list(enumerate(module._modules.values()))) if child is not None]
        self.parameters = [spec for layout in self.layouts for _, spec in layout.parameters if spec is not None]
        self.buffers = [spec for layout in self.layouts for _, spec in layout.buffers if spec is not None]
        self.tensors = [*self.parameters, *self.buffers]
        self.order = self._order(0)
        self.leaves = sum(not children for children in self.children)

    def _order(self, index: int) -> list[int]:
        """Places in ``tensors``, in the order in which ``Module.to`` moves them: those of the modules below, then parameters, then buffers."""
        order = [at for _, child in self.children[index] if child is not None for at in self._order(child)]
        return order + [at for at, spec in enumerate(self.tensors) if spec.module == index]

    def match(self, block: nn.Module) -> Twin | None:
        """``block`` as a twin of this one, if it is."""
        if not self.layouts and not self.is_odd:
            try:
                self._look()
            except _Odd:
                self.is_odd = True
        if self.is_odd:
            return None
        twin = Twin(self)
        waiting = [(block, 0)]
        while waiting:
            module, index = waiting.pop()
            below = twin.take(module, index)
            if below is None:
                return None
            waiting += below
        return twin


class Twin:
    """A block like the first of its pattern: the same classes, settings, specs, and whatever objects they share."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.modules: list[nn.Module] = []           #: each before those that it holds
        self.parameters: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self.storages: list[int] = []                #: addresses of what its tensors share
        self.differing: set[tuple[int, str]] = set()  #: places and names of plain attributes that have other values than the first's
        self._found: list[list[Any]] = []            #: of each module: what its attributes and registries held
        self._empty: list[Any] = []                  #: containers that were empty

    @property
    def block(self) -> nn.Module:
        return self.modules[0]

    def identities(self) -> Iterator[int]:
        """The ids of its modules and tensors, and the addresses of the storages."""
        return chain(map(id, self.modules), map(id, self.parameters), map(id, self.buffers), self.storages)

    def take(self, module: nn.Module, index: int) -> list[tuple[nn.Module, int]] | None:
        """Take a module in as number ``index``; the modules that it holds and their places, the last first. None where it is another kind."""
        layout = self.pattern.layouts[index]
        contents = module.__dict__
        values = list(contents.values())
        if type(module) is not layout.type or tuple(contents) != layout.keys or not all(map(operator.is_, layout.get_shared(values), layout.shared)):
            return None
        empty = layout.get_empty(values)
        if any(empty) or tuple(map(type, empty)) != layout.empty_types:
            return None
        plain = layout.get_plain(values)
        if not all(map(operator.is_, plain, layout.plain)):
            for name, mine, theirs in zip(layout.plain_names, plain, layout.plain):
                if mine is not theirs:
                    if type(mine) not in _LEAVES and not (type(mine) is tuple and all(type(x) in _LEAVES for x in mine)):
                        return None
                    if type(mine) is not type(theirs) or mine != theirs or type(mine) is tuple and tuple(map(type, mine)) != tuple(map(type, theirs)):
                        self.differing.add((index, name))
        parameters, buffers, children = layout.get_registries(values)
        for held, specs, kind, taken in ((parameters, layout.parameters, nn.Parameter, self.parameters),
                                         (buffers, layout.buffers, torch.Tensor, self.buffers)):
            if len(held) != len(specs):
                return None
            for (name, tensor), (its_name, spec) in zip(held.items(), specs):
                if name != its_name or (tensor is None) != (spec is None):
                    return None
                if spec is not None:
                    storage = spec.storage_of(tensor, kind)
                    if storage is None:
                        return None
                    taken.append(tensor)
                    self.storages.append(storage)
            values += held.values()
        below = self.pattern.children[index]
        if len(children) != len(below):
            return None
        found: list[tuple[nn.Module, int]] = []
        for (name, child), (its_name, place) in zip(children.items(), below):
            if name != its_name or (child is None) != (place is None):
                return None
            if place is not None:
                found.append((child, place))
        values += children.values()
        self.modules.append(module)
        self._found.append(values)
        self._empty += empty
        found.reverse()
        return found

    def is_unchanged(self) -> bool:
        """Whether its modules hold what they held."""
        if any(self._empty):
            return False
        for layout, module, found in zip(self.pattern.layouts, self.modules, self._found):
            contents = module.__dict__
            now = list(contents.values())
            if tuple(contents) != layout.keys:
                return False
            for held in layout.get_registries(now):
                now += held.values()
            if len(now) != len(found) or not all(map(operator.is_, now, found)):
                return False
        return True

    def put_back(self) -> None:
        """Give its modules what they held."""
        if self.is_unchanged():
            return
        for container in self._empty:
            if container:
                container.clear()
        for index, (layout, module, found) in enumerate(zip(self.pattern.layouts, self.modules, self._found)):
            values = iter(found)
            own = dict(zip(layout.keys, values))
            names = ([name for name, _ in layout.parameters], [name for name, _ in layout.buffers], [name for name, _ in self.pattern.children[index]])
            for registry, held in zip(_REGISTRIES, names):
                own[registry].clear()
                own[registry].update(zip(held, values))
            module.__dict__.clear()
            module.__dict__.update(own)


def _ends(block: nn.Module) -> list[Hashable]:
    """What most often tells blocks of one class apart: the first tensors of the first and of the last module in it."""
    found: list[Hashable] = [len(block._modules)]
    for at in (0, -1):
        module: nn.Module | None = block
        while module is not None and module._modules:
            module = list(module._modules.values())[at]
        held = None if module is None else next(chain(module._parameters.values(), module._buffers.values()), None)
        found.append(None if held is None or is_lazy(held) else held.shape)
    return found


def find_twins(root: nn.Module, is_excluded: Callable[[nn.Module], bool], pays: Callable[[int, int], bool]) -> list[Twin]:
    """The twins below ``root``, none of them in another; modules, tensors and storages of a twin are no one else's.

    ``is_excluded`` tells which modules are no blocks, ``pays`` whether so many blocks of so many leaves are worth it.
    """
    patterns: dict[Hashable, list[Pattern]] = {}
    twins: list[Twin] = []
    found: list[int] = []  # each module, tensor and storage, as often as it is held
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if len(module._modules) > 1 and module is not root and id(module) not in seen and not is_excluded(module):
            kinds = patterns.setdefault((type(module), *_ends(module)), [])
            twin = next((twin for pattern in kinds if (twin := pattern.match(module)) is not None), None)
            if twin is not None:
                twins.append(twin)
                found += twin.identities()
                continue
            if len(kinds) < _MOST:
                kinds.append(Pattern(module))
        found.append(id(module))
        if id(module) in seen:
            continue
        seen.add(id(module))
        for tensor in chain(module._parameters.values(), module._buffers.values()):
            if tensor is not None:
                found.append(id(tensor))
                if type(tensor) in (nn.Parameter, torch.Tensor) and tensor.layout is torch.strided:
                    found.append(tensor.untyped_storage()._cdata)
        waiting += [child for child in reversed(list(module._modules.values())) if child is not None]
    times = Counter(found)
    alone = [twin for twin in twins if all([times[x] == 1 for x in twin.identities()])]
    counts = Counter(id(twin.pattern) for twin in alone)
    return [twin for twin in alone if pays(counts[id(twin.pattern)] + 1, twin.pattern.leaves)]
