"""Recurrent layers. Each weight matrix meets each row of the sequence once: matrix elements × rows multiply-adds.

The cell's own arithmetic is counted per hidden element and step: biases add nothing in the fused layers, as in a matrix
product; in the fused cells they are sums like any other.
"""
from __future__ import annotations

from collections.abc import Mapping
from math import prod

from analyzer.meta.spec import TensorSpec as Spec

from .registration import FlopCount, Formula, register_each
from .size import GATES, multiply_adds

LSTM, GRU = 2, 3  # of GATES' modes
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


def layer_flops(rows: int, weights: list[Spec], mode: int, hidden_size: int, like: Spec, products: int = 1,
                cell_flops: Mapping[int, int] = CELL_FLOPS) -> FlopCount:
    """All layers and directions, given their weights: matrices [gates · hidden, inputs] and biases. Each row meets each
    matrix in so many ``products``.
    """
    matrices = [w for w in weights if len(w) == 2]
    recurrent = sum(w[0] == GATES[mode] * hidden_size for w in matrices) // 2  # layers × directions (projections aside)
    return multiply_adds(products * rows * sum(w.numel for w in matrices), like) + FlopCount(
        cell_flops[mode] * rows * hidden_size * recurrent)


def layer_backward_flops(rows: int, weights: list[Spec], mode: int, hidden_size: int, like: Spec,
                         of_weights: bool = True) -> FlopCount:
    """The gradient of the data always runs; that of the weights is as many multiply-adds again."""
    return layer_flops(rows, weights, mode, hidden_size, like, 1 + of_weights, CELL_BACKWARD_FLOPS)


def fused_cell(mode: int) -> Formula:
    """The formula of a cell whose gates arrive multiplied: its arithmetic, and for each bias a sum a gate.

    >>> import torch
    >>> gates, c, b = (Spec.of(s, (1,) * len(s), torch.float32, "cpu") for s in ((2, 12), (2, 3), (12,)))
    >>> fused_cell(LSTM)(gates, gates, c), fused_cell(LSTM)(gates, gates, c, b, b)
    (78, 126)
    """
    return lambda _input_gates, _hidden_gates, state, input_bias=None, hidden_bias=None, *_, **__: (
        state.numel * (CELL_FLOPS[mode] + GATES[mode] * ((input_bias is not None) + (hidden_bias is not None))))


# x [time, batch, features] (or batch first), or packed [rows, features]
register_each("_cudnn_rnn", lambda x, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, *_, **__: (
    layer_flops(prod(x[:-1]), weight, mode, hidden_size, x)))
# The last argument says which gradients are wanted, weights the last of them
register_each("_cudnn_rnn_backward miopen_rnn_backward",
    lambda x, weight, weight_stride0, weight_buf, hx, cx, y, grad_y, grad_hy, grad_cy, mode, hidden_size, *rest, **_: (
        layer_backward_flops(prod(x[:-1]), weight, mode, hidden_size, x, bool(rest[-1][3]))))
register_each("miopen_rnn", lambda x, weight, weight_stride0, hx, cx, mode, hidden_size, *_, **__: (
    layer_flops(prod(x[:-1]), weight, mode, hidden_size, x)))
# One layer in one direction
register_each("mkldnn_rnn_layer",
    lambda x, w_ih, w_hh, b_ih, b_hh, hx, cx, reverse, lengths, mode, hidden_size, *_, **__: (
        layer_flops(prod(x[:-1]), [w_ih, w_hh], mode, hidden_size, x)))
register_each("mkldnn_rnn_layer_backward",
    lambda x, w_ih, w_hh, b_ih, b_hh, hx, cx, y, hy, cy, grad_y, grad_hy, grad_cy, reverse, mode, size, *_, **__: (
        layer_backward_flops(prod(x[:-1]), [w_ih, w_hh], mode, size, x)))
register_each("_lstm_mps", lambda x, hx, params, *_, **__: layer_flops(prod(x[:-1]), params, LSTM, hx[1][-1], x))
register_each("lstm_mps_backward",
    lambda grad_y, grad_hy, grad_cy, z_state, cell_state, x, outputs, hx, params, *_, **__: (
        layer_backward_flops(prod(x[:-1]), params, LSTM, hx[1][-1], x)))
register_each("_thnn_fused_lstm_cell", fused_cell(LSTM))
register_each("_thnn_fused_gru_cell", fused_cell(GRU))
# The bias gradient sums the gates' over the batch: 4 to a hidden element, where there is one
register_each("_thnn_fused_lstm_cell_backward_impl _thnn_fused_lstm_cell_backward",
    lambda grad_hy, grad_cy, cx, *rest, **__: cx.numel * (CELL_BACKWARD_FLOPS[LSTM] + 4 * bool(rest and rest[-1])))
# The two bias gradients sum three gates each
register_each("_thnn_fused_gru_cell_backward",
    lambda grad_hy, workspace, has_bias, *_, **__: grad_hy.numel * (CELL_BACKWARD_FLOPS[GRU] + 6 * bool(has_bias)))
