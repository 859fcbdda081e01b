"""Sees each operator that runs on real tensors, times it and reports it."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from analyzer.meta.intercept.mode_stack import DirectDispatchMode
from analyzer.meta.intercept.replacement import call_handlers, replace, waiting
from analyzer.meta.operator_info import describe_operator
from analyzer.meta.spec import ARGUMENTS, SPARSE_LAYOUTS, Signature, to_specs

from .clock import Clock

_LARGEST = 1 << 16  # signatures; a process that meets more kinds of call than this starts over, to bound memory
_signatures: dict[Any, Signature] = {}


#: Is told, while the clock stands still, that an operator ran: signature, inputs, outputs, and the marks around it.
OperatorListener = Callable[[Signature, list[torch.Tensor], list[torch.Tensor], Any, Any], None]


class MeasuringMode(DirectDispatchMode):
    """Runs every operator between two marks of the clock. Of tensors that wrap others it sees what they run inside."""

    supports_higher_order_operators = True

    def __init__(self, listener: OperatorListener, clock: Clock) -> None:
        super().__init__()
        self.listener, self.clock = listener, clock

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if waiting:
            call_handlers()
        start = self.clock.pause()
        if types and _wraps(tuple(types)):
            self.clock.go()
            return NotImplemented
        facts = _facts.get(id(func)) or _look_up(func)
        if facts.composite:  # under inference_mode nothing takes it apart before
            self.clock.go()
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
            start = self.clock.pause()
        self.clock.go()
        result = func(*args, **(kwargs or {}))
        end = self.clock.pause()
        if not facts.silent:
            with torch._C.DisableTorchFunction():
                if (found := describe_call(func, args, kwargs or {}, result)) is not None:
                    self.listener(*found, start, end)
        self.clock.go()
        return result


def describe_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
                  result: Any) -> tuple[Signature, list[torch.Tensor], list[torch.Tensor]] | None:
    """The signature of an operator's call, its tensors and those of its result; None where one has no shape yet."""
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    key: list[Any] = [id(func)]  # which the signature keeps alive; an operator's own hash is slow
    if not _flatten(args, inputs, key):
        return None  # a lazy module looks at what it has not made yet
    for name, value in kwargs.items():
        key.append(name)
        _flatten((value,), inputs, key)
    _flatten(result if isinstance(result, (list, tuple)) else (result,), outputs, key)
    packed = describe_operator(func).packed if isinstance(func, torch._ops.OpOverload) else ()
    values = {i: tuple(args[i].tolist()) for i in packed if i < len(args) and isinstance(args[i], torch.Tensor)}
    key.extend(values.items())
    try:
        frozen = tuple(key)
        signature = _signatures.get(frozen)
    except TypeError:
        frozen, signature = None, None
    if signature is None:
        # of a storage, which holds real memory, a signature keeps the bytes
        known, named = (to_specs(pytree.tree_map_only(_STORAGES, lambda storage: storage.nbytes(), part))
                        for part in (args, kwargs))
        specs = tuple([spec.with_values(values[i]) if i in values else spec for i, spec in enumerate(known)])
        signature = Signature(func, specs, named, tuple(to_specs(inputs)), tuple(to_specs(outputs)))
        if frozen is not None:
            if len(_signatures) >= _LARGEST:
                _signatures.clear()
            _signatures[frozen] = signature
    return signature, inputs, outputs


class _OperatorTraits(NamedTuple):
    operator: Any  # kept, so that no other takes its id
    composite: bool
    silent: bool


_facts: dict[int, _OperatorTraits] = {}


def _look_up(func: Any) -> _OperatorTraits:
    known = describe_operator(func) if isinstance(func, torch._ops.OpOverload) else None  # a higher-order operator
    found = _facts[id(func)] = _OperatorTraits(func, known is not None and known.composite,
                                               known is not None and known.silent)
    return found


@lru_cache(maxsize=256)
def _wraps(types: tuple[type, ...]) -> bool:
    return any(is_traceable_wrapper_subclass_type(t) for t in types)


_PLAIN = frozenset(ARGUMENTS)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_LAZY = (UninitializedParameter, UninitializedBuffer)


def _flatten(args: Any, tensors: list[torch.Tensor], key: list[Any]) -> bool:
    """Collect tensors, and what tells one kind of call from another; False where one has no shape yet."""
    for a in args:
        if isinstance(a, torch.Tensor):
            if type(a) in _LAZY:
                return False
            tensors.append(a)
            if a.is_nested or a.layout in SPARSE_LAYOUTS:
                key.append(id(to_specs(a)))  # specs are never given up
                continue
            key.append((a.shape, a.stride() if a.layout is torch.strided else None, a.dtype, a.device))
        elif isinstance(a, (list, tuple)):
            key.append(len(a))
            if not _flatten(a, tensors, key):
                return False
        elif type(a) in _PLAIN:
            key.append(type(a))  # 1, 1.0 and True are equal as keys
            key.append(a)
        else:
            # a function or another object, which no table may keep alive: a list cannot be hashed, so the call is
            # remembered nowhere
            key.append([])
    return True


@contextmanager
def run_as_written() -> Iterator[None]:
    """Run compiled functions and modules eagerly, as compiled code does not run operators one by one."""
    with ExitStack() as undo:
        is_set = False

        def set_stance() -> None:
            nonlocal is_set
            # nothing was compiled before, where it is not there
            if not is_set and "torch._dynamo.eval_frame" in sys.modules:
                stance = torch.compiler.set_stance("force_eager")
                undo.callback(stance.__exit__, None, None, None)
                is_set = True

        def compile(original: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                set_stance()
                return result

            return run

        undo.callback(replace(torch, "compile", compile))
        set_stance()
        yield
