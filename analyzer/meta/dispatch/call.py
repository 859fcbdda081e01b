"""One operator call: its tensors, what tells calls of its kind, and outputs made as they were for that kind before."""
from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from analyzer.meta.address_space import MetaStorage, find_storage, next_number
from analyzer.meta.argument import adopt_arguments
from analyzer.meta.operator_info import Held, OperatorFacts, has_rule, hold_before, kernel_memory
from analyzer.meta.spec import SPARSE_LAYOUTS, Signature, parts_of, strided_of
from analyzer.meta.state import CPU, MetaState, indexed_device
from analyzer.meta.tensor import META, MetaTensor, kernel, take_class
from analyzer.meta.value.contents import read_known

Tensor = torch.Tensor


class OperatorCall:
    """One call: what goes in; then, as far as it has come, what comes out and what it holds meanwhile."""

    __slots__ = ("info", "args", "kwargs", "tensors", "storages", "key", "result", "outputs", "born", "signature",
                 "stages", "kept")

    signature: Signature
    result: Any                       #: as the caller gets it
    outputs: list[Any]                #: the parts of the result
    born: list[MetaStorage | None]    #: the new storage of each output, None where it has none
    stages: tuple[Held, ...]

    def __init__(self, info: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor],
                 storages: list[MetaStorage], key: list[Any] | None) -> None:
        self.info, self.args, self.kwargs = info, args, kwargs
        self.tensors, self.storages = tensors, storages  #: of the arguments, in order
        self.key = key                                   #: None where no recipe can be made
        self.kept: list[MetaStorage] = []                #: memory that is held until the operator ends

    def is_followed(self) -> bool:
        """Whether anything may follow about the contents of what it makes or writes."""
        if self.info.is_followed or not self.tensors:
            return True
        for s in self.storages:
            if s.known is not None or s.nonzero_bound is not None or s.sample is not None:
                return True
        return False

    def written(self) -> Iterator[tuple[tuple[int, ...] | None, Tensor]]:
        """The tensors that the operator writes to, with their places in ``args``; None: in ``kwargs``."""
        for i, name, is_named in self.info.mutated:
            is_given = not is_named and i < len(self.args)
            value = self.args[i] if is_given else self.kwargs.get(name)
            if isinstance(value, Tensor):
                yield (i,) if is_given else None, value
            elif isinstance(value, (list, tuple)):
                for j, t in enumerate(value):
                    if isinstance(t, Tensor):
                        yield (i, j) if is_given else None, t


def resolve(state: MetaState, info: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorCall:
    """The call with its tensors, those with data replaced by fake ones, and its key."""
    tensors: list[Tensor] = []
    storages: list[MetaStorage] = []
    key: list[Any] = [info, state.pending_device]  # not the operator: torch hashes those in Python
    has_recipe = True
    lists = state.lists
    if not _flatten(args, tensors, storages, key, lists) or kwargs and not _flatten(
            chain.from_iterable(kwargs.items()), tensors, storages, key, lists):
        tensors.clear()
        storages.clear()
        key = [info, state.pending_device]
        args, kwargs = adopt_arguments(state, args), adopt_arguments(state, kwargs)
        if not _flatten(chain(args, *kwargs.items()), tensors, storages, key):
            has_recipe = False
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            storages = [s for s in map(storage_of, tensors) if type(s) is MetaStorage]
    if state.templates and _use_templates(state, storages):
        return resolve(state, info, args, kwargs)
    if not storages and state.pending_device is None and kwargs.get("device") is not None:
        key.append(result_device(state, storages, kwargs["device"]))  # a factory called by C++ code
    if info.packed:
        key.append(tuple(values_at(args, info.packed)))
    if info.reads_offset and has_recipe:
        key.append(tensors[0].storage_offset())
    return OperatorCall(info, args, kwargs, tensors, storages, key if has_recipe else None)


def _use_templates(state: MetaState, storages: list[MetaStorage]) -> bool:
    """Put those of the model's templates among ``storages`` on the device; whether there were any."""
    before = len(state.templates)
    for storage in storages:
        device = state.templates.pop(storage.number, None)
        if device is not None:
            storage.space.resize(storage, next_number(), device)
    return len(state.templates) < before


def values_at(args: tuple[Any, ...], positions: tuple[int, ...]) -> Iterator[tuple[int, ...] | None]:
    """The integers in the arguments at ``positions``; None where there is no tensor, or its contents are not known."""
    for i in positions:
        known = read_known(args[i]) if i < len(args) and isinstance(args[i], Tensor) else None
        yield None if known is None else tuple(known.tolist())


def storage_of(tensor: Tensor) -> Any:
    return (parts_of(tensor)[-1] if tensor.layout in SPARSE_LAYOUTS else tensor).untyped_storage()


_FLOATS = {float}


def _flatten(args: Iterable[Any], tensors: list[Tensor], storages: list[MetaStorage], key: list[Any],
             lists: ListMemo | None = None) -> bool:
    """Collect tensors and the cache key; False where a tensor is not one of the mode's own."""
    for a in args:
        if isinstance(a, Tensor):
            if a.layout is not torch.strided:
                return False
            storage = a.untyped_storage()
            if type(storage) is not MetaStorage:
                return False
            tensors.append(a)
            storages.append(storage)
            key.append(a.shape)
            key.append(a.stride())
            key.append(a.dtype)
            key.append(storage.device)
        elif isinstance(a, (list, tuple)):
            key.append(len(a))
            if a and isinstance(a[0], int):
                key.append(tuple(a))
            elif len(a) > 1 and type(a[0]) is float and set(map(type, a)) == _FLOATS:
                key.append(float)
                key.append(tuple(a))
            elif lists is not None and (kind := lists.take(a, tensors, storages)) is not None:
                key.append(kind)
            elif not _flatten(a, tensors, storages, key, lists):
                return False
        else:
            key.append(type(a))  # 1, 1.0 and True are equal as keys but promote differently
            key.append(a)
    return True


def result_device(state: MetaState, storages: list[MetaStorage], asked: torch.device | None = None) -> torch.device:
    """The device of new outputs: the one asked for, the accelerator of an argument, what C++ means, or the host."""
    if state.pending_device is not None:
        return state.pending_device
    if asked is not None and asked.type != "meta":
        return indexed_device(asked)
    for s in storages:
        if s.device.type != "cpu":
            return s.device
    if asked is not None and not storages:  # asked of meta by C++ code, which sees where a tensor really is
        return state.device_of_options or _accelerator_of(state.arguments) or CPU
    return CPU


def _accelerator_of(args: Any) -> torch.device | None:
    for a in args:
        if isinstance(a, Tensor):
            storage = find_storage(strided_of(a))
            if type(storage) is MetaStorage and storage.device.type != "cpu":
                return storage.device
        elif isinstance(a, (list, tuple)) and (found := _accelerator_of(a)) is not None:
            return found
    return None


_WORTH = 8      # tensors in a list: shorter ones are looked at as fast
_MOST = 1 << 12  # kinds of lists; a process that meets more starts over, to bound memory
_referent = weakref.ref.__call__
_kinds: dict[tuple[Any, ...], object] = {}  # stand for the shapes, strides, dtypes and devices of a list's tensors


class ListMemo:
    """Lists that were looked at, while their tensors live and none changes its shape, storage or device."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], tuple[list[weakref.ref[Tensor]], object]] = {}

    def take(self, given: Any, tensors: list[Tensor], storages: list[MetaStorage]) -> object | None:
        """Add a list's tensors and storages to these; its kind, None where it is short or not all the mode's own."""
        if len(given) < _WORTH:
            return None
        ids = tuple(map(id, given))
        found = self._found.get(ids)
        if found is None or not all(map(operator.is_, map(_referent, found[0]), given)):
            contents: list[Any] = []
            if not all(isinstance(t, Tensor) for t in given) or not _flatten(given, [], [], contents):
                return None
            if len(_kinds) >= _MOST:
                _kinds.clear()
            found = self._found[ids] = list(map(weakref.ref, given)), _kinds.setdefault(tuple(contents), object())
        tensors += given
        storages += map(Tensor.untyped_storage, given)  # type: ignore[arg-type]  # `_flatten` looked
        return found[1]


NEW, VIEW, SAME, VALUE = range(4)


class OutputRecipe(NamedTuple):
    """How to make one output: a new storage, a view of an argument, the argument itself, or a plain value."""

    kind: int
    shape: Any = None
    stride: Any = None
    dtype: Any = None
    device: Any = None
    source: int = 0
    offset: int = 0
    value: Any = None


class Entry(NamedTuple):
    """One cached call: its signature, a recipe per output, and what holds several: list, tuple, or None for one."""

    signature: Signature
    recipes: list[OutputRecipe]
    structure: Any


LARGEST = 1 << 17  #: entries; a process that meets more kinds of call than this starts over, to bound memory
entries: dict[Any, Entry] = {}
_empty_strided = torch.empty_strided
_as_strided = torch.as_strided
_default_dtype = torch.get_default_dtype
_FLOAT32 = torch.float32
_TENSOR_DATA: Any = torch._C.TensorBase.data  # the property itself
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradMeta


def find_entry(call: OperatorCall) -> tuple[Any, Entry | None]:
    """The key of a call, None where nothing is remembered of its kind, and what is remembered."""
    if call.key is None or not call.info.cacheable:
        return None, None
    try:
        key: Any = tuple(call.key)
        default = _default_dtype()
        if default is not _FLOAT32:  # which factories, and quotients of integers, have where nothing else says it
            key = (default, *key)
        return key, entries.get(key)
    except (TypeError, NotImplementedError):
        return None, None  # an argument that cannot be hashed or compared, as an object of C++


def rebuild(state: MetaState, call: OperatorCall, entry: Entry) -> None:
    signature = call.signature = entry.signature
    stages, order = kernel_memory(signature) if has_rule(call.info) else ((), None)
    call.stages, recipes = stages, entry.recipes
    outputs: list[Any] = []
    born: list[MetaStorage | None] = []
    for i, r in enumerate(recipes if order is None else [recipes[k] for k in order]):
        kind = r.kind
        storage = None
        if kind == NEW:
            if stages:
                hold_before(state, stages, i, r.device, call.kept)
            out = _empty_strided(r.shape, r.stride, dtype=r.dtype, device=META)
            storage = state.space.attach(out, r.device)
            if not state.has_plain_tensors:
                out.__class__ = MetaTensor
        elif kind == SAME:
            out = call.tensors[r.source]
        elif kind == VIEW:
            out = _view(call.tensors[r.source], r.shape, r.stride, r.offset)
        else:
            out = r.value
        outputs.append(out)
        born.append(storage)
    if order is not None:
        returned = sorted(range(len(order)), key=order.__getitem__)
        outputs, born = [outputs[k] for k in returned], [born[k] for k in returned]
    call.outputs, call.born = outputs, born
    call.result = outputs[0] if entry.structure is None else entry.structure(outputs)


def _view(base: Tensor, shape: Any, stride: Any, offset: int) -> Tensor:
    if base.requires_grad and not _is_excluded(_AUTOGRAD):
        # Autograd detaches a result that it saves: a view with a history would hold its own node.
        base = _TENSOR_DATA.__get__(base)
    kernel.depth += 1
    try:
        out = _as_strided(base, shape, stride, base.storage_offset() + offset)
    finally:
        kernel.depth -= 1
    return take_class(out)
