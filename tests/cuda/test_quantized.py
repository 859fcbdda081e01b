"""Quantised layers and simulated quantisation without data."""
import warnings

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, profile, symbolic_trace


@pytest.fixture(scope="module")
def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 6), nn.ReLU()), {nn.Linear},
                                                      dtype=torch.qint8)


def test_a_packed_weight_gives_the_shape_and_is_named_as_not_counted(quantized):
    x = torch.rand(4, 8)
    p = profile(quantized, args=(x,), mode="infer", device="cpu")
    assert p.fwd_macs == 4 * 8 * 6 and not p.uncounted
    assert any(
        "a weight of 48 bytes, packed by torch.ao.quantization, is in no count of memory" in a for a in p.assumptions)
    graph = symbolic_trace(quantized, meta_args={"input": x})
    assert torch.equal(graph(x), quantized(x))


@pytest.mark.parametrize("call", [
    lambda x: torch.fake_quantize_per_channel_affine(x, torch.full((6,), 0.1), torch.zeros(6), 1, -128, 127),
    lambda x: torch._fake_quantize_learnable_per_tensor_affine(x, torch.tensor([0.1]), torch.tensor([0.0]), -128, 127),
])
def test_simulated_quantization_keeps_the_shape_and_has_a_gradient(call):
    real = call(torch.rand(4, 6))
    with MetaTensorMode():
        x = torch.rand(4, 6, requires_grad=True)
        out = call(x)
        assert (out.shape, out.dtype) == (real.shape, real.dtype)
        out.sum().backward()
        assert x.grad.shape == x.shape


def test_tensors_are_quantized_and_back():
    with MetaTensorMode():
        q = torch.quantize_per_tensor(torch.rand(4, 6), 0.1, 0, torch.quint8)
        assert (q.dtype, q.int_repr().dtype, q.dequantize().dtype) == (torch.quint8, torch.uint8, torch.float32)
        assert q.dequantize().shape == (4, 6)


def test_products_in_eight_bits():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("eight", torch.zeros(32, 64, dtype=torch.int8))
            self.register_buffer("scale", torch.ones(32, dtype=torch.bfloat16))

        def forward(self, x):
            packed = torch._weight_int8pack_mm(x, self.eight, self.scale)
            return packed + torch._int_mm(x.to(torch.int8), self.eight.t()).to(x.dtype)

    p = profile(Products(), args=(torch.rand(17, 64, dtype=torch.bfloat16),), mode="infer")
    # the second product is of integers that stand for floating-point numbers, and counts as theirs
    assert p.fwd_macs == 2 * 17 * 64 * 32 and p.buffer_bytes == 32 * 64 + 32 * 2 and not p.uncounted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_observers_of_rows_grow_in_the_first_step(device):
    quantization = torch.ao.quantization
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Linear(64, 6), torch.nn.Linear(6, 6))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.prepare_qat(model.train())
    x, before = torch.rand(3, 6), sum(b.nbytes for b in model.buffers())
    p = profile(model, x, device=device)
    assert sum(b.nbytes for b in model.buffers()) == before
    model(x)
    right = sum(b.nbytes for b in model.buffers())
    assert right == before + 4 * 4 * (64 + 6 + 6) - 3 * 8 and p.buffer_bytes == right
