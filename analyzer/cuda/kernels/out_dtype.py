"""The higher-order operator ``out_dtype``, by which libraries ask for products of int8 that give int32: below autograd
it is one operator or a few (torch/_higher_order_ops/out_dtype.py, out_dtype_dense).
"""
from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from analyzer.cuda.kernel_registry import kernel_replacements
from analyzer.meta.dispatch.mode import MetaDispatchMode
from analyzer.meta.intercept.replacement import Undo
from analyzer.meta.simulated_device import reopened

# its package has the operator under this name
_module: Any = importlib.import_module("torch._higher_order_ops.out_dtype")


def _run(mode: MetaDispatchMode, *args: Any) -> Any:
    with mode, reopened():
        return _module.out_dtype_dense(*args)


@kernel_replacements.append
def answer_operator() -> Iterator[Undo]:
    """Answer the operator where a mode is active; the result undoes it."""
    operator = _module.out_dtype
    operator.python_key_table[MetaDispatchMode] = _run
    operator._dispatch_cache.clear()

    def put_back() -> None:
        del operator.python_key_table[MetaDispatchMode]
        operator._dispatch_cache.clear()

    yield put_back
