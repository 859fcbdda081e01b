"""A call's signature at any sizes of the inputs: each number in it is a function of these."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from analyzer.meta.spec import Signature, TensorSpec

from .size_function import Numbers, fit_with_derived


class SignatureFunction:
    """The signature of a call that has those of ``signatures`` at these ``points``; ``derived`` as `fit_with_derived`
    has them.
    """

    def __init__(self, points: Numbers, signatures: Sequence[Signature], derived: Numbers) -> None:
        self._like = signatures[0]
        found = [_numbers_in(signature) for signature in signatures]
        self.is_constant = all(numbers == found[0] for numbers in found)
        self.is_exact = len(set(map(len, found))) == 1  #: whether the function gives each of the signatures
        if self.is_exact and not self.is_constant:
            rows = np.array(found, np.int64).T
            self._numbers, is_exact = fit_with_derived(points, rows, derived)
            self.is_exact = bool(is_exact.all())

    def at(self, point: tuple[int, ...]) -> Signature:
        if self.is_constant:
            return self._like
        left = iter(self._numbers(point).tolist())
        like = self._like
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
