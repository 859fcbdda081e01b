"""Nested tensors in the jagged layout: what they are made of, and which attention they take on the simulated device."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nested._internal.sdpa
import torch.utils.flop_counter  # noqa: F401  # torch/nested/_internal/sdpa.py uses it and does not import it

from analyzer.cuda.kernel_registry import device_kernel, device_shape, kernel_replacements
from analyzer.errors import UnsupportedOperatorError
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import active_state
from analyzer.meta.tensor import device_of

Tensor = torch.Tensor
_HALVES = (torch.float16, torch.bfloat16)
# torch/nested/_internal/nested_tensor.py keeps one tensor for all views: made in the first run, it would be in its log
torch.nested._internal.nested_tensor._nt_view_dummy()


@kernel_replacements.append
def choose_attention() -> Iterator[Undo]:
    """Choose the kernels of attention as the simulated device would; each result undoes one step."""
    sdpa = torch.nested._internal.sdpa
    yield answer(sdpa, "can_use_flash_attention",
                 _choose(lambda dtype: torch._C._get_flash_sdp_enabled() and dtype in _HALVES))
    yield answer(sdpa, "can_use_efficient_attention", _choose(
        lambda dtype: torch._C._get_mem_efficient_sdp_enabled() and dtype in (*_HALVES, torch.float32)))
    # the last one asked; flash takes what it could
    yield answer(sdpa, "can_use_cudnn_attention", _choose(lambda dtype: False))


def _choose(can_use: Callable[[torch.dtype], bool]) -> Callable[..., bool]:
    """check_tensor_dtype of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; Python checks shapes besides."""
    def ask(params: Any, debug: bool = False) -> bool:
        # The host's products take the strided layout, which cannot be without data; a trace asks for the shape alone.
        is_possible = active_state().tape is not None or device_of(params.query).type == "cuda"
        return is_possible and can_use(params.query.dtype)
    return ask


@device_kernel("_nested_tensor_from_tensor_list", "_nested_view_from_buffer", on_any_device=True)
def refuse_strided_layout(*args: Any, **kwargs: Any) -> Any:
    """Raise UnsupportedOperatorError: C++ asserts that such a tensor has data (NestedTensorImpl.cpp)."""
    raise UnsupportedOperatorError(
        f"a nested tensor in the strided layout cannot be without data. {active_state().where()}\n"
        "Way out: make it with layout=torch.jagged. (Attention over jagged tensors takes the strided layout on a host; "
        "profile it on an accelerator.)")


@device_shape("_padded_dense_to_jagged_forward")
def shape_padded_dense_to_jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    """aten/src/ATen/native/nested/NestedTensorTransformerFunctions.cpp: one row for each element."""
    rows = int(offsets[0][-1]) if total_L is None else total_L
    return dense.new_empty((rows, *dense.shape[len(offsets) + 1:]))
