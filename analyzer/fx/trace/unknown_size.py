"""Which sizes of traced tensors depend on data, found by running a call again with other sizes.

A size that data decides (``nonzero``, ``unique``, a mask) is taken by a policy while tracing, so it must not become a
constant of the graph. Each call that such a tensor goes into is repeated with other sizes: what comes out different
depends on them. Three others (none, a few more, many more) do not miss a bound such as that of ``x[:100]``.
"""
from __future__ import annotations

import dataclasses
import dis
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.copied_tensor import copy_tensor
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.spec import NUMBERS
from analyzer.meta.state import MetaState
from analyzer.meta.structure import children, replace_tensors, tensors_of
from analyzer.meta.tensor import device_of, new_tensor
from analyzer.meta.value.contents import read_known
from analyzer.meta.value.known_value import Known, Watched, reads

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]

#: (another value for a size, the bound for sizes that the call takes from data and its answer for an unknown scalar)
_OTHERS: list[tuple[Callable[[int], int], int]] = [(lambda n: 0, 0), (lambda n: n + 3, 2), (lambda n: 2 * n + 7, 3)]


class SizeWatch:
    """Follows the sizes that depend on data through the calls of a trace."""

    def __init__(self, state: MetaState) -> None:
        self.state = state
        self._dims: dict[int, frozenset[int]] = {}
        self._guessed: set[int] = set()  # those of which a policy decided
        self._kept: list[Tensor] = []    # keeps what these name by id alive
        self._answered = state.unknown_sizes, reads.varying
        self.is_guess = True  #: whether what the last call asked for was decided by a policy: no exact constant

    def dims_of(self, tensor: Tensor) -> frozenset[int]:
        return self._dims.get(id(tensor), frozenset())

    def is_guessed(self, tensor: Tensor) -> bool:
        """Whether a policy decided the sizes of ``tensor``, which are no others than the trace's data gives if not."""
        return id(tensor) in self._guessed

    def set_dims(self, tensor: Tensor, dims: frozenset[int], is_guess: bool) -> None:
        if dims or id(tensor) in self._dims:
            self._dims[id(tensor)] = dims
            (self._guessed.add if is_guess else self._guessed.discard)(id(tensor))
            self._kept.append(tensor)

    def concerns(self, args: Any, kwargs: Any) -> bool:
        """Whether a call that has just run asked for what depends on data, or was given a tensor with such a size."""
        before, self._answered = self._answered, (self.state.unknown_sizes, reads.varying)
        given = [t for t in tensors_of((args, kwargs)) if self._dims.get(id(t))] if self._dims else []
        self.is_guess = before[0] != self._answered[0] or any(map(self.is_guessed, given))
        return before != self._answered or bool(given)

    def follow(self, run: Run, args: Any, kwargs: Any, result: Any, module: nn.Module | None = None,
               contents: bool = False) -> bool:
        """Note what sizes of ``result`` of ``run(args, kwargs)`` depend on data; whether anything else does. Buffers of
        ``module`` stay. With ``contents``, contents that depend on data are forgotten; else they vary.
        """
        others = [again for change, bound in _OTHERS
                  if (again := self._repeat(run, args, kwargs, change, bound, module)) is not None]
        tensors = list(tensors_of(result))
        alike = [found for other in others if len(found := list(tensors_of(other))) == len(tensors)]
        outline = _outline((result,), set())
        differs = any(_outline(other, set()) != outline for other in others) if others else not _is_fixed(result)
        for i, tensor in enumerate(tensors):
            shapes = [found[i].shape for found in alike]
            dims = [d for d in range(tensor.dim())
                    if any(len(s) != tensor.dim() or s[d] != tensor.shape[d] for s in shapes)]
            self.set_dims(tensor, frozenset(dims if shapes else range(tensor.dim())), contents or self.is_guess)
            for _, exact in () if contents else known_contents([tensor]):
                if exact is not None and not exact.varies:
                    tensor.untyped_storage().known = Watched(exact, varies=True)  # type: ignore[attr-defined]
            if contents and not (shapes and all(_same_contents(tensor, found[i]) for found in alike)):
                forget_contents(tensor)
        self._answered = self.state.unknown_sizes, reads.varying
        return differs

    def _repeat(self, run: Run, args: Any, kwargs: Any, change: Callable[[int], int], bound: int,
                module: nn.Module | None) -> Any:
        """What ``run`` gives for other sizes, in a tuple; None where it cannot run with them."""
        memo: dict[int, Any] = {}

        def another(tensor: Tensor) -> Tensor:  # one of its own, with other sizes where they depend on data
            dims = self.dims_of(tensor)
            if tensor.layout is not torch.strided or not isinstance(tensor.untyped_storage(), MetaStorage):
                return tensor
            if not dims:
                out: Tensor = copy_tensor(tensor, memo)
            else:
                with without_modes():
                    shape = [change(n) if d in dims else n for d, n in enumerate(tensor.shape)]
                    out, _ = new_tensor(shape, None, tensor.dtype, device_of(tensor), self.state.space)
            out.requires_grad_(tensor.requires_grad)
            return out if tensor.is_leaf else out.clone()  # a leaf that requires a gradient cannot be written to

        with self._undone(module, bound):
            args, kwargs = replace_tensors((args, kwargs), another)
            try:
                return (run(args, kwargs),)
            except Exception:  # these sizes do not go together, or are too few: the other values decide
                return None

    @contextmanager
    def _undone(self, module: nn.Module | None, bound: int) -> Iterator[None]:
        """Another policy inside; what the state and the module's buffers know is as it was afterwards."""
        state = self.state
        before = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        assumptions = dict(state.assumptions)
        contents = [(s, s.known) for b in (() if module is None else module.buffers())
                    if isinstance(s := b.untyped_storage(), MetaStorage)]
        state.options = dataclasses.replace(state.options, unknown_size=bound)
        state.placeholder, reads.hides_varying = bound, True
        try:
            yield
        finally:
            reads.hides_varying = False
            for name, value in before.items():
                setattr(state, name, value)
            state.assumptions.clear()
            state.assumptions.update(assumptions)
            for storage, known in contents:
                storage.known = known


def known_contents(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Known | None]]:
    return [(t, s.known) for t in tensors
            if t.layout is torch.strided and isinstance(s := t.untyped_storage(), MetaStorage)]


def forget_contents(tensor: Tensor) -> None:
    for t, _ in known_contents([tensor]):
        t.untyped_storage().known = None  # type: ignore[attr-defined]


def _same_contents(tensor: Tensor, other: Tensor) -> bool:
    first, second = (read_known(t) if known_contents([t]) else None for t in (tensor, other))
    return first is None or second is not None and torch.equal(first, second)


def _is_fixed(value: Any) -> bool:
    """Whether a result is a tensor or a tuple of tensors, of which there are as many whatever the data is."""
    return value is None or isinstance(value, Tensor) or type(value) is tuple and all(map(_is_fixed, value))


def _outline(value: Any, seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, NUMBERS):
        return value
    if isinstance(value, torch.Size):
        return tuple(value)
    if id(value) in seen:
        return None
    inside = children(value)
    if inside:
        seen.add(id(value))
    return [(str(access), _outline(child, seen)) for access, child in inside]


def subscript_of_shape() -> int | None:
    """``1`` where the code that asks for a shape reads ``x.shape[1]``; None where it takes all of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    following = [] if frame is None else [
        i for i in dis.get_instructions(frame.f_code)
        if i.offset >= frame.f_lasti and i.opname not in ("CACHE", "EXTENDED_ARG")][:3]
    if len(following) < 3 or (following[0].opname, following[0].argval) != ("LOAD_ATTR", "shape"):
        return None
    _, index, taken = following
    subscript = taken.opname == "BINARY_SUBSCR" or taken.opname == "BINARY_OP" and taken.argrepr == "[]"
    return index.argval if index.opname.startswith("LOAD_") and type(index.argval) is int and subscript else None
