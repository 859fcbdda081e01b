"""Recurrent layers. Each weight matrix meets each row of the sequence once: matrix elements × rows multiply-adds.

The cell's own arithmetic is counted per hidden element and step: biases add nothing in the fused layers, as in a matrix
product; in the fused cells they are sums like any other.
"""
from __future__ import annotations

from math import prod
from typing import Any

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, register_each
from .size import GATES, multiply_adds

CELL_FLOPS = {
    0: 2, 1: 2,  # sum of the two products, activation
    2: 13,       # four such sums and activations; f c + i g (3); o tanh c (2)
    3: 11,       # r and z (2 each); r × hidden, +, tanh (3); (1 - z) n + z h (4)
}
CELL_BACKWARD_FLOPS = {
    0: 1, 1: 3,  # g where positive; g (1 - h·h)
    2: 22,       # dc (5), do, di, df, dg and dc of the step before (5), three sigmoids and a tanh (12)
    3: 16,       # dn, dz (4), dh of the step before (1), tanh (3), dr and its hidden (2), two sigmoids (6)
}


def layer_flops(rows: int, weights: list[Spec], mode: int, hidden_size: int, like: Spec) -> FlopCount:
    """Forward of all layers and directions, given their weights: matrices [gates · hidden, inputs] and biases."""
    matrices = [w for w in weights if len(w) == 2]
    recurrent = sum(w[0] == GATES[mode] * hidden_size for w in matrices) // 2  # layers × directions (projections aside)
    cells = rows * hidden_size * recurrent
    return multiply_adds(rows * sum(w.numel for w in matrices), like) + FlopCount(CELL_FLOPS[mode] * cells)


def layer_backward_flops(rows: int, weights: list[Spec], mode: int, hidden_size: int, like: Spec,
                         of_weights: bool) -> FlopCount:
    """The gradient of the data always runs; that of the weights is as many multiply-adds again."""
    matrices = [w for w in weights if len(w) == 2]
    recurrent = sum(w[0] == GATES[mode] * hidden_size for w in matrices) // 2
    products = multiply_adds((1 + of_weights) * rows * sum(w.numel for w in matrices), like)
    return products + FlopCount(CELL_BACKWARD_FLOPS[mode] * rows * hidden_size * recurrent)


def cudnn_backward_flops(x: Spec, weight: list[Spec], weight_stride0: int, weight_buf: Any, hx: Spec, cx: Any,
                         output: Spec, grad_output: Any, grad_hy: Any, grad_cy: Any, mode: int, hidden_size: int, *rest:
                         Any, out: Any = None, **_: Any) -> FlopCount:
    """Of cuDNN and MIOpen; the last argument says which gradients are wanted, weights the last of them."""
    return layer_backward_flops(prod(x[:-1]), weight, mode, hidden_size, x, bool(rest[-1][3]))


def mkldnn_flops(x: Spec, w_ih: Spec, w_hh: Spec, b_ih: Spec, b_hh: Spec, hx: Spec, cx: Spec, reverse: bool,
                 batch_sizes: Any, mode: int, hidden_size: int, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """One layer in one direction."""
    return layer_flops(prod(x[:-1]), [w_ih, w_hh], mode, hidden_size, x)


def mkldnn_backward_flops(x: Spec, w_ih: Spec, w_hh: Spec, b_ih: Spec, b_hh: Spec, hx: Spec, cx: Spec, output: Spec,
                          hy: Spec, cy: Spec, grad_output: Any, grad_hy: Any, grad_cy: Any, reverse: bool, mode: int,
                          hidden_size: int, *_: Any, out: Any = None, **__: Any) -> FlopCount:
    """FLOPs of ``mkldnn_rnn_layer_backward``."""
    return layer_backward_flops(prod(x[:-1]), [w_ih, w_hh], mode, hidden_size, x, True)


LSTM = 2


def mps_lstm_backward_flops(grad_y: Any, grad_hy: Any, grad_cy: Any, z_state: Spec, cell_state: Spec, x: Spec,
                            outputs: Spec, hx: list[Spec], params: list[Spec], *_: Any, out: Any = None,
                            **__: Any) -> FlopCount:
    """FLOPs of ``lstm_mps_backward``."""
    return layer_backward_flops(prod(x[:-1]), params, LSTM, hx[1][-1], x, True)


def lstm_cell_flops(input_gates: Spec, hidden_gates: Spec, cx: Spec, input_bias: Any = None, hidden_bias: Any = None, *,
                    out: Any = None, **_: Any) -> int:
    """The gates arrive multiplied: 13 FLOPs a hidden element, and four sums more for each bias.

    >>> import torch
    >>> gates, c, b = (Spec.of(s, (1,) * len(s), torch.float32, "cpu") for s in ((2, 12), (2, 3), (12,)))
    >>> lstm_cell_flops(gates, gates, c), lstm_cell_flops(gates, gates, c, b, b)
    (78, 126)
    """
    return cx.numel * (CELL_FLOPS[2] + 4 * ((input_bias is not None) + (hidden_bias is not None)))


def lstm_cell_backward_flops(grad_hy: Any, grad_cy: Any, cx: Spec, *_: Any, out: Any = None, **__: Any) -> int:
    """The bias gradient sums the gates' over the batch: 4 to a hidden element, where there is one."""
    has_bias = bool(_[-1]) if _ else False
    return cx.numel * (CELL_BACKWARD_FLOPS[2] + 4 * has_bias)


def gru_cell_flops(input_gates: Spec, hidden_gates: Spec, hx: Spec, input_bias: Any = None, hidden_bias: Any = None, *,
                   out: Any = None, **_: Any) -> int:
    """FLOPs of ``_thnn_fused_gru_cell``."""
    return hx.numel * (CELL_FLOPS[3] + 3 * ((input_bias is not None) + (hidden_bias is not None)))


# x [time, batch, features] (or batch first), or packed [rows, features]
register_each("_cudnn_rnn", lambda x, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, *_, **__: (
    layer_flops(prod(x[:-1]), weight, mode, hidden_size, x)))
register_each("_cudnn_rnn_backward miopen_rnn_backward", cudnn_backward_flops)
register_each("miopen_rnn", lambda x, weight, weight_stride0, hx, cx, mode, hidden_size, *_, **__: (
    layer_flops(prod(x[:-1]), weight, mode, hidden_size, x)))
register_each("mkldnn_rnn_layer", mkldnn_flops)
register_each("mkldnn_rnn_layer_backward", mkldnn_backward_flops)
register_each("_lstm_mps", lambda x, hx, params, *_, **__: layer_flops(prod(x[:-1]), params, LSTM, hx[1][-1], x))
register_each("lstm_mps_backward", mps_lstm_backward_flops)
register_each("_thnn_fused_lstm_cell", lstm_cell_flops)
register_each("_thnn_fused_lstm_cell_backward_impl _thnn_fused_lstm_cell_backward", lstm_cell_backward_flops)
register_each("_thnn_fused_gru_cell", gru_cell_flops)
# The two bias gradients sum three gates each
register_each("_thnn_fused_gru_cell_backward",
    lambda grad_hy, workspace, has_bias, *_, **__: grad_hy.numel * (CELL_BACKWARD_FLOPS[3] + 6 * bool(has_bias)))
