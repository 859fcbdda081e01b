"""Higher-order operators find their kernel in Python, by the highest key set: those of the mode are not for them."""
from __future__ import annotations

from collections.abc import Iterator

import torch

from analyzer.meta.intercept.replacement import Undo


def replacements(keys: tuple[torch._C.DispatchKey, ...]) -> Iterator[Undo]:
    """Let higher-order operators fall through ``keys``, as through autocast's; each result undoes one step."""
    defaults = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    added = [key for key in keys if key not in defaults]
    defaults.extend(added)  # for those that are defined while the mode is active
    def put_back() -> None:
        for key in added:
            defaults.remove(key)
    yield put_back
    for operator in list(torch._ops._higher_order_ops.values()):
        yield _fall_through(operator, keys)


def _fall_through(operator: torch._ops.HigherOrderOperator, keys: tuple[torch._C.DispatchKey, ...]) -> Undo:
    before = operator.non_fallthrough_keys
    for key in keys:
        operator.fallthrough(key)
    def put_back() -> None:
        operator.non_fallthrough_keys = before
    return put_back
