"""A stage of Megatron's GPT as one tensor-parallel rank runs it: layers, collectives and optimizer of Megatron-LM of
2021 to 2023 (and Megatron-DeepSpeed): megatron/model/transformer.py, language_model.py, mpu/layers.py, mpu/mappings.py,
mpu/cross_entropy.py, optimizer/optimizer.py. Float16, no sequence parallelism, every layer recomputed.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from analyzer import register_time_impl
from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.hardware.kernel_time.pointwise import random_time, stream_time
from analyzer.meta.spec import Signature

Tensor = torch.Tensor
DROPOUT = 0.1  #: --hidden-dropout, --attention-dropout: arguments.py's defaults

# The fused kernels as operators: causal softmax, bias with GELU, bias with dropout and residual. Each is one kernel
# forward and one backward (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h,
# megatron/model/fused_bias_gelu.py, ``bias_dropout_add_fused_train`` of megatron/model/transformer.py); its time is
# that of what it reads and writes.


def stream_signature(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    return stream_time(sum(spec.nbytes for spec in (*signature.inputs, *signature.outputs)), device)


def _triangle(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Reads the keys that a query sees, half of a square, and writes all of it."""
    read = sum(spec.nbytes for spec in signature.inputs) / 2
    return stream_time(read + sum(spec.nbytes for spec in signature.outputs), device)


def _random(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    nbytes = sum(spec.nbytes for spec in (*signature.inputs, *signature.outputs))
    return random_time(signature.outputs[0].numel, nbytes, device)


def define(name: str, schema: str, fake: Any, rule: Any) -> Any:
    """An operator that makes its outputs alone, by ``fake``, with the time of ``rule``."""
    made = torch.library.custom_op(name, fake, mutates_args=(), schema=schema)
    made.register_fake(fake)
    register_time_impl(name)(rule)
    return made


causal_softmax_op = define("megatron::causal_softmax", "(Tensor scores, float scale) -> Tensor",
                           lambda scores, scale: torch.empty_like(scores), _triangle)
causal_softmax_backward_op = define(
    "megatron::causal_softmax_backward", "(Tensor grad, Tensor probabilities, float scale) -> Tensor",
    lambda grad, probabilities, scale: torch.empty_like(grad), _triangle)
bias_gelu_op = define("megatron::bias_gelu", "(Tensor x, Tensor bias) -> Tensor",
                      lambda x, bias: torch.empty_like(x), stream_signature)
bias_gelu_backward_op = define("megatron::bias_gelu_backward", "(Tensor grad, Tensor x, Tensor bias) -> Tensor",
                               lambda grad, x, bias: torch.empty_like(x), stream_signature)
bias_dropout_add_op = define(
    "megatron::bias_dropout_add", "(Tensor x, Tensor bias, Tensor residual, float p) -> (Tensor, Tensor)",
    lambda x, bias, residual, p: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)), _random)
dropout_backward_op = define("megatron::dropout_backward", "(Tensor grad, Tensor mask, float p) -> Tensor",
                             lambda grad, mask, p: torch.empty_like(grad), stream_signature)


def run(function: Any, *inputs: Any) -> Tensor:  # ``function.apply``, which torch does not annotate
    out: Tensor = function.apply(*inputs)
    return out


class CausalSoftmax(torch.autograd.Function):  # ``ScaledUpperTriangMaskedSoftmax``
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        out: Tensor = causal_softmax_op(scores, scale)
        ctx.save_for_backward(out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return causal_softmax_backward_op(grad, *ctx.saved_tensors, ctx.scale), None


class BiasGelu(torch.autograd.Function):
    """``GeLUFunction``: its backward gives one tensor for both inputs, which autograd sums for the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        out: Tensor = bias_gelu_op(x, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out = bias_gelu_backward_op(grad, *ctx.saved_tensors)
        return out, out.sum((0, 1))


class BiasDropoutAdd(torch.autograd.Function):  # ``bias_dropout_add_fused_train``
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
        out: Tensor
        out, mask = bias_dropout_add_op(x, bias, residual, p)
        ctx.save_for_backward(mask)
        ctx.p = p
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out = dropout_backward_op(grad, *ctx.saved_tensors, ctx.p)
        return out, out.sum((0, 1)), grad, None


@dataclass(frozen=True)
class StageShape:
    hidden: int
    heads: int
    layers: int
    seq_len: int
    micro_batch: int
    tensor_parallel: int
    vocab: int
    has_embedding: bool
    has_head: bool

    @property
    def padded_vocab(self) -> int:  # rounded up to 128 times the tensor-parallel ranks: ``_vocab_size_with_padding``
        unit = 128 * self.tensor_parallel
        return -(-self.vocab // unit) * unit


def all_reduce(x: Tensor, group: str | None, op: str = "sum") -> Tensor:  # the sum over the group, in place
    if group is None:
        return x
    functional: Any = torch.ops._c10d_functional
    out: Tensor = functional.wait_tensor(functional.all_reduce_(x, op, group))
    return out


class CopyToRegion(torch.autograd.Function):
    """Of mpu/mappings.py: nothing forward, the gradient summed over ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad.contiguous(), ctx.group), None


class ReduceFromRegion(torch.autograd.Function):  # of mpu/mappings.py: summed over ranks forward, nothing backward
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str | None) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class ColumnLinear(nn.Module):  # ColumnParallelLinear without gather; the bias may be left to the kernel that follows
    def __init__(self, shape: StageShape, group: str | None, out: int, adds_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out // shape.tensor_parallel, shape.hidden))
        self.bias = nn.Parameter(torch.empty(out // shape.tensor_parallel))
        self.group, self.adds_bias = group, adds_bias

    def forward(self, x: Tensor) -> Tensor:
        x = run(CopyToRegion, x, self.group)
        return F.linear(x, self.weight, self.bias if self.adds_bias else None)


class RowLinear(nn.Module):  # RowParallelLinear, its bias left to the kernel that follows
    def __init__(self, shape: StageShape, group: str | None, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.hidden, width // shape.tensor_parallel))
        self.bias = nn.Parameter(torch.empty(shape.hidden))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return run(ReduceFromRegion, F.linear(x, self.weight), self.group)


def unfused_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """``FusedScaleMaskSoftmax.forward_torch_softmax``, in float32 as with the default
    ``apply_query_key_layer_scaling``.
    """
    scaled = (scores.float() * 1.0).masked_fill_(mask, -10000.0)
    return F.softmax(scaled, dim=-1).half()


class Attention(nn.Module):
    """ParallelAttention: scores, fused causal softmax, dropout, values; [sequence, batch, hidden]."""

    mask: Tensor

    def __init__(self, shape: StageShape, group: str | None) -> None:
        super().__init__()
        self.heads, self.size = shape.heads // shape.tensor_parallel, shape.hidden // shape.heads
        self.query_key_value = ColumnLinear(shape, group, 3 * shape.hidden, adds_bias=True)
        self.dense = RowLinear(shape, group, shape.hidden)
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("mask", torch.empty(shape.seq_len, shape.seq_len, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        seq, batch = x.shape[:2]
        mixed = self.query_key_value(x).view(seq, batch, self.heads, 3 * self.size)
        q, k, v = (part.view(seq, batch * self.heads, self.size) for part in mixed.split(self.size, dim=3))
        room = torch.empty(batch * self.heads, seq, seq, dtype=x.dtype, device=x.device)
        scores = torch.baddbmm(room, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0,
                               alpha=self.size**-0.5)
        # ``FusedScaleMaskSoftmax.is_kernel_available``: the kernel takes matrices by fours
        is_fused = batch * self.heads % 4 == 0
        weights = self.dropout(run(CausalSoftmax, scores, 1.0) if is_fused else unfused_softmax(scores, self.mask))
        context = torch.bmm(weights, v.transpose(0, 1))
        context = context.view(batch, self.heads, seq, self.size).permute(2, 0, 1, 3).contiguous()
        out: Tensor = self.dense(context.view(seq, batch, self.heads * self.size))
        return out


class Mlp(nn.Module):  # ParallelMLP
    def __init__(self, shape: StageShape, group: str | None) -> None:
        super().__init__()
        self.dense_h_to_4h = ColumnLinear(shape, group, 4 * shape.hidden, adds_bias=False)
        self.dense_4h_to_h = RowLinear(shape, group, 4 * shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense_4h_to_h(run(BiasGelu, self.dense_h_to_4h(x), self.dense_h_to_4h.bias))
        return out


class Layer(nn.Module):  # ParallelTransformerLayer
    def __init__(self, shape: StageShape, group: str | None) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape, group)
        self.post_attention_layernorm = nn.LayerNorm(shape.hidden)
        self.mlp = Mlp(shape, group)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.input_layernorm(x))
        x = run(BiasDropoutAdd, attended, self.attention.dense.bias, x, DROPOUT)
        return run(BiasDropoutAdd, self.mlp(self.post_attention_layernorm(x)), self.mlp.dense_4h_to_h.bias, x, DROPOUT)


class Embedding(nn.Module):  # VocabParallelEmbedding, positions and dropout
    def __init__(self, shape: StageShape, group: str | None) -> None:
        super().__init__()
        self.rows = shape.padded_vocab // shape.tensor_parallel
        self.words = nn.Parameter(torch.empty(self.rows, shape.hidden))
        self.positions = nn.Embedding(shape.seq_len, shape.hidden)
        self.dropout = nn.Dropout(DROPOUT)
        self.group = group

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand_as(ids)
        if self.group is None:
            words = F.embedding(ids, self.words)
        else:
            outside = (ids < 0) | (ids >= self.rows)
            words = F.embedding((ids - 0).masked_fill(outside, 0), self.words)
            words = run(ReduceFromRegion, words.masked_fill(outside.unsqueeze(-1), 0.0), self.group)
        out: Tensor = self.dropout(words + self.positions(places)).transpose(0, 1).contiguous()
        return out


class VocabCrossEntropy(torch.autograd.Function):  # _VocabParallelCrossEntropy of mpu/cross_entropy.py
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: str | None) -> Tensor:
        largest = all_reduce(logits.max(dim=-1)[0], group, "max")
        logits.sub_(largest.unsqueeze(-1))
        columns = logits.shape[-1]
        outside = (target < 0) | (target >= columns)
        masked = (target.clone() - 0).masked_fill(outside, 0)
        flat = logits.view(-1, columns)
        rows = torch.arange(flat.shape[0], device=logits.device)
        told = flat[rows, masked.view(-1)].clone().contiguous().view_as(target).masked_fill(outside, 0.0)
        told = all_reduce(told, group)
        exponents = torch.exp(logits)
        total = all_reduce(exponents.sum(dim=-1), group)
        loss: Tensor = torch.log(total) - told
        exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponents, outside, masked.view(-1))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        softmax, outside, masked = ctx.saved_tensors
        flat = softmax.view(-1, softmax.shape[-1])
        rows = torch.arange(flat.shape[0], device=flat.device)
        flat[rows, masked] -= 1.0 - outside.view(-1).float()
        return softmax.mul_(grad.unsqueeze(-1)), None, None


class Head(nn.Module):  # the last norm, logits by the words' embedding, loss in float32: post_language_model_processing
    def __init__(self, shape: StageShape, group: str | None, words: nn.Parameter | None) -> None:
        super().__init__()
        self.final_layernorm = nn.LayerNorm(shape.hidden)
        own = torch.empty(shape.padded_vocab // shape.tensor_parallel, shape.hidden)
        self.words = nn.Parameter(own) if words is None else words
        self.group = group

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.final_layernorm(x).transpose(0, 1).contiguous()
        logits = F.linear(run(CopyToRegion, x, self.group), self.words)
        loss = run(VocabCrossEntropy, logits.float(), labels, self.group)
        return loss.view(-1).sum() / loss.numel()


class Stage(nn.Module):
    """What one rank holds. Called with token ids or the output of the stage before, and labels on the last stage.

    ``group`` is the name of the process group of its tensor-parallel ranks, None for one rank.
    """

    def __init__(self, shape: StageShape, group: str | None) -> None:
        super().__init__()
        self.embedding = Embedding(shape, group) if shape.has_embedding else None
        self.layers = nn.ModuleList(Layer(shape, group) for _ in range(shape.layers))
        self.head = Head(shape, group, self.embedding.words if self.embedding else None) if shape.has_head else None

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(x) if self.embedding else x
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        if self.head is None:
            return x
        assert labels is not None
        out: Tensor = self.head(x, labels)
        return out


class MixedPrecisionAdam(torch.optim.Optimizer):
    """Float16OptimizerWithFloat16Params over apex's FusedAdam: gradients copied to float32, unscaled and checked,
    clipped, applied to float32 copies, which are copied back.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(list(params), {})
        self.mains: list[Tensor] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leaves gradients: the next step's pass adds to them, as do those of all micro-batches but the first."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not self.mains:
            self.mains = [p.float() for p in params]
            self.averages = [torch.zeros_like(p) for p in self.mains]
            self.squares = [torch.zeros_like(p) for p in self.mains]
            self.steps = [torch.zeros((), device=p.device) for p in params]
        grads = [p.grad.float() for p in params if p.grad is not None]
        found, scale = torch.zeros((), device=grads[0].device), torch.ones((), device=grads[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
        found.item()
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        norm.item()
        torch._foreach_mul_(grads, 1.0)
        torch._fused_adam_(self.mains, grads, self.averages, self.squares, [], self.steps, lr=1e-4, beta1=0.9,
                           beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)
        torch._foreach_copy_(params, self.mains)
