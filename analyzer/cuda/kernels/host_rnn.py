"""Recurrent layers on the host: oneDNN's LSTM, else cells step by step, where on meta torch takes the steps of a GPU
without cuDNN. Sources: ``aten/src/ATen/native/RNN.cpp`` and ``mkldnn/RNN.cpp``.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from analyzer.cuda.kernel_registry import host_kernel, host_shape
from analyzer.cuda.workspaces.recurrent import GRU, LSTM, RELU, TANH
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.state import active_state

from .rnn import RnnSpec, register_layers

Tensor = torch.Tensor
State = tuple[Tensor, ...]  # hidden, of an LSTM also cell
aten = torch.ops.aten
_CACHE_LINE, _PAGE = 64, 4096


class CellParameters(NamedTuple):
    """Weights and biases of one layer in one direction; ``w_hr`` projects the hidden state."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None


Cell = Callable[[Tensor, State, CellParameters], State]


def step_gru(gates: Tensor, state: State, params: CellParameters) -> State:
    """GRUCell: ``gates`` is the step's input, multiplied."""
    reset, update, new = gates.unsafe_chunk(3, 1)
    (hidden,) = state
    h_reset, h_update, h_new = aten.linear.default(hidden, params.w_hh, params.b_hh).unsafe_chunk(3, 1)
    reset = h_reset.add_(reset).sigmoid_()
    update = h_update.add_(update).sigmoid_()
    new = new.add(h_new.mul_(reset)).tanh_()
    return ((hidden - new).mul_(update).add_(new),)


def step_lstm(gates: Tensor, state: State, params: CellParameters) -> State:
    hidden, cell = state
    gates = aten.linear.default(hidden, params.w_hh, params.b_hh).add_(gates)
    input_gate, forget_gate, cell_gate, output_gate = gates.unsafe_chunk(4, 1)
    input_gate, forget_gate = input_gate.sigmoid_(), forget_gate.sigmoid_()
    cell_gate, output_gate = cell_gate.tanh_(), output_gate.sigmoid_()
    cell = (forget_gate * cell).add_(input_gate * cell_gate)
    hidden = output_gate * cell.tanh()
    return hidden if params.w_hr is None else torch.matmul(hidden, params.w_hr.t()), cell


def _make_simple_step(activation: Callable[[Tensor], Tensor]) -> Cell:
    def step(gates: Tensor, state: State, params: CellParameters) -> State:
        return (activation(aten.linear.default(state[0], params.w_hh, params.b_hh).add_(gates)),)
    return step


def _narrow(state: State, start: int, end: int) -> State:
    return tuple(t.narrow(0, start, end - start) for t in state)


def _join(states: list[State]) -> State:
    return tuple(map(torch.cat, zip(*states)))


def run_steps(cell: Cell, x: Tensor, states: list[State], params: list[CellParameters]) -> tuple[Tensor, list[State]]:
    """FullLayer and FullBidirectionalLayer: a layer on ``x`` [time, batch, features], and the last states."""
    outputs: list[list[Tensor]] = []
    stacked, finals = [], []
    for reverse, (state, weights) in enumerate(zip(states, params)):
        gates = aten.linear.default(x, weights.w_ih, weights.b_ih)  # those of the other direction are held until then
        steps = gates.unbind(0)
        outputs.append([])  # held to the end, as there
        for step in reversed(steps) if reverse else steps:
            state = cell(step, state, weights)
            outputs[-1].append(state[0])
        stacked.append(torch.stack(outputs[-1][::-1] if reverse else outputs[-1]))
        finals.append(state)
    return torch.cat(stacked, -1) if len(stacked) > 1 else stacked[0], finals


def _run_packed_steps(cell: Cell, x: Tensor, sizes: tuple[int, ...], states: list[State],
                      params: list[CellParameters]) -> tuple[Tensor, list[State]]:
    """PackedBidirectionalLayer: step i of ``x`` [rows, features] is that of ``sizes[i]`` sequences."""
    run = _run_packed, _run_packed_reversed  # what they made is given back at the end, as there
    runs = [run[i](cell, x, sizes, state, weights) for i, (state, weights) in enumerate(zip(states, params))]
    outputs = [output for output, _ in runs]
    return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0], [final for _, final in runs]


def _run_packed(cell: Cell, x: Tensor, sizes: tuple[int, ...], state: State,
                params: CellParameters) -> tuple[Tensor, State]:
    """PackedLayer."""
    gates = aten.linear.default(x, params.w_ih, params.b_ih)
    outputs, ended, start, before = [], [], 0, sizes[0]
    for size in sizes:
        step = gates.narrow(0, start, size)
        if size < before:  # the last sequences have ended
            ended.append(_narrow(state, size, before))
            state = _narrow(state, 0, size)
        start, before = start + size, size
        state = cell(step, state, params)
        outputs.append(state[0])
    return torch.cat(outputs), _join([state, *ended[::-1]])


def _run_packed_reversed(cell: Cell, x: Tensor, sizes: tuple[int, ...], first: State,
                         params: CellParameters) -> tuple[Tensor, State]:
    """ReversedPackedLayer."""
    gates = aten.linear.default(x, params.w_ih, params.b_ih)
    outputs, before, start = [], sizes[-1], x.shape[0]
    state = _narrow(first, 0, before)
    for size in reversed(sizes):
        if size > before:
            state = _join([state, _narrow(first, before, size)])
        start, before = start - size, size
        state = cell(gates.narrow(0, start, size), state, params)
        outputs.append(state[0])
    return torch.cat(outputs[::-1]), state


def _drop_out(spec: RnnSpec, x: Tensor, layer: int) -> Tensor:
    applies = spec.dropout and spec.train and layer < spec.num_layers - 1
    return aten.dropout.default(x, spec.dropout, True) if applies else x


def _each_layer(spec: RnnSpec, states: list[Any], params: list[Tensor],
                has_projections: bool = False) -> Iterator[tuple[list[Any], list[CellParameters]]]:
    """gather_params: the states and the weights of each layer's one or two directions."""
    count, directions = 2 + 2 * spec.has_biases + has_projections, 1 + spec.bidirectional
    groups = [params[i:i + count] for i in range(0, len(params), count)]
    weights = [CellParameters(g[0], g[1], g[2] if spec.has_biases else None, g[3] if spec.has_biases else None,
                              g[-1] if has_projections else None) for g in groups]
    return ((states[i:i + directions], weights[i:i + directions]) for i in range(0, len(states), directions))


def run_cells(spec: RnnSpec, x: Tensor, hx: list[Tensor], params: list[Tensor]) -> tuple[Tensor, ...]:
    """apply_layer_stack, with torch's own cells."""
    cell, has_projections = _CELLS[spec.mode], len(hx) == 2 and hx[0].shape[2] != hx[1].shape[2]
    finals: list[State] = []
    x = x.transpose(0, 1) if spec.batch_first else x
    given = list(zip(*(s.unbind(0) for s in hx)))
    for layer, (states, weights) in enumerate(_each_layer(spec, given, params, has_projections)):
        if spec.batch_sizes:
            x, last = _run_packed_steps(cell, x, spec.batch_sizes, states, weights)
        else:
            x, last = run_steps(cell, x, states, weights)
        finals += last
        x = _drop_out(spec, x, layer)
    stacked = [torch.stack(s) for s in reversed(list(zip(*finals)))]  # the cell's before the hidden state's
    return x.transpose_(0, 1) if spec.batch_first else x, *reversed(stacked)  # no view: it may be written to


def uses_onednn(x: Tensor, hx: list[Tensor]) -> bool:
    """use_mkldnn, and no projections, which oneDNN's LSTM lacks; the processor is assumed to be this machine's."""
    if not torch._C._has_mkldnn or not torch._C._get_mkldnn_enabled() or not x.numel():
        return False
    if hx[0].shape[2] != hx[1].shape[2]:
        return False
    if x.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if x.dtype == torch.float16:
        return not torch.is_grad_enabled() and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return x.dtype == torch.float32


def _call_onednn(spec: RnnSpec, x: Tensor, weights: CellParameters, state: list[Tensor],
                 reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    w_ih, w_hh, b_ih, b_hh, _ = weights
    if not spec.has_biases:  # zeros of the shape of weights, the last argument first
        b_hh, b_ih = torch.zeros_like(w_hh), torch.zeros_like(w_ih)
    # What backward needs is kept where gradients are enabled, whatever the layer is told (``train``).
    if torch.is_grad_enabled() and count_state_spaces() not in (1, 3):
        active_state().assume("what oneDNN's LSTM keeps for its backward pass is not known of this version of oneDNN: "
                              "it is counted as that of oneDNN 3.7 to 3.12")
    out, hy, cy, _ = aten.mkldnn_rnn_layer.default(
        x, w_ih, w_hh, b_ih, b_hh, *state, reverse, [], LSTM, state[0].shape[-1], spec.num_layers, spec.has_biases,
        spec.bidirectional, spec.batch_first, torch.is_grad_enabled())
    return out, hy, cy


def run_onednn(spec: RnnSpec, x: Tensor, hx: list[Tensor], params: list[Tensor]) -> tuple[Tensor, ...]:
    """mkldnn_rnn: one call for each layer and direction."""
    # the first is held to the end, as there
    time_first = x = (x.transpose(0, 1) if spec.batch_first else x).contiguous()  # noqa: F841
    hx = [s.contiguous() for s in hx]
    finals: list[State] = []
    for layer, (indices, weights) in enumerate(_each_layer(spec, [*range(len(hx[0]))], params)):
        outputs: list[Tensor] = []
        for index, given in zip(indices, weights):
            out, *state = _call_onednn(spec, x, given, [s[index] for s in hx], reverse=len(outputs) > 0)
            outputs.append(out)
            finals.append(tuple(state))
        x = torch.cat(outputs, -1) if spec.bidirectional else out
        x = _drop_out(spec, x, layer)
    hy, cy = map(torch.stack, zip(*finals))
    return x.transpose(0, 1) if spec.batch_first else x, hy, cy


def _leading_dimension(elements: int, itemsize: int) -> int:
    """get_good_ld of oneDNN: whole cache lines, and no multiple of 256 elements, which would share cache sets."""
    line = _CACHE_LINE // itemsize
    rounded = -(-elements // line) * line
    return rounded + line if rounded % 256 == 0 else rounded


@functools.cache
def count_state_spaces() -> int:
    """How often oneDNN reserves the states of two layers, learned from a layer whose arrays have a page each: once; the
    versions of torch 2.9 and 2.10 thrice, of which they use one (set_offsets of ``src/cpu/rnn/rnn_utils.cpp``).
    """
    shapes = (1, 1, 1), (4, 1), (4, 1), (4,), (4,), (1, 1), (1, 1)
    with without_modes(), torch.inference_mode(False), torch.enable_grad():
        given = [torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes]
        layer: Any = torch.mkldnn_rnn_layer
        kept = layer(*given, False, [], LSTM, 1, 1, True, False, False, True)[3]
    return int(kept.numel()) // _PAGE - 6


def onednn_workspace_bytes(steps: int, batch: int, features: int, hidden_size: int, itemsize: int,
                           state_spaces: int = 1) -> int:
    """What oneDNN's LSTM keeps for its backward pass: set_workspace_sizes of oneDNN's ``src/cpu/rnn/rnn_utils.hpp``.

    >>> onednn_workspace_bytes(20, 8, 32, 64, 4)
    647168
    """
    rows, states = steps * batch, 2 * (steps + 1) * batch
    wide = max(features, hidden_size)
    gradients = states * _leading_dimension(wide, 4) * 4
    arrays = (rows * _leading_dimension(4 * hidden_size, itemsize) * itemsize,
              rows * _leading_dimension(hidden_size, itemsize) * itemsize,
              *[states * _leading_dimension(wide, itemsize) * itemsize] * state_spaces,
              states * hidden_size * itemsize, states * hidden_size * 4, gradients, gradients)
    return sum(-(-n // _PAGE) * _PAGE for n in arrays)


@host_shape("mkldnn_rnn_layer")
def shape_onednn_layer(input: Tensor, weight0: Tensor, weight1: Tensor, weight2: Tensor, weight3: Tensor, hx_: Tensor,
                       cx_: Tensor, reverse: bool, batch_sizes: list[int], mode: int, hidden_size: int,
                       num_layers: int, has_biases: bool, bidirectional: bool, batch_first: bool,
                       train: bool) -> tuple[Tensor | None, ...]:
    """``input`` is time first, whatever ``batch_first`` says."""
    steps, batch, features = input.shape
    workspace = None
    if train:
        nbytes = onednn_workspace_bytes(steps, batch, features, hidden_size, input.itemsize, count_state_spaces())
        workspace = input.new_empty(nbytes, dtype=torch.uint8)
    return input.new_empty(steps, batch, hidden_size), torch.empty_like(hx_), torch.empty_like(cx_), workspace


@host_shape("mkldnn_rnn_layer_backward")
def shape_onednn_layer_backward(input: Tensor, weight1: Tensor, weight2: Tensor, weight3: Tensor, weight4: Tensor,
                                hx_: Tensor, cx_tmp: Tensor, *_: Any) -> tuple[Tensor, ...]:
    bias = weight3.shape[:1]
    shapes = (input.shape, weight1.shape, weight2.shape, bias, bias, hx_.shape, cx_tmp.shape)
    return tuple(input.new_empty(shape, dtype=torch.float32) for shape in shapes)


_CELLS = {LSTM: step_lstm, GRU: step_gru, TANH: _make_simple_step(torch.tanh), RELU: _make_simple_step(torch.relu)}


def _run(spec: RnnSpec, x: Tensor, hx: Any, params: list[Tensor]) -> tuple[Tensor, ...]:
    states = hx if spec.mode == LSTM else [hx]
    on_onednn = spec.mode == LSTM and not spec.batch_sizes and uses_onednn(x, states)
    return (run_onednn if on_onednn else run_cells)(spec, x, states, params)


register_layers(host_kernel, _run)
