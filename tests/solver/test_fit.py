"""Largest batch and longest sequence: against exhaustive search, with few evaluations, verified on both sides."""
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import ProfileOptions, profile
from analyzer.cli import main
from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.tools.solver.fit import max_batch_size, max_sequence_length
from analyzer.units import format_bytes
from tests.small_model import Calls

MIB = 2**20


def layer():
    return nn.Linear(1024, 1024, bias=False)  # 4 MiB


def rows(n):
    return torch.empty(n, 1024, device="meta")


def limit(mib):
    return ProfileOptions(capacity_bytes=mib * MIB)


class Attention(nn.Module):
    """Memory quadratic in the sequence: it writes the matrix of weights out."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


def check(found, run, spare=8):
    """The two ends were profiled, one fits and the next does not, and what was evaluated agrees."""
    tried = {e.size: e.fits for e in found.evaluations}
    assert tried[found.size] and all(fits == (size <= found.size) for size, fits in tried.items())
    assert len(tried) == len(found.evaluations)
    assert found.at_limit.out_of_memory is None
    assert run(found.size).peak_allocated_bytes == found.at_limit.peak_allocated_bytes
    if found.beyond is not None:
        assert found.beyond.out_of_memory is not None
    # halving alone, from an end that is not known, takes twice the logarithm
    assert len(found.evaluations) <= spare + math.log2(found.size)


@pytest.mark.parametrize("mib", [60, 100])
def test_inference_of_a_layer_by_hand(mib):
    """4 MiB of weights and 33 of workspaces (a segment each; cuBLASLt takes none without a bias), then input and output
    of 4 KiB a row.

    Above 1 MiB and below 10 MiB a block takes a segment of 20 MiB, which other blocks share; all else is exact in 2
    MiB.
    """
    def run(n):
        return profile(layer, args=(rows(n),), mode="infer", options=limit(mib))

    found = max_batch_size(layer, rows, mode="infer", options=limit(mib))
    check(found, run)
    assert found.beyond is not None and found.capacity_bytes == mib * MIB
    assert run(found.size + 1).out_of_memory is not None


@pytest.mark.parametrize(("model", "make", "mib"), [
    (lambda: nn.Sequential(layer(), nn.Sigmoid(), layer()), rows, 500),
    (lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3)),
     lambda n: torch.empty(n, 3, 64, 64, device="meta"), 2000),
])
def test_training(model, make, mib):
    def run(n):
        return profile(model, args=(make(n),), optimizer="adamw", options=limit(mib))

    found = max_batch_size(model, make, optimizer="adamw", options=limit(mib), start=2)
    check(found, run)
    assert found.beyond is not None
    assert run(found.size + 1).out_of_memory is not None


def test_a_sequence_whose_memory_is_quadratic():
    def make(n):
        return {"x": torch.empty(2, n, 64, device="meta")}

    found = max_sequence_length(Attention, make, options=limit(1000), optimizer="sgd")
    check(found, lambda n: profile(Attention, kwargs=make(n), options=limit(1000), optimizer="sgd"), spare=12)
    # at the peak of the backward pass, that of softmax: its saved result, the gradient of it, their product that the
    # CUDA kernel makes (aten/src/ATen/native/cuda/SoftMax.cu), and the gradient of its input, of 8 n^2 bytes each (and
    # 64 MiB of workspaces and what is linear)
    assert 32 * found.size**2 < found.at_limit.peak_allocated_bytes - 64 * MIB < 33 * found.size**2


@pytest.mark.parametrize(("bounds", "size", "evaluations"), [
    (dict(at_most=1), 1, 1),
    (dict(at_most=7), 7, 3),
    (dict(at_most=100, multiple_of=64), 64, 1),
    (dict(at_most=8, start=8), 8, 1),
])
def test_the_callers_bound_is_an_answer(bounds, size, evaluations):
    found = max_batch_size(layer, rows, mode="infer", device="t4", **bounds)
    assert (found.size, found.beyond, len(found.evaluations)) == (size, None, evaluations)
    assert f"is {size} or more: no larger size than {bounds['at_most']} was asked for" in str(found)


def test_multiples_only():
    found = max_batch_size(layer, rows, mode="infer", options=limit(100), multiple_of=64)
    plain = max_batch_size(layer, rows, mode="infer", options=limit(100))
    assert found.size == plain.size // 64 * 64
    assert all(e.size % 64 == 0 for e in found.evaluations)


def test_nothing_fits():
    found = max_batch_size(layer, rows, mode="infer", options=limit(3))
    assert (found.size, found.at_limit, len(found.evaluations)) == (0, None, 1)
    assert str(found).startswith("h200: no batch size fits: 1 does not")


def test_capacity_is_the_devices_less_what_is_known_outside():
    found = max_batch_size(layer, rows, mode="infer", device="a100_80gb", at_most=2, world_size=8)
    from analyzer.hardware import find_device

    context = next(u for u in found.unseen if u.what.startswith("CUDA context"))
    assert found.capacity_bytes == find_device("a100_80gb").memory_bytes - 688 * MIB - context.bytes
    assert "assumed: as on" in context.what and found.device == "a100_80gb"


@pytest.mark.parametrize(("more", "text"), [
    (dict(start=0), "start=0"),
    (dict(multiple_of=0), "multiple_of=0"),
    (dict(start=8, at_most=4), "at_most=4"),
    (dict(device="cpu"), "memory of 'cpu' is not known"),
])
def test_bounds_that_cannot_be(more, text):
    with pytest.raises(InputError, match=text):
        max_batch_size(layer, rows, mode="infer", **more)


def test_inputs_that_do_not_grow_are_noticed():
    with pytest.raises(InputError, match="does make_inputs use its argument"):
        max_batch_size(layer, lambda n: rows(4), mode="infer")


@pytest.mark.parametrize(("words", "code", "said"), [
    (["gpt2", "--sequence", "--at-most", "16", "--multiple-of", "16"], 0,
     "largest sequence length that fits is 16 or more"),
    (["resnet18", "--sequence"], 2, "none of its inputs float32:8x3x224x224 has a sequence dimension"),
])
def test_the_command(capsys, words, code, said):
    assert main(["fit", *words]) == code
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


def widening():
    """Blocks of many sizes, of which an allocator caches more than it needs."""
    return Calls(lambda m, x: sum(torch.sigmoid(layer(x)).sum() for layer in m.layers),
                 layers=nn.ModuleList(nn.Linear(256, 256 * (1 + i % 3)) for i in range(6)))


def test_the_verdict_of_a_profile_is_that_of_the_search():
    card = DeviceSpec("card", kind="cuda", memory_bytes=150 * MIB)
    large = replace(card, name="large", memory_bytes=10**12)

    def step(n, device):
        return profile(widening, torch.empty(n, 256, device="meta"), optimizer="adamw", device=device)

    found = max_batch_size(widening, lambda n: torch.empty(n, 256, device="meta"), device=card, optimizer="adamw",
                           multiple_of=64)
    assert "a size also counts as fitting if PyTorch must free its cache first" in str(found)
    assert found.beyond is not None
    at_limit, beyond, elsewhere = step(found.size, card), step(found.size + 64, card), step(found.size, large)
    assert elsewhere.peak_allocated_bytes < card.memory_bytes < elsewhere.peak_reserved_bytes
    # on the card, within what there is
    assert at_limit.fits(card).fits is True and at_limit.peak_reserved_bytes == found.at_limit.peak_reserved_bytes
    assert any(f"the allocator may take {format_bytes(card.memory_bytes)}:" in a for a in at_limit.assumptions)
    assert beyond.fits(card).fits is False and beyond.out_of_memory is None
    assert "giving cached memory back does not suffice" in " ".join(str(beyond.fits(card)).split())
    # of another device it cannot be told, unless even what is allocated is too much
    assert elsewhere.fits(card).fits is None and elsewhere.fits(large).fits is True
    assert "which it gives back before it runs out: profile(device='card') tells" in " ".join(
        str(elsewhere.fits(card)).split())
    assert elsewhere.fits(replace(card, memory_bytes=elsewhere.peak_allocated_bytes - 1)).fits is False
    for size in (e.size for e in found.evaluations):
        assert step(size, card).fits(card).fits is (size <= found.size)
