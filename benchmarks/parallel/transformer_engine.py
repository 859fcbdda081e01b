"""A stand-in for Transformer Engine, which cannot be built without CUDA: what its layers allocate and save.

Megatron's own code subclasses these. Each layer is one autograd function that keeps what the layer of that name keeps
(TransformerEngine 2.x, transformer_engine/pytorch/module/{linear,layernorm_linear,grouped_linear}.py and
attention/dot_product_attention/backends.py), for 16-bit training without quantization.
"""
from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import Tensor, nn

VERSION = "2.8.0"
STREAMS = 4  #: on which grouped products run: transformer_engine/common, nvte_get_num_compute_streams
OVERLAP_STREAMS = 3  #: on which a product runs that overlaps its communication: _NUM_MAX_UB_STREAMS


def workspace_bytes() -> int:
    """Of one cuBLASLt call (cpp_extensions/gemm.py, get_cublas_workspace_size_bytes)."""
    return 32 * 2**20 + 1024 if torch.cuda.get_device_properties(0).major >= 9 else 4 * 2**20


class _Workspace:
    """The process's own (cpp_extensions/gemm.py, get_cublas_workspace): one by the first product, one for each of four
    streams by the first grouped product, and one for each of three by the first that overlaps its communication.
    """

    held: dict[int, list[Tensor]] = {}               #: by how many

    @classmethod
    def take(cls, count: int = 1) -> None:
        if count not in cls.held:
            cls.held[count] = [torch.empty(workspace_bytes(), dtype=torch.uint8, device="cuda") for _ in range(count)]


def _gather(x: Tensor, group: Any) -> Tensor:
    """Along the first dimension, of all ranks of the group."""
    n = group.size()
    out = torch.empty(x.shape[0] * n, *x.shape[1:], dtype=x.dtype, device=x.device)
    torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scatter(x: Tensor, group: Any) -> Tensor:
    """Summed over the group's ranks, this rank's part of the first dimension."""
    out = torch.empty(x.shape[0] // group.size(), *x.shape[1:], dtype=x.dtype, device=x.device)
    torch.distributed.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, overlaps: bool) -> Tensor:
    """One GEMM with the bias in its epilogue."""
    _Workspace.take(OVERLAP_STREAMS if overlaps else 1)
    flat = x.reshape(-1, x.shape[-1])
    out = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias, flat, weight.t())
    return out.view(*x.shape[:-1], -1)


class _Dummy:
    """What stands for a gradient that is in ``main_grad`` already, one a size (module/base.py, get_dummy_wgrad)."""

    held: dict[Any, Tensor] = {}

    @classmethod
    def take(cls, weight: Tensor) -> Tensor:
        key = (weight.shape, weight.dtype)
        if key not in cls.held:
            cls.held[key] = torch.empty_like(weight, requires_grad=False)
        return cls.held[key].detach()


class _Linear(torch.autograd.Function):
    """Saves the input of this rank (before a gather) and the weight; gathers again for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        ctx.layer, ctx.bias = layer, bias is not None
        ctx.save_for_backward(x, weight)
        total = _gather(x, layer.tp_group) if layer.gathers else x
        out = _product(total, weight, bias, layer.overlaps)
        if layer.scatters:
            return _scatter(out, layer.tp_group)
        if layer.reduces:
            torch.distributed.all_reduce(out, group=layer.tp_group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer = ctx.layer
        if layer.scatters:
            gradient = _gather(gradient, layer.tp_group)
        total = _gather(x, layer.tp_group) if layer.gathers else x
        flat = gradient.reshape(-1, gradient.shape[-1])
        dgrad = None
        if ctx.needs_input_grad[0]:
            dgrad = torch.mm(flat, weight).view(*total.shape)
            if layer.gathers:
                dgrad = _scatter(dgrad, layer.tp_group)
            elif layer.column and layer.tp_size > 1:
                torch.distributed.all_reduce(dgrad, group=layer.tp_group)
        wgrad = _weight_gradient(weight, flat, total, layer.fused)
        return dgrad, wgrad, flat.sum(0) if ctx.bias else None, None


def _weight_gradient(weight: Tensor, flat: Tensor, total: Tensor, fused: bool) -> Tensor | None:
    """Of a weight; straight into ``main_grad`` where accumulation is fused."""
    if not weight.requires_grad:
        return None
    if fused:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return _Dummy.take(weight)
    return torch.mm(flat.t(), total.reshape(-1, total.shape[-1]))


class _Norm(torch.autograd.Function):
    """Saves the input, the weight and float32 statistics of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        rows = x.numel() // x.shape[-1]
        statistics = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(1 if bias is None else 2)]
        ctx.bias = bias is not None
        ctx.save_for_backward(x, weight, *statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *_ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight) if ctx.bias else None, None


class _LayerNormLinear(torch.autograd.Function):
    """Saves the input, the normed input, statistics and the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None,
                layer: Any) -> Tensor:
        rows = x.numel() // x.shape[-1]
        statistics = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(1 if beta is None else 2)]
        normed = torch.empty_like(x)
        ctx.layer, ctx.bias, ctx.beta = layer, bias is not None, beta is not None
        total = _gather(normed, layer.tp_group) if layer.gathers else normed
        ctx.save_for_backward(x, normed, gamma, weight, *statistics)
        return _product(total, weight, bias, layer.overlaps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, normed, gamma, weight, *_ = ctx.saved_tensors
        layer = ctx.layer
        total = _gather(normed, layer.tp_group) if layer.gathers else normed
        flat = gradient.reshape(-1, gradient.shape[-1])
        dgrad = torch.mm(flat, weight).view(*total.shape)
        if layer.gathers:
            dgrad = _scatter(dgrad, layer.tp_group)
        elif layer.tp_size > 1:
            torch.distributed.all_reduce(dgrad, group=layer.tp_group)
        wgrad = _weight_gradient(weight, flat, total, layer.fused)
        dbias = flat.sum(0) if ctx.bias else None
        dx = torch.empty_like(x)
        return dx, torch.empty_like(gamma), torch.empty_like(gamma) if ctx.beta else None, wgrad, dbias, None


class Base(nn.Module):
    """What layers of Transformer Engine share."""


class Linear(Base):
    """``transformer_engine.pytorch.Linear``."""

    def __init__(self, in_features: int, out_features: int, sequence_parallel: bool = False, tp_group: Any = None,
                 tp_size: int = 1, init_method: Any = None, bias: bool = True, return_bias: bool = False,
                 parallel_mode: str | None = None, params_dtype: torch.dtype | None = None, device: Any = "cuda",
                 fuse_wgrad_accumulation: bool = False, **others: Any) -> None:
        super().__init__()
        self.fused = fuse_wgrad_accumulation
        self.overlaps = any(others.get(name) for name in ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad"))
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.in_features, self.out_features, self.use_bias, self.return_bias = (
            in_features, out_features, bias, return_bias)
        self.column, self.row = parallel_mode == "column", parallel_mode == "row"
        split, parallel = tp_size if self.column else 1, sequence_parallel and tp_size > 1
        self.gathers, self.scatters = parallel and self.column, parallel and self.row
        self.reduces = self.row and tp_size > 1 and not parallel
        size = (out_features // split, in_features // (tp_size if self.row else 1))
        self.weight = nn.Parameter(torch.empty(*size, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.zeros(size[0], dtype=params_dtype, device=device))
        if tp_size > 1:
            _mark(self.weight, self.column or self.row, 0 if self.column else 1)
            if bias:
                _mark(self.bias, self.column, 0)
                if self.row and parallel:
                    self.bias.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        bias = self.bias if self.use_bias else None
        fused = None if self.return_bias or self.row and self.tp_size > 1 else bias
        out = _Linear.apply(x, self.weight, fused, self)  # type: ignore[no-untyped-call]
        if self.return_bias:
            return out, bias
        return out if fused is bias else out + bias

    def backward_dw(self) -> None: ...


def _mark(parameter: Tensor, parallel: bool, dimension: int) -> None:
    parameter.tensor_model_parallel = parallel  # type: ignore[attr-defined]
    parameter.partition_dim = dimension  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]


class LayerNormLinear(Linear):
    """``transformer_engine.pytorch.LayerNormLinear``."""

    def __init__(self, in_features: int, out_features: int, normalization: str = "LayerNorm",
                 sequence_parallel: bool = False, params_dtype: torch.dtype | None = None, device: Any = "cuda",
                 **kwargs: Any) -> None:
        super().__init__(in_features, out_features, sequence_parallel=sequence_parallel, params_dtype=params_dtype,
                         device=device, **kwargs)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias: nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=params_dtype, device=device))
            self.layer_norm_bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        bias = self.bias if self.use_bias else None
        out = _LayerNormLinear.apply(  # type: ignore[no-untyped-call]
            x, self.layer_norm_weight, self.layer_norm_bias, self.weight, None if self.return_bias else bias, self)
        return (out, bias) if self.return_bias else out


class LayerNorm(Base):
    """``transformer_engine.pytorch.LayerNorm``."""

    with_bias = True

    def __init__(self, hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False,
                 params_dtype: torch.dtype | None = None, device: Any = "cuda", **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros_like(self.weight)) if self.with_bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        return _Norm.apply(x, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]


class RMSNorm(LayerNorm):
    """``transformer_engine.pytorch.RMSNorm``."""

    with_bias = False


class _GroupedLinear(torch.autograd.Function):
    """One product an expert; saves the parts of the input and the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], biased: bool, fused: bool, *weights: Tensor) -> Tensor:
        _Workspace.take(STREAMS)
        ctx.splits, ctx.biased = splits, biased
        kernels = weights[:len(splits)]
        ctx.fused = fused
        out = torch.empty(*x.shape[:-1], kernels[0].shape[0], dtype=x.dtype, device=x.device)
        ctx.save_for_backward(x, *kernels)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *kernels = ctx.saved_tensors
        dgrad = torch.empty_like(x)
        wgrads = [_weight_gradient(weight, gradient, x, True) if ctx.fused else torch.empty_like(weight)
                  for weight in kernels]
        dbias = [torch.empty(w.shape[0], dtype=w.dtype, device=w.device) for w in kernels] if ctx.biased else []
        return dgrad, None, None, None, *wgrads, *dbias


class GroupedLinear(Base):
    """``transformer_engine.pytorch.GroupedLinear``."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, tp_size: int = 1, bias: bool = True,
                 return_bias: bool = False, parallel_mode: str | None = None, params_dtype: torch.dtype | None = None,
                 device: Any = "cuda", fuse_wgrad_accumulation: bool = False, **_: Any) -> None:
        super().__init__()
        self.fused = fuse_wgrad_accumulation
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        size = (out_features // (tp_size if parallel_mode == "column" else 1),
                in_features // (tp_size if parallel_mode == "row" else 1))
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", nn.Parameter(
                torch.empty(*size, dtype=params_dtype, device=device)))
            if bias:
                self.register_parameter(f"bias{number}", nn.Parameter(
                    torch.zeros(size[0], dtype=params_dtype, device=device)))

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        weights = [getattr(self, f"weight{n}") for n in range(self.num_gemms)]
        biases = [getattr(self, f"bias{n}") for n in range(self.num_gemms)] if self.use_bias else []
        inside = [] if self.return_bias else biases
        out = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
            x, list(m_splits), bool(inside), self.fused, *weights, *inside)
        return (out, biases) if self.return_bias else out

    def backward_dw(self) -> None: ...


class _Attention(torch.autograd.Function):
    """A fused kernel: saves query, key, value, the output and float32 log-sum-exp of each row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, b, h, _ = q.shape
        out = torch.empty(s, b, h, v.shape[-1], dtype=q.dtype, device=q.device)
        ctx.save_for_backward(q, k, v, out, torch.empty(b, h, s, 1, dtype=torch.float32, device=q.device))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *_ = ctx.saved_tensors
        base = q._base
        if base is not None and base is k._base and base is v._base:  # interleaved: one gradient, three views of it
            whole = torch.empty_like(base)
            return tuple(whole.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (q, k, v))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Softmax(torch.autograd.Function):
    """The causal softmax kernel: its output is saved, its gradient written over the incoming one."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        out = torch.empty_like(scores)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class DotProductAttention(Base):
    """``transformer_engine.pytorch.DotProductAttention`` for ``sbhd`` inputs."""

    backend = "auto"                                 #: unfused, or a kernel

    def __init__(self, num_attention_heads: int, kv_channels: Any, attention_dropout: float = 0.0,
                 get_rng_state_tracker: Any = None, cp_group: Any = None, **_: Any) -> None:
        super().__init__()
        self.dropout = nn.Dropout(attention_dropout)
        self.cp_group = cp_group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.backend != "unfused":
            out: Tensor = _Attention.apply(q, k, v)  # type: ignore[no-untyped-call]
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


class FusedAdam(torch.optim.Optimizer):
    """Two states a parameter, in float32, written in place by one kernel."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, adam_w_mode: bool = True, bias_correction: bool = True, **_: Any) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=0))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = {name: torch.zeros_like(parameter, dtype=torch.float32)
                                             for name in ("exp_avg", "exp_avg_sq")}


def multi_tensor_applier(operator: Any, overflow: Tensor, lists: Any, *args: Any) -> Any:
    return operator(65536, overflow, lists, *args)


def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: Any, per_tensor: bool = False, *_: Any) -> Any:
    norm = torch.ones(1, dtype=torch.float32, device="cuda")
    return norm, norm


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Any, *_: Any) -> None: ...


class CudaRNGStatesTracker:
    """Its name only."""


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


class _Quantized:
    """No tensor is one."""


class _Rotary(torch.autograd.Function):
    """One kernel; saves the frequencies (attention/rope.py, FusedRoPEFunc)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, freqs: Tensor) -> Tensor:
        ctx.save_for_backward(freqs)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device), None


def apply_rotary_pos_emb(x: Tensor, freqs: Tensor, *_: Any, **__: Any) -> Tensor:
    rotated: Tensor = _Rotary.apply(x, freqs)  # type: ignore[no-untyped-call]
    return rotated


class _ApexNorm:
    """apex's layer norm: saves what Transformer Engine's does."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> Any:  # whose arguments Megatron reads
        return _Norm.apply(x, weight, bias, 1e-5)  # type: ignore[no-untyped-call]

    apply = forward


class _CausalSoftmax:
    """Megatron's kernel, called with the scale."""

    @staticmethod
    def forward(x: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(gradient: Tensor, *_: Any) -> Tensor:
        return gradient

    @staticmethod
    def get_batch_per_block(*_: Any) -> int:
        return 4


class _Recipe:
    def __init__(self, *_: Any, **__: Any) -> None: ...


class _State:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _accumulate(total: Tensor, gradient: Tensor, main: Tensor) -> None: ...


APEX: dict[str, dict[str, Any]] = {
    "apex": {}, "apex.contrib": {}, "apex.contrib.layer_norm": {}, "apex.normalization": {},
    "apex.contrib.layer_norm.layer_norm": {"FastLayerNormFN": _ApexNorm},
    "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": _ApexNorm},
    "fused_weight_gradient_mlp_cuda": {"wgrad_gemm_accum_fp32": _accumulate, "wgrad_gemm_accum_fp16": _accumulate},
    **{f"scaled_{kind}masked_softmax_cuda": {name: getattr(_CausalSoftmax, name) for name in (
        "forward", "backward", "get_batch_per_block")} for kind in ("", "upper_triang_")},
}


def _modules() -> dict[str, types.ModuleType]:
    name = "transformer_engine"
    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        ".common": {}, ".common.recipe": {"DelayedScaling": _Recipe, "Format": _Recipe},
        ".pytorch": {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "LayerNorm": LayerNorm, "RMSNorm": RMSNorm,
                     "GroupedLinear": GroupedLinear, "DotProductAttention": DotProductAttention},
        ".pytorch.fp8": {"FP8GlobalStateManager": _State, "fp8_autocast": nullcontext},
        ".pytorch.distributed": {"CudaRNGStatesTracker": CudaRNGStatesTracker, **dict.fromkeys((
            "activation_recompute_forward", "checkpoint", "is_fp8_activation_recompute_enabled"))},
        ".pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD,
                                "multi_tensor_applier": multi_tensor_applier,
                                "multi_tensor_l2norm": multi_tensor_l2norm, "multi_tensor_scale": multi_tensor_scale},
        ".pytorch.attention": {"_SplitAlongDim": _SplitAlongDim},
        ".pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb,
                                    "apply_fused_qkv_rotary_pos_emb": None},
        ".pytorch.router": dict.fromkeys(("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss",
                                          "fused_topk_with_score_function")),
        ".pytorch.ops": dict.fromkeys(("Sequential", "FusibleOperation")),
        ".pytorch.tensor": {"QuantizedTensor": _Quantized},
        ".pytorch.tensor.float8_tensor": {"Float8Tensor": _Quantized},
        ".pytorch.float8_tensor": {"Float8Tensor": _Quantized},
        ".pytorch.tensor.utils": dict.fromkeys((
            "replace_raw_data", "cast_master_weights_to_fp8", "post_all_gather_processing")),
        ".pytorch.module": {}, ".pytorch.module.base": {"TransformerEngineBaseModule": Base},
    }
    modules = {}
    for full, values in {**{name + suffix: values for suffix, values in contents.items()}, **APEX}.items():
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
    _Workspace.held.clear()
    _Dummy.held.clear()
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        DotProductAttention.backend = before
        _Workspace.held.clear()
        _Dummy.held.clear()
