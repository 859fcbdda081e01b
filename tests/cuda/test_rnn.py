"""Recurrent layers on the claimed GPU."""
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.cuda.kernels import host_rnn
from analyzer.cuda.kernels.host_rnn import count_state_spaces, onednn_workspace_bytes
from analyzer.cuda.kernels.rnn import GRU, LSTM, TANH, reserve_elements
from analyzer.errors import DataDependentError
from analyzer.tools.runtime import measure


@pytest.mark.parametrize(("make", "outputs"), [
    # (output, hidden, cell), with 5 time steps of 3 sequences of 8 features
    (lambda: nn.LSTM(8, 16, 2, bidirectional=True), [(5, 3, 32), (4, 3, 16), (4, 3, 16)]),
    (lambda: nn.LSTM(8, 16, proj_size=4), [(5, 3, 4), (1, 3, 4), (1, 3, 16)]),
    (lambda: nn.GRU(8, 16, 2), [(5, 3, 16), (2, 3, 16)]),
    (lambda: nn.RNN(8, 16, nonlinearity="relu", bias=False), [(5, 3, 16), (1, 3, 16)])])
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


@pytest.mark.parametrize(("kind", "layers", "elements"), [
    (LSTM, 1, 15 * 16 * 5),              # four gates and the cell of 15 steps of 16 units
    (LSTM, 2, 15 * 16 * (2 * 5 + 1)),    # and the output of the first layer
    (GRU, 1, 15 * 16 * 6), (TANH, 3, 15 * 16 * (3 + 2))])
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


# Recurrent layers on a simulated CPU are those that this machine's CPU runs.

X = torch.rand(6, 4, 8)


class Packed(nn.Module):
    """A recurrent layer on sequences of several lengths."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 4, 1]))
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])


def total(out):
    return out[0].sum()


def costs(found):
    return (found.fwd_flops, found.bwd_flops, found.peak_allocated_bytes,
            {name: row.allocated_bytes for name, row in found.phases.items()})


@pytest.mark.parametrize(("mode", "autocast"), [("train", None), ("infer", None), ("train", torch.bfloat16)])
@pytest.mark.parametrize("layer", [
    nn.LSTM(8, 16, bias=False),
    nn.LSTM(8, 16, 2, proj_size=4, bidirectional=True), nn.GRU(8, 16, 3, batch_first=True, dropout=0.5, bias=False),
    nn.RNN(8, 16, nonlinearity="relu"), Packed(nn.RNN(8, 16, 2, bidirectional=True))], ids=str)
def test_a_recurrent_layer_costs_what_the_processor_runs(layer, mode, autocast):
    given = {"args": (X,), "loss_fn": total, "mode": mode, "autocast": autocast}
    try:
        measured = measure(layer, **given, steps=1)
    except RuntimeError as error:
        if autocast is None or "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
    assert costs(profile(layer, device="cpu", reuse=False, **given)) == costs(measured)


def test_training_on_packed_sequences_adds_gradients_in_place():
    """Which a dispatch mode keeps torch from doing, so what is measured holds more at its peak."""
    given = {"args": (X,), "loss_fn": total}
    predicted = profile(Packed(nn.LSTM(8, 16)), device="cpu", reuse=False, **given)
    measured = measure(Packed(nn.LSTM(8, 16)), **given, steps=1)
    assert (predicted.fwd_flops, predicted.bwd_flops) == (measured.fwd_flops, measured.bwd_flops)
    assert predicted.phases["forward"].peak_allocated_bytes == measured.phases["forward"].peak_allocated_bytes
    assert predicted.peak_allocated_bytes <= measured.peak_allocated_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (33, 8, 300, 64), (9, 2, 16, 256)])
def test_onednn_keeps_what_is_predicted(sizes, dtype):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16")
    steps, batch, features, hidden = sizes
    shapes = [(steps, batch, features), (4 * hidden, features), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,),
              (batch, hidden), (batch, hidden)]
    kept = torch.mkldnn_rnn_layer(*[torch.zeros(s, dtype=dtype) for s in shapes], False, [], 2, hidden, 1, True, False,
                                  False, True)[3]
    assert kept.numel() == onednn_workspace_bytes(*sizes, dtype.itemsize, count_state_spaces())


def test_a_version_of_onednn_that_is_not_known_is_told(monkeypatch):
    """Torch 2.9 and 2.10 have oneDNN 3.7, which reserves states thrice."""
    assert count_state_spaces() == (3 if torch.__version__ < (2, 11) else 1)
    monkeypatch.setattr(host_rnn, "count_state_spaces", lambda: 2)
    told = profile(nn.LSTM(8, 13), (X,), loss_fn=total, device="cpu", reuse=False).assumptions
    assert [text for text in told if "oneDNN" in text] == [
        "what oneDNN's LSTM keeps for its backward pass is not known of this version of oneDNN: it is counted as that "
        "of oneDNN 3.7 to 3.12"]
