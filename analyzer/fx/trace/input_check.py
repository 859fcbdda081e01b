"""A user's arguments: bound to what forward takes, and checked against those that were traced."""
from __future__ import annotations

import difflib
import dis
import enum
import functools
import inspect
import itertools
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from analyzer.errors import InputError
from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.argument import check_tensors
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.spec import VALUES
from analyzer.meta.structure import Access, children, holds_tensor, tensors_of
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.known_value import Watched


class Bound(NamedTuple):
    """Values of the parameters of a forward, in its order; ``given`` are those that have one. Tensors in those that are
    ``concrete``, by name, are part of the graph.
    """

    parameters: list[Parameter]
    given: dict[str, Any]
    concrete: frozenset[str]

    def concrete_parts(self, values: Mapping[str, Any]) -> list[Any]:
        """What is part of the graph of ``values``, which are by the names of parameters."""
        gathers = (p.name for p in self.parameters if p.kind is Parameter.VAR_KEYWORD)
        rest: Mapping[str, Any] = values.get(next(gathers, ""), {})
        return [held[name] for held in (values, rest) for name in self.concrete if name in held]

    def name_in_graph(self, p: Parameter) -> str:
        """The name of a parameter in generated code, where ``self`` is the graph module."""
        taken = {q.name for q in self.parameters}
        return next(f"self_{i}" for i in itertools.count(1) if f"self_{i}" not in taken) if p.name == "self" else p.name

    def call_arguments(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = inspect.BoundArguments(inspect.Signature(self.parameters), OrderedDict(values))
        return bound.args, bound.kwargs


def bind_arguments(forward: Callable[..., Any], meta_args: Mapping[str, Any],
                   concrete_args: Mapping[str, Any]) -> Bound:
    """Which parameter gets which value; names that a ``**kwargs`` parameter takes are gathered under its name. Raises
    InputError for a name that forward does not take, one given twice, and a value that is missing or holds no tensor.
    """
    parameters = list(inspect.signature(forward).parameters.values())
    by_name = {p.name: p for p in parameters}
    rest = next((p.name for p in parameters if p.kind is Parameter.VAR_KEYWORD), None)
    marks: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
    takes = ", ".join(f"{marks.get(p.kind, '')}{p.name}" for p in parameters) or "no arguments"
    given: dict[str, Any] = {}
    for source, values in (("meta_args", meta_args), ("concrete_args", concrete_args)):
        if not isinstance(values, Mapping):
            raise InputError(f"{source} must be a dict from argument names to values, got {type(values).__name__}")
        for name, value in values.items():
            if source == "meta_args" and value is not None and not holds_tensor(value):
                raise InputError(f"meta_args[{name!r}] = {value!r:.80} holds no tensor; give one, for instance "
                                 "torch.empty(..., device='meta'), or pass a constant in concrete_args")
            target = given
            if name not in by_name or name == rest and not isinstance(value, Mapping):
                if rest is None:
                    close = difflib.get_close_matches(name, by_name, n=1)
                    hint = f"; did you mean {close[0]!r}?" if close else "."
                    raise InputError(f"{source}[{name!r}]: forward takes no such argument{hint} It takes {takes}")
                target = given.setdefault(rest, {})
            check_tensors(value)
            if name in target:
                raise InputError(f"{name!r} is in meta_args and in concrete_args; give it once")
            target[name] = dict(value) if name == rest else value
    for p in parameters:
        if p.kind is Parameter.VAR_POSITIONAL and not isinstance(given.get(p.name, ()), (tuple, list)):
            raise InputError(
                f"meta_args[{p.name!r}]: forward takes *{p.name}, so give a tuple, got {type(given[p.name]).__name__}")
    shared = set(map(id, tensors_of([*meta_args.values()]))) & set(map(id, tensors_of([*concrete_args.values()])))
    if shared:
        names = [n for n, v in concrete_args.items() if any(id(t) in shared for t in tensors_of(v))]
        raise InputError(f"concrete_args[{names[0]!r}] holds a tensor that meta_args holds too: it varies, or it is "
                         "part of the graph. Put a clone of it into one of them")
    missing = [p.name for p in parameters if p.default is Parameter.empty and p.name not in given
               and p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    if missing:
        raise InputError(f"no value for {', '.join(map(repr, missing))}; forward takes {takes}. "
                         f"Put tensors into meta_args and constants into concrete_args")
    varargs = next((i for i, p in enumerate(parameters) if p.kind is Parameter.VAR_POSITIONAL), None)
    if varargs is not None and given.get(parameters[varargs].name):
        for p in parameters[:varargs]:
            given.setdefault(p.name, p.default)  # values of *args can only follow all of these
    return Bound(parameters, given, frozenset(concrete_args))


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)


_PART = "; it is part of the graph: leave it out, or trace again with this one"


class Expected(NamedTuple):
    """One tensor, one constant, or the ``keys`` of one container, that the graph was traced with; ``path`` leads to it
    inside the argument. Places with one ``tensor``, a number, held the same object. ``states`` are what code asked of
    the tensor besides (name, arguments, those by keyword), each with what it was told. ``part`` is a tensor that is
    part of the graph, which may be left out.
    """

    argument: str
    path: tuple[Access, ...]
    shape: tuple[Any, ...] | None
    dtype: torch.dtype | None
    constant: Any = None
    keys: tuple[Any, ...] | None = None
    tensor: int = 0
    states: tuple[tuple[tuple[str, tuple[Any, ...], tuple[Any, ...]], Any], ...] = ()
    part: Tensor | None = None

    def __str__(self) -> str:
        return self.argument + "".join(map(str, self.path))

    def check(self, value: Any, by_name: bool) -> None:
        """Raise InputError where the argument ``value`` has something else here; named constants may be left out."""
        try:
            value = self.find(value)
        except (AttributeError, KeyError, IndexError, TypeError):
            if self.part is not None or by_name and len(self.path) == 1 and self.shape is None:
                return
            raise InputError(f"{self}: missing; the graph was traced with {self.describe()} there") from None
        if isinstance(value, fx.Proxy) or value is None and self.part is not None:
            return
        is_tensor, wrong = isinstance(value, Tensor), None  # what a message says besides, where something is
        if self.keys is not None:
            keys = _keys(value)
            if keys is None or all(type(k) is int for k in keys) and len(keys) > len(self.keys):
                got = "no container" if keys is None else f"{len(keys)} items"
                raise InputError(f"{self}: got {got}, but the graph was traced with {len(self.keys)}")
            if extra := [str(k) for k in keys if k not in self.keys]:
                raise InputError(f"{', '.join(extra)}: not given when the graph was traced; put it into meta_args, or "
                                 "a constant into concrete_args")
        elif self.shape is None:
            found = [c for c in _comparable(value) if type(c) is type(self.constant)]
            if not found or found[0] != self.constant and repr(found[0]) != repr(self.constant):  # as NaN is
                wrong = "; trace again with the value that you want"
        elif not is_tensor:
            wrong = ""
        elif shape_of(value) != self.shape or value.dtype != self.dtype:
            wrong = ("; shapes and dtypes are constants of a traced graph: trace again with a tensor like this one in "
                     "meta_args") if self.part is None else _PART
        elif self.part is not None and not _is_alike(value, self.part):
            wrong = f" of other contents{_PART}"
        if wrong is not None:
            got = name_spec(shape_of(value), value.dtype) if is_tensor else repr(value)
            raise InputError(f"{self}: got {got}, but the graph was traced with {self.describe()}{wrong}")
        for (name, args, kwargs), traced in self.states:
            if (told := ask_state(value, name, args, kwargs)) != traced:
                raise InputError(f"{self}: its {name} is {told}, but the graph was traced with {traced}, and forward "
                                 "asks for it: trace again with a tensor like this one in meta_args")

    @property
    def varies(self) -> bool:
        return self.shape is not None and self.part is None

    def find(self, value: Any) -> Any:
        for access in self.path:
            value = access.get(value)
        return value

    def describe(self) -> str:
        if self.keys is not None:
            return f"{len(self.keys)} items"
        if self.shape is None:
            return f"the constant {self.constant!r}"
        return name_spec(self.shape, self.dtype)


class Asked(NamedTuple):
    """What ``torch.<name>(*args)`` told forward of the modes around it."""

    name: str
    args: tuple[Any, ...]
    told: Any
    place: str | None

    def check(self) -> None:
        found = getattr(torch, self.name)(*self.args)
        if found != self.told:
            call = f"torch.{self.name}({', '.join(map(repr, self.args))})"
            raise InputError(f"{call} is {found}, but the graph was traced where it is {self.told}, and forward asks "
                             f"for it at {self.place}: trace again where it is {found}")


def keep_state(tensor: Tensor, name: str, traced: Any, place: str | None) -> None:
    """Raise InputError where autograd tells another state of ``tensor``, which is a result, than when it was traced."""
    if (told := ask_state(tensor, name)) != traced:
        raise InputError(f"{name} of a tensor is {told} at {place}, and the graph was traced with {traced}: trace "
                         "again with inputs, weights and a grad mode like these")


_METHODS = frozenset({"_is_view", "is_inference", "is_contiguous", "stride", "storage_offset"})


def ask_state(tensor: Tensor, name: str, args: tuple[Any, ...] = (), kwargs: tuple[Any, ...] = ()) -> Any:
    told = getattr(tensor, name)
    return state_told(name, told(*args, **dict(kwargs)) if name in _METHODS else told)


def state_told(name: str, result: Any) -> Any:
    """What code was told of a tensor, as a value that can be compared: of nodes and bases, if there is one."""
    return (result is not None) if name in ("grad_fn", "_base") else result


def shape_of(tensor: Tensor) -> tuple[Any, ...]:
    """The shape of a tensor; of a jagged one with the lengths of its sequences, None where they are not known."""
    if tensor.layout is not torch.jagged:
        return tuple(tensor.shape)
    offsets: Tensor = tensor.offsets()  # type: ignore[attr-defined]
    with without_modes():
        starts = read_known(offsets) if isinstance(offsets.untyped_storage(), MetaStorage) else offsets
        lengths = None if starts is None or starts.device.type == "meta" else tuple(starts.diff().tolist())
    return tuple([n if isinstance(n, int) else lengths for n in tensor.shape])


def name_spec(shape: Iterable[Any], dtype: torch.dtype | None) -> str:
    """A shape and a dtype as text: ``float32[3, 4]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have equal contents, as far as there are any."""
    if tensor is other or tensor.layout is not torch.strided or other.layout is not torch.strided:
        return tensor is other
    return _has_no_data(tensor) or _has_no_data(other) or torch.equal(
        tensor.detach(), other.detach().to(tensor.device))


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.device.type == "meta" or isinstance(tensor.untyped_storage(), MetaStorage)


_EMPTY: dict[Any, Any] = {Parameter.VAR_POSITIONAL: (), Parameter.VAR_KEYWORD: {}}


def expectations(bound: Bound) -> list[Expected]:
    """What arguments of a graph must be like, those that are not given as by default."""
    found: list[Expected] = []
    numbers: dict[int, int] = {}  # by id of a tensor
    seen: set[int] = set()

    def walk(argument: str, value: Any, path: tuple[Access, ...]) -> None:
        if isinstance(value, Tensor):
            number = numbers.setdefault(id(value), len(numbers))
            found.append(Expected(argument, path, shape_of(value), value.dtype, tensor=number,
                                  part=value if id(value) in parts else None))
        elif constant := _comparable(value):
            found.append(Expected(argument, path, None, None, *constant))
        elif id(value) not in seen:
            seen.add(id(value))
            if (keys := _keys(value)) is not None:
                found.append(Expected(argument, path, None, None, keys=keys))
            for access, child in children(value):
                walk(argument, child, (*path, access))

    values = {p.name: bound.given.get(p.name, _EMPTY.get(p.kind, p.default)) for p in bound.parameters}
    defaults = [value for name, value in values.items() if name not in bound.given]
    parts = {id(tensor) for tensor in tensors_of([defaults, bound.concrete_parts(bound.given)])}
    for p in bound.parameters:
        walk(bound.name_in_graph(p), values[p.name], ())
    return found


def _keys(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, (dict, UserDict)):
        return tuple(value)
    return tuple(range(len(value))) if isinstance(value, (list, tuple, deque)) else None


def _comparable(value: Any) -> list[Any]:
    """What tells a constant from others, and can be copied and pickled; empty where only its parts do, if any."""
    if isinstance(value, _FUNCTIONS):
        return [f"{value.__module__}.{value.__qualname__}"]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return [value.tolist()]
    return [value] if isinstance(value, (*VALUES, slice, range, enum.Enum)) else []


# Contents of tensors that a module holds, and that its forward both reads and changes (a queue's pointer).
# What is read is different in the next call, so it must not become a constant of the graph. The forward is traced
# again with these contents unknown: code that asks for them becomes one node (`outline`). Where the forward of the root
# itself asks for them, the graph checks that they are what they were when it was traced.

class ContentWatch:
    """Tells which contents of a module's tensors its forward reads and changes; those of ``unknown`` ids are hidden."""

    def __init__(self, borrowed: Borrowed, unknown: frozenset[int]) -> None:
        #: tensors, originals, storages, and contents, None where they are unknown
        self._held: list[tuple[Tensor, Tensor, MetaStorage, Watched | None]] = []
        for original, tensor in borrowed.fakes:
            storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
            if isinstance(storage, MetaStorage) and storage.known is not None:
                storage.known = None if id(original) in unknown else Watched(storage.known)
                self._held.append((tensor, original, storage, storage.known))

    def forget(self) -> None:
        """Let contents that were unknown when the forward began be unknown, whatever wrote to them since."""
        for tensor, _, _, contents in self._held:
            storage = tensor.untyped_storage()
            if contents is None and isinstance(storage, MetaStorage):
                storage.known = None

    def find_changed(self, replaced: frozenset[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """By id of the user's, tensors that were read, and changed or ``replaced``, with their contents before that."""
        with without_modes():
            return {id(original): (tensor, contents.flat().as_strided(
                        original.shape, original.stride(), original.storage_offset()))
                    for tensor, original, storage, contents in self._held if contents is not None and contents.was_read
                    and (storage.known is not contents or id(tensor) in replaced
                         or tensor.untyped_storage() is not storage)}


def keep_contents(tensor: Tensor, traced: Tensor, name: str) -> None:
    """Raise InputError where ``tensor``, which the module has as ``name``, has other contents than were traced."""
    if isinstance(tensor.untyped_storage(), MetaStorage) or torch.equal(tensor, traced.to(tensor.device)):
        return
    raise InputError(f"{name} was {shorten(traced.tolist())} when the graph was traced and is "
                     f"{shorten(tensor.tolist())} now; the traced forward itself reads and changes it, so that the "
                     "graph is right for one value. Put the code that reads it into a submodule or a function, which "
                     "then becomes one node")


def keep_read(method: str, traced: Any, place: str | None, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """Raise InputError where a method of ``tensor`` gives another value than when the graph was traced."""
    if any(t.device.type == "meta" or isinstance(t.untyped_storage(), MetaStorage)
           for t in (tensor, *args) if isinstance(t, Tensor)):
        return  # a run without data
    found = getattr(Tensor, method)(tensor, *args, **kwargs)
    if found != traced and repr(found) != repr(traced):  # which NaN is not
        raise InputError(f"{method} of a tensor gives {shorten(found)} at {place}, and the graph was traced with "
                         f"{shorten(traced)}: trace again with this data, or put the code that reads it into a "
                         "submodule or a function, and give meta_args without data: it then becomes one node")


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


# Whether code asks if two tensors are one object, which decides whether a graph holds for others than it was traced
# with: one tensor may be given in two places, as query and key.

#: how code takes what may be a tensor, before ``is`` compares it
_TAKES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR", "BINARY_SUBSCR", "BINARY_OP")


@functools.lru_cache(4096)
def compares_identity(code: types.CodeType) -> bool:
    """Whether code compares by ``is`` what is no constant and no name of its module, or asks for an id or address."""
    found = list(dis.get_instructions(code))
    for i, instruction in enumerate(found):
        if instruction.opname == "IS_OP":
            of_module = found[i - 1].opname == "LOAD_ATTR" and found[i - 2].opname in ("LOAD_GLOBAL", "LOAD_NAME")
            if found[i - 1].opname.startswith(_TAKES) and not of_module:
                return True
        elif instruction.argval == "data_ptr" or instruction.opname == "LOAD_GLOBAL" and instruction.argval == "id":
            return True
    return any(compares_identity(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))


def check_identity(expected: Iterable[Expected], arguments: Mapping[str, Any]) -> None:
    """Raise InputError where other places among ``arguments`` hold one tensor than when the graph was traced."""
    place_of: dict[int, Expected] = {}  # by id of a tensor
    first: dict[int, tuple[Expected, Any]] = {}
    for place in expected:
        value = place.find(arguments[place.argument]) if place.argument in arguments else None
        if place.shape is None or value is None or isinstance(value, fx.Proxy):
            continue
        other, (mine, tensor) = place_of.setdefault(id(value), place), first.setdefault(place.tensor, (place, value))
        told = "one tensor" if other.tensor != place.tensor else "two tensors" if tensor is not value else ""
        if told:
            traced, pair = ("two", other) if told == "one tensor" else ("one", mine)
            raise InputError(f"{place} and {pair}: {told}, but the graph was traced with {traced}, and its code asks "
                             f"whether they are the same: trace again with {told} in meta_args")
