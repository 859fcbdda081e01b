"""Calls that get lists of tensors, one of each parameter: which belong together, and signatures for other lists."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec


def rows_of(signature: Signature, inputs: Sequence[int], outputs: Sequence[int]) -> Sequence[Sequence[int]]:
    """The storages of a call that belong together: all of them, or those at one position of its lists."""
    length = length_of_lists(signature)
    if length <= 1:
        return [(*inputs, *outputs)]
    rows: list[list[int]] = [[] for _ in range(length)]
    for position, number in (*zip(list_positions(signature), inputs), *zip(range(length), outputs)):
        if position is not None:
            rows[position].append(number)
    return rows


def spread_owners(rows: Sequence[Sequence[int]], owners: dict[int, int]) -> None:
    """Let what stands in a row with the storages of one owner alone be that owner's, until no more is found.

    >>> owners = {1: 0, 2: 1}
    >>> spread_owners([(3, 4), (1, 3), (1, 2, 5)], owners)
    >>> owners
    {1: 0, 2: 1, 3: 0, 4: 0}
    """
    before = -1
    while len(owners) > before:
        before = len(owners)
        for row in rows:
            found = {owners[number] for number in row if number in owners}
            if len(found) == 1:
                owners.update(dict.fromkeys(row, found.pop()))


def list_positions(signature: Signature) -> list[int | None]:
    """Of each input its position in a list, None outside of lists."""
    found: list[int | None] = []
    for value in (*signature.args, *signature.kwargs.values()):
        if isinstance(value, TensorSpec):
            found.append(None)
        elif isinstance(value, (list, tuple)):
            found += [i for i, x in enumerate(value) if isinstance(x, TensorSpec)]
    return found


def length_of_lists(signature: Signature) -> int:
    """Of how many tensors the lists are that a call gets; 0 without lists."""
    return 1 + max((position for position in list_positions(signature) if position is not None), default=-1)


_MOST_DERIVED = 16  # of one signature: those of lists of a thousand tensors take some 100 KB each


def derive(signature: Signature, key: Any, fit: Callable[[Any], Any]) -> Signature:
    """A signature made of another one, which runs of the same optimizer share: with it what profilers note in it."""
    derived: dict[Any, Signature] = signature.memo.setdefault("derived", {})
    found = derived.get(key)
    if found is None:
        if len(derived) >= _MOST_DERIVED:
            derived.clear()
        args, kwargs = fit(signature.args), fit(signature.kwargs)
        found = derived[key] = Signature(signature.op, args, kwargs, tuple(specs_in((*args, *kwargs.values()))),
                                         tuple(fit(signature.outputs)))
    return found


def fit_lists(value: Any, length: int, fit: Callable[[Any], Any]) -> Any:
    """A part of a signature in which ``fit`` was applied to each list of that length."""
    if isinstance(value, dict):
        return {name: fit_lists(x, length, fit) for name, x in value.items()}
    if isinstance(value, TensorSpec) or not isinstance(value, (list, tuple)):
        return value
    if len(value) != length or not isinstance(value[0], (TensorSpec, float)):
        return type(value)([fit_lists(x, length, fit) for x in value])
    return fit(value)


def specs_in(value: Any) -> list[TensorSpec]:
    """The specs in nested lists, in order."""
    if isinstance(value, TensorSpec):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    if value and isinstance(value[0], TensorSpec) and isinstance(value, list):
        return value  # lists of tensors hold nothing else
    return [spec for x in value for spec in specs_in(x)]
