"""What a model's code reaches outside of the model, and gets back where a run leaves tensors without data in it."""
from __future__ import annotations

import functools
import gc
import io
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.meta.address_space import MetaStorage, find_storage, next_number, spaces
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import InterruptsHeld
from analyzer.meta.state import current
from analyzer.meta.structure import is_plain_object
from analyzer.meta.tensor import PLAIN_TENSORS, is_around_tensors, keep_class, meta_storage_of, names_of_parts
from analyzer.on_use import rare_collections
from analyzer.output import hold_over_forks
from analyzer.record.tensor_walk import walk_modules
from analyzer.state.fingerprint import CodeRecord, StateRecord
from analyzer.state.reachable_code import is_written_iterator
from analyzer.state.value import MOST_OBJECTS, PLAIN, look_up

_NOT_ENTERED = (type, ModuleType, CodeType, BuiltinFunctionType)

_lock = threading.RLock()
hold_over_forks(_lock)
_kept: list[Surroundings] = []  #: of runs that overlap, in the order in which these began
_runs: dict[int, int] = {}      #: the thread that runs a module, by id of the module

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def keep_surroundings(root: nn.Module | None, functions: Iterable[Any] = (), values: Any = (),
                      walked: Sequence[tuple[str, nn.Module]] | None = None) -> Iterator[Surroundings]:
    """Put back, at the end of the block, what the code of ``root`` (``walked`` where its modules were listed), and
    ``functions`` that run with it, put tensors without data into, among them ``values``. Raises InputError for a model
    that a run in another thread has now.
    """
    if walked is None:
        walked = [] if root is None else walk_modules(root)
    with _running(walked):
        with without_modes(), torch._C.DisableTorchFunction():
            found = Surroundings([module for _, module in walked], functions, values)
        _kept.append(found)
        try:
            yield found
        finally:
            with InterruptsHeld(), without_modes(), torch._C.DisableTorchFunction():
                found.put_back()


@contextmanager
def _running(walked: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
    thread = threading.get_ident()
    with _lock:
        for path, module in walked:
            if _runs.get(id(module), thread) != thread:
                raise InputError(f"{path or 'the model'} ({type(module).__name__}) is profiled or traced in another "
                                 "thread now, which has its tensors: give each thread a model of its own, or run one "
                                 "after the other")
        taken = [id(module) for _, module in walked if id(module) not in _runs]
        _runs.update(dict.fromkeys(taken, thread))
    try:
        yield
    finally:
        with InterruptsHeld(), _lock:
            for key in taken:
                del _runs[key]


def leaves_no_tensor(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function``, given a model or what builds one, put back what the build reaches, and warn of what is left."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        model = next(iter(args), kwargs.get("model"))
        if current() is not None:  # the caller's own mode, whose tensors are the caller's
            return function(*args, **kwargs)
        first = next_number()
        with rare_collections():  # what is new is still among the young
            with nullcontext() if isinstance(model, nn.Module) or not callable(model) else keep_surroundings(
                    None, (*args, *kwargs.values())):
                result = function(*args, **kwargs)
            if spaces and threading.active_count() == 1:
                _warn_of_left(first, result)
        return result

    return call


def _warn_of_left(first: int, result: Any) -> None:
    """Warn of tensors without data that were made since the storage of number ``first`` and are not the result's."""
    new = [weakref.ref(t) for generation in (0, 1) for t in gc.get_objects(generation)
           if type(t) in PLAIN_TENSORS and (storage := meta_storage_of(t)) is not None and storage.number >= first]
    if new:
        gc.collect()  # what was held in a circle
    left = [keep_class(t) for t in [ref() for ref in new] if t is not None]
    if left and not leads_to_fake((result,)):
        holders = {type(holder).__name__ for holder in gc.get_referrers(*left) if holder is not left}
        warnings.warn(f"tensors without data stay behind ({len(left)}, held by {', '.join(sorted(holders)) or '?'}): "
                      "code put them where the names in it do not lead to, and what was there before is not known",
                      stacklevel=3)


class Holders(StateRecord):
    """A record, with tensors, of what can hold one: not of data, nor of generators of random numbers."""

    def __init__(self, **settings: Any) -> None:
        self.code: list[Any] = []  #: functions and classes of objects that were met
        #: arrays, buffers, files, iterators and generators of random numbers that were met
        self.unrecorded: list[Any] = []
        self.modules: list[nn.Module] = []  #: that were met
        super().__init__(keeps=True, **settings)

    def _take(self, value: Any, kind: type) -> Iterable[Any]:
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            self.modules.append(value)
            self.capture_module(value, own=True)
            return value._modules.values()
        if isinstance(value, torch.Tensor):
            self.add_mapping(value.__dict__)
        return super()._take(value, kind)

    def _take_object(self, value: Any, kind: type) -> Iterable[Any]:
        if _holds_data(value, kind):
            self.unrecorded.append(value)
            return ()
        if kind.__module__.startswith(("numpy", "random")):
            return ()
        self.code.append(kind)
        if is_plain_object(value) and not vars(value):
            self.empty.append(vars(value))
        if isinstance(value, functools._lru_cache_wrapper):
            self.add_object(value, lambda: value.cache_info().misses, lambda old: value.cache_clear())
            return ()
        return super()._take_object(value, kind)

    def _take_function(self, function: FunctionType) -> Iterable[Any]:
        self.code.append(function)
        return super()._take_function(function)


class Surroundings(Holders, CodeRecord):
    """What the code of ``modules``, and ``functions``, reach outside of them, and the values that they are given. What
    of it holds a tensor without data, and did not before, gets back what it held. Plain values stay as the run left
    them (they may count, or another thread has set them), but for those in what is put back.
    """

    def __init__(self, modules: list[nn.Module], functions: Iterable[Any], values: Any) -> None:
        self._given, self._is_over = Holders(), False
        plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        super().__init__(classes=set(map(type, plain)), functions=(), inside=set(map(id, modules)))
        self.search.constructs = True
        for module in plain:
            self.capture_module(module, own=False)
        for function in filter(callable, functions):
            self.capture(function)
        self.give(values)

    @property
    def records(self) -> tuple[Holders, ...]:
        """What the code reaches, and what it is given."""
        return self, self._given

    def give(self, values: Any) -> None:
        self._given.capture(values)
        while code := [*self.code, *self._given.code]:
            self.code, self._given.code = [], []
            self.follow((), code)
        self.unrecorded += self._given.unrecorded
        self._given.unrecorded.clear()
        self.seen.clear()
        self._given.seen.clear()

    def put_back(self) -> None:
        """Put back what holds tensors without data, what was given, and what overlapping runs put back."""
        with _lock:
            self._is_over = True
            for other in reversed(_kept[:_kept.index(self) + 1]):
                if other._is_over:
                    for restore in [restore for _, now, restore in other.list_changes() if leads_to_fake(now)]:
                        restore()
            while _kept and _kept[-1]._is_over:
                _kept.pop()
        self._given.put_back()

    def put_back_all(self) -> None:
        with without_modes(), torch._C.DisableTorchFunction():
            super().put_back()


def _holds_data(value: Any, kind: type) -> bool:
    """Whether its state is bytes, a position or where a generator of random numbers is, and not what it refers to."""
    if isinstance(value, (io.IOBase, random.Random)) or hasattr(kind, "bit_generator") or (
            hasattr(kind, "get_state") and kind.__module__.startswith("numpy")):
        return True
    if hasattr(kind, "__next__"):
        return kind not in weakref.ProxyTypes and not is_written_iterator(kind)
    try:
        memoryview(value)
    except (TypeError, ValueError, BufferError):
        return hasattr(kind, "tobytes")
    return True


def leads_to_fake(values: Iterable[Any]) -> bool:
    """Whether a tensor without data is reached from ``values``, by whatever holds it."""
    waiting, seen = list(values), dict[int, Any]()
    while waiting and len(seen) < MOST_OBJECTS:
        value = waiting.pop()
        if type(value) in PLAIN or id(value) in seen or isinstance(value, _NOT_ENTERED):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if _is_fake(value):
                return True
            waiting += (value.grad if value.is_leaf else None, value.__dict__)
        elif isinstance(value, FunctionType):  # not its globals
            waiting += (*(look_up(cell, "") for cell in value.__closure__ or ()), *(value.__defaults__ or ()),
                        *(value.__kwdefaults__ or {}).values(), value.__dict__)
        elif isinstance(value, ContextVar):
            waiting.append(value.get(None))
        else:
            waiting += gc.get_referents(value)
    return False


def _is_fake(tensor: torch.Tensor) -> bool:
    if is_around_tensors(tensor):
        return any(_is_fake(getattr(tensor, name)) for name in names_of_parts(tensor))
    return tensor.layout is torch.strided and isinstance(find_storage(tensor), MetaStorage)
