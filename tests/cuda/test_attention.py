"""The attention kernel that the claimed GPU would run, and what it returns and saves."""
import dataclasses
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.profiler import ProfilerActivity, profile

from analyzer import MetaTensorMode
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import simulating
from analyzer.profilers.flop_registry import count_call

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
KERNELS = {"_scaled_dot_product_cudnn_attention": CUDNN, "_scaled_dot_product_flash_attention": FLASH,
           "_scaled_dot_product_efficient_attention": EFFICIENT}


@pytest.fixture
def recorder(mode):
    return mode.state.recorder


def gpu(capability):
    return dataclasses.replace(find_device("h200"), name=f"sm{capability}", aliases=(), compute_capability=capability)


def attend(recorder, dtype, size=64, heads=4, kv_heads=None, length=128, kv_length=None, value_size=None, grad=True,
           mask=None, **options):
    """Kernel and output of attention on (2, heads, length, size); ``mask`` makes one from (length, kv_length)."""
    kv_heads, kv_length = kv_heads or heads, kv_length or length
    shapes = (heads, length, size), (kv_heads, kv_length, size), (kv_heads, kv_length, value_size or size)
    query, key, value = (torch.rand(2, *shape, dtype=dtype, device="cuda", requires_grad=grad) for shape in shapes)
    attn_mask = mask and mask(length, kv_length)
    recorder.calls.clear()
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
    found = {KERNELS[n] for n in recorder.names() if n in KERNELS}
    return found.pop() if found else MATH, out


def boolean(rows, columns):
    return torch.ones(rows, columns, dtype=torch.bool, device="cuda")


def additive(dtype, requires_grad=False):
    return lambda rows, columns: torch.rand(rows, columns, dtype=dtype, device="cuda", requires_grad=requires_grad)


def strided(rows, columns):
    return torch.rand(columns, rows, dtype=FP32, device="cuda").t()


# The rules of sdp_utils.cpp, each at its border. Rows without a source say what an H200 did (torch 2.11, cuDNN 9.19).
HOPPER = [
    (CUDNN, BF16, {}),                                              # measured: every 16-bit attention
    (CUDNN, BF16, dict(dropout_p=0.1)),                             # measured: BERT and GPT-2
    (CUDNN, BF16, dict(mask=boolean)),
    (CUDNN, BF16, dict(kv_heads=2, enable_gqa=True)),               # measured: grouped queries of Llama and Qwen3
    (CUDNN, BF16, dict(size=192, value_size=128)),                  # check_cudnn_tensor_shapes: the one pair above 128
    (FLASH, BF16, dict(size=136)),                                  # above 128
    (FLASH, BF16, dict(size=100)),                                  # no multiple of 8
    (FLASH, BF16, dict(kv_length=1)),                               # cuDNN: no key of length 1
    (FLASH, BF16, dict(length=1, kv_length=128, dropout_p=0.1)),    # cuDNN: no query of length 1 with dropout
    (EFFICIENT, BF16, dict(size=264)),                              # flash ends at 256
    (EFFICIENT, BF16, dict(size=136, is_causal=True, kv_length=64)),   # flash: causal needs a square
    (EFFICIENT, BF16, dict(size=136, mask=boolean)),                # flash takes no mask
    (MATH, BF16, dict(size=260)),                                   # efficient: multiples of 8 for halves
    (EFFICIENT, BF16, dict(mask=additive(BF16, requires_grad=True))),  # cuDNN gives a mask no gradient
    (EFFICIENT, FP32, {}),                                          # measured: every float32 attention
    (MATH, FP32, dict(size=6)),                                     # multiples of 4 for float32
    (MATH, FP32, dict(kv_heads=2, enable_gqa=True)),                # measured: Llama in float32
    (MATH, FP32, dict(mask=strided)),                               # measured: T5, whose bias is a transposed view
    (MATH, FP64, {}),
]


@pytest.mark.parametrize(("kernel", "dtype", "options"), HOPPER)
def test_hopper_runs_the_kernel_that_pytorch_chooses(recorder, kernel, dtype, options):
    assert attend(recorder, dtype, **options)[0] == kernel


@pytest.mark.parametrize(("capability", "kernel", "dtype", "options"), [
    ((10, 0), CUDNN, BF16, {}), ((8, 0), FLASH, BF16, {}),          # cuDNN comes last there
    ((8, 6), EFFICIENT, BF16, dict(size=200)),                      # flash: no backward between 192 and 224
    ((8, 6), FLASH, BF16, dict(size=200, grad=False)), ((8, 9), FLASH, BF16, dict(size=232)),
    ((8, 9), EFFICIENT, BF16, dict(size=232, dropout_p=0.1)),
    ((7, 5), EFFICIENT, FP16, {}), ((7, 5), MATH, BF16, {}),        # before 8.0: no flash, no cuDNN, no bfloat16
    ((7, 5), EFFICIENT, FP32, dict(size=6)),                        # nor an alignment for float32
])
def test_other_generations_have_other_kernels(recorder, capability, kernel, dtype, options):
    with simulating(gpu(capability)):
        assert attend(recorder, dtype, **options)[0] == kernel


def test_the_switches_and_the_priority_of_the_user_are_followed(recorder):
    for backend, kernel in ((SDPBackend.CUDNN_ATTENTION, CUDNN), (SDPBackend.FLASH_ATTENTION, FLASH),
                            (SDPBackend.EFFICIENT_ATTENTION, EFFICIENT), (SDPBackend.MATH, MATH)):
        with sdpa_kernel(backend):
            assert attend(recorder, BF16)[0] == kernel
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        assert attend(recorder, BF16)[0] == EFFICIENT


def test_without_a_kernel_the_error_repeats_the_call_and_names_the_switch(recorder):
    message = r"No available kernel.*'dtype': 'torch.float32'.*sdpa_kernel"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match=message):
        attend(recorder, FP32)


def test_wrong_arguments_get_the_message_of_torch(recorder):
    q = torch.rand(1, 2, 8, 16, device="cuda")
    with pytest.raises(RuntimeError, match="Expected query, key, and value to have the same dtype"):
        F.scaled_dot_product_attention(q, q.half(), q)


def specs(call):
    return [(tuple(s), s.dtype, s.device) for s in call.outputs]


SEED = ((), torch.int64, "cuda:0")
HOST_SEED = ((), torch.int64, "cpu")


def test_cudnn_returns_logarithms_of_sums_where_a_gradient_is_needed_and_two_seeds(recorder):
    attend(recorder, BF16)
    (call,) = recorder.find("_scaled_dot_product_cudnn_attention")
    assert specs(call) == [((2, 4, 128, 64), BF16, "cuda:0"), ((2, 4, 128, 1), FP32, "cuda:0"), SEED, SEED]
    with torch.no_grad():
        attend(recorder, BF16)
    (call,) = recorder.find("_scaled_dot_product_cudnn_attention")
    assert specs(call) == [((2, 4, 128, 64), BF16, "cuda:0"), SEED, SEED]


def test_the_efficient_kernel_pads_its_sums_to_32_and_keeps_seeds_on_the_host(recorder):
    attend(recorder, FP32, length=100)
    (call,) = recorder.find("_scaled_dot_product_efficient_attention")
    assert specs(call) == [((2, 4, 100, 64), FP32, "cuda:0"), ((2, 4, 128), FP32, "cuda:0"), HOST_SEED, HOST_SEED]


def test_flash_pads_the_head_size_to_8_keeps_the_scale_and_cuts_the_output(recorder):
    _, out = attend(recorder, BF16, size=100)
    (call,) = recorder.find("_scaled_dot_product_flash_attention")
    assert [tuple(s) for s in call.inputs] == [(2, 4, 128, 104)] * 3
    assert call.kwargs["scale"] == pytest.approx(100**-0.5)
    assert out.shape == (2, 4, 128, 100)


# a row of 128 is aligned to 8; one of 100 is padded, and the pad cut off again by a view
@pytest.mark.parametrize(("columns", "padded"), [(128, None), (100, 104)])
def test_the_efficient_kernel_gets_an_aligned_mask(recorder, columns, padded):
    attend(recorder, FP32, length=64, kv_length=columns, mask=boolean)
    (call,) = recorder.find("_scaled_dot_product_efficient_attention")
    mask = call.args[3]
    assert (tuple(mask), mask.dtype) == ((2, 4, 64, columns), FP32)
    assert mask.stride[-2:] == (padded or columns, 1)
    assert [tuple(c.outputs[0]) for c in recorder.find("constant_pad_nd")] == ([(64, padded)] if padded else [])


def real_calls(run):
    """How often torch's own CPU kernels run which operator, from its profiler: no mode and no subclass is there to be
    seen.
    """
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
    return Counter(e.name.removeprefix("aten::") for e in prof.events())


@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(mask=FP32), dict(mask=torch.bool)])
def test_the_plain_products_are_those_that_torch_runs_on_tensors_with_data(options, make_recorder):
    def run(device):
        x = torch.rand(2, 4, 16, 8, device=device)
        dtype = options.get("mask")
        mask = None if dtype is None else torch.ones(16, 16, dtype=dtype, device=device)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal="is_causal" in options)

    real = real_calls(lambda: run("cpu"))
    with MetaTensorMode() as mode:
        mode.state.recorder = make_recorder()
        run("cuda")
        mine = Counter(mode.state.recorder.names())
    for name in ("bmm", "add", "add_", "_safe_softmax", "tril", "ones", "logical_not"):
        assert mine[name] == real[name], name


@pytest.mark.parametrize("mask", [None, FP32, torch.bool])
@pytest.mark.parametrize("options", [
    {}, dict(is_causal=True), dict(dropout_p=0.1), dict(heads=4, enable_gqa=True), dict(heads=4), dict(value_size=4),
    dict(dtype=BF16), dict(dtype=torch.complex64)])
def test_the_claimed_host_runs_what_a_cpu_runs(options, mask, make_recorder):
    options = dict(options)
    heads, value_size, dtype = options.pop("heads", 2), options.pop("value_size", 8), options.pop("dtype", FP32)
    if mask is not None and "is_causal" in options or dtype is torch.complex64 and mask is FP32:
        pytest.skip("torch takes no such call")

    def run():
        q, k, v = (torch.ones(2, h, 16, s, dtype=dtype, requires_grad=True)
                   for h, s in ((heads, 8), (2, 8), (2, value_size)))
        attn_mask = None if mask is None else torch.ones(16, 16, dtype=mask)
        try:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
            (grad,) = torch.autograd.grad(out.abs().sum(), q)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return type(out.grad_fn).__name__, tuple(out.shape), out.stride(), grad.stride()

    expected, real = run(), real_calls(run)
    with MetaTensorMode() as mode:
        mode.state.recorder = make_recorder()
        found = run()
        mine = Counter(mode.state.recorder.names())
    if isinstance(expected, str):
        assert isinstance(found, str)
        return
    assert found == expected
    for name in ("bmm", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"):
        assert mine[name] == real[name], name


@pytest.mark.parametrize(("device", "dtype", "kernel"), [
    ("cuda", FP16, "_scaled_dot_product_flash_attention"), ("cuda", FP32, "_efficient_attention_forward"),
    ("cuda", FP64, "bmm"), ("cpu", FP32, "_scaled_dot_product_flash_attention_for_cpu")])
def test_a_mask_aligned_to_the_lower_right_takes_a_kernel_that_can(device, dtype, kernel, recorder):
    query, key = (torch.rand(1, 2, n, 8, dtype=dtype, device=device) for n in (3, 5))
    out = F.scaled_dot_product_attention(query, key, key, attn_mask=causal_lower_right(3, 5))
    assert out.shape == (1, 2, 3, 8) and out.device.type == device
    assert kernel in recorder.names()
    # queries at keys 2, 3 and 4 see 3, 4 and 5 of them: flash and efficient kernels leave out the others
    if device == "cuda" and "attention" in kernel:
        assert count_call(recorder.find(kernel)[0]).executed_flops == 2 * 2 * 12 * (8 + 8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_groups_of_no_heads_are_an_error_and_not_the_end_of_the_process(device):
    with MetaTensorMode():
        query, none = torch.rand(1, 4, 8, 16, device=device), torch.rand(1, 0, 8, 16, device=device)
        with pytest.raises(InputError, match=r"\(1, 0, 8, 16\) need at least one head"):
            F.scaled_dot_product_attention(query, none, none, enable_gqa=True)
