"""Recurrent networks. Each weight matrix meets each row of the sequence once: matrix elements × rows multiply-adds.

The cell's own arithmetic is counted per hidden element and step: biases add nothing in the fused layers, as in a matrix
product; in the fused cells they are sums like any other.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime, join_known
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec

from .matmul import UNMEASURED, name_of_dtype, product_time
from .registration import (
    GATES,
    FlopCount,
    Formula,
    OfSignature,
    multiply_adds,
    register_each,
    register_times,
    uses_tf32,
)

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


def layer_flops(x: Spec, weights: list[Spec], mode: int, hidden_size: int, products: int = 1,
                cell_flops: Mapping[int, int] = CELL_FLOPS) -> FlopCount:
    """All layers and directions, given their weights: matrices [gates · hidden, inputs] and biases. Each row of x
    [time, batch, features] (or batch first), or packed [rows, features], meets each matrix in so many ``products``.
    """
    rows, matrices = prod(x[:-1]), [w for w in weights if len(w) == 2]
    recurrent = sum(w[0] == GATES[mode] * hidden_size for w in matrices) // 2  # layers × directions (projections aside)
    return multiply_adds(products * rows * sum(w.numel for w in matrices), x) + FlopCount(
        cell_flops[mode] * rows * hidden_size * recurrent)


def fused_cell(mode: int) -> Formula:
    """The formula of a cell whose gates arrive multiplied: its arithmetic, and for each bias a sum a gate."""
    return lambda _input_gates, _hidden_gates, state, input_bias=None, hidden_bias=None, *_, **__: (
        state.numel * (CELL_FLOPS[mode] + GATES[mode] * ((input_bias is not None) + (hidden_bias is not None))))


def _of_layers(signature: Signature) -> FlopCount:
    """Layers whose arguments go by the names of cuDNN's, or of oneDNN's one layer in one direction. The gradient of the
    data always runs; that of the weights, the last of the output mask, is as many multiply-adds again.
    """
    named, backward = signature.named_arguments(), "backward" in signature.op._schema.name
    weights = named.get("weight") or [named[f"weight{n + backward}"] for n in (0, 1)]
    products = 1 + backward * bool(named.get("output_mask", (True,))[-1])
    return layer_flops(named["input"], weights, named["mode"], named["hidden_size"], products,
                       CELL_BACKWARD_FLOPS if backward else CELL_FLOPS)


register_each("_cudnn_rnn miopen_rnn mkldnn_rnn_layer _cudnn_rnn_backward miopen_rnn_backward "
              "mkldnn_rnn_layer_backward", OfSignature(_of_layers))
register_each("_lstm_mps", lambda x, hx, params, *_, **__: layer_flops(x, params, LSTM, hx[1][-1]))
register_each("lstm_mps_backward",
    lambda grad_y, grad_hy, grad_cy, z_state, cell_state, x, outputs, hx, params, *_, **__: (
        layer_flops(x, params, LSTM, hx[1][-1], 2, CELL_BACKWARD_FLOPS)))
register_each("_thnn_fused_lstm_cell", fused_cell(LSTM))
register_each("_thnn_fused_gru_cell", fused_cell(GRU))
# The bias gradient sums the gates' over the batch: 4 to a hidden element, where there is one
register_each("_thnn_fused_lstm_cell_backward_impl _thnn_fused_lstm_cell_backward",
    lambda grad_hy, grad_cy, cx, *rest, **__: cx.numel * (CELL_BACKWARD_FLOPS[LSTM] + 4 * bool(rest and rest[-1])))
# The two bias gradients sum three gates each
register_each("_thnn_fused_gru_cell_backward",
    lambda grad_hy, workspace, has_bias, *_, **__: grad_hy.numel * (CELL_BACKWARD_FLOPS[GRU] + 6 * bool(has_bias)))


def _rnn(passes: int, signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The recurrent layers of cuDNN; backward, each matrix meets gradient and data. Of a layer's matrices that of its
    input meets all rows at once, the others one step's rows at a time.
    """
    named = signature.named_arguments()
    x, sizes = named["input"], named["batch_sizes"]
    if sizes:
        steps, batch = len(sizes), -(-sum(sizes) // len(sizes))
    else:
        steps, batch = (x[1], x[0]) if named["batch_first"] else (x[0], x[1])
    times: list[KernelTime | None] = []
    for index, (n, k) in enumerate(spec for spec in named["weight"] if len(spec) == 2):
        is_of_input = index % (3 if named["proj_size"] else 2) == 0
        one = product_time(1, steps * batch if is_of_input else batch, n, k, name_of_dtype(x), device,
                           use_tf32=uses_tf32("rnn"))
        times.append(one if one is None or is_of_input else KernelTime(
            one.seconds * steps, one.spread, "latency", one.kernels * steps))
    one = join_known(*times)
    return None if one is None else KernelTime(one.seconds * passes, max(one.spread, UNMEASURED), one.bound,
                                               one.kernels * passes)


register_times("_cudnn_rnn", partial(_rnn, 1))
register_times("_cudnn_rnn_backward", partial(_rnn, 2))
