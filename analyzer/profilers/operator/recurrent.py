"""Recurrent networks. Each weight matrix meets each row of the sequence once: matrix elements × rows multiply-adds.

The cell's own arithmetic is counted per hidden element and step: biases add nothing in the fused layers, as in a matrix
product; in the fused cells they are sums like any other.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from analyzer.cuda.workspaces.recurrent import (
    BACKWARD_STEPS,
    FORWARD_STEPS,
    GATES,
    GRU,
    KEPT,
    LSTM,
    RnnLayers,
    copied_bytes,
    missing_gradients,
)
from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime, join_known
from analyzer.hardware.kernel_time.pointwise import pointwise_time, stream_time
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec

from .matmul import UNMEASURED, name_of_dtype, product_time
from .registration import FlopCount, Formula, OfSignature, multiply_adds, register_each, register_times, uses_tf32

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


# The time of recurrent layers on cuDNN: its kernels, and PyTorch's beside them (``cudnn/RNN.cpp``).
#
# Seen in a step of one H200 (cuDNN 9.19), of an LSTM of two layers in float32 with dropout, whose kernels these rules
# count as they were. Forward, a kernel for each matrix that transposes it, a product of the input for each group of
# steps, for each step a product of the state and the cell; dropout's mask is drawn once and applied to each group. The
# gradient of the data runs the same steps the other way. That of the weights multiplies all steps at once, the initial
# state apart, sums up biases, and applies the mask again. Layers have streams of their own, but the host gave steps in
# turn and no faster than they ran, so that they took nearly their sum. GRUs and plain layers are assumed to be alike.
#
# Of layers that are small enough one kernel runs all steps. These were not measured: steps are assumed to be no faster.

#: PERSIST_STATIC_SMALL_H: the most units forward and backward, by mode (use_rnn_persist_small_h).
_SMALL = ((384, 256), (384, 256), (192, 128), (192, 128))


def is_persistent(named: Mapping[str, Any], layers: RnnLayers, backward: bool) -> bool:
    """Whether one kernel runs all steps: get_algo on devices of compute capability 8.0 and more."""
    dtype, batch, units = named["input"].dtype, layers.batch, layers.hidden
    if layers.is_packed or layers.output != units or dtype is torch.float64:
        return False
    if units <= _SMALL[layers.mode][backward]:
        return True
    is_alike = layers.layers == layers.directions == 1 and units % 128 == layers.features % 128 == batch % 8 == 0
    is_fast = layers.mode == LSTM or layers.mode != GRU and (batch < 96 or units < 896)
    return dtype is torch.float16 and is_alike and is_fast and units <= 1024 and batch <= 128


class _Kernels:
    """Times of the kernels of one call."""

    def __init__(self, signature: Signature, device: DeviceSpec) -> None:
        self.named, self.device, self.times = signature.named_arguments(), device, list[KernelTime | None]()
        self.layers = layers = RnnLayers.of_call(self.named)
        self.dtype, self.itemsize = name_of_dtype(self.named["input"]), self.named["input"].dtype.itemsize
        matrices = [w for w in self.named["weight"] if len(w) == 2]
        each = 2 + (layers.output != layers.hidden)
        #: of each layer and direction: of the input, of the state, and a projection
        self.matrices = [matrices[i:i + each] for i in range(0, len(matrices), each)]
        drops = self.named["train"] and self.named["dropout"] > 0
        self.dropped = range(layers.directions, len(self.matrices), layers.directions) if drops else range(0)

    def add(self, time: KernelTime | None, times: int = 1) -> None:
        self.times.append(None if time is None else KernelTime(time.seconds * times, time.spread, time.bound, times))

    def move(self, *elements: int, times: int = 1) -> None:
        """Kernels that read or write so many elements, of each number ``times``; none where it is 0."""
        for count in elements:
            if count:
                self.add(stream_time(count * self.itemsize, self.device), times)

    def multiply(self, m: int, n: int, k: int, times: int = 1) -> None:
        """Products [m, k] x [k, n]. Where a sum is split its parts are added up in the same kernel."""
        self.add(product_time(1, m, n, k, self.dtype, self.device, use_tf32=uses_tf32("rnn")), times)

    def walk(self, backward: bool) -> None:
        """All steps, of one layer and direction after the other, with their input."""
        layers, gates, kept = self.layers, GATES[self.layers.mode], KEPT[self.layers.mode]
        groups = -(-layers.steps // (BACKWARD_STEPS if backward else FORWARD_STEPS))
        rows, batch = -(-layers.rows // groups), -(-layers.rows // layers.steps)
        # It reads both products and a state and writes what is kept and the output; backward it reads what is kept and
        # the gradients of output and states, and writes those of gates and a state.
        moved = kept + gates + 4 if backward else 2 * gates + kept + 2
        for i, (of_input, *of_state) in enumerate(self.matrices):
            if not backward:
                self.move(*(2 * matrix.numel for matrix in (of_input, *of_state)))
            self.multiply(rows, of_input[backward], of_input[1 - backward], groups)
            if i in self.dropped:
                self.move(2 * rows * layers.width, times=groups)
            before = len(self.times)
            for matrix in of_state:
                self.multiply(batch, matrix[backward], matrix[1 - backward], layers.steps)
            units = batch * layers.hidden  # each has its numbers in rows of gates: two dimensions
            self.add(pointwise_time(units, units * moved * self.itemsize, self.device, dimensions=2, operands=moved),
                     layers.steps)
            if is_persistent(self.named, layers, backward) and (steps := join_known(*self.times[before:])) is not None:
                self.times[before:] = [replace(steps, kernels=1)]

    def move_weights(self, is_copied: bool) -> None:
        """A buffer of all weights is made of zeros; they are copied to it, or out of it, one by one."""
        counts = [w.numel for w in self.named["weight"]]
        self.move(sum(counts), *(2 * count * is_copied for count in counts))

    def weigh(self) -> None:
        """The gradient of the weights."""
        rows, batch = self.layers.rows, self.layers.batch
        self.move_weights(is_copied=self.named["weight_stride0"] < 4)
        for i, (of_input, of_state, *projection) in enumerate(self.matrices):
            self.move(2 * rows * self.layers.width * (i in self.dropped), rows * of_input[0])  # and sums for biases
            for matrix, count in ((of_input, rows), (of_state, rows - batch), (of_state, batch), *(
                    (matrix, rows) for matrix in projection)):
                self.multiply(matrix[0], matrix[1], count)

    def join(self) -> KernelTime | None:
        one = join_known(*self.times)
        return None if one is None else replace(one, spread=max(one.spread, UNMEASURED))


def _forward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    run = _Kernels(signature, device)
    if run.named["weight_buf"] is None:
        run.move_weights(is_copied=True)
    bits = run.layers.rows * run.layers.width * len(run.dropped)
    run.move(2 * copied_bytes(run.named)[0] // run.itemsize, bits // (8 * run.itemsize))
    run.walk(backward=False)
    return run.join()


def _backward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    run = _Kernels(signature, device)
    gives_weights = run.named["output_mask"][3]
    copies = [2 * nbytes // run.itemsize for nbytes in copied_bytes(run.named)]
    run.move(*(like.numel for like in missing_gradients(run.named)), *copies, copies[0] * gives_weights)
    run.walk(backward=True)
    if gives_weights:
        run.weigh()
    return run.join()


register_times("_cudnn_rnn", _forward)
register_times("_cudnn_rnn_backward", _backward)
