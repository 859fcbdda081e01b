"""Run a user's module without its data: every tensor it holds is swapped for a stand-in and put back afterwards."""
from __future__ import annotations

import functools
import operator
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from analyzer.meta.current_device import claimed_device
from analyzer.meta.intercept.interrupt import InterruptsHeld
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.reserved_touch import ReservedTouch
from analyzer.meta.state import MetaState, current
from analyzer.meta.tensor import MetaTensor
from analyzer.record.module_walk import REGISTRIES, walk_modules
from analyzer.replay.reserved import Reserved
from analyzer.replay.twin import LEAVES, Twin

from .stand_in import StandIns

Tensor = torch.Tensor
Triple = tuple[str, Tensor, Tensor]

_CONTAINERS = (list, dict, set, deque)
_EMPTY = frozenset({list, dict, set, OrderedDict})
_REGISTERED = frozenset(REGISTRIES)
_OBJECT_DEPTH = 2  # plain objects of a module's (a config, a cache) and what they hold; not the whole heap behind them


class Borrowed:
    """What stands for what while a module is borrowed.

    ``parameters`` and ``buffers`` list (path, stand-in, original) as ``named_parameters()`` and ``named_buffers()`` do:
    a tensor that the module holds under several names is listed once, under the first. ``modules`` maps id(module) to
    its first path, registered modules only, ``by_path`` the other way. ``root`` is the module to call: what a compiled
    one wraps. A buffer or another attribute is listed until the forward replaces it, which frees its memory.

    ``walked`` has those modules in order. Tensors of a block in ``reserved`` (by the id of the block) have places and
    no stand-ins, and are in none of these lists; `lend` makes them, should somebody need them. ``held`` are all
    parameters, and all buffers, in order: stand-ins and reserved blocks.
    """

    def __init__(self, root: nn.Module, stand_ins: StandIns) -> None:
        self.root = root
        self.parameters: list[Triple] = []
        self._buffers: list[tuple[str, weakref.ref[Tensor], Tensor] | Reserved] = []
        self.modules: dict[int, str] = {}
        self.by_path: dict[str, nn.Module] = {}
        self.walked: list[tuple[str, nn.Module]] = []
        self.reserved: dict[int, Reserved] = {}
        self._parameters: list[Tensor | Reserved] = []
        self.stand_ins = stand_ins
        self.lend: Callable[[Reserved], None] = _keep

    @property
    def buffers(self) -> list[Triple]:
        return [(entry[0], stand_in, entry[2]) for entry in self._buffers
                if not isinstance(entry, Reserved) and (stand_in := entry[1]()) is not None]

    @property
    def held(self) -> tuple[list[Tensor | Reserved], list[Tensor | Reserved]]:
        found = [entry if isinstance(entry, Reserved) else entry[1]() for entry in self._buffers]
        return self._parameters, [item for item in found if item is not None]

    def add(self, item: Reserved | tuple[str, Tensor, Tensor], is_buffer: bool) -> None:
        """List a parameter or buffer, or a block of them."""
        if isinstance(item, Reserved):
            self._buffers.append(item) if is_buffer else self._parameters.append(item)
        elif is_buffer:
            self._buffers.append((item[0], weakref.ref(item[1]), item[2]))
        else:
            self.parameters.append(item)
            self._parameters.append(item[1])

    @property
    def attributes(self) -> list[tuple[Tensor, Tensor]]:
        """Stand-ins and originals of tensors that are not registered, as long as nothing replaced them."""
        named = {id(stand_in) for group in (self.parameters, self.buffers) for _, stand_in, _ in group}
        return [(stand_in, original) for original, stand_in in self.stand_ins if id(stand_in) not in named]

    def assigned(self) -> Iterator[tuple[str, str, Tensor]]:
        """Attributes of registered modules that hold a tensor which is no stand-in: (path of the module, name, tensor)."""
        for path, module in self.root.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                for name, value in (*module.__dict__.items(), *module._parameters.items(), *module._buffers.items()):
                    if isinstance(value, Tensor) and self.original_of(value) is None:
                        yield path, name, value

    def lends_others(self, module: nn.Module) -> bool:
        """Whether ``module`` holds tensors in place of its own, as `torch.func.functional_call` gives them to it."""
        return id(module) in self.modules and any(t is not None and self.original_of(t) is None
                                                  for m in module.modules()
                                                  for t in (*m._parameters.values(), *m._buffers.values()))

    def stand_in_of(self, original: Tensor) -> Tensor | None:
        """The tensor that takes the place of ``original``, or None."""
        return self.stand_ins.of(original)

    def original_of(self, stand_in: Tensor) -> Tensor | None:
        """The tensor whose place ``stand_in`` takes, or None."""
        return self.stand_ins.original_of(stand_in)


def _keep(reserved: Reserved) -> None:
    """Nothing is lent any more."""


@contextmanager
def borrow_module(root: nn.Module, claim: torch.device | None = None, twins: Iterable[Twin] = ()) -> Iterator[Borrowed]:
    """Swap the tensors of ``root`` for stand-ins without data; on leaving, everything is as it was, also after an
    exception.

    To be entered inside an active `MetaTensorMode`. Stand-ins claim ``claim``, or without one the device of the
    original (the state's ``adopted_claim`` for CPU and meta); a model made under a mode and put on an accelerator keeps
    its claims. They are allocated in the order in which ``Module.to`` moves tensors: children first, then parameters,
    then buffers. Tied tensors stay tied and shared storages shared; those of a ``ScriptModule`` are swapped in C++. Put
    back: attributes and their containers, registered tensors and modules, hooks, training flags, classes of lazy
    modules, the random number generators, torch's grad mode and default dtype. For the tensors of ``twins`` only places
    are reserved; code that looks at them all the same raises ReservedTouch.

    >>> from analyzer.meta.mode import MetaTensorMode
    >>> layer = nn.Linear(2, 3)
    >>> with MetaTensorMode(), borrow_module(layer, torch.device("cuda")) as borrowed:
    ...     print(layer.weight.device, [path for path, _, _ in borrowed.parameters])
    cuda:0 ['weight', 'bias']
    >>> layer.weight.device
    device(type='cpu')
    """
    state = current()
    assert state is not None, "borrow_module() needs an active MetaTensorMode"
    loan = _Loan(root, state, None if claim is None else claimed_device(claim), twins)
    generators = save_generators()
    grad_enabled, default_dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        with without_modes():
            loan.take()
        yield loan.borrowed
    finally:
        with InterruptsHeld():
            torch.set_grad_enabled(grad_enabled)
            torch.set_default_dtype(default_dtype)
            loan.give_back()
            restore_generators(generators)


def is_placed(tensors: Iterable[Tensor | None]) -> bool:
    """Whether somebody put tensors made under a mode on an accelerator; then those that claim the host are there on
    purpose.
    """
    return any(
        t is not None and type(t) is not nn.Parameter and isinstance(t, MetaTensor) and t.device.type not in ("cpu",
                                                                                                              "meta")
        for t in tensors)


_Contents = tuple[dict[Any, Any], tuple[Any, ...], tuple[Any, ...]]  # a mapping, its keys and values


class _Loan:
    """One borrowing: what was swapped, and how to undo it."""

    def __init__(self, root: nn.Module, state: MetaState, claim: torch.device | None, twins: Iterable[Twin]) -> None:
        self.state, self.claim = state, claim
        root = uncompiled(root)
        self.twins = {id(twin.block): twin for twin in twins}
        self.inside = {id(module): twin for twin in self.twins.values() for module in twin.modules}
        lent = walk_modules(root, left_out=[twin.block for twin in self.twins.values()])
        self.stand_ins = StandIns(
            state, claim,
            is_placed(t for _, module in lent for held in (module._parameters, module._buffers) for t in held.values()))
        self.borrowed = Borrowed(root, self.stand_ins)
        self.borrowed.lend = self.lend
        self.undo: list[Callable[[], None] | _Contents] = []
        self.keys: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # modules of a class have the same ones
        self.empty: list[Any] = []              # containers that were empty
        self.seen: set[int] = set()             # modules, containers and objects already walked
        self.kept: list[Any] = []               # keeps what `seen` names by id alive

    def take(self) -> None:
        self._walk(self.borrowed.root)
        self._list()

    def give_back(self) -> None:
        while self.undo:
            last = self.undo.pop()
            if type(last) is not tuple:
                last()  # type: ignore[operator]
                continue
            contents, keys, values = last
            # some mappings refuse to be changed
            if tuple(contents) != keys or not all(map(operator.is_, contents.values(), values)):
                contents.clear()
                contents.update(zip(keys, values))
        for container in self.empty:
            if container:
                container.clear()
        self.empty.clear()
        for twin in self.twins.values():
            twin.put_back()
        self.borrowed.lend = _keep
        self.stand_ins.forget_storages()

    # -- walking -------------------------------------------------------------------------------------------------

    def _reserve(self, twin: Twin) -> None:
        assert self.claim is not None
        self.borrowed.reserved[id(twin.block)] = Reserved(twin, self.claim, self.state.space)
        self.state.reserved.update(dict.fromkeys(twin.tensors_and_storages(), twin.block))

    def lend(self, reserved: Reserved) -> None:
        """Make the stand-ins of a block for which there are places."""
        twin = reserved.twin
        del self.borrowed.reserved[id(twin.block)]
        for identity in twin.tensors_and_storages():
            del self.state.reserved[identity]
        for module in twin.modules:
            del self.inside[id(module)]
        self.stand_ins.places = reserved.places()
        with without_modes():
            self._walk(twin.block)
        reserved.stand_ins = [found for tensor in twin.parameters if (found := self.stand_ins.of(tensor)) is not None]

    def _walk(self, module: nn.Module) -> None:
        if id(module) in self.seen:
            return
        twin = self.inside.get(id(module))
        if twin is not None:
            if id(twin.block) not in self.borrowed.reserved:
                if module is not twin.block:
                    raise ReservedTouch(module)  # somebody else holds a part of a block
                self._reserve(twin)
            return
        self.seen.add(id(module))
        self.kept.append(module)
        if isinstance(module, torch.jit.ScriptModule):
            self._walk_scripted(module)
            return
        attributes = module.__dict__
        self._snapshot(attributes)
        self._keep_class(module)
        children = attributes["_modules"]
        if children:
            self._snapshot(children)
            for name, child in children.items():
                if child is not None:
                    inner = uncompiled(child)
                    if inner is not child:
                        children[name] = inner
                        self.state.assume(
                            f"{name}: a module under torch.compile is profiled as the module that it wraps")
                    self._walk(inner)
        for tensors, is_buffer in ((attributes["_parameters"], False), (attributes["_buffers"], True)):
            if tensors:
                self._snapshot(tensors)
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self.stand_ins.make(tensor, readable=is_buffer)
        if attributes.get("_compiled_call_impl") is not None:
            attributes["_compiled_call_impl"] = None
            self.state.assume(
                f"{type(module).__name__}: a module under torch.compile is profiled as the module that it wraps")
        self._walk_items(attributes, _REGISTERED, 0)

    def _walk_scripted(self, module: torch.jit.ScriptModule) -> None:
        """A module of TorchScript, whose tensors C++ holds."""
        held: Any = module._c
        for tensors, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in list(tensors.items()):
                if tensor is not None:
                    self.undo.append(functools.partial(held.setattr, name, tensor))
                    held.setattr(name, self.stand_ins.make(tensor, readable=is_buffer))
        for child in module.children():
            self._walk(child)

    def _snapshot(self, contents: dict[Any, Any]) -> None:
        keys = tuple(contents)
        self.undo.append((contents, self.keys.setdefault(keys, keys), tuple(contents.values())))

    def _keep_class(self, module: nn.Module) -> None:
        kind = type(module)
        if issubclass(kind, nn.modules.lazy.LazyModuleMixin):  # becomes another class in its first forward

            def put_back() -> None:
                module.__class__ = kind

            self.undo.append(put_back)

    def _walk_items(self, contents: dict[Any, Any], skipped: frozenset[str], depth: int) -> None:
        changes: list[tuple[Any, Any]] = []
        for key, value in contents.items():
            kind = type(value)
            if kind in LEAVES or key in skipped:
                continue
            if kind in _EMPTY and not value:  # most of what a module has: hooks that nobody registered
                self.empty.append(value)
                continue
            new = self._replace(value, depth)
            if new is not value:
                changes.append((key, new))
        if changes:
            contents.update(changes)

    def _replace(self, value: Any, depth: int) -> Any:
        """``value`` with its tensors replaced: containers in place, tuples and weak references as new objects."""
        if isinstance(value, Tensor):
            return self.stand_ins.make(value, readable=True, constant=True)
        if isinstance(value, nn.Module):
            inner = uncompiled(value)
            self._walk(inner)
            return inner
        if isinstance(value, _CONTAINERS):
            self._replace_in(value, depth)
            return value
        if type(value) is tuple:
            new = tuple(v if type(v) in LEAVES else self._replace(v, depth) for v in value)
            return value if all(a is b for a, b in zip(new, value)) else new
        if type(value) is weakref.ref:
            target = value()
            new_target = self.stand_ins.of(target) if isinstance(target, Tensor) else None
            return value if new_target is None else weakref.ref(new_target)
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and attributes and depth < _OBJECT_DEPTH and not _is_foreign(value) and id(
                value) not in self.seen:
            self.seen.add(id(value))
            self.kept.append(value)
            self._snapshot(attributes)
            self._walk_items(attributes, frozenset(), depth + 1)
        return value

    def _replace_in(self, container: Any, depth: int) -> None:
        if id(container) in self.seen:
            return
        self.seen.add(id(container))
        self.kept.append(container)
        if not container:
            self.empty.append(container)
        elif isinstance(container, dict):
            self._snapshot(container)
            self._walk_items(container, frozenset(), depth)
        elif isinstance(container, set):
            members = set(container)

            def put_back_set() -> None:
                container.clear()
                container.update(members)

            self.undo.append(put_back_set)
        else:
            items = list(container)

            def put_back() -> None:
                container.clear()
                container.extend(items)

            self.undo.append(put_back)
            for i, value in enumerate(items):
                if type(value) not in LEAVES:
                    new = self._replace(value, depth)
                    if new is not value:
                        container[i] = new

    # -- names ---------------------------------------------------------------------------------------------------

    def _list(self) -> None:
        """Fill the lists of the result, in the order and under the names of ``named_parameters()``."""
        borrowed, original_of = self.borrowed, self.stand_ins.original_of
        named: set[int] = set()
        borrowed.walked = walk_modules(borrowed.root)
        for path, module in borrowed.walked:
            if id(module) in self.inside:
                if id(module) in borrowed.reserved:
                    for is_buffer in (False, True):
                        borrowed.add(borrowed.reserved[id(module)], is_buffer)
                continue
            borrowed.modules[id(module)] = path
            borrowed.by_path[path] = module
            prefix = path + "." if path else ""
            for tensors, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for name, stand_in in tensors.items():
                    if stand_in is not None and id(stand_in) not in named:
                        named.add(id(stand_in))
                        original = original_of(stand_in)
                        assert original is not None
                        borrowed.add((prefix + name, stand_in, original), is_buffer)


def uncompiled(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile(module)``."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None:
        while isinstance(module, eval_frame.OptimizedModule):
            module = module._orig_mod
    return module


def _is_foreign(value: Any) -> bool:
    """Whether an object is none of the model's: functions, classes, torch's own."""
    kind = type(value)
    return callable(value) and not hasattr(kind, "__call__") or isinstance(value, type) or kind.__module__.startswith(
        ("torch.", "types"))


def save_generators() -> tuple[Any, Any, Any]:
    """The states of the host's random number generators: torch's, Python's and numpy's, where it is imported."""
    numpy = sys.modules.get("numpy.random")
    with without_modes():
        return torch.default_generator.get_state(), random.getstate(), None if numpy is None else numpy.get_state()


def restore_generators(saved: tuple[Any, Any, Any]) -> None:
    """Put back what `save_generators` found."""
    with without_modes():
        torch.default_generator.set_state(saved[0])
    random.setstate(saved[1])
    if saved[2] is not None:
        sys.modules["numpy.random"].set_state(saved[2])
