"""Operators of bitsandbytes on the simulated GPU, and layers that are quantized when they get there."""
import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, profile
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import simulating
from tests.call import Call

bnb = pytest.importorskip("bitsandbytes")

INSIDE, OUTSIDE = 1024, 4096


def four_bits(**options):
    return bnb.nn.Linear4bit(INSIDE, OUTSIDE, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", **options)


def eight_bits():
    return bnb.nn.Linear8bitLt(INSIDE, OUTSIDE, bias=False, has_fp16_weights=False)


def made_in_the_mode(make):
    with MetaTensorMode():
        return make().cuda()


PLACES = {"on the host": lambda make: make(), "a callable": lambda make: make, "moved": made_in_the_mode,
          "a callable that moves": lambda make: lambda: make().cuda()}
X = torch.empty(16, INSIDE, dtype=torch.bfloat16)


@pytest.mark.parametrize("place", PLACES)
def test_eight_bits_are_one_byte(place):
    """A layer that was only built holds float32: it is quantized where it gets to the GPU, four times smaller."""
    p = profile(PLACES[place](eight_bits), args=(X,), mode="infer", device="h200")
    assert (p.params, p.param_bytes) == (INSIDE * OUTSIDE, INSIDE * OUTSIDE)
    assert p.buffer_bytes == 4 * OUTSIDE  # a scale for each row
    assert p.fwd_macs == 16 * INSIDE * OUTSIDE and not p.uncounted


def test_four_bits_are_half_a_byte():
    p = profile(four_bits, args=(X,), mode="infer", device="h200")
    assert (p.params, p.param_bytes) == (INSIDE * OUTSIDE, INSIDE * OUTSIDE // 2)
    blocks = INSIDE * OUTSIDE // 64
    assert p.buffer_bytes == blocks + 4 * blocks // 256 + 4 * (16 + 256 + 1)  # scales in 8 bits, theirs, and codes
    assert p.fwd_macs == 16 * INSIDE * OUTSIDE and not p.uncounted


def test_a_model_is_as_it_was():
    layer = four_bits()
    weight = layer.weight
    profile(layer, args=(X,), mode="infer", device="h200")
    assert layer.weight is weight and weight.dtype == torch.float32 and weight.quant_state is None
    assert layer.quant_state is None and not weight.bnb_quantized


def operators(model, rows, device="h200"):
    p = profile(model, args=(torch.empty(rows, INSIDE, dtype=torch.bfloat16),), mode="infer", device=device)
    return p, [operator.operator.split(".")[1] for operator in p.operators if operator.operator.startswith("bits")]


def test_a_weight_is_made_whole_where_that_is_faster():
    """bitsandbytes decides by the shape and the GPU: 16 rows are one kernel on an L4, two on an H200."""
    plain, fused = operators(four_bits(compress_statistics=False), 16, "l4")
    assert fused == ["gemm_4bit"]
    p, apart = operators(four_bits(compress_statistics=False), 2048, "l4")
    assert apart == ["dequantize_4bit"]
    assert p.fwd_macs == 2048 * INSIDE * OUTSIDE
    whole = 2 * INSIDE * OUTSIDE  # in bfloat16, while it is multiplied
    assert p.peak_by_category["temporary"] == whole
    assert plain.peak_by_category.get("temporary", 0) < whole
    _, nested = operators(four_bits(), 2048, "l4")
    assert sorted(nested) == ["dequantize_4bit", "dequantize_blockwise"]


def test_scales_and_bias_of_eight_bits():
    """The kernel gives float16: a result in bfloat16, or with a bias in it, takes a tensor more."""
    with MetaTensorMode() as mode, simulating(find_device("h200")):
        a, b = (torch.empty(64, 256, dtype=torch.int8, device="cuda") for _ in range(2))
        rows, columns = (torch.empty(64, device="cuda") for _ in range(2))
        held = mode.space.allocator().allocated_bytes
        for dtype, most in ((torch.float16, 4 + 2), (torch.bfloat16, 4 + 2 + 2)):
            mode.space.allocator().reset_peaks()
            out = torch.ops.bitsandbytes.int8_scaled_mm(a, b, rows, columns, dtype=dtype)
            assert (out.shape, out.dtype, out.device.type) == ((64, 64), dtype, "cuda")
            assert mode.space.allocator().peak_allocated_bytes - held == most * 64 * 64
            del out
        odd = torch.empty(64, 6, dtype=torch.int8, device="cuda")  # which cuBLASLt does not take
        assert torch.ops.bitsandbytes.int8_linear_matmul(odd, odd).dtype == torch.int32


def test_training_through_a_frozen_weight():
    """QLoRA's way: the gradient goes through the weight, made whole for it."""
    model = nn.Sequential(nn.Linear(INSIDE, INSIDE, bias=False, dtype=torch.bfloat16), four_bits())
    p = profile(model, args=(X,), optimizer="sgd", device="h200", loss_fn=lambda out: out.sum())
    assert p.fwd_macs == 16 * INSIDE * (INSIDE + OUTSIDE)
    assert p.bwd_macs == 16 * INSIDE * (INSIDE + OUTSIDE)  # of the first its weight, of the second its input
    assert sum(o.calls for o in p.operators if o.operator == "bitsandbytes.dequantize_4bit.default") == 2


def test_an_update_reads_its_gradient_and_writes_the_rest():
    elements = 1 << 20
    p = profile(Call(lambda m, x: m.weight * x, weight=torch.empty(elements)), args=(torch.empty(elements),),
                optimizer=lambda parameters: bnb.optim.AdamW8bit(parameters), device="h200",
                loss_fn=lambda out: out.sum())
    phase = p.phases["optimizer"]
    scales, maps = 2 * 4 * elements // 256, 2 * 4 * 256
    assert p.optimizer_bytes == 2 * elements + scales + maps
    assert phase.read_bytes == 4 * elements + 4 * elements + 2 * elements + scales + maps
    assert phase.written_bytes == 4 * elements + 2 * elements + scales


class FourBits(nn.Module):
    """A layer of which the parameter names its module, and the module what the parameter is quantized by."""

    def __init__(self):
        super().__init__()
        self.layer = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")

    def forward(self, x):
        return x + self.layer(x)


def test_blocks_of_four_bits_are_run_once(replaying_torch):
    def make():
        return nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), *(FourBits() for _ in range(9)))

    x = torch.empty(4, 64, dtype=torch.bfloat16)
    repeated, run = (profile(make, args=(x,), device="h200", reuse=reuse) for reuse in (True, False))
    assert repeated == run
    assert sum(row.replayed and row.kind == "block" for row in repeated.replay) >= 4
