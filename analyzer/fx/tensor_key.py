"""Tensors as keys, and their ids or addresses as numbers or in texts, in what a model's code reaches while it is
borrowed.
"""
from __future__ import annotations

import gc
import re
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterable
from functools import _lru_cache_wrapper, partial
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import InterruptsHeld
from analyzer.meta.structure import make_tuple
from analyzer.meta.tensor import data_ptr
from analyzer.record.tensor_walk import REGISTRIES
from analyzer.state.fingerprint import StateRecord
from analyzer.state.value import look_up, set_value

from .fake_tensor import FakeTensors
from .module_borrow import Borrowed

_LOWEST = 1 << 32  #: no address of a 64-bit process is below; ids are addresses
_IN_TEXT = re.compile(r"\d{9,}|[0-9a-f]{9,}|[0-9A-F]{9,}")  #: such numbers, of ten or of sixteen digits
_MOST_DIGITS = 20  # of an address of 64 bits in tens; Python refuses to read thousands of them (sys.int_info)
_DECIMAL = re.compile(r"\d{9,}")
_MAY_HOLD_NUMBERS = frozenset({int, str, tuple, frozenset})


class TensorKeys:
    """Lets containers in ``records``, and attributes of borrowed modules, name the fake tensor where they name an
    original: as a key of a dictionary or of a cache of results, a member of a set, or by a number, which may stand in
    a text, that is its id or its address. `put_back`, or the end of the block, lets them name the original again, also
    in what was added meanwhile.

    >>> from analyzer.fx.module_borrow import borrow_module
    >>> from analyzer.fx.surroundings import keep_surroundings
    >>> from analyzer.meta.mode import MetaTensorMode
    >>> layer = torch.nn.Linear(2, 3)
    >>> layer.rates = {layer.weight: 0.1, id(layer.bias): 0.2}
    >>> with MetaTensorMode(), keep_surroundings(layer) as found, borrow_module(layer) as borrowed:
    ...     with TensorKeys(borrowed, [found]):
    ...         print(layer.rates[layer.weight], layer.rates[id(layer.bias)])
    0.1 0.2
    >>> layer.rates[layer.weight]
    0.1
    """

    def __init__(self, borrowed: Borrowed, records: Iterable[StateRecord]) -> None:
        self._borrowed, self._records = borrowed, records
        self._names = _Names(borrowed.fakes)
        self._containers: list[Any] = []
        self._places: list[tuple[Any, str]] = []
        self._plain_names: set[str] = set()  #: of modules, parameters and buffers, that have no number
        self._registries: list[tuple[Any, str, dict[str, Any]]] = []  #: attributes of modules, names, what was there

    def __enter__(self) -> TensorKeys:
        with without_modes(), torch._C.DisableTorchFunction():
            for container in chain.from_iterable(map(_list_containers, self._records)):
                if _rename(container, self._names.fake):
                    self._containers.append(container)
            for holder, name in self._list_places():
                value = look_up(holder, name)
                name_it = self._names.fake_number if type(value) is tuple else self._names.fake
                if (new := name_it(value)) is not value:
                    set_value(holder, name, new)
                    self._places.append((holder, name))
            for module in self._borrowed.every:
                self._let_registries_be_asked(vars(module))
        return self

    def _let_registries_be_asked(self, attributes: Any) -> None:
        """Let modules, parameters and buffers whose names have numbers of originals be found by those of fakes."""
        for kind in REGISTRIES:
            held = attributes.get(kind)
            if held and type(held) is dict and any(  # most hold none, or some of few names
                    [name not in self._plain_names and self._is_renamed(name) for name in held]):
                attributes[kind] = NamedForFakes(held, self._names.original)
                self._registries.append((attributes, kind, held))

    def _is_renamed(self, name: str) -> bool:
        if _may_name(name) and self._names.fake(name) is not name:
            return True
        self._plain_names.add(name)
        return False

    def _list_places(self) -> list[tuple[Any, str]]:
        """The places of single values that may be numbers, or hold them: attributes, globals, cells."""
        rows: list[tuple[Any, Iterable[tuple[str, Any]]]] = [
            (vars(module), vars(module).items()) for module in self._borrowed.every]
        for record in self._records:
            rows += [(holder, zip(names, found)) for holder, _, names, found in record.rows]
            rows += [(holder, ((name, found),)) for holder, name, found in record.places]
        return [(holder, name) for holder, items in rows for name, value in items
                if (kind := type(value)) in _MAY_HOLD_NUMBERS and (  # most are small, and this is faster than a call
                    value > _LOWEST if kind is int else kind is not str or len(value) > 8 and _may_name(value))]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.put_back()

    def put_back(self) -> None:
        with InterruptsHeld(), without_modes(), torch._C.DisableTorchFunction():
            while self._places:
                holder, name = self._places.pop()
                value = look_up(holder, name)
                if (old := self._names.original(value)) is not value:
                    set_value(holder, name, old)
            while self._registries:
                attributes, kind, held = self._registries.pop()
                found = attributes[kind]
                held.clear()
                held.update(found)
                attributes[kind] = held
            while self._containers:
                _rename(self._containers.pop(), self._names.original)


class NamedForFakes(dict[str, Any]):
    """A registry of a module, in which names that have numbers of originals are found by those of fake tensors too."""

    def __init__(self, held: dict[str, Any], original: Callable[[str], str]) -> None:
        super().__init__(held)
        self._original = original

    def __missing__(self, name: str) -> Any:
        if type(name) is str and (original := self._original(name)) in self.keys():
            return self[original]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or type(name) is str and super().__contains__(self._original(name))

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if name in self else default


class _Names:
    """What names a fake tensor where something names its original, and the other way."""

    def __init__(self, fakes: FakeTensors) -> None:
        self._fakes = fakes
        self._given: dict[int, tuple[Any, Any]] = {}  #: what names fake tensors, by its id, with what was there
        self._numbers: tuple[dict[int, int], dict[int, int]] | None = None  #: of originals, and of fake tensors

    def fake(self, value: Any) -> Any:
        return self._note(self._translate(value, self._fakes.of, 0), value)

    def fake_number(self, value: Any) -> Any:
        """Of a tuple that is no key, the numbers alone: contents of tensors in it may be compared."""
        return self._note(self._translate(value, lambda _: None, 0), value)

    def _note(self, new: Any, value: Any) -> Any:
        if new is not value:
            self._given[id(new)] = new, value
        return new

    def original(self, value: Any) -> Any:
        new, old = self._given.get(id(value), (None, None))
        return old if new is value and new is not None else self._translate(value, self._fakes.original_of, 1)

    def _translate(self, value: Any, find: Callable[[Tensor], Tensor | None], way: int) -> Any:
        if type(value) is int:
            number = self._find_numbers()[way].get(value) if value > _LOWEST else None
            return value if number is None else number + 0  # an object of its own
        if type(value) is str:
            return self._translate_text(value, way)
        if isinstance(value, Tensor):
            found = find(value)
            return value if found is None else found
        if not isinstance(value, (tuple, frozenset)):
            return value
        new = [self._translate(item, find, way) for item in value]
        if all([a is b for a, b in zip(new, value)]):
            return value
        return make_tuple(value, new) if isinstance(value, tuple) else frozenset(new)

    def _translate_text(self, text: str, way: int) -> str:
        if not _IN_TEXT.search(text):
            return text
        new = _IN_TEXT.sub(partial(self._translate_digits, way), text)
        return text if new == text else new

    def _translate_digits(self, way: int, found: re.Match[str]) -> str:
        digits = found.group()
        if len(digits) > _MOST_DIGITS:
            return digits
        base = 10 if digits.isdecimal() else 16
        number = self._find_numbers()[way].get(int(digits, base))
        if number is None:  # a letter before it may be none of its digits
            return digits if base == 10 else _DECIMAL.sub(partial(self._translate_digits, way), digits)
        return str(number) if base == 10 else format(number, f"0{len(digits)}{'X' if digits.isupper() else 'x'}")

    def _find_numbers(self) -> tuple[dict[int, int], dict[int, int]]:
        if self._numbers is None:
            pairs: dict[int, int] = {}
            for original, fake in self._fakes:
                pairs[id(original)] = id(fake)
                if original.layout is torch.strided and original.device.type != "meta":
                    pairs.setdefault(original.data_ptr(), data_ptr(fake))
                    pairs.setdefault(original.untyped_storage()._cdata, fake.untyped_storage()._cdata)
            self._numbers = pairs, {fake: original for original, fake in pairs.items()}
        return self._numbers


def _list_containers(record: StateRecord) -> list[Any]:
    """Those that may be keyed by tensors or numbers."""
    found: list[Any] = [mapping for mapping, keys, values in record.mappings
                        if any(map(_may_be_key, keys)) or _holds_number(values)]
    found += [items for items, _ in record.sequences if isinstance(items, set) or _holds_number(items)]
    for value, *_ in record.objects:
        if isinstance(value, WeakIdKeyDictionary):
            found.append(value)
        elif isinstance(value, (UserDict, ChainMap)):
            found += value.maps if isinstance(value, ChainMap) else [value.data]
        elif isinstance(value, _lru_cache_wrapper):
            found += [table for table in gc.get_referents(value) if _is_cache_of(value, table)]
    return found


def _is_cache_of(function: Any, table: Any) -> bool:
    """Whether something that a cached function refers to is its dictionary of results, not one of these results."""
    if type(table) is not dict or table is vars(function) or len(table) != function.cache_info().currsize:
        return False
    limit: int | None = function.cache_parameters()["maxsize"]
    return bool(table) and (limit is None or all(
        [type(value).__name__ == "_lru_list_elem" for value in table.values()]))  # Modules/_functoolsmodule.c


def _may_be_key(key: Any) -> bool:
    return type(key) is not str or _may_name(key)


def _may_name(value: Any) -> bool:
    """Whether a number or a text may be, or have in it, an id or an address."""
    if type(value) is int:
        return value > _LOWEST
    return type(value) is not str or len(value) > 8 and _IN_TEXT.search(value) is not None


def _holds_number(values: Iterable[Any]) -> bool:
    return any([type(value) in (int, str) and _may_name(value) or type(value) is frozenset for value in values])


def _rename(container: Any, name: Callable[[Any], Any]) -> bool:
    """Whether something in a container is named otherwise now."""
    if isinstance(container, (dict, WeakIdKeyDictionary)):
        before = list(container.items())
        after = [(name(key), value if isinstance(value, (Tensor, tuple)) else name(value)) for key, value in before]
        if all([a is c and b is d for (a, b), (c, d) in zip(before, after)]):
            return False
        if isinstance(container, dict):
            container.clear()
        else:
            container.data.clear()
        for key, value in after:  # a Counter's update() adds
            container[key] = value
        return True
    held = list(container)
    new = [name(item) if isinstance(container, set) or type(item) in (int, str, frozenset) else item for item in held]
    if all([a is b for a, b in zip(held, new)]):
        return False
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(new)
    return True
