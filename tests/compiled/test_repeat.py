"""Programs of many layers, written from those of a few: the same as those of the whole graph, line by line."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from analyzer import profile
from analyzer.compiled import region
from analyzer.compiled.repeat import GROUP, KEPT, Shortened, shorten
from analyzer.zoo import llama
from analyzer.zoo.llama import Llama, LlamaConfig

WIDTH, TOKENS = 64, 256


def build(count):
    return Llama(LlamaConfig(100, WIDTH, 2 * WIDTH, count, 4, 4, tie_word_embeddings=False))


class Layer(nn.Module):
    """Two residuals; positions are read by every layer."""

    def __init__(self):
        super().__init__()
        self.norm, self.joined, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, positions):
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2)
                             for part in self.joined(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query * positions, key * positions, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Short(Layer):
    """The residuals and the positions without attention."""

    def forward(self, x, positions):
        x = x + self.out(self.norm(x) * positions)
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Fewer operators a layer than a Llama has, for each takes its time to compile."""

    def __init__(self, count, kind=Layer):
        super().__init__()
        self.embed, self.layers = nn.Embedding(100, WIDTH), nn.ModuleList(kind() for _ in range(count))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, ids):
        x, positions = self.embed(ids), torch.arange(TOKENS, device=ids.device).cos()[:, None]
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


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


class Caching(Decoder):
    """Each layer gives a result of its own, as keys that are kept for later tokens."""

    def forward(self, ids):
        x, positions = self.embed(ids), torch.arange(TOKENS, device=ids.device).cos()[:, None]
        keys = []
        for layer in self.layers:
            keys.append(layer.joined(x).clone())
            x = layer(x, positions)
        return self.head(x), keys


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
            patch.setattr(region, "shorten", lambda joint, labels: None)
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        return profile(torch.compile(model), ids, mode=mode, device="h100"), left_out


class Masked(nn.Module):
    """Each layer makes what is added to its scores of one mask."""

    def __init__(self, count, monkeypatch):
        super().__init__()
        self.llama, self.mask = build(count), None
        monkeypatch.setattr(llama, "attend", lambda query, keys, values, grouped: F.scaled_dot_product_attention(
            query, keys, values, self.mask))

    def forward(self, ids):
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=ids.device).tril()
        self.mask = causal & (ids > 0)[:, None, None]
        logits = self.llama(ids)
        self.mask = None
        return logits


@pytest.mark.sweep(1)
@pytest.mark.parametrize("is_masked", [False, True])
def test_inference_repeats_every_two_layers_and_with_a_mask_every_four(is_masked, monkeypatch):
    """A residual is written when four were added to it, two of each layer. One kernel makes the masks of four layers,
    whose kernels are 20 or 21 apart. Of the layers, one is cut in two by the ends of what is alike.
    """
    layers = (4 if is_masked else 3) * GROUP + GROUP + 1
    model = Masked(layers, monkeypatch) if is_masked else Decoder(layers, Short)
    short, left_out = measure(model, "infer", monkeypatch, whole=False)
    whole, _ = measure(model, "infer", monkeypatch, whole=True)
    assert left_out == [GROUP]
    assert short.peak_allocated_bytes == whole.peak_allocated_bytes
    assert short.step_seconds == pytest.approx(whole.step_seconds)
    assert short.kernels == whole.kernels and short.compiled == whole.compiled


@pytest.mark.parametrize("make", [Decoder, lambda count: Caching(count, Short)], ids=["one result", "one a layer"])
def test_the_profile_is_that_of_the_whole_graph(make, monkeypatch):
    short, left_out = measure(make(KEPT + 3), "train", monkeypatch, whole=False)
    whole, none = measure(make(KEPT + 3), "train", monkeypatch, whole=True)
    assert left_out and left_out[0] >= 1 and not none
    assert short.peak_allocated_bytes == whole.peak_allocated_bytes
    assert short.step_seconds == pytest.approx(whole.step_seconds) and short.compiled == whole.compiled
    for name, phase in whole.step_phases.items():
        assert short.step_phases[name].allocated_bytes == phase.allocated_bytes, name
        assert short.step_phases[name].peak_allocated_bytes == phase.peak_allocated_bytes, name
    assert [(n.name, n.fwd_flops, n.output_bytes) for n in short.nodes] == [
        (n.name, n.fwd_flops, n.output_bytes) for n in whole.nodes]


@pytest.mark.parametrize(("make", "mode"), [(lambda: build(KEPT), "train"), (Unlike, "infer")])
def test_few_layers_and_layers_that_are_read_elsewhere_are_compiled_as_they_are(make, mode, monkeypatch):
    class Answered(Exception):
        """No graph need be compiled."""

    def answer(joint, labels):
        raise Answered(shorten(joint, labels))

    monkeypatch.setattr(region, "shorten", answer)
    with pytest.raises(Answered) as found:
        profile(torch.compile(make()), torch.zeros(1, TOKENS, dtype=torch.int64), mode=mode, device="h100")
    assert found.value.args == (None,)
