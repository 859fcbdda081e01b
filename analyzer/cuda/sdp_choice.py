"""Which kernel PyTorch chooses for scaled dot product attention. Source of every rule for CUDA:
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h``, whose checks the comments name. Two
rules of the newest source are left out, since an H200 under torch 2.11 did not follow them: grouped queries in the
memory-efficient kernel (it ran plain products), and cuDNN only for dropout in sixteenths (it ran cuDNN with 0.1).
"""
from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from analyzer.hardware.catalogue import asked, asked_each_time, simulated_spec
from analyzer.meta.intercept.mode_stack import without_modes

Tensor = torch.Tensor

CUDNN_VERSION = 91900
"""What ``torch.backends.cudnn.version()`` returned where the project's measurements were taken (torch 2.11.0+cu130)."""

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # c10's SDPBackend, and torch.nn.attention.SDPBackend
_HALVES = (torch.float16, torch.bfloat16)
_DEFAULT_ORDER = (FLASH, EFFICIENT, MATH, CUDNN)  # aten/src/ATen/Context.h, sdp_priority_order
_CUDNN_ORDER = (CUDNN, FLASH, EFFICIENT, MATH)


class AttentionCall(NamedTuple):
    """The arguments that decide."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self[:3])

    def describe(self) -> dict[str, Any]:
        return {"query": tuple(self.query.shape), "key": tuple(self.key.shape), "value": tuple(self.value.shape),
                "dtype": str(self.query.dtype), "mask": None if self.mask is None else tuple(self.mask.shape),
                "dropout_p": self.dropout, "is_causal": self.is_causal, "enable_gqa": self.enable_gqa}


@asked
def simulated_capability() -> tuple[int, int]:
    """The compute capability of the simulated device; Hopper's where it is no GPU or its generation is unknown."""
    return simulated_spec().compute_capability or (9, 0)


@asked_each_time
def choose_backend(call: AttentionCall) -> int:
    """The backend of PyTorch's ``select_sdp_backend``: MATH, FLASH, EFFICIENT, CUDNN, or -1 where none may run."""
    return next((backend for backend in _priority_order() if can_use(backend, call)), -1)


@asked_each_time
def can_use(backend: int, call: AttentionCall) -> bool:
    """Whether a kernel may run a call of the simulated GPU."""
    if backend == MATH:
        return torch._C._get_math_sdp_enabled()
    rule = {FLASH: _can_use_flash, EFFICIENT: _can_use_efficient, CUDNN: _can_use_cudnn}[backend]
    return rule(call)


_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def choose_host_backend(call: AttentionCall) -> int:
    """The same on the host, of which the installed torch is asked (``sdp_utils_cpp.cpp``, select_sdp_backend_cpp).

    >>> x = torch.empty(1, 2, 8, 16, device="meta")
    >>> [choose_host_backend(AttentionCall(x, x, x, None, dropout, False, False)) for dropout in (0.0, 0.1)]
    [1, 0]
    """
    op, mask = torch.ops.aten._fused_sdp_choice.default, call[3]
    if mask is not None:  # on the host it may lie in memory as it likes, which meta tensors are not asked for
        with without_modes():
            mask = torch.empty(mask.shape, dtype=mask.dtype, device="meta").requires_grad_(mask.requires_grad)
    return int(op.redispatch(_ON_CPU, *call[:3], mask, *call[4:6], enable_gqa=call.enable_gqa))


def _priority_order() -> tuple[int, ...]:
    chosen = tuple(b for b in map(int, torch._C._get_sdp_priority_order()) if b in _DEFAULT_ORDER)
    if chosen != _DEFAULT_ORDER:
        return chosen  # sdpa_kernel(..., set_priority=True)
    # check_prefer_cudnn_attention, of builds with CUDA 13
    is_demoted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return _CUDNN_ORDER if not is_demoted and CUDNN_VERSION > 91500 and simulated_capability()[0] in (
        9, 10) else _DEFAULT_ORDER


def _is_dense_4d(call: AttentionCall) -> bool:  # check_tensor_shapes
    return call.query.dim() == call.key.dim() == call.value.dim() == 4


def _same_dtype(call: AttentionCall, allowed: tuple[torch.dtype, ...]) -> bool:  # check_tensor_dtype
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in allowed


def _halves(capability: tuple[int, int]) -> tuple[torch.dtype, ...]:  # check_dtypes_low_precision
    return _HALVES if capability >= (8, 0) else (torch.float16,)


def _batch_and_heads_match(call: AttentionCall, supports_gqa: bool, requires_same_num_heads: bool = True) -> bool:
    # check_batch_size_and_num_heads_dense, check_grouped_query_attention
    q, k, v = call[:3]
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    heads, k_heads, v_heads = q.shape[1], k.shape[1], v.shape[1]
    if call.enable_gqa and supports_gqa:
        if requires_same_num_heads:
            return k_heads == v_heads and heads % k_heads == 0
        return heads % k_heads == 0 and heads % v_heads == 0
    return heads == k_heads == v_heads


def _is_not_empty(call: AttentionCall) -> bool:  # check_nonzero_sequence_lengths_dense
    return call.query.shape[-2] != 0 and call.key.shape[-2] != 0


# check_last_dim_stride_equals_1_dense
def _last_strides_are_1(call: AttentionCall, ignore_singleton_dim: bool) -> bool:
    strided = all(t.stride(-1) == 1 for t in call[:3]) or ignore_singleton_dim and call.query.shape[-1] == 1
    return strided and (call.mask is None or call.mask.stride(-1) == 1)


def _mask_shape_is_supported(call: AttentionCall) -> bool:  # check_attn_mask_shape
    mask, q, k = call.mask, call.query, call.key
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    fits = mask.shape[-2] in (1, q.shape[2]) and mask.shape[-1] in (1, k.shape[2])
    return fits and (mask.dim() == 2 or mask.shape[0] in (1, q.shape[0]) and mask.shape[1] in (1, q.shape[1]))


def _can_use_cudnn(call: AttentionCall) -> bool:
    capability = simulated_capability()
    if not torch._C._get_cudnn_sdp_enabled() or not _is_dense_4d(call):
        return False
    if call.dropout > 0 and 91100 < CUDNN_VERSION < 91400:
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False  # check_cudnn_deterministic
    if not (_same_dtype(call, _halves(capability)) and _mask_shape_is_supported(call) and (8, 0) <= capability <=
            (12, 1)):
        return False
    return (_is_not_empty(call) and _last_strides_are_1(call, ignore_singleton_dim=True)
            and _batch_and_heads_match(call, supports_gqa=True, requires_same_num_heads=False)
            and _cudnn_shapes_fit(call, capability))


def _cudnn_shapes_fit(call: AttentionCall, capability: tuple[int, int]) -> bool:  # check_cudnn_tensor_shapes
    batch, heads, q_length, size = call.query.shape
    k_length, v_size = call.key.shape[2], call.value.shape[3]
    is_hopper_or_blackwell = capability == (9, 0) or capability[0] == 10
    limit = 192 if is_hopper_or_blackwell and CUDNN_VERSION >= 91100 and (size, v_size) == (192, 128) else 128
    if max(batch, heads) > 65535 or max(size, v_size) > limit or size % 8 or v_size % 8:
        return False
    return k_length != 1 and (call.dropout == 0 or q_length != 1)


def _can_use_flash(call: AttentionCall) -> bool:
    capability = simulated_capability()
    q, k, v = call[:3]
    if not torch._C._get_flash_sdp_enabled() or not _is_dense_4d(call) or call.mask is not None:
        return False
    # check_head_dim_size_flash
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 or not (8, 0) <= capability <= (12, 1):
        return False
    if call.needs_grad and ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)):
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        if not (q.shape[-1] <= 192 or call.dropout == 0 and q.shape[-1] > 224):
            return False
    if call.is_causal and q.shape[-2] != k.shape[-2]:  # check_flash_causal_non_square_seqlens
        return False
    return (_same_dtype(call, _halves(capability)) and _batch_and_heads_match(call, supports_gqa=True)
            and _is_not_empty(call) and _last_strides_are_1(call, ignore_singleton_dim=True))


def _gemm_alignment(call: AttentionCall, capability: tuple[int, int]) -> int:  # minimum_gemm_alignment
    is_half = call.query.dtype in _HALVES
    alignment = 4 if capability[0] >= 8 else 1
    uses_tensor_cores = capability[0] >= 8 or capability[0] == 7 and is_half
    return max(alignment, 128 // (16 if is_half else 32)) if uses_tensor_cores else alignment


def _can_use_efficient(call: AttentionCall) -> bool:
    capability = simulated_capability()
    q, k, v = call[:3]
    if not torch._C._get_mem_efficient_sdp_enabled() or not (5, 0) <= capability <= (12, 1) or not _is_dense_4d(call):
        return False
    alignment = _gemm_alignment(call, capability)
    # check_head_dim_size_mem_efficient
    if q.shape[-1] != k.shape[-1] or any(n == 0 or n % alignment for n in (q.shape[-1], v.shape[-1])):
        return False
    if not (_is_not_empty(call) and _last_strides_are_1(call, ignore_singleton_dim=False)
            and _batch_and_heads_match(call, supports_gqa=False)):
        return False
    return _same_dtype(call, (*_HALVES, torch.float32) if capability[0] >= 8 else (torch.float16, torch.float32))
