"""Recurrent layers on CUDA: one cuDNN call for all time steps, on weights that share one buffer. Sources: RNN.cpp and
cudnn/RNN.cpp in aten/src/ATen/native, and ``aten/src/ATen/cudnn/AutocastRNN.cpp``.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.backends.cudnn import CUDNN_TENSOR_DTYPES

from analyzer.cuda.autocast import cached_cast, lower_precision
from analyzer.cuda.kernel_registry import call_whole, device_kernel, device_shape
from analyzer.cuda.sdp_choice import CUDNN_VERSION, simulated_capability
from analyzer.cuda.workspaces.recurrent import GRU, LSTM, RELU, TANH, RnnLayers
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.state import active_state
from analyzer.meta.tensor import with_node

from .functional import read_lengths

Tensor = torch.Tensor
aten = torch.ops.aten


class RnnSpec(NamedTuple):
    """What a call of a recurrent layer is, besides its tensors: after the mode, in the order of its arguments."""

    mode: int
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False
    batch_sizes: tuple[int, ...] = ()  #: of a packed sequence


@with_node("CudnnRnnBackward0")
class CudnnRnn(torch.autograd.Function):
    """``aten::_cudnn_rnn``: saves input, states, output, reserve and the weight buffer."""

    @staticmethod
    def forward(ctx: Any, spec: RnnSpec, input: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor) -> Any:
        hidden_size = hx.shape[2] if cx is None else cx.shape[2]
        proj_size = 0 if hx.shape[2] == hidden_size else hx.shape[2]  # an LSTM with projections has states of two sizes
        stride = (4 if spec.has_biases else 2) + (proj_size > 0)
        settings = (spec.mode, hidden_size, proj_size, spec.num_layers, spec.batch_first, spec.dropout, spec.train,
                    spec.bidirectional, list(spec.batch_sizes), None)
        out, hy, cy, reserve, buffer = call_whole(aten._cudnn_rnn.default, input, list(weights), stride,
                                                  _shared_buffer(weights, stride), hx, cx, *settings)
        ctx.call = (stride, settings)
        ctx.save_for_backward(input, hx, cx, out, reserve, buffer, *weights)
        ctx.set_materialize_grads(False)
        return out, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        input, hx, cx, out, reserve, buffer, *weights = ctx.saved_tensors
        stride, settings = ctx.call
        mask = [*ctx.needs_input_grad[1:4], any(ctx.needs_input_grad[4:])]
        results = call_whole(aten._cudnn_rnn_backward.default, input, weights, stride, buffer, hx, cx, out, *grads,
                             *settings, reserve, mask)
        return None, *results


def _count(weights: Sequence[Tensor], stride: int) -> int:
    """Elements of all weights in cuDNN's buffer, which has two biases of each gate (``CUDNN_RNN_DOUBLE_BIAS``) also
    where the layers, of two or three weights each, have none.
    """
    gates = sum(w.shape[0] for i, w in enumerate(weights) if i % stride < 2) if stride < 4 else 0
    return sum(w.numel() for w in weights) + gates


def _shared_buffer(weights: Sequence[Tensor], stride: int) -> Tensor | None:
    """The one buffer in which all weights lie (``flatten_parameters`` saw to it), or None: try_get_weight_buf."""
    first, total = weights[0], _count(weights, stride)
    storages = {w.untyped_storage()._cdata for w in weights}
    if len(storages) > 1 or first.untyped_storage().nbytes() != total * first.itemsize:
        return None
    with torch.no_grad():
        return first.detach().as_strided((total,), (1,), 0)


@device_shape("_cudnn_rnn")
def _cudnn_rnn_shape(input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Tensor | None, hx: Tensor,
                     cx: Tensor | None, mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool,
                     dropout: float, train: bool, bidirectional: bool, batch_sizes: list[int],
                     dropout_state: Tensor | None) -> tuple[Tensor, ...]:
    layers = RnnLayers.of(tuple(input.shape), mode, hidden_size, proj_size, num_layers, batch_first, bidirectional,
                          batch_sizes)
    if batch_sizes:
        out = input.new_empty(layers.rows, layers.width)
    else:
        out = input.new_empty(layers.steps, layers.batch, layers.width)
        out = out.transpose(0, 1) if batch_first else out
    count = layers.reserve_bytes(input.itemsize, dropout > 0) if train else 0
    cy = hx.new_empty(0) if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format)
    buffer = input.new_empty(_count(weight, weight_stride0)) if weight_buf is None else weight_buf
    return out, torch.empty_like(hx, memory_format=torch.contiguous_format), cy, input.new_empty(
        count, dtype=torch.uint8), buffer


@device_shape("_cudnn_rnn_backward")
def cudnn_rnn_backward_shape(input: Tensor, weight: list[Tensor], weight_stride0: int, weight_buf: Tensor, hx: Tensor,
                             cx: Tensor | None, output: Tensor, grad_output: Tensor | None, grad_hy: Tensor | None,
                             grad_cy: Tensor | None, mode: int, hidden_size: int, proj_size: int, num_layers: int,
                             batch_first: bool, *args: Any) -> tuple[Tensor | None, ...]:
    output_mask = args[-1]
    time_first = input.transpose(0, 1) if batch_first else input
    grad_input = torch.empty_like(time_first, memory_format=torch.contiguous_format)
    states = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in (hx, cx)]
    grads: list[Tensor | None] = [None] * len(weight)
    if output_mask[3] and weight_stride0 < 4:  # copied out of a buffer that has biases
        grads = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in weight]
    elif output_mask[3]:
        buffer, grads, start = torch.empty_like(weight_buf), [], 0
        for w in weight:
            grads.append(buffer[start:start + w.numel()].view(w.shape))
            start += w.numel()
    return grad_input.transpose(0, 1) if batch_first else grad_input, *states, *grads


def register_layers(register: Callable[[str], Callable[[Any], Any]],
                    run: Callable[[RnnSpec, Tensor, Any, list[Tensor]], Any]) -> None:
    """Let recurrent layers call ``run`` with the input, the hidden state (of an LSTM also the cell's) and weights."""
    def add(name: str, mode: int) -> None:
        @register(f"{name}.input")
        def layer(input: Tensor, hx: Any, params: list[Tensor], *settings: Any) -> Any:
            return run(RnnSpec(mode, *settings), input, hx, params)
        @register(f"{name}.data")
        def packed(data: Tensor, batch_sizes: Tensor, hx: Any, params: list[Tensor], *settings: Any) -> Any:
            sizes = tuple(read_lengths("a recurrent layer on a packed sequence", batch_sizes))
            return run(RnnSpec(mode, *settings)._replace(batch_sizes=sizes), data, hx, params)
    for name, mode in (("lstm", LSTM), ("gru", GRU), ("rnn_tanh", TANH), ("rnn_relu", RELU)):
        add(name, mode)


def _run(spec: RnnSpec, input: Tensor, states: Any, params: list[Tensor]) -> Any:
    hx, cx = states if spec.mode == LSTM else (states, None)
    state = active_state()
    takes = input.dtype in CUDNN_TENSOR_DTYPES or input.dtype is torch.bfloat16 and _takes_bfloat16()
    if not torch._C._get_cudnn_enabled() or not takes or not input.numel():  # use_cudnn
        state.assume(f"a recurrent layer that cuDNN does not run ({input.dtype}) is counted with the CPU's cells, "
                     "not CUDA's fused ones")
        return NotImplemented
    if lower_precision(state) is not None:  # _cudnn_rnn_cast_reflatten: float16, whatever the region's dtype
        def lower(x: Tensor) -> Tensor:
            return cached_cast(state, x, torch.float16, "cuda")
        input, hx, cx = lower(input), lower(hx), None if cx is None else lower(cx)
        if params[0].dtype in (torch.float32, torch.bfloat16):
            params = _copy_flat(params, len(params) // (spec.num_layers * (1 + spec.bidirectional)))
    if spec.train:
        state.assume("what cuDNN reserves for the backward pass of a recurrent layer is estimated: "
                     "gates, cells and inner outputs of every step and layer")
    out, hy, cy = CudnnRnn.apply(spec, input, hx, cx, *params)
    return (out, hy, cy) if spec.mode == LSTM else (out, hy)


def _takes_bfloat16() -> bool:
    """CUDAHooks::supportsBFloat16RNNWithCuDNN, and cudnn_is_acceptable, which asks for no dtype from 2.10 on."""
    return torch.__version__ >= "2.10" and CUDNN_VERSION >= 91300 and simulated_capability() >= (8, 0)


def _copy_flat(params: list[Tensor], stride: int) -> list[Tensor]:
    """copy_weights_to_flat_buf_views: the parameters in float16, each copied to its place in one buffer."""
    buffer = aten.new_zeros.default(params[0], [_count(params, stride)], dtype=torch.float16)
    copies, start = [], 0
    for param in params:
        with torch.no_grad():
            copy = aten.set_.source_Tensor(buffer.new_empty(0), buffer[start:start + param.numel()].view(param.shape))
        copies.append(aten.copy_.default(copy, param))
        start += param.numel()
    return copies


register_layers(device_kernel, _run)
device_kernel("_use_cudnn_rnn_flatten_weight", on_any_device=True)(lambda: True)


@device_kernel("_cudnn_rnn_flatten_weight")
def flatten_weights(weight_arr: list[Tensor], weight_stride0: int, input_size: int, mode: int, hidden_size: int,
                    proj_size: int, num_layers: int, batch_first: bool, bidirectional: bool) -> Tensor:
    """copy_weights_to_flat_buf_views: one buffer, into which the weights move."""
    first = weight_arr[0]
    if _shared_buffer(weight_arr, weight_stride0) is not None and isinstance(first.untyped_storage(), MetaStorage):
        return first
    buffer = aten.new_zeros.default(first, [_count(weight_arr, weight_stride0)])
    start = 0
    for weight in weight_arr:
        view = aten.slice.Tensor(buffer, 0, start, start + weight.numel()).view(weight.shape)
        aten.copy_.default(view, weight)
        aten.set_.source_Tensor(weight, view)
        start += weight.numel()
    return buffer  # type: ignore[no-any-return]


@device_kernel("lstm_cell")
def _lstm_cell(input: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
               b_hh: Tensor | None = None) -> Any:
    gates = aten.linear.default(input, w_ih), aten.linear.default(hx[0], w_hh)
    return aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)[:2]


@device_kernel("gru_cell")
def _gru_cell(input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
              b_hh: Tensor | None = None) -> Any:
    gates = aten.linear.default(input, w_ih), aten.linear.default(hx, w_hh)
    return aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)[0]


@device_shape("_thnn_fused_gru_cell")
def _fused_gru_cell_shape(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *biases:
                          Tensor | None) -> tuple[Tensor, Tensor]:
    # aten/src/ATen/native/cuda/RNN.cu, GRU_WORKSPACE_MULTIPLIER
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


@device_shape("_thnn_fused_gru_cell_backward")
def _fused_gru_cell_backward_shape(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    batch, size = workspace.shape[0], workspace.shape[1] // 5
    gates = [workspace.new_empty(batch, 3 * size) for _ in range(2)]
    biases = [workspace.new_empty(3 * size) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad_hy, memory_format=torch.contiguous_format), *biases
