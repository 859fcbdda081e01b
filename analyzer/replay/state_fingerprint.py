"""What the code of modules could read or change besides its arguments: attributes, containers, objects, tensors' own
attributes, globals, closures, defaults, class attributes and random generators.
"""
from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.value.known_value import Watched

from .reachable_code import CodeSearch
from .state_record import StateRecord
from .state_value import PLAIN, describe_tensor_state, list_reached, look_up, read_generators, refill_environment

_METHODS = (FunctionType, staticmethod, classmethod, property)
_NOT_CAPTURED = PLAIN.union(_METHODS)


class CodeRecord(StateRecord):
    """What the code of modules of some classes, and functions, reach outside of the modules; ``inside`` are the modules
    by id. Where it is not their ``own`` state that is asked for, code that leads to others cannot be known.
    """

    def __init__(self, classes: Iterable[type], functions: Iterable[Any], inside: set[int], own: bool,
                 seen: set[int] | None = None, keeps: bool = False) -> None:
        super().__init__(keeps, seen)
        self._inside, self._own = inside, own
        self.search = CodeSearch()
        self.follow(classes, functions)

    def follow(self, classes: Iterable[type], functions: Iterable[Any]) -> None:
        """Capture what the code of modules of ``classes``, and ``functions``, reach that was not captured yet."""
        reachable = self.search.find(classes, functions)
        self.give_up(reachable.unreadable)
        if reachable.reads_identities and not self._own:  # those of other modules are others
            self.give_up("its code asks for id")
        if reachable.reads_environment:
            self.add_object(os.environ, os.environ.copy, refill_environment)
        self.classes += [(cls, vars(cls), frozenset(vars(cls))) for cls in reachable.classes]
        self._capture_classes(reachable.classes)
        self._capture_places(reachable.places)

    def _capture_classes(self, classes: Iterable[type]) -> None:
        for cls in classes:
            contents = vars(cls)
            names = [name for name in contents if name[:2] != "__"]
            found = [contents[name] for name in names]
            self.rows.append((cls, contents, names, self.let_die(found)))
            for name, value in zip(names, found):
                if type(value) not in _NOT_CAPTURED and not isinstance(value, _METHODS):
                    self._capture_reached(name, value)

    def _capture_places(self, places: Sequence[tuple[Any, str]]) -> None:
        rows: dict[int, tuple[Any, Any, list[str], list[Any]]] = {}  # what is in one namespace is compared together
        for holder, name in places:
            value = look_up(holder, name)
            if type(holder) is dict:
                _, _, names, found = rows.setdefault(id(holder), (holder, holder, [], []))
                names.append(name)
                found += self.let_die((value, ))
            else:
                self.add_places(holder, (name, ), (value, ))
            if type(value) not in PLAIN:
                self._capture_reached(name, value)
        self.rows += rows.values()

    def _capture_reached(self, name: str, value: Any) -> None:
        """What reachable code finds under a name."""
        if not self._own and not all(list_reached(value, self._inside)):
            self.give_up(f"its code names {name or 'a variable'}, which leads to modules or tensors outside of it")
        if isinstance(value, nn.Module):
            for module in value.modules():
                self.capture_module(module, id(module) not in self._inside)
        self.capture(value)


class StateFingerprint(StateRecord):
    """The state of ``modules`` and of what their code and ``functions`` reach, to be compared and put back later.

    ``unreadable`` says what can be neither compared nor put back: an iterator, a variable of a thread or context, code
    that asks for what no comparison knows. ``own`` tells whether the modules' attributes and tensors, and
    the generators of random numbers, are part of it: then known contents that are read and written are state as well.
    Tensors are kept alive, to be put back, where it ``keeps`` them; elsewhere they die as if there were no fingerprint.
    ``code`` is that of another fingerprint of the same modules, taken just now.
    """

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any] = (), own: bool = True,
                 values: Any = (), keeps: bool = False, code: CodeRecord | None = None) -> None:
        super().__init__(keeps)
        modules = list(modules)
        self.functions += functions
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                self.give_up("it holds a module of TorchScript, which is compiled anew as it runs")
            else:
                self.capture_module(module, own)
        # what is not the modules' own can be part of another fingerprint, and is whole by itself
        self.code = code = code or CodeRecord(
            {type(m) for m in modules if not isinstance(m, torch.jit.ScriptModule)}, self.functions,
            set(map(id, modules)), own, self.seen if own else None)
        self.add(code)
        for value in self.functions:
            self.capture(value)
        self.capture(values)
        self._kept = [tensor() for tensor, _ in self.tensors] if keeps else []
        self._contents = _watch_contents([tensor for tensor, _ in self.tensors]) if own else []
        self._random = read_generators() if own else None
        self.seen.clear()

    def change(self) -> str | None:
        """What changed since; None where nothing did."""
        for what, _, _ in self.list_changes():
            return what
        if any([(alive := tensor()) is not None and describe_tensor_state(alive) != state
                for tensor, state in self.tensors]):
            return "a tensor's attribute, hook, storage or requires_grad"
        if any([watched.was_read and ((storage := _storage_of(tensor())) is None or storage.known is not watched)
                for tensor, watched in self._contents]):
            return "contents of a tensor, which it reads"
        is_random = self._random is not None and read_generators() != self._random
        return "the host's generators of random numbers" if is_random else None

    def is_same(self) -> bool:
        """Whether all of it can be read and is what it was."""
        return self.unreadable is None and self.change() is None


def _watch_contents(tensors: Iterable[weakref.ref[torch.Tensor]]) -> list[tuple[weakref.ref[torch.Tensor], Watched]]:
    """See from now on whether known contents are read."""
    found: list[tuple[weakref.ref[torch.Tensor], Watched]] = []
    for ref in tensors:
        storage = _storage_of(ref())
        if storage is not None and storage.known is not None:
            watched = storage.known = Watched(storage.known)
            found.append((ref, watched))
    return found


def _storage_of(tensor: torch.Tensor | None) -> MetaStorage | None:
    storage = None if tensor is None or tensor.layout is not torch.strided else find_storage(tensor)
    return storage if isinstance(storage, MetaStorage) else None
