"""A stand-in for Transformer Engine, which cannot be built without CUDA: what its layers allocate, save and multiply.

Megatron's own code subclasses these. Each layer is one autograd function that keeps what the layer of that name keeps
(TransformerEngine 2.x, transformer_engine/pytorch/module/{linear,layernorm_linear,grouped_linear}.py and
attention/dot_product_attention/backends.py), for training in 16 bits or in float8 with current scaling.
"""
from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parallel.transformer_engine_attention import Exchange, attend
from benchmarks.parallel.transformer_engine_layer import (
    Base,
    Dummy,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    Norm,
    RMSNorm,
    Workspace,
    add_product,
    autocast,
    general_gemm,
)

VERSION = "2.8.0"


def uses_flash(backend: str, dropout: float) -> bool:
    """Whether FlashAttention runs rather than cuDNN's attention: on Ampere where both may, and where cuDNN has no
    deterministic backward pass, on Blackwell with dropout (dot_product_attention/utils.py, ``get_attention_backend``,
    and common/fused_attn/fused_attn.cpp, ``nvte_get_fused_attn_backend``, "determinism on Blackwell").
    """
    major = torch.cuda.get_device_properties(0).major
    is_deterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
    return backend == "flash" or backend == "auto" and (
        major < 9 or major >= 10 and is_deterministic and dropout > 0)


def lay_out(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value as kernels take them: views of one tensor, or the last two of one, only where they follow
    each other in it by heads or by parts of a head; else each by itself (dot_product_attention/utils.py,
    ``get_qkv_layout``). So grouped queries, which Megatron copies out of theirs, have keys and values copied too.
    """
    for together in ((q, k, v), (k, v)):
        alike = {(t.untyped_storage()._cdata, t.shape, t.stride()) for t in together}
        offsets, size = [t.storage_offset() for t in together], k.shape[-1]
        if len(alike) == 1 and any(offsets == [i * step for i in range(len(together))]
                                   for step in (size, size * k.shape[-2])):
            return q, k, v
    return q.contiguous(), k.contiguous(), v.contiguous()


class _Attention(torch.autograd.Function):
    """A fused kernel: saves query, key, value, the output and float32 log-sum-exp of each row. Positions are along the
    dimension ``sequence``; of other ranks' keys an ``exchange`` tells.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, sequence: int) -> Tensor:
        s, b, h, _ = q.shape
        out = torch.empty(s, b, h, v.shape[-1], dtype=q.dtype, device=q.device)
        ctx.save_for_backward(q, k, v, out, torch.empty(b, h, s, 1, dtype=torch.float32, device=q.device))
        ctx.exchange, ctx.sequence = exchange, sequence
        exchange.run(q, k, v, out, False)
        attend(q, k, v, out, exchange.ranks * k.shape[sequence], sequence, False)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *_ = ctx.saved_tensors
        ctx.exchange.run(q, k, v, out, True)
        base = q._base
        if base is not None and base is k._base and base is v._base:  # interleaved: one gradient, three views of it
            whole = torch.empty_like(base)
            found = [whole.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (q, k, v)]
        else:
            found = [torch.empty_like(t) for t in (q, k, v)]
        attend(q, k, v, found[0], ctx.exchange.ranks * k.shape[ctx.sequence], ctx.sequence, True)
        return *found, None, None


class _Softmax(torch.autograd.Function):
    """The causal softmax kernel: its output is saved, its gradient written over the incoming one."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        out = torch.empty_like(scores)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _out, = ctx.saved_tensors  # which may be on the host until then
        return gradient


class DotProductAttention(Base):  # ``transformer_engine.pytorch.DotProductAttention`` for ``sbhd`` inputs
    backend = "auto"                                 #: unfused, or a kernel

    def __init__(self, num_attention_heads: int, kv_channels: Any, attention_dropout: float = 0.0,
                 get_rng_state_tracker: Any = None, cp_group: Any = None, cp_comm_type: str | None = None,
                 **_: Any) -> None:
        super().__init__()
        self.dropout = nn.Dropout(attention_dropout)
        self.exchange = Exchange(cp_group, cp_comm_type)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        out: Tensor
        q, k, v = lay_out(q, k, v)
        if uses_flash(self.backend, self.dropout.p):  # of [batch, sequence, heads, size]: backends.py, FlashAttention
            out = _Attention.apply(  # type: ignore[no-untyped-call]
                *(t.transpose(0, 1).contiguous() for t in (q, k, v)), self.exchange, 1)
            return out.view(*out.shape[:2], -1).transpose(0, 1).contiguous()
        if self.backend != "unfused":
            out = _Attention.apply(q, k, v, self.exchange, 0)  # type: ignore[no-untyped-call]
            return out.view(*out.shape[:2], -1)
        s, b, h, d = q.shape
        if k.shape[2] != h:
            k, v = (t.repeat_interleave(h // t.shape[2], dim=2) for t in (k, v))
        scores = torch.empty(b * h, s, k.shape[0], dtype=q.dtype, device=q.device)
        q, k = q.reshape(s, b * h, d), k.reshape(k.shape[0], b * h, d)
        scores = torch.baddbmm(scores, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0)
        weights = self.dropout(_Softmax.apply(scores))  # type: ignore[no-untyped-call]
        v = v.reshape(v.shape[0], b * h, -1)
        context = torch.bmm(weights, v.transpose(0, 1)).view(b, h, s, -1)
        return context.permute(2, 0, 1, 3).contiguous().view(s, b, -1)


class CrossEntropy(torch.autograd.Function):
    """Of logits split over ranks: in forward the gradient is written over them (common/triton/cross_entropy.py)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float, reduce_loss: bool, group: Any,
                ignored: int) -> Tensor:
        rows, ranks = logits.shape[0] * logits.shape[1], 1 if group is None else group.size()
        loss = torch.zeros(rows, dtype=torch.float32, device=logits.device)
        largest = torch.zeros(3 * rows, dtype=torch.float32, device=logits.device)  # with its sum and the target's
        torch.zeros(3 * rows * ranks, dtype=torch.float32, device=logits.device)  # of all ranks
        del largest
        ctx.save_for_backward(logits.detach())
        return loss.view(logits.shape[0], logits.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0], None, None, None, None, None


def parallel_cross_entropy(logits: Tensor, target: Tensor, smoothing: float = 0.0, reduce_loss: bool = False,
                           group: Any = None, ignored: int = -100, is_cg_capturable: bool = False) -> Tensor:
    loss: Tensor = CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, smoothing, reduce_loss, group, ignored)
    return loss


class FusedAdam(torch.optim.Optimizer):
    """Two states a parameter, written in place by one kernel; and where it keeps copies of parameters in 32 bits, the
    half of each that the parameter lacks.
    """

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, adam_w_mode: bool = True, bias_correction: bool = True,
                 exp_avg_dtype: torch.dtype = torch.float32, exp_avg_sq_dtype: torch.dtype = torch.float32,
                 master_weights: bool = False, master_weight_dtype: Any = None, use_decoupled_grad: bool = False,
                 store_param_remainders: bool = False, **_: Any) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=0))
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        if master_weights:
            self.dtypes["master_param"] = torch.int16 if store_param_remainders else torch.float32
        self.gradient = "decoupled_grad" if use_decoupled_grad else "grad"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, self.gradient, None) is not None and not self.state[parameter]:
                    self.state[parameter] = {
                        name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in self.dtypes.items()}


class Orthogonalized(torch.optim.Optimizer):
    """`OrthogonalizedOptimizer` of emerging_optimizers, whose releases need a newer Python: one momentum a matrix, and
    matrices one after another. Megatron's Muon is a subclass.
    """

    orthogonalize: Any                               #: of a matrix and its momentum, by the subclass

    def __init__(self, params: Any, lr: float, momentum_beta: float, scaled_orthogonalize_fn: Any = None,
                 **_: Any) -> None:
        super().__init__(params, dict(lr=lr, momentum_beta=momentum_beta))
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                parameter.add_(parameter, alpha=-0.01 * group["lr"])
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum_beta"])
                parameter.add_(self.orthogonalize(parameter, momentum), alpha=-group["lr"])


def newton_schulz(x: Tensor, steps: int, **_: Any) -> Tensor:  # of a whole matrix, in 16 bits (muon_utils.py)
    tall = x.shape[0] > x.shape[1]
    wide = nn.functional.normalize(x.mT if tall else x, dim=(-2, -1)).to(torch.bfloat16)  # type: ignore[arg-type]
    for _step in range(steps):
        square = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(square, square, square), wide)
    return wide.float().mT if tall else wide.float()


def multi_tensor_applier(operator: Any, overflow: Tensor, lists: Any, *args: Any) -> Any:
    return operator(65536, overflow, lists, *args)


def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: Any, per_tensor: bool = False, *_: Any) -> Any:
    norm = torch.ones(1, dtype=torch.float32, device="cuda")
    return norm, norm


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Any, *_: Any) -> None: ...


class _SplitAlongDim(torch.autograd.Function):
    """Views of the parts; their gradients are joined in one tensor, or are parts of one already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dimension: int, sizes: Any, *_: Any) -> tuple[Tensor, ...]:
        ctx.dimension, ctx.shape = dimension, x.shape
        return torch.split(x, sizes, dim=dimension)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        storages = {g.untyped_storage()._cdata for g in gradients}
        if len(storages) == 1:
            base = gradients[0]._base
            if base is not None and base.numel() == ctx.shape.numel():
                return base.view(ctx.shape), None, None
        return torch.cat(gradients, dim=ctx.dimension), None, None


class _Rotary(torch.autograd.Function):  # one kernel; saves the frequencies (attention/rope.py, FusedRoPEFunc)
    @staticmethod
    def forward(ctx: Any, x: Tensor, freqs: Tensor) -> Tensor:
        ctx.save_for_backward(freqs)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _freqs, = ctx.saved_tensors
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device), None


def apply_rotary_pos_emb(x: Tensor, freqs: Tensor, *_: Any, **__: Any) -> Tensor:
    rotated: Tensor = _Rotary.apply(x, freqs)  # type: ignore[no-untyped-call]
    return rotated


class _ApexNorm:  # apex's layer norm: saves what Transformer Engine's does
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> Any:  # whose arguments Megatron reads
        return Norm.apply(x, weight, bias, 1e-5)  # type: ignore[no-untyped-call]

    apply = forward


class _CausalSoftmax:  # Megatron's kernel, called with the scale
    @staticmethod
    def forward(x: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(gradient: Tensor, *_: Any) -> Tensor:
        return gradient

    @staticmethod
    def get_batch_per_block(*_: Any) -> int:
        return 4


def _accumulate(total: Tensor, gradient: Tensor, main: Tensor) -> None:
    add_product(main, gradient.t(), total)


#: A class of which the name alone is asked for.
_NAME = type("Name", (), {"__init__": lambda self, *_, **__: None})


APEX: dict[str, dict[str, Any]] = {
    "apex": {}, "apex.contrib": {}, "apex.contrib.layer_norm": {}, "apex.normalization": {},
    "apex.contrib.layer_norm.layer_norm": {"FastLayerNormFN": _ApexNorm},
    "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": _ApexNorm},
    "fused_weight_gradient_mlp_cuda": {"wgrad_gemm_accum_fp32": _accumulate, "wgrad_gemm_accum_fp16": _accumulate},
    **{f"scaled_{kind}masked_softmax_cuda": {name: getattr(_CausalSoftmax, name) for name in (
        "forward", "backward", "get_batch_per_block")} for kind in ("", "upper_triang_")},
}


EMERGING: dict[str, dict[str, Any]] = {
    "emerging_optimizers": {},
    "emerging_optimizers.orthogonalized_optimizers": {
        "OrthogonalizedOptimizer": Orthogonalized, "get_muon_scale_factor": lambda *_, **__: 1.0},
    "emerging_optimizers.orthogonalized_optimizers.muon_utils": {"newton_schulz_tp": newton_schulz}}


def _modules() -> dict[str, types.ModuleType]:
    name = "transformer_engine"
    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".common": {}, ".common.recipe": {"DelayedScaling": _NAME, "Float8CurrentScaling": _NAME,
                                          "Format": types.SimpleNamespace(E4M3="e4m3", HYBRID="hybrid")},
        ".pytorch": {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "LayerNorm": LayerNorm, "RMSNorm": RMSNorm,
                     "GroupedLinear": GroupedLinear, "DotProductAttention": DotProductAttention,
                     "fp8_autocast": autocast, "fp8_model_init": autocast},
        ".pytorch.cross_entropy": {"parallel_cross_entropy": parallel_cross_entropy},
        ".pytorch.fp8": {"FP8GlobalStateManager": types.SimpleNamespace(is_fp8_enabled=lambda: False),
                         "fp8_autocast": autocast},
        ".pytorch.distributed": {"CudaRNGStatesTracker": _NAME, "is_fp8_activation_recompute_enabled": None,
                                 "checkpoint": None, "activation_recompute_forward": lambda **_: nullcontext()},
        ".pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD,
                                "multi_tensor_applier": multi_tensor_applier,
                                "multi_tensor_l2norm": multi_tensor_l2norm, "multi_tensor_scale": multi_tensor_scale},
        ".pytorch.attention": {"_SplitAlongDim": _SplitAlongDim},
        ".pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb,
                                    "apply_fused_qkv_rotary_pos_emb": None},
        ".pytorch.router": dict.fromkeys(("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss",
                                          "fused_topk_with_score_function")),
        ".pytorch.cpu_offload_v1": {"CPUOffloadEnabled": False},
        ".pytorch.ops": dict.fromkeys(("Sequential", "FusibleOperation")),
        ".pytorch.tensor": {"QuantizedTensor": _NAME},
        ".pytorch.tensor.float8_tensor": {"Float8Tensor": _NAME},
        ".pytorch.float8_tensor": {"Float8Tensor": _NAME},
        ".pytorch.tensor.utils": dict.fromkeys((
            "replace_raw_data", "cast_master_weights_to_fp8", "post_all_gather_processing")),
        ".pytorch.module": {}, ".pytorch.cpp_extensions": {"general_gemm": general_gemm},
        ".pytorch.module.base": {"TransformerEngineBaseModule": Base, "get_workspace": lambda: None,
                                 "get_dummy_wgrad": Dummy.take},
    }
    modules = {}
    given = {name + suffix: values for suffix, values in contents.items()}
    for full, values in {**given, **APEX, **EMERGING}.items():
        module = types.ModuleType(full)
        module.__spec__ = ModuleSpec(full, None)
        module.__path__ = []
        vars(module).update(values)
        modules[full] = module
    for full, module in modules.items():
        parent, _, child = full.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


@contextmanager
def fresh(backend: str) -> Iterator[None]:
    """A block for one run, with this attention: ``import transformer_engine`` and apex give the stand-ins, and no
    workspace is there yet.
    """
    modules = _modules()
    sys.modules.update(modules)
    before, DotProductAttention.backend = DotProductAttention.backend, backend
    Workspace.held.clear()
    Dummy.held.clear()
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        DotProductAttention.backend = before
        Workspace.held.clear()
        Dummy.held.clear()
