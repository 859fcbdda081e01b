"""Activation checkpointing inside a compiled function: its operators are tagged, and run once.

``torch.compile`` runs no checkpoint. Its operators are tagged with what its policy says of each (recompute, where it
has none), and with a number that tells it from the next; the partitioner decides by them. So does
``torch/_higher_order_ops/wrap.py``, ``tag_activation_checkpoint_impl``, with ``_CachingTorchDispatchMode`` of
``torch/utils/checkpoint.py``, for checkpoints of both kinds.
"""
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import checkpoint

Tag = Callable[[Sequence[fx.Node], Any, Any, Any, Any], None]
"""Tags the nodes that a call of an operator, with its arguments and its result, put into the graph."""


def _tag(number: int, policy: Callable[..., Any] | None, nodes: Sequence[fx.Node], func: Any, args: Any, kwargs: Any,
         result: Any) -> None:
    """``policy`` of a checkpoint tells of an operator whether it is recomputed; None: each is."""
    found: Any = checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    if policy is not None and func not in checkpoint.SAC_IGNORED_OPS:
        context = checkpoint.SelectiveCheckpointContext(is_recompute=False, **(
            {"op_output": result} if torch.__version__ >= "2.12" else {}))
        found = policy(context, func, *args, **kwargs)
        if isinstance(found, bool):
            found = checkpoint._policy_from_bool(found)
    for node in nodes:
        node.meta["recompute"], node.meta["ac_graph_id"] = found, number


@contextmanager
def tagged_checkpoints(trace: Any) -> Iterator[None]:
    """A block in which ``torch.utils.checkpoint`` tags the graphs of a `trace.FunctionTrace` and runs nothing twice."""
    numbers, thread = itertools.count(), threading.get_ident()
    run_as_written, apply_as_written = (
        checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction.apply)

    @contextmanager
    def region(context: Any = None) -> Iterator[None]:
        # one in another has the number of that
        outer, policy = trace.tag, getattr(context, "policy_fn", None)
        trace.tag = partial(_tag, next(numbers) if outer is None else outer.args[0], policy)
        try:
            with nullcontext() if context is None or policy is not None else context:
                yield
        finally:
            trace.tag = outer

    def runs_as_written() -> bool:
        return trace.tape is None or threading.get_ident() != thread

    def run(fn: Any, preserve: Any = True, context_fn: Any = checkpoint.noop_context_fn, *rest: Any,
            **kwargs: Any) -> Iterator[None]:
        if runs_as_written():
            yield from run_as_written(fn, preserve, context_fn, *rest, **kwargs)
            return
        forward, _ = context_fn()
        if not torch.is_grad_enabled():
            yield
            return
        with region(forward):
            yield

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if runs_as_written():
            return apply_as_written(function, preserve, *args)  # type: ignore[no-untyped-call]
        with region():
            return function(*args)

    with (mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", run),
          mock.patch.object(checkpoint.CheckpointFunction, "apply", apply)):
        yield
