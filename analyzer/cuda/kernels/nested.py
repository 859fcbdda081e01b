"""Attention over nested tensors, which torch chooses kernels for in Python, and other operators of theirs."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nested._internal.ops
import torch.nested._internal.sdpa
import torch.utils.flop_counter  # noqa: F401  # torch/nested/_internal/sdpa.py uses it and does not import it
from torch.nested._internal.nested_tensor import NestedTensor, _nt_view_dummy, nested_view_from_values_offsets_lengths
from torch.nn.attention import SDPBackend

from analyzer.cuda.kernel_registry import device_kernel, device_shape, kernel_replacements
from analyzer.errors import UnsupportedOperatorError
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.simulated_device import any_on
from analyzer.meta.state import active_state
from analyzer.meta.tensor import device_of

Tensor = torch.Tensor
aten = torch.ops.aten
_sdpa = torch.nested._internal.sdpa
_HALVES = (torch.float16, torch.bfloat16)
# torch/nested/_internal/nested_tensor.py keeps one tensor for all views: made in the first run, it would be in its log
_nt_view_dummy()


@kernel_replacements.append
def choose_attention() -> Iterator[Undo]:
    yield answer(torch.nested._internal.ops, "jagged_scaled_dot_product_attention", _attend, passes_original=True)
    yield answer(_sdpa, "can_use_flash_attention",
                 _choose(lambda dtype: torch._C._get_flash_sdp_enabled() and dtype in _HALVES))
    yield answer(_sdpa, "can_use_efficient_attention", _choose(
        lambda dtype: torch._C._get_mem_efficient_sdp_enabled() and dtype in (*_HALVES, torch.float32)))
    # the last one asked; flash takes what it could
    yield answer(_sdpa, "can_use_cudnn_attention", _choose(lambda dtype: False))


def _choose(can_use: Callable[[torch.dtype], bool]) -> Callable[..., bool]:
    """check_tensor_dtype of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; Python checks shapes besides."""
    def ask(params: Any, debug: bool = False) -> bool:
        # a trace asks for the shape alone
        is_possible = active_state().tape is not None or device_of(params.query).type == "cuda"
        return is_possible and can_use(params.query.dtype)
    return ask


def _attend(original: Callable[..., Any], query: Any, key: Any, value: Any, attn_mask: Any = None,
            dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
            enable_gqa: bool = False) -> Any:
    """On the host torch takes the strided layout for the plain products, which cannot be without data: here the
    sequences are tensors of their own (``jagged_scaled_dot_product_attention`` in torch/nested/_internal/sdpa.py).
    """
    state, options = active_state(), (dropout_p, is_causal, scale)
    on_host = state.tape is None and not any_on(state, "cuda", (query, key, value))
    tensors = _sdpa._autocast(query, key, value, attn_mask)
    if not on_host or attn_mask is not None or not all(isinstance(t, NestedTensor) for t in tensors[:3]) or (
            query._ragged_idx == 1 or _sdpa._select_sdp_backend(*tensors, dropout_p, is_causal, enable_gqa)
            != SDPBackend.MATH):
        return original(query, key, value, attn_mask, *options, enable_gqa)
    _sdpa._validate_sdpa_input(*tensors, *options)
    products = _attend_with_products([_split(t) for t in tensors[:3]], dropout_p, scale)
    merged = torch.cat([out.transpose(0, 1) for out in products])
    return nested_view_from_values_offsets_lengths(
        merged, query.offsets(), query.lengths(), min_seqlen=query._maybe_min_seqlen,
        max_seqlen=query._maybe_max_seqlen).transpose(1, 2)


def _split(nested: Any) -> list[Tensor]:
    """(heads, length, size) of each sequence, copied twice, as ``get_strided_layout_nested_tensor`` does."""
    offsets = nested.offsets()
    parts = nested.transpose(1, 2).values().split((offsets[1:] - offsets[:-1]).tolist())
    merged = torch.cat(parts)
    return [part.transpose(0, 1).contiguous() for part in merged.split([len(part) for part in parts])]


def _attend_with_products(parts: list[list[Tensor]], dropout_p: float, scale: float | None) -> tuple[Tensor, ...]:
    """``_scaled_dot_product_attention_math`` in aten/src/ATen/native/transformers/attention.cpp."""
    query, key, value = parts
    factor = math.sqrt(abs(1 / math.sqrt(query[0].shape[-1]) if scale is None else scale))
    scaled = [part * (-factor if scale is not None and scale < 0 else factor) for part in query]
    weights = PaddedProduct.apply(*scaled, *[part.transpose(-2, -1) * factor for part in key])
    del scaled
    weights = [aten._safe_softmax.default(part, -1) for part in weights]
    if dropout_p > 0:
        weights = [aten.dropout.default(part, dropout_p, True) for part in weights]
    return PaddedProduct.apply(*weights, *value)  # type: ignore[no-any-return]


class PaddedProduct(torch.autograd.Function):
    """The products of two lists of matrices, one after the other in the arguments, which the host pads to one size:
    ``matmul_nested`` in aten/src/ATen/native/nested/NestedTensorMatmul.cpp, ``matmul_backward`` in
    tools/autograd/derivatives.yaml.
    """

    @staticmethod
    def forward(ctx: Any, *matrices: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*matrices)
        half = len(matrices) // 2
        return _multiply(matrices[:half], matrices[half:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        half = len(grads)
        left, right = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        needs_left, needs_right = any(ctx.needs_input_grad[:half]), any(ctx.needs_input_grad[half:])
        none = (None,) * half
        return (*(_multiply(grads, [part.transpose(-2, -1) for part in right]) if needs_left else none),
                *(_multiply([part.transpose(-2, -1) for part in left], grads) if needs_right else none))


def _multiply(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, ...]:
    shapes = [(*a.shape[:-1], b.shape[-1]) for a, b in zip(left, right)]
    left, right = [part.contiguous() for part in left], [part.contiguous() for part in right]
    padded_left, padded_right = torch.stack(_pad(left)), torch.stack(_pad(right))  # which C++ holds to its end
    padded = torch.matmul(padded_left, padded_right)
    # nested_from_padded_generic in NestedTensorUtils.cpp: what a mask selects, whose elements are counted as int64
    masks = _pad([padded.new_ones(shape, dtype=torch.bool) for shape in shapes])
    counted = torch.stack(masks).to(torch.int64)
    del counted
    sizes = [math.prod(shape) for shape in shapes]
    parts = padded.new_empty(sum(sizes)).split(sizes)
    return tuple([part.view(shape) for part, shape in zip(parts, shapes)])


def _pad(parts: Sequence[Tensor]) -> list[Tensor]:
    """``NestedTensor_to_padded_tensor_generic`` in aten/src/ATen/native/nested/NestedTensorMath.cpp."""
    rows, columns = (max(part.shape[d] for part in parts) for d in (-2, -1))
    return [aten.constant_pad_nd.default(part, [0, columns - part.shape[-1], 0, rows - part.shape[-2]])
            for part in parts]


@device_kernel("_nested_tensor_from_tensor_list", "_nested_view_from_buffer", on_any_device=True)
def refuse_strided_layout(*args: Any, **kwargs: Any) -> Any:
    """Raise UnsupportedOperatorError: C++ asserts that such a tensor has data (NestedTensorImpl.cpp)."""
    raise UnsupportedOperatorError(
        f"a nested tensor in the strided layout cannot be without data. {active_state().where()}\n"
        "Way out: make it with layout=torch.jagged.")


@device_shape("_padded_dense_to_jagged_forward")
def shape_padded_dense_to_jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    """aten/src/ATen/native/nested/NestedTensorTransformerFunctions.cpp: one row for each element."""
    rows = int(offsets[0][-1]) if total_L is None else total_L
    return dense.new_empty((rows, *dense.shape[len(offsets) + 1:]))
