"""Recurrent layers on the claimed GPU."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer.cuda.kernels.rnn import GRU, LSTM, TANH, reserve_elements
from analyzer.errors import DataDependentError


@pytest.mark.parametrize(
    ("make", "outputs"),
    [
        # (output, hidden, cell), with 5 time steps of 3 sequences of 8 features
        (lambda: nn.LSTM(8, 16), [(5, 3, 16), (1, 3, 16), (1, 3, 16)]),
        (lambda: nn.LSTM(8, 16, 2, bidirectional=True), [(5, 3, 32), (4, 3, 16), (4, 3, 16)]),
        (lambda: nn.LSTM(8, 16, proj_size=4), [(5, 3, 4), (1, 3, 4), (1, 3, 16)]),
        (lambda: nn.GRU(8, 16, 2), [(5, 3, 16), (2, 3, 16)]),
        (lambda: nn.RNN(8, 16, nonlinearity="relu", bias=False), [(5, 3, 16), (1, 3, 16)]),
    ],
)
def test_a_layer_is_one_call_forward_and_one_backward(mode, make, outputs):
    layer = make().cuda()
    x = torch.rand(5, 3, 8, device="cuda", requires_grad=True)
    out, state = layer(x)
    states = state if isinstance(state, tuple) else (state,)
    assert [tuple(t.shape) for t in (out, *states)] == outputs
    out.sum().backward()
    assert [len(mode.state.recorder.find(n))
            for n in ("_cudnn_rnn", "_cudnn_rnn_backward", "mm", "addmm")] == [1, 1, 0, 0]
    assert x.grad.shape == x.shape
    assert [p.grad.shape for p in layer.parameters()] == [p.shape for p in layer.parameters()]


def test_weights_and_their_gradients_lie_in_one_buffer_each(mode):
    layer = nn.LSTM(8, 16, 2).cuda()
    count = sum(p.numel() for p in layer.parameters())
    storages = {p.untyped_storage()._cdata for p in layer.parameters()}
    assert len(storages) == 1 and next(layer.parameters()).untyped_storage().nbytes() == 4 * count
    layer(torch.rand(5, 3, 8, device="cuda"))[0].sum().backward()
    assert len({p.grad.untyped_storage()._cdata for p in layer.parameters()}) == 1
    (call,) = mode.state.recorder.find("_cudnn_rnn")
    assert tuple(call.args[3]) == (count,)


def test_batch_first_output_is_a_view_of_time_first_memory(mode):
    out, _ = nn.GRU(8, 16, batch_first=True).cuda()(torch.rand(3, 5, 8, device="cuda"))
    assert (tuple(out.shape), out.stride()) == ((3, 5, 16), (16, 48, 1))


@pytest.mark.parametrize(
    ("kind", "layers", "elements"),
    [
        (LSTM, 1, 15 * 16 * 5),              # four gates and the cell of 15 steps of 16 units
        (LSTM, 2, 15 * 16 * (2 * 5 + 1)),    # and the output of the first layer
        (GRU, 1, 15 * 16 * 6),
        (TANH, 3, 15 * 16 * (3 + 2)),
    ],
)
def test_the_reserve_is_what_backward_needs(kind, layers, elements):
    assert reserve_elements(kind, 15, 16, layers, 1) == elements


def test_training_reserves_and_says_so_evaluation_does_not(mode):
    layer = nn.LSTM(8, 16).cuda()
    x = torch.rand(5, 3, 8, device="cuda")
    layer(x)
    layer.eval()(x)
    training, evaluation = mode.state.recorder.find("_cudnn_rnn")
    assert (training.outputs[3].nbytes, evaluation.outputs[3].nbytes) == (4 * 15 * 16 * 5, 0)
    assert any("recurrent layer is estimated" in text for text in mode.state.assumptions)


def test_autocast_casts_input_states_and_weights(mode):
    layer = nn.LSTM(8, 16).cuda()
    with torch.autocast("cuda", torch.float16):
        out, _ = layer(torch.rand(5, 3, 8, device="cuda"))
    out.float().sum().backward()
    (call,) = mode.state.recorder.find("_cudnn_rnn")
    assert {s.dtype for s in call.inputs} == {torch.float16}
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


def test_a_dtype_that_cudnn_does_not_take_runs_step_by_step_and_says_so(mode):
    nn.LSTM(8, 16).cuda().bfloat16()(torch.rand(5, 3, 8, device="cuda", dtype=torch.bfloat16))
    assert mode.state.recorder.find("_cudnn_rnn") == []
    assert any("torch.bfloat16" in text for text in mode.state.assumptions)


def test_packed_sequences_run_on_their_own_steps_only(mode):
    x = torch.rand(3, 5, 8, device="cuda", requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 5, 3]), batch_first=True, enforce_sorted=False)
    assert (tuple(packed.data.shape), packed.batch_sizes.tolist()) == ((10, 8), [3, 3, 2, 1, 1])
    out, _ = nn.GRU(8, 16).cuda()(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    assert (tuple(padded.shape), tuple(lengths.shape)) == ((3, 5, 16), (3,))
    padded.sum().backward()
    assert x.grad.shape == x.shape
    (call,) = mode.state.recorder.find("_cudnn_rnn")
    assert (tuple(call.inputs[0]), call.outputs[3].nbytes) == ((10, 8), 4 * 10 * 16 * 6)


def test_packing_works_on_the_host_too(mode):
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(5, 2, 8), torch.tensor([5, 1]))
    padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, total_length=7)
    assert (tuple(packed.data.shape), tuple(padded.shape), lengths.tolist()) == ((6, 8), (7, 2, 8), [5, 1])


def test_unknown_lengths_are_refused_with_a_way_out(mode):
    lengths = torch.randint(1, 5, (3,))
    with pytest.raises(DataDependentError, match=r"lengths of the sequences(.|\n)*torch.tensor\(\[...\]\)"):
        nn.utils.rnn.pack_padded_sequence(torch.rand(5, 3, 8, device="cuda"), lengths, enforce_sorted=False)


@pytest.mark.parametrize(("cell", "operator"),
                         [(nn.LSTMCell, "_thnn_fused_lstm_cell"), (nn.GRUCell, "_thnn_fused_gru_cell")])
def test_cells_are_fused(mode, cell, operator):
    layer = cell(8, 16).cuda()
    out = layer(torch.rand(3, 8, device="cuda"))
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    (call,) = mode.state.recorder.find(operator)
    # 4 and 5 per unit
    assert (tuple(call.outputs[0]), tuple(call.outputs[-1])) == ((3, 16), (3, 64) if cell is nn.LSTMCell else (3, 80))
    assert [p.grad.shape for p in layer.parameters()] == [p.shape for p in layer.parameters()]
