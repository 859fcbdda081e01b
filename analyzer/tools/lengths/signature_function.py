"""Signatures of calls at any sizes of the inputs: each number in them is a function of these."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from analyzer.meta.spec import Signature, TensorSpec

from .size_function import Numbers, fit_with_derived


class SignatureFunctions:
    """Signatures of calls at any sizes: ``alike`` has for each of them those at ``points``; ``derived`` is as
    `fit_with_derived` has it.
    """

    def __init__(self, points: Numbers, alike: Sequence[Sequence[Signature]], derived: Numbers) -> None:
        self._like = [signatures[0] for signatures in alike]
        rows: list[tuple[int, ...]] = []
        self._parts: list[slice | None] = []  #: of each signature its numbers; None where it is the same at all points
        told = []
        for signatures in alike:
            numbers = [_numbers_in(signature) for signature in signatures]
            told.append(len(set(map(len, numbers))) == 1)
            varies = told[-1] and any(each != numbers[0] for each in numbers)
            self._parts.append(slice(len(rows), len(rows) + len(numbers[0])) if varies else None)
            rows += zip(*numbers) if varies else ()
        table = np.array(rows, np.int64).reshape(len(rows), len(points))
        self._numbers, is_exact = fit_with_derived(points, table, derived)
        #: whether each follows exactly
        self.is_exact = [is_told and (part is None or bool(is_exact[part].all()))
                         for is_told, part in zip(told, self._parts)]

    def at(self, point: tuple[int, ...]) -> list[Signature]:
        numbers = self._numbers(point).tolist()
        return [like if part is None else _with_numbers(like, iter(numbers[part]))
                for like, part in zip(self._like, self._parts)]


def _with_numbers(like: Signature, left: Iterator[int]) -> Signature:
    args, kwargs = (_rebuild(tree, left) for tree in (like.args, like.kwargs))
    inputs, outputs = (tuple([_rebuild(spec, left) for spec in specs]) for specs in (like.inputs, like.outputs))
    return Signature(like.op, args, kwargs, inputs, outputs, like.launch)


def _numbers_in(signature: Signature) -> list[int]:
    found: list[int] = []
    for tree in (signature.args, signature.kwargs, signature.inputs, signature.outputs):
        _visit(tree, found.append)
    return found


def _visit(tree: Any, note: Callable[[int], None]) -> None:
    if isinstance(tree, TensorSpec):
        for number in (*tree, *tree.stride, *(tree.values or ())):
            note(number)
        for part in tree.parts:
            _visit(part, note)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _visit(item, note)
    elif isinstance(tree, dict):
        for item in tree.values():
            _visit(item, note)
    elif type(tree) is int:
        note(tree)


def _rebuild(tree: Any, left: Any) -> Any:
    if isinstance(tree, TensorSpec):
        shape, stride = (tuple([next(left) for _ in numbers]) for numbers in (tree, tree.stride))
        values = None if tree.values is None else tuple([next(left) for _ in tree.values])
        parts = tuple([_rebuild(part, left) for part in tree.parts])
        return TensorSpec.of(shape, stride, tree.dtype, tree.device, parts, values)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_rebuild(item, left) for item in tree])
    if isinstance(tree, dict):
        return {key: _rebuild(item, left) for key, item in tree.items()}
    return next(left) if type(tree) is int else tree
