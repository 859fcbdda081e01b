"""Recurrent layers on the claimed GPU."""
import pytest
import torch
from torch import nn

from analyzer import ProfileOptions, profile
from analyzer.cuda.kernels import host_rnn
from analyzer.cuda.kernels.host_rnn import count_state_spaces, onednn_workspace_bytes
from analyzer.cuda.workspaces.recurrent import GRU, LSTM, TANH, RnnLayers
from analyzer.errors import DataDependentError
from analyzer.meta.operator_info import Held, kernel_memory
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


def of(mode, *, layers=1, directions=1, projection=0, packed=False):
    """Layers of 16 units on three sequences of 5 steps of 8 features; packed they are of 5, 3 and 2 steps."""
    shape, sizes = ((10, 8), [3, 3, 2, 1, 1]) if packed else ((5, 3, 8), [])
    return RnnLayers.of(shape, mode, 16, projection, layers, False, directions == 2, sizes)


@pytest.mark.parametrize(("layers", "dropout", "elements", "others"), [
    # other bytes: a number of each sequence, and a bit of each inner output
    (of(LSTM), 0, 15 * 16 * 5, 12),                           # four gates and the cell of 15 steps of 16 units
    (of(LSTM, layers=2), 0, 15 * 16 * (2 * 5 + 1), 12),       # and the output of the first layer
    (of(LSTM, layers=2), 1, 15 * 16 * (2 * 5 + 1), 12 + 15 * 16 // 8),
    (of(LSTM, layers=2, directions=2), 0, 15 * 16 * 2 * (2 * 5 + 1), 12),
    (of(LSTM, layers=2, projection=4), 0, 15 * (16 * 2 * 6 + 4), 12),  # with what is projected
    (of(LSTM, layers=2, packed=True), 1, 10 * 16 * (2 * 5 + 1), 10 * 16 // 8),
    (of(GRU), 1, 15 * 16 * 6, 12), (of(TANH, layers=3), 0, 15 * 16 * (3 + 2), 12)])
@pytest.mark.parametrize("itemsize", [4, 2])
def test_the_reserve_is_what_backward_needs(layers, dropout, elements, others, itemsize):
    assert layers.reserve_bytes(itemsize, bool(dropout)) == itemsize * elements + others


@pytest.mark.parametrize(("layers", "training", "elements", "others"), [
    # Of 15 steps two outputs; input, output and their gradients, that of the input as wide as the output; states of
    # three sequences, at both ends, with gradients; two states more; three numbers of each sequence. All steps are one
    # group.
    (of(LSTM), True, 15 * (2 * 16 + 8 + 3 * 16) + 3 * 16 * 2 * 4 + 3 * 16 * 2, 36),
    (of(LSTM), False, 15 * (2 * 16 + 8 + 16) + 3 * 16 * 2 * 2 + 3 * 16 * 2, 36),
    (of(LSTM, layers=2), False, 15 * (2 * 16 + 8 + 16) + 2 * (3 * 16 * 2 * 2 + 3 * 16 * 2), 36),
    (of(GRU, directions=2), True, 15 * (2 * 32 + 8 + 3 * 32) + 2 * (3 * 16 * 4 + 3 * 16 * 2), 36),
    (of(LSTM, projection=4), True, 15 * (2 * 4 + 2 * 8 + 2 * 4) + 3 * (16 + 4) * 4 + 3 * 16 * 2, 36),
    *((of(TANH, packed=True), training, 2 * 10 * 16 + 3 * 16 * 2, 0) for training in (True, False))])
def test_the_workspace_is_what_its_parts_are(layers, training, elements, others):
    assert layers.workspace_bytes(1000, 4, training) == 4 * (1000 + elements) + others


@pytest.mark.parametrize(("steps", "groups"), [(8, 0), (9, 8), (32, 8), (33, 40)])
def test_steps_run_in_groups_of_32_forward_and_8_backward(steps, groups):
    layers = RnnLayers.of((steps, 3, 8), LSTM, 16, 0, 2, False, True, ())
    alone = layers._replace(steps=1).workspace_bytes(1000, 4, training=True)
    assert layers.workspace_bytes(1000, 4, training=True) - alone == 4 * 2 * 2 * 3 * 4 * 16 * groups


@pytest.mark.parametrize(("layers", "matrices", "reported", "groups"), [
    # plain, two layers of 512 units, 20 steps (tensorflow/tensorflow#30889): in cuDNN 7 they were one group
    (RnnLayers.of((20, 64, 512), TANH, 512, 0, 2, False, False, ()), 4 * 512 * 512, 21_496_576, 8),
    (RnnLayers.of((20 * 64, 512), TANH, 512, 0, 2, False, False, [64] * 20), 4 * 512 * 512, 9_961_472, 8),
    # 800 units in two directions, 326 steps, of 672 and 800 features (SeanNaren/deepspeech.pytorch#172): its groups
    # were of 14 steps, as three gates and two states of each direction are left of what was reported
    *((RnnLayers.of((326 * 64, features), GRU, 800, 0, 1, False, True, [64] * 326), 2 * 3 * 800 * (features + 800),
       reported, 40 - 14) for features, reported in ((672, 313_344_000), (800, 315_801_600)))])
def test_what_was_reported_of_cudnn_7_differs_by_groups_of_steps(layers, matrices, reported, groups):
    gates = {TANH: 1, GRU: 3}[layers.mode]
    assert layers.workspace_bytes(matrices, 4, training=True) == reported + (
        4 * layers.layers * layers.directions * 64 * layers.hidden * gates * groups)


@pytest.mark.parametrize(("make", "used", "power", "forward", "backward"), [
    # Batch first, the input is copied (60 elements); so is a gradient of a sum (240), which is expanded, not one of a
    # square, which lies as the output does. Gradients of states that are not used are zeros (48 elements each).
    (lambda: nn.LSTM(4, 16, batch_first=True), 0, 1, [([240], 0, True), (["w"], 4, True)],
     [([192, 192], 0, True), ([240, 960, "w"], 3, False), ([240, "w"], None, False)]),
    (lambda: nn.LSTM(4, 16, batch_first=True), 0, 2, [([240], 0, True), (["w"], 4, True)],
     [([192, 192], 0, True), ([240, "w"], 3, False), ([240, "w"], None, False)]),
    (lambda: nn.LSTM(4, 16), 0, 2, [(["w"], 4, True)],
     [([192, 192], 0, True), (["w"], 3, False), (["w"], None, False)]),
    # where only the last state is used, zeros for the output's gradient, [batch, step], are copied to [step, batch]
    (lambda: nn.GRU(4, 16, batch_first=True), 1, 2, [([240], 0, True), (["w"], 4, True)],
     [([960], 0, True), ([240, 960, "w"], 3, False), ([240, "w"], None, False)]),
    # (4 + 16) * 16 weights are copied out of a buffer that has 2 * 16 biases
    (lambda: nn.RNN(4, 16, bias=False), 0, 2, [(["w"], 4, True)],
     [([192], 0, True), (["w"], 3, False), ([4 * (320 + 32), "w"], 3, True)])])
def test_what_is_held_while_a_layer_runs(mode, make, used, power, forward, backward):
    layer = make().cuda()
    found = layer(torch.rand(*((3, 5, 4) if layer.batch_first else (5, 3, 4)), device="cuda"))[used]
    (found if power == 1 else found**power).sum().backward()
    for name, expected in (("_cudnn_rnn", forward), ("_cudnn_rnn_backward", backward)):
        (call,) = mode.state.recorder.find(name)
        matrices = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
        workspace = RnnLayers.of_call(call.named_arguments()).workspace_bytes(matrices, 4, training=True)
        assert kernel_memory(call)[0] == tuple(Held(tuple(workspace if b == "w" else b for b in blocks), before, kept)
                                               for blocks, before, kept in expected)


def test_training_reserves_and_says_so_evaluation_does_not(mode):
    layer = nn.LSTM(8, 16).cuda()
    x = torch.rand(5, 3, 8, device="cuda")
    layer(x)
    layer.eval()(x)
    training, evaluation = mode.state.recorder.find("_cudnn_rnn")
    assert (training.outputs[3].nbytes, evaluation.outputs[3].nbytes) == (4 * 15 * 16 * 5 + 12, 0)
    assert any("recurrent layer is estimated" in text for text in mode.state.assumptions)


def test_layers_without_cudnn_run_step_by_step_and_say_so(mode):
    with torch.backends.cudnn.flags(enabled=False):
        nn.LSTM(8, 16).cuda()(torch.rand(5, 3, 8, device="cuda"))
    assert mode.state.recorder.find("_cudnn_rnn") == []
    assert any("cuDNN does not run (torch.float32)" in text for text in mode.state.assumptions)


@pytest.mark.parametrize(("device", "runs"), [("h200", torch.__version__ >= "2.10"), ("v100", False)])
def test_bfloat16_runs_on_cudnn_from_ampere_and_torch_2_10_on(device, runs):
    found = profile(nn.LSTM(8, 16).bfloat16(), (X.bfloat16(),), device=device, loss_fn=total)
    assert ("aten._cudnn_rnn.default" in {row.operator for row in found.operators}) == runs


def test_a_region_of_autocast_copies_the_weights_to_one_buffer_of_float16(mode):
    layer = nn.LSTM(8, 16, bias=False).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        out, _ = layer(torch.rand(5, 3, 8, device="cuda"))
    out.sum().backward()
    (call,) = mode.state.recorder.find("_cudnn_rnn")
    assert {t.dtype for t in (*call.inputs, *call.outputs[:3])} == {torch.float16}
    assert tuple(call.args[3]) == (64 * (8 + 16) + 2 * 64,)  # cuDNN's buffer has biases all the same
    assert [p.grad.dtype for p in layer.parameters()] == [torch.float32] * 2


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


def test_a_profile_moves_the_weights_into_one_buffer_and_leaves_the_module_as_it_was():
    layer = nn.LSTM(8, 16, 2)
    before = [(p, p.data_ptr()) for p in layer.parameters()]
    found = profile(layer, (X,), device="h200", loss_fn=total)
    assert [(id(p), p.data_ptr()) for p in layer.parameters()] == [(id(p), place) for p, place in before]
    assert {row.operator: row.calls for row in found.operators}["aten._cudnn_rnn.default"] == 1
    (parameters,) = [row for row in found.holders if row.category == "parameter"]  # of one storage
    assert (parameters.storages, parameters.bytes) == (1, -(-found.param_bytes // 512) * 512)


def test_dropout_takes_states_of_generators_once_and_keeps_them():
    with_dropout, without = (profile(nn.LSTM(8, 16, 2, dropout=p), (X,), device="h200", loss_fn=total,
                                     options=ProfileOptions(steps=2)) for p in (0.5, 0.0))
    held = [[row.bytes for row in found.holders if row.label.startswith("cudnn dropout")]
            for found in (with_dropout, without)]
    assert held == [[132 * 4 * 256 * 48], []]  # multiprocessors, blocks, threads, bytes


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
