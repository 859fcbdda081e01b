"""Recurrent layers on a simulated CPU are those that this machine's CPU runs."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.cuda.kernels import host_rnn
from analyzer.cuda.kernels.host_rnn import count_state_spaces, onednn_workspace_bytes
from analyzer.tools.runtime import measure

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


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("layer", [
    nn.LSTM(8, 16),
    nn.LSTM(8, 16, 2, bidirectional=True),
    nn.LSTM(8, 16, 3, batch_first=True, dropout=0.5),
    nn.LSTM(8, 16, bias=False),
    nn.LSTM(8, 16, 2, proj_size=4, bidirectional=True),
    nn.GRU(8, 16, 2, bidirectional=True),
    nn.GRU(8, 16, 3, batch_first=True, dropout=0.5, bias=False),
    nn.RNN(8, 16, 2, bidirectional=True),
    nn.RNN(8, 16, nonlinearity="relu"),
    Packed(nn.RNN(8, 16, 2, bidirectional=True)),
], ids=str)
def test_a_recurrent_layer_costs_what_the_processor_runs(layer, mode, autocast):
    given = {"args": (X,), "loss_fn": total, "mode": mode, "autocast": autocast}
    try:
        measured = measure(layer, **given, steps=1)
    except RuntimeError as error:
        if autocast is None or "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
    assert costs(profile(layer, device="cpu", reuse=False, **given)) == costs(measured)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_training_on_packed_sequences_adds_gradients_in_place(kind):
    """Which a dispatch mode keeps torch from doing, so what is measured holds more at its peak."""
    given = {"args": (X,), "loss_fn": total}
    predicted = profile(Packed(kind(8, 16)), device="cpu", reuse=False, **given)
    measured = measure(Packed(kind(8, 16)), **given, steps=1)
    assert (predicted.fwd_flops, predicted.bwd_flops) == (measured.fwd_flops, measured.bwd_flops)
    assert predicted.phases["forward"].peak_allocated_bytes == measured.phases["forward"].peak_allocated_bytes
    assert predicted.peak_allocated_bytes <= measured.peak_allocated_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (5, 3, 20, 33), (33, 8, 300, 64), (9, 2, 16, 256)])
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
