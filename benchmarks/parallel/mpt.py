"""MPT as llm-foundry trained it at commit 5e85bd6 (llmfoundry/models/mpt/modeling_mpt.py and layers/), wrapped by FSDP
as Composer wraps it, with FlashAttention and its fused cross entropy.
"""
from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.spec import Signature
from benchmarks.parallel.megatron_gpt import define, run, stream_signature

Tensor = torch.Tensor
METRICS = 2  #: LanguageCrossEntropy and LanguagePerplexity, ``use_train_metrics``

# Triton's FlashAttention, which MPT trained with, as an operator that takes as long as what it says it is near. The
# kernel is ``flash_attn/flash_attn_triton.py`` of HazyResearch's flash-attention, which
# ``llmfoundry/models/layers/flash_attn_triton.py`` copies. Of itself it says: "Overall Triton forward + backward is
# slightly slower than CUDA forward + backward". So it takes as long as the CUDA kernels of that time, the first
# FlashAttention, whose rates are printed in FlashAttention-2 (Dao, 2023; figures 4 and 7, the latter for an H100, are
# ``assets/flash2_a100_fwd_bwd_benchmark.png`` and ``flash2_h100_fwd_bwd_benchmark.png`` of Dao-AILab/flash-attention):
# forward and backward together, causal, 16,384 tokens. ``attn_impl: flash``, which sweep.py names for some rows, is
# that kernel itself: submit_benchmarks.py installs the extra ``gpu``, whose flash-attn is 1.0.9 (setup.py). Both passes
# are assumed to run at the one rate; shorter sequences as those of 512, and longer ones as those of 16,384. The bars
# named "FlashAttention Triton" there are OpenAI's kernel.
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: By size of a head, at each of `LENGTHS`: 10^12 FLOPs a second, half of the square counted.
A100 = {64: (58, 70, 77, 87, 92, 97), 128: (55, 62, 69, 76, 80, 83)}
H100 = {64: (104, 123, 136, 138, 149, 156), 128: (98, 109, 108, 126, 135, 137)}
_SPREAD = 0.3  # assumed: of a figure's bars, for other batches and heads


def interpolate(rates: Sequence[float], length: int) -> float:
    """The rate at a length, on straight lines between those of `LENGTHS`.

    >>> interpolate(A100[64], 768), interpolate(A100[64], 65536)
    (64.0, 97.0)
    """
    length = min(max(length, LENGTHS[0]), LENGTHS[-1])
    after = max(1, bisect.bisect_left(LENGTHS, length))
    low, high = LENGTHS[after - 1], LENGTHS[after]
    return rates[after - 1] + (rates[after] - rates[after - 1]) * (length - low) / (high - low)


def find_rate(head_dim: int, length: int, device: DeviceSpec) -> float:
    """FLOPs a second of causal attention on A100 or H100."""
    return 1e12 * interpolate((H100 if device.architecture == "Hopper" else A100)[head_dim], length)


def _time(signature: Signature, device: DeviceSpec, products: int) -> KernelTime:
    batch, length, heads, head_dim = signature.inputs[0]
    flops = products * batch * heads * length * length * head_dim  # of 2 x a product, half of the square
    return KernelTime(flops / find_rate(head_dim, length, device), _SPREAD, "arithmetic", 1 if products == 2 else 2)


# the forward kernel, of two products, and the backward ones, of five
attend_op = define(
    "flash_triton::attend", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)", lambda q, k, v: (
        torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)),
    functools.partial(_time, products=2))
attend_backward_op = define(
    "flash_triton::attend_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums) -> (Tensor, Tensor, Tensor)",
    lambda grad, q, k, v, out, sums: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
    functools.partial(_time, products=5))


class TritonAttention(torch.autograd.Function):  # FlashAttnFunc
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sums = attend_op(q, k, v)
        ctx.save_for_backward(q, k, v, out, sums)
        attended: Tensor = out
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return attend_backward_op(grad.contiguous(), *ctx.saved_tensors)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of tensors [batch, length, heads, size of a head]."""
    return run(TritonAttention, q, k, v)


class LowPrecisionNorm(nn.LayerNorm):  # LPLayerNorm of layers/norm.py: in the narrow format under autocast
    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            return F.layer_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.bias.to(dtype))


class Block(nn.Module):
    """MPTBlock with biases, without dropout."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = LowPrecisionNorm(hidden), LowPrecisionNorm(hidden)
        self.wqkv, self.out_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up_proj, self.down_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        q, k, v = self.wqkv(self.norm_1(x)).view(batch, seq, 3, self.heads, -1).unbind(2)
        attended = attend(q, k, v)
        x = x + self.out_proj(attended.reshape(batch, seq, hidden))
        out: Tensor = x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))
        return out


# the kernels of flash_attn.losses.cross_entropy: one forward, one backward, over the logits as they are
losses_op = define(
    "xentropy::losses", "(Tensor logits, Tensor targets) -> (Tensor, Tensor)", lambda logits, targets: tuple([
        torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2)]), stream_signature)
losses_backward_op = define(
    "xentropy::losses_backward", "(Tensor grad, Tensor logits, Tensor sums, Tensor targets) -> Tensor",
    lambda grad, logits, sums, targets: torch.empty_like(logits), stream_signature)


class FusedCrossEntropy(torch.autograd.Function):  # SoftmaxCrossEntropyLossFn
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        losses, sums = losses_op(logits, targets)
        ctx.save_for_backward(logits, sums, targets)
        out: Tensor = losses
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return losses_backward_op(grad.contiguous(), *ctx.saved_tensors), None


class Mpt(nn.Module):  # MPTForCausalLM: learned positions, head tied to the embedding
    def __init__(self, hidden: int, heads: int, layers: int, vocab: int, seq_len: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(seq_len, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm_f = LowPrecisionNorm(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_f(x), self.wte.weight)


def shard(model: Mpt, strategy: str, pure: bool, checkpointing: bool, forward_prefetch: bool) -> nn.Module:
    """FSDP of torch over each block and the whole, as Composer's ``prepare_fsdp_module`` sets it up; ``pure``: all in
    bfloat16, else gradients are summed in float32.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    reduced = torch.bfloat16 if pure else torch.float32
    wrapped: nn.Module = FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(torch.bfloat16, reduced, torch.bfloat16), use_orig_params=True, device_id=0,
        forward_prefetch=forward_prefetch)
    if checkpointing:
        apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, Block))
    return wrapped


def run_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, micro_batches: int) -> None:
    """A step of Composer's trainer: gradients are summed over ranks after every micro-batch, then clipped. After each
    micro-batch cross entropy and perplexity are updated (``_eval_train_metrics``; ``LanguageCrossEntropy.update``).
    """
    for _ in range(micro_batches):
        targets = ids.roll(-1).flatten()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids).flatten(0, 1)
            losses = run(FusedCrossEntropy, logits, targets)
        (losses.sum() / losses.numel() / micro_batches).backward()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            for _ in range(METRICS):
                F.cross_entropy(logits, targets, reduction="sum")
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
