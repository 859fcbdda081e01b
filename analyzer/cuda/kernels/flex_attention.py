"""``flex_attention`` under the mode: the products that it runs where it is not compiled into one kernel, forward and
backward. Source of both passes: ``sdpa_dense``, ``sdpa_dense_backward`` and ``FlexAttentionAutogradOp`` in
``torch/_higher_order_ops/flex_attention.py``. What differs is how the gradient of the score function is found: torch
traces it with tensors of its own, which know no mode.
"""
from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey

from analyzer.cuda.kernel_registry import kernel_replacements
from analyzer.meta.dispatch.mode import MetaDispatchMode
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo
from analyzer.meta.simulated_device import reopened
from analyzer.meta.state import active_state, current

Tensor = torch.Tensor
# its package has the operator under this name
flex: Any = importlib.import_module("torch._higher_order_ops.flex_attention")


@kernel_replacements.append
def answer_operator() -> Iterator[Undo]:
    """Answer the operator with and without autograd; each result undoes one step."""
    operator = flex.flex_attention
    yield _set(operator.py_kernels, DispatchKey.Autograd, _attend_with_autograd, operator)
    yield _set(operator.python_key_table, MetaDispatchMode, _attend_below_autograd, operator)


def _set(table: dict[Any, Any], key: Any, value: Any, operator: Any) -> Undo:
    before = table.get(key)
    table[key] = value
    operator._dispatch_cache.clear()
    def put_back() -> None:
        if before is None:
            del table[key]
        else:
            table[key] = before
        operator._dispatch_cache.clear()
    return put_back


def _attend_with_autograd(*args: Any) -> Any:
    if current() is None:  # another thread
        return flex.flex_attention_autograd(*args)
    *first, score_buffers, mask_buffers = args
    return FlexAttention.apply(*first, mask_buffers, *score_buffers)


def _attend_below_autograd(mode: MetaDispatchMode, *args: Any) -> Any:
    with mode, reopened():
        return _attend(*args)


def _attend(*args: Any) -> Any:
    active_state().assume(
        "flex_attention is profiled as it runs without torch.compile: it makes the whole matrix of scores")
    with without_modes():
        # torch asks it for the order of strides, and its import makes tensors
        import torch._inductor.ir  # noqa: F401
    return flex.sdpa_dense(*args)


class FlexAttention(torch.autograd.Function):
    """Saves what ``FlexAttentionAutogradOp`` saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: tuple[Any, ...],
                scale: float, kernel_options: dict[str, Any], mask_buffers: tuple[Any, ...],
                *score_buffers: Any) -> Any:
        """Run the kernel and keep what its backward pass needs."""
        ctx.set_materialize_grads(False)
        settings = score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers
        out, logsumexp, max_scores = _attend(query, key, value, *settings)
        ctx.mark_non_differentiable(max_scores)
        ctx.save_for_backward(query, key, value, out, logsumexp, max_scores,
                              *(t for t in block_mask if isinstance(t, Tensor)),
                              *(t for t in (*score_buffers, *mask_buffers) if isinstance(t, Tensor)))
        ctx.settings = settings
        return out, logsumexp, max_scores

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients of the inputs."""
        query, key, value, out, logsumexp, *_ = ctx.saved_tensors
        score_mod, *settings = ctx.settings
        for_logsumexp = torch.zeros_like(logsumexp) if grads[1] is None else grads[1]  # torch 2.9 takes no None
        *found, for_buffers = flex.sdpa_dense_backward(query, key, value, out, logsumexp, grads[0], for_logsumexp,
                                                       score_mod, _gradient_of(score_mod), *settings)
        return *found, *[None] * 5, *for_buffers


def _gradient_of(score_mod: Any) -> Any:
    """Gradients of a score function with respect to its arguments, as ``sdpa_dense_backward`` asks for them."""
    def joint(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, grad: Tensor, *buffers: Any) -> Any:
        pull_back = torch.func.vjp(lambda score, *buffers: score_mod(score, b, h, m, n, *buffers), score, *buffers)[1]
        for_score, *for_buffers = pull_back(grad)
        return [for_score, None, None, None, None, *for_buffers]
    return joint
