"""Liger's kernels under a dry run: norms, activations and the loss with the head, as what they save and allocate."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch.nn import functional

from .package import check_dry_run
from .saved_file import assume

# Names as in liger-kernel 0.8.2, transformers/monkey_patch.py. What each kernel saves and writes in place is in ops/:
# rms_norm.py, swiglu.py, fused_linear_cross_entropy.py. Rotary embeddings, which it turns in place, are as they were.
VERSION = "0.8.2"
Tensor = torch.Tensor


class _SwiGLU(torch.autograd.Function):
    """Saves both products; their gradients are written in their place. The kernel is one, and takes no memory while it
    runs, where operators of torch take one result more in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        grad, (gate, up) = grads[0], ctx.saved_tensors
        of_up = functional.silu(gate).mul_(grad)
        torch.ops.aten.silu_backward.grad_input(grad.mul(up), gate, grad_input=gate)
        up.copy_(of_up)
        return gate, up


class _HeadLoss(torch.autograd.Function):
    """The loss of rows by a head whose scores are there for some rows at a time; both gradients are made with it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, mean: bool) -> Tensor:
        count, (vocabulary, hidden) = len(rows), weight.shape
        of_rows, of_weight = torch.zeros_like(rows), torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.zeros(count, dtype=torch.float32, device=rows.device)
        size = 1 << (-(-count // -(-vocabulary // hidden)) - 1).bit_length()  # as many scores as rows have channels
        for start in range(0, count, size):
            part = rows[start:start + size]
            scores = part @ weight.t()
            losses[start:start + size] = scores[:, 0]  # the kernel reads scores, and writes gradients in their place
            scores.mul_(1 / count)
            of_rows[start:start + size] = scores @ weight
            if of_weight is not None:
                of_weight.addmm_(scores.t(), part)
        ctx.save_for_backward(of_rows, *(() if of_weight is None else (of_weight,)))
        return losses.sum() / (count if mean else 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made = [one.mul_(grads[0]) for one in ctx.saved_tensors]
        return made[0], made[1] if len(made) > 1 else None, None, None


def _norm(module: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, module.weight.shape, module.weight, getattr(module, "variance_epsilon", 1e-6))


def _multiply(module: Any, x: Tensor) -> Any:
    return module.down_proj(_SwiGLU.apply(module.gate_proj(x), module.up_proj(x)))  # type: ignore[no-untyped-call]


def _run(model: Any, original: Callable[..., Any], *args: Any, labels: Tensor | None = None, **named: Any) -> Any:
    """The forward pass of a causal model; where it has labels, without scores."""
    if labels is None or not model.training:
        return original(*args, labels=labels, **named)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    number = named.pop("num_items_in_batch", None)
    shifted = named.pop("shift_labels", None)
    named = {name: value for name, value in named.items() if name not in ("logits_to_keep", "skip_logits")}
    found = model.model(*args, **named)
    if shifted is None:
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:]
    compute: Any = _HeadLoss.apply
    loss = compute(found.last_hidden_state.flatten(0, -2), model.lm_head.weight, shifted.flatten(), number is None)
    return CausalLMOutputWithPast(loss=loss if number is None else loss / number,
                                  past_key_values=found.past_key_values)


def _apply(model: Any, *, rms_norm: bool = True, swiglu: bool = True, fused_linear_cross_entropy: bool = True,
           cross_entropy: bool = False, rope: bool = True, **_: Any) -> None:
    """Let a model of transformers have the kernels; what is asked for that a model has none of is left."""
    check_dry_run("liger_kernel")
    assume(f"liger_kernel: a stand-in for version {VERSION} took its place: norms, gated activations and the loss with "
           "the head save and allocate what its kernels do; its rotary embeddings and its cross entropy of scores that "
           "are there are left out")
    for module in model.modules():
        if rms_norm and type(module).__name__.endswith("RMSNorm") and module.weight is not None:
            module.forward = MethodType(_norm, module)
        elif swiglu and all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")) and (
                getattr(getattr(model, "config", None), "hidden_act", "silu") in ("silu", "swish")):
            module.forward = MethodType(_multiply, module)
    if fused_linear_cross_entropy and hasattr(model, "lm_head") and hasattr(model, "model"):
        model.forward = wraps(model.forward)(partial(_run, model, model.forward))  # trainers read its arguments


def _apply_later(*_: Any, model: Any = None, **named: Any) -> None:
    if model is None:
        raise NotImplementedError("the stand-in for liger_kernel in a dry run changes models that are there: give "
                                  "model=, or use_liger_kernel=True to a trainer")
    _apply(model, **named)


_FAMILIES = "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text phi3 mixtral granite olmo2"
#: What each module has. Others of the package are not there.
MODULES: dict[str, dict[str, Any]] = {
    "liger_kernel": {"__version__": VERSION},
    "liger_kernel.transformers": {"_apply_liger_kernel_to_instance": _apply, **{
        f"apply_liger_kernel_to_{family}": _apply_later for family in _FAMILIES.split()}}}
