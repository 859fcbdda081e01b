"""Control flow as operators (torch.cond, while_loop, scan, map) runs as Python's does.

A condition that only data could give is asked as any other, so that it is refused, or answered by the user's policy.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from analyzer.meta.state import current

from .replacement import Undo, answer

Function = Callable[..., Any]
Tensors = Sequence[Any]


def control_flow_replacements() -> Iterator[Undo]:
    """Run the operators in Python where a mode is active; each result undoes one replacement."""
    for name, run in (("cond", _cond), ("while_loop", _while), ("scan", _scan), ("map_impl", _map)):
        yield answer(type(getattr(torch.ops.higher_order, name)), "__call__", run)


def _cond(op: Any, pred: Any, true_fn: Function, false_fn: Function, operands: Tensors) -> Any:
    state = current()
    if state is not None and torch.is_grad_enabled():
        state.assume("torch.cond: weights that only the other branch uses get no gradient, where torch gives zeros, "
                     f"{state.where()}")
    return true_fn(*operands) if pred else false_fn(*operands)


def _while(op: Any, cond_fn: Function, body_fn: Function, carried_inputs: Tensors, additional_inputs: Tensors,
           **options: Any) -> Any:
    while cond_fn(*carried_inputs, *additional_inputs):
        carried_inputs = body_fn(*carried_inputs, *additional_inputs)
    return tuple(carried_inputs)


def _scan(op: Any, combine_fn: Function, init: Tensors, xs: Tensors, additional_inputs: Tensors) -> Any:
    carried, outputs = list(init), []
    for slices in zip(*(x.unbind() for x in xs)):
        result = combine_fn(*carried, *slices, *additional_inputs)
        carried = result[:len(init)]
        outputs.append(result[len(init):])
    return [*carried, *map(torch.stack, zip(*outputs))]


def _map(op: Any, f: Function, xs: Tensors, pos_args: Tensors) -> Any:
    return [torch.stack(outputs) for outputs in zip(*(f(*slices, *pos_args) for slices in zip(*(
        x.unbind() for x in xs))))]
