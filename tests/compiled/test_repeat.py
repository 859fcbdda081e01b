"""Programs of many layers, written from those of a few: the same as those of the whole graph, line by line."""
import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.compiled import region
from analyzer.compiled.repeat import KEPT, Shortened, shorten
from analyzer.zoo.llama import Llama, LlamaConfig

WIDTH, TOKENS = 64, 256


def build(count):
    return Llama(LlamaConfig(100, WIDTH, 2 * WIDTH, count, 4, 4, tie_word_embeddings=False))


class Unlike(nn.Module):
    """One layer's result is read again at the end."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, ids):
        kept = [ids.float()[:, :WIDTH]]
        for layer in self.layers:
            kept.append(layer(kept[-1]).sin())
        return kept[-1] + kept[4]


def measure(model, mode, monkeypatch, whole):
    """The profile, and how many laps were left out of the graphs that were compiled."""
    left_out = []

    class Noted(Shortened):
        def extend(self, *halves):
            found = super().extend(*halves)
            left_out.append(self.removed if found else None)
            return found

    monkeypatch.setattr(region, "_made", {})
    with monkeypatch.context() as patch:
        patch.setattr("analyzer.compiled.repeat.Shortened", Noted)
        if whole:
            patch.setattr(region, "shorten", lambda joint: None)
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        return profile(torch.compile(model), ids, mode=mode, device="h100"), left_out


def test_inference_repeats_every_two_layers(monkeypatch):
    """A residual is written when four were added to it, two of each layer."""
    layers = 2 * (KEPT + 3)  # of two in each lap, as the ends of a graph differ
    short, left_out = measure(build(layers), "infer", monkeypatch, whole=False)
    whole, _ = measure(build(layers), "infer", monkeypatch, whole=True)
    assert left_out == [2]
    assert short.peak_allocated_bytes == whole.peak_allocated_bytes
    assert short.step_seconds == pytest.approx(whole.step_seconds)
    assert short.kernels == whole.kernels


def test_the_profile_is_that_of_the_whole_graph(monkeypatch):
    short, left_out = measure(build(KEPT + 3), "train", monkeypatch, whole=False)
    whole, none = measure(build(KEPT + 3), "train", monkeypatch, whole=True)
    assert left_out and left_out[0] >= 1 and not none
    assert short.peak_allocated_bytes == whole.peak_allocated_bytes
    assert short.step_seconds == pytest.approx(whole.step_seconds)
    for name, phase in whole.step_phases.items():
        assert short.step_phases[name].allocated_bytes == phase.allocated_bytes, name
        assert short.step_phases[name].peak_allocated_bytes == phase.peak_allocated_bytes, name
    assert [(n.name, n.fwd_flops, n.output_bytes) for n in short.nodes] == [
        (n.name, n.fwd_flops, n.output_bytes) for n in whole.nodes]


@pytest.mark.parametrize(("make", "mode"), [(lambda: build(KEPT), "train"), (Unlike, "infer")])
def test_few_layers_and_layers_that_are_read_elsewhere_are_compiled_as_they_are(make, mode, monkeypatch):
    class Answered(Exception):
        """No graph need be compiled."""

    def answer(joint):
        raise Answered(shorten(joint))

    monkeypatch.setattr(region, "shorten", answer)
    with pytest.raises(Answered) as found:
        profile(torch.compile(make()), torch.zeros(1, TOKENS, dtype=torch.int64), mode=mode, device="h100")
    assert found.value.args == (None,)
