"""Blocks that are made like an earlier one, found before the model runs: what is known of the first need not be looked
up again.
"""
from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, ValuesView
from itertools import chain, compress, islice
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from analyzer.memory.allocator_replay import Instruction, Opcode
from analyzer.meta.plain_type import LEAVES
from analyzer.record.module_walk import REGISTRIES

from .block_key import CONTAINERS, getter
from .match import Mismatch
from .state_value import tensor_attributes

_MOST = 2  # kinds that look alike, with which a block is compared: each kind more costs every other block a comparison
_DEEPEST = 16  # a module may hold itself
_KINDS = (nn.Parameter, torch.Tensor)


class HeldTensor(NamedTuple):
    """A parameter or buffer of a block: the place of its module in the block, its name there, and its specs. It fills
    its storage.
    """

    module: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    numel: int
    nbytes: int
    attributes: tuple[tuple[str, Any], ...] | None


def _storages_of(tensors: Sequence[Any], kind: type) -> list[Any] | None:
    """The storages of strided tensors of a class that fill them; None where something else about them matters."""
    if any([type(t) is not kind for t in tensors]) or any([
            t.layout is not torch.strided or not t.is_contiguous() or t.storage_offset() or t._backward_hooks
            for t in tensors
    ]):
        return None
    if any([t.__dict__ and tensor_attributes(t) is None for t in tensors]):
        return None
    if kind is nn.Parameter and any([t._post_accumulate_grad_hooks for t in tensors]):
        return None
    storages = [t.untyped_storage() for t in tensors]
    return None if any([type(storage) is not torch.UntypedStorage for storage in storages]) else storages


class Layout:
    """What one module of a prototype is, to be compared with others."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.type = module, type(module)
        if isinstance(module,
                      (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)) or "_orig_mod" in module._modules:
            raise Mismatch("it is compiled, scripted or lazy")
        if module._buffers and not type(module).extra_repr.__module__.startswith("torch.nn."):
            raise Mismatch("its description may tell the contents of its buffers")
        contents = module.__dict__
        self.keys, self.values = tuple(contents), tuple(contents.values())
        self.plain: list[int] = []   # places of what may differ: numbers, names and the like
        self.empty: list[int] = []   # places of containers that are empty, each module's own
        for at, (name, value) in enumerate(contents.items()):
            kind = type(value)
            if kind in CONTAINERS and not value:
                self.empty.append(at)
            elif name in REGISTRIES:
                continue
            elif name != "training" and _is_plain(value):
                self.plain.append(at)
            elif kind is tuple or isinstance(
                    value, (torch.Tensor, nn.Module)) or kind.__module__ == "weakref" or name == "_compiled_call_impl":
                raise Mismatch("an attribute is an object of its own")
        #: registries that hold something, and under which names
        self.filled = [(name, tuple(contents[name])) for name in REGISTRIES if contents[name]]

    def is_unchanged(self) -> bool:
        """Whether the module's settings are as they were."""
        contents = self.module.__dict__
        return tuple(contents) == self.keys and all(map(
            operator.is_, contents.values(), self.values)) and not any([self.values[at] for at in self.empty])


def _is_plain(value: Any) -> bool:
    return type(value) in LEAVES or type(value) is tuple and all([type(x) in LEAVES for x in value])


def _are_equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b) and (type(a) is not tuple or list(map(type, a)) == list(map(type, b)))


class Prototype:
    """A block that later ones are compared with.

    What its modules hold, attributes and then registered things, is also kept in one list (``found``), in which each
    thing has a place.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.layouts: list[Layout] = []         #: of its modules, each before those that it holds
        self.children: list[list[int]] = []     #: of each, the places of those that it holds
        self.found: list[Any] = []
        self.is_odd = False
        self._instructions: list[Instruction] = []

    def instructions(self, rounded_bytes: Callable[[int], int]) -> list[Instruction]:
        """What places its tensors in a memory that rounds so (`memory.allocator_replay`); a slot is a place in
        ``tensors``.
        """
        if not self._instructions:
            self._instructions = [(Opcode.ALLOCATE, at, rounded_bytes(self.tensors[at].nbytes), self.tensors[at].nbytes)
                          for at in self._order(0)]
        return self._instructions

    def _look(self) -> None:
        """Describe the block, when the first other one is there to compare with."""
        seen: set[int] = set()
        waiting: list[tuple[nn.Module, list[int]]] = [(self.block, [])]
        held: tuple[list[HeldTensor], list[HeldTensor]] = ([], [])
        empty: list[int] = []
        own: list[int] = []
        self.plain: dict[int, tuple[int, str]] = {}  # place of a module and name, by place in `found`
        self.registered: list[int] = []              # places in `found` of tensors and modules
        while waiting:
            module, above = waiting.pop()
            if id(module) in seen:
                raise Mismatch("it holds a module in two places")
            seen.add(id(module))
            index, base = len(self.layouts), len(self.found)
            above.append(index)
            layout = Layout(module)
            self.layouts.append(layout)
            self.children.append([])
            for found, registry, kind in zip(held, (module._parameters, module._buffers), _KINDS):
                tensors: dict[str,
                              Any] = {name: t for name, t in cast("dict[str, Any]", registry).items() if t is not None}
                if _storages_of(list(tensors.values()), kind) is None or any(
                    [t.untyped_storage().nbytes() != t.numel() * t.itemsize or not t.numel()
                     for t in tensors.values()]):
                    raise Mismatch("a tensor is a view, empty, or has hooks")
                found += [
                    HeldTensor(index, name, t.shape, t.dtype, t.requires_grad, t.numel(),
                               t.numel() * t.itemsize, tensor_attributes(t)) for name, t in tensors.items()
                ]
            waiting += [(child, self.children[index]) for child in reversed(module._modules.values())
                        if child is not None]
            empty += [base + at for at in layout.empty]
            own += [base + layout.keys.index(name) for name, _ in layout.filled]
            self.plain.update((base + at, (index, layout.keys[at])) for at in layout.plain)
            self.found += layout.values
            for name, _ in layout.filled:
                for thing in module.__dict__[name].values():
                    if thing is not None:
                        self.registered.append(len(self.found))
                    self.found.append(thing)
        self.parameters, self.buffers = held
        self.tensors = [*self.parameters, *self.buffers]
        self.leaves = sum(not children for children in self.children)
        self.own = tuple(sorted([*empty, *own, *self.registered]))  # places of what each block has of its own
        self.get_empty, self.get_registered = getter(empty), getter(self.registered)
        self.empty_types = list(map(type, self.get_empty(self.found)))
        self.places = range(len(self.found))

    def _order(self, index: int) -> list[int]:
        """Places in ``tensors``, in the order in which ``Module.to`` moves them: those of the modules below, then
        parameters, then buffers.
        """
        order = [at for child in self.children[index] for at in self._order(child)]
        return order + [at for at, spec in enumerate(self.tensors) if spec.module == index]

    def is_unchanged(self) -> bool:
        """Whether the settings of the block are those that others were compared with."""
        return all([layout.is_unchanged() for layout in self.layouts])

    def match(self, block: nn.Module) -> Isomorph | None:
        """``block`` as an isomorph of this one, if it is."""
        if not self.layouts and not self.is_odd:
            try:
                self._look()
            except Mismatch:
                self.is_odd = True
        isomorph = Isomorph(self)
        return isomorph if not self.is_odd and isomorph.adopt(block) else None


class Isomorph:
    """A block like the first of its prototype: the same classes, settings, specs, and whatever objects they share."""

    def __init__(self, prototype: Prototype) -> None:
        self.prototype = prototype
        self.modules: list[nn.Module] = []           #: each before those that it holds
        self.parameters: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self.storages: list[int] = []                #: addresses of what its tensors share
        #: places and names of settings that have other values than the first's
        self.differing: set[tuple[int, str]] = set()
        self.is_settled = False                      #: its modules change no more
        self._found: list[Any] = []                  #: what its modules hold, as `Prototype.found`
        self._contents: list[dict[str, Any]] = []    # attributes of its modules
        self._views: list[ValuesView[Any]] = []      # what is in them and in registries now

    @property
    def block(self) -> nn.Module:
        """The block itself."""
        return self.modules[0]

    def tensors_and_storages(self) -> Iterator[int]:
        """The ids of its tensors, and the addresses of their storages."""
        return chain(map(id, self.parameters), map(id, self.buffers), self.storages)

    def identities(self) -> Iterator[int]:
        """These and the ids of its modules."""
        return chain(map(id, self.modules), self.tensors_and_storages())

    def adopt(self, block: nn.Module) -> bool:
        """Take ``block`` in; False where it is another kind."""
        prototype, modules, found = self.prototype, self.modules, self._found
        layouts, count = prototype.layouts, len(prototype.layouts)
        waiting = [block]
        targets: dict[str, list[Any]] = dict(zip(REGISTRIES, (self.parameters, self.buffers, waiting)))
        while waiting:
            module = waiting.pop()
            if len(modules) == count:
                return False
            layout, contents = layouts[len(modules)], module.__dict__
            if type(module) is not layout.type or tuple(contents) != layout.keys:
                return False
            modules.append(module)
            self._contents.append(contents)
            self._views.append(contents.values())
            found += contents.values()
            for name, names in layout.filled:
                held = contents[name]
                if tuple(held) != names:
                    return False
                theirs = held.values()
                self._views.append(theirs)
                found += theirs
                targets[name] += [x for x in (theirs if name != "_modules" else reversed(theirs)) if x is not None]
        return len(modules) == count and self._holds_the_same() and self._fits()

    def _holds_the_same(self) -> bool:
        """Whether all that is held is the first's but for tensors, modules, empty containers, and settings that may
        differ: these are noted.
        """
        prototype, found = self.prototype, self._found
        if len(found) != len(prototype.found) or any([x is None for x in prototype.get_registered(found)]):
            return False
        empty = prototype.get_empty(found)
        if any(empty) or list(map(type, empty)) != prototype.empty_types:
            return False
        apart = tuple(compress(prototype.places, map(operator.is_not, found, prototype.found)))
        if apart == prototype.own:
            return True
        for at in set(apart).difference(prototype.own):
            if at not in prototype.plain or not _is_plain(found[at]):
                return False
            if not _are_equal(found[at], prototype.found[at]):
                self.differing.add(prototype.plain[at])
        return True

    def _fits(self) -> bool:
        """Whether the tensors have the specs of the first's."""
        prototype = self.prototype
        for tensors, specs, kind in zip((self.parameters, self.buffers), (prototype.parameters, prototype.buffers),
                                        _KINDS):
            storages = _storages_of(tensors, kind)
            if storages is None or [
                    (t.shape, t.dtype, t.requires_grad, s.nbytes(), tensor_attributes(t) if t.__dict__ else ())
                    for t, s in zip(tensors, storages)
            ] != [(spec.shape, spec.dtype, spec.requires_grad, spec.nbytes, spec.attributes) for spec in specs]:
                return False
            self.storages += [storage._cdata for storage in storages]
        return True

    def is_unchanged(self) -> bool:
        """Whether its modules hold what they held."""
        return (self.holds_the_same() and not any(self.prototype.get_empty(self._found)) and all(
            [tuple(contents) == layout.keys for contents, layout in zip(self._contents, self.prototype.layouts)]))

    def holds_the_same(self) -> bool:
        """Whether its modules hold the things that they held, under whatever names."""
        return (all([module.__dict__ is contents for module, contents in zip(self.modules, self._contents)])
                and sum(map(len, self._views)) == len(self._found)
                and all(map(operator.is_, chain.from_iterable(self._views), self._found)))

    def put_back(self) -> None:
        """Give its modules what they held."""
        if self.is_settled or self.is_unchanged():
            return
        for container in self.prototype.get_empty(self._found):
            if container:
                container.clear()
        values = iter(self._found)
        for layout, module, contents in zip(self.prototype.layouts, self.modules, self._contents):
            own = dict(zip(layout.keys, islice(values, len(layout.keys))))
            for name, names in layout.filled:
                held = list(islice(values, len(names)))
                own[name].clear()
                own[name].update(zip(names, held))
            contents.clear()
            contents.update(own)
            object.__setattr__(module, "__dict__", contents)


def _ends(block: nn.Module) -> list[Hashable]:
    """What most often tells blocks of one class apart: how many modules they hold, and the first tensors of the first
    and of the last of these.
    """
    children = [child for child in block._modules.values() if child is not None]
    found: list[Hashable] = [len(children)]
    for module in (children[0], children[-1]) if children else ():
        inside: list[nn.Module | None] = [module]
        while (last := inside[-1]) is not None and last._modules and len(inside) < _DEEPEST:
            inside.append(next(iter(last._modules.values())))
        held = None if last is None else next(chain(last._parameters.values(), last._buffers.values()), None)
        found.append(None if held is None or is_lazy(held) else held.shape)
    return found


def find_isomorphs(root: nn.Module, is_excluded: Callable[[nn.Module], bool], pays: Callable[[int, int],
                                                                                         bool]) -> list[Isomorph]:
    """The isomorphs below ``root``, none of them in another; modules, tensors and storages of an isomorph are no one
    else's.

    ``is_excluded`` tells which modules are no blocks, ``pays`` whether so many blocks of so many leaves are worth it.
    """
    prototypes: dict[Hashable, list[Prototype]] = {}
    latest: dict[type, Prototype] = {}  # the one that a block of the class was like last: most often the next is too
    isomorphs: list[Isomorph] = []
    found: list[int] = []  # each module, tensor and storage, as often as it is held
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        # a list of modules is not
        is_called = not isinstance(module, torch.jit.ScriptModule) and type(module).forward is not nn.Module.forward
        if len(module._modules) > 1 and is_called and module is not root and id(
                module) not in seen and not is_excluded(module):
            likely = latest.get(type(module))
            isomorph = None if likely is None else likely.match(module)
            if isomorph is None:
                kinds = prototypes.setdefault((type(module), *_ends(module)), [])
                isomorph = next((isomorph for prototype in kinds
                                 if prototype is not likely and (isomorph := prototype.match(module)) is not None),
                                None)
            if isomorph is not None:
                latest[type(module)] = isomorph.prototype
                isomorphs.append(isomorph)
                found += isomorph.identities()
                continue
            if len(kinds) < _MOST:
                kinds.append(Prototype(module))
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
    shared = {identity for identity, times in Counter(found).items() if times > 1}
    alone = [isomorph for isomorph in isomorphs if shared.isdisjoint(isomorph.identities())]
    counts = Counter(id(isomorph.prototype) for isomorph in alone)
    return [isomorph for isomorph in alone if pays(counts[id(isomorph.prototype)] + 1, isomorph.prototype.leaves)]
