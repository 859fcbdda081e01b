"""Which kernels a call runs, on which sizes, whatever the operator's dimensions are."""
import dataclasses

import pytest
import torch
from torch import nn

import analyzer.tools.generation  # noqa: F401  # defines attention to a cache
from analyzer import profile
from analyzer.hardware import DeviceSpec, PeakRates, find_device
from analyzer.hardware.cluster_spec import host_of
from analyzer.hardware.kernel_time.attention import attention_time
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.kernel_time.matmul import matmul_time
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.kernel_time import default_time, find_rule, signature_time
from analyzer.profilers.operator import pointwise, reduction
from analyzer.profilers.operator.matmul import row_elements

H200 = find_device("h200")
CARD = DeviceSpec("card", memory_bandwidth=1e12, flops_per_second=PeakRates(fp32=10e12, bf16=100e12),
                  compute_capability=(8, 0))
META = {"device": "meta"}
HALF = torch.bfloat16
aten = torch.ops.aten


def spec(*shape, dtype=torch.float32, stride=None, last=False, device="cuda:0"):
    t = torch.empty(shape, device="meta", dtype=dtype)
    t = t.contiguous(memory_format=torch.channels_last) if last else t
    return TensorSpec.of(shape, stride or tuple(t.stride()), dtype, device)


def half(*shape):
    return spec(*shape, dtype=HALF)


def call(op, out, *args, **kwargs):
    flat = [a for item in (*args, *kwargs.values()) for a in (item if isinstance(item, list) else [item])]
    return Signature(op, args, kwargs, tuple(a for a in flat if isinstance(a, TensorSpec)),
                     (out,) if isinstance(out, TensorSpec) else tuple(out))


def time_of(op, out, *args, device=H200, **kwargs):
    return find_rule(op)(call(op, out, *args, **kwargs), device)


def seconds(op, args, *outputs):
    time = signature_time(call(op, outputs, *args), H200)
    return time and time.seconds


def test_index_select_moves_what_it_gives_along_any_dimension():
    index = spec(512, dtype=torch.int64)
    x = spec(64, 1024, 1024)
    inner = seconds(aten.index_select.default, (x, 1, index), spec(64, 512, 1024))
    flat = seconds(aten.index_select.default, (spec(64 * 1024, 1024), 0, spec(64 * 512, dtype=torch.int64)),
                   spec(64 * 512, 1024))
    assert inner == flat > 2 * 64 * 512 * 1024 * 4 / H200.memory_bandwidth  # read and written


@pytest.mark.parametrize(("kernel", "taps"), [([3, 3, 3], 27), ([3, 9, 3], 81), ([3], 27)])
def test_every_dimension_of_a_pooling_window_counts(kernel, taps):
    x, y = spec(8, 64, 32, 64, 64), spec(8, 64, 32, 64, 64)
    found = seconds(aten.avg_pool3d.default, (x, kernel, [1, 1, 1], [1, 1, 1]), y)
    one = seconds(aten.avg_pool3d.default, (x, [1, 1, taps], [1, 1, 1], [1, 1, 1]), y)
    assert found == one


def test_products_on_the_host_take_no_time_of_the_device():
    a = spec(4096, 4096, device="cpu")
    assert seconds(aten.mm.default, (a, a), a) == 0
    assert seconds(aten._softmax.default, (a, -1, False), a) == 0


def test_a_number_is_copied_as_what_the_host_makes_of_it():
    whole, host = spec(1024, 1024), spec(1024, 1024, device="cpu")
    assert seconds(aten.copy_.default, (whole, 2.5), whole) == seconds(aten.copy_.default, (whole, host), whole) > 0
    assert seconds(aten.copy_.default, (host, 2.5), host) == 0


def test_views_launch_nothing_and_others_move_their_bytes(log_signatures):
    x = torch.empty(4096, 4096, device="meta")
    times = {str(s.op): default_time(s, CARD) for s in log_signatures(lambda: torch.roll(x, 1).t().reshape(-1))}
    assert times["aten.t.default"].kernels == 0
    assert 2 * 4096**2 * 4 / 1e12 < times["aten.roll.default"].seconds < 1.4 * 2 * 4096**2 * 4 / 1e12


def test_a_measured_device_tells_what_products_reach(log_signatures):
    x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    (signature,) = [s for s in log_signatures(lambda: nn.functional.linear(x, x)) if "mm" in str(s.op)]
    measured = dataclasses.replace(CARD, calibration={"default": {"product_fraction": 1.0}})
    assert default_time(signature, measured).seconds == 2 * 4096**3 / 100e12 < default_time(signature, CARD).seconds


def test_what_is_known_of_cuda_alone_takes_its_traffic_elsewhere(log_signatures):
    x, weight = (torch.empty(8, 64, n, n, device="meta") for n in (56, 3))
    (signature,) = [s for s in log_signatures(lambda: nn.functional.conv2d(x, weight)) if "conv" in str(s.op)]
    host = DeviceSpec("host", kind="cpu", memory_bandwidth=10e9, flops_per_second=PeakRates(fp32=100e9))
    assert signature_time(signature, host) == default_time(signature, host) is not None
    assert signature_time(signature, DeviceSpec("host", kind="cpu")) is None


def times_of(signatures):
    return {str(s.op._schema.name)[6:]: find_rule(s.op)(s, H200) for s in signatures if find_rule(s.op)}


def one_time(log_signatures, name, f):
    return times_of(log_signatures(f))[name]


@pytest.mark.parametrize(("make", "name", "microseconds"), [
    # kernel time on an H200, from benchmarks/truth/latency.json
    (lambda: torch.empty(64, 256, 56, 56, **META).relu_(), "relu_", 97.5),
    (lambda: nn.functional.gelu(torch.empty(8, 512, 3072, dtype=torch.bfloat16, **META)), "gelu", 17.3),
    (lambda: torch.empty(128, 197, 2304, dtype=torch.bfloat16, **META) + torch.empty(
        2304, dtype=torch.bfloat16, **META), "add", 164.9),
    (lambda: torch.empty(32, 197, 768, **META).to(torch.bfloat16), "_to_copy", 9.6),
    (lambda: torch.empty(25216, 768, dtype=torch.bfloat16, **META).sum(0), "sum", 41.8),
    (lambda: torch.empty(4, 512, 2048, **META).mean(-1), "mean", 6.3),
    (lambda: torch.log_softmax(torch.empty(2048, 50257, **META), -1), "_log_softmax", 384.7),
])
def test_kernels_take_what_was_measured(log_signatures, make, name, microseconds):
    assert one_time(log_signatures, name, make).seconds * 1e6 == pytest.approx(microseconds, rel=0.3)


def test_operands_that_lie_differently_take_longer(log_signatures):
    x, row = (torch.empty(*s, dtype=torch.bfloat16, **META) for s in ((4096, 4096), (4096, )))
    alike, broadcast, transposed = (one_time(log_signatures, "add", f).seconds
                                    for f in (lambda: x + x, lambda: x + row, lambda: x + x.t()))
    assert alike < broadcast < transposed


def test_every_name_with_a_rule_is_an_operator():
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    unknown = [n for n in f"{pointwise.NAMES} {pointwise.FILLS} {pointwise.RANDOM} {reduction.NAMES}".split()
               if f"aten::{n}" not in known]
    assert unknown == []


# ---- attention


def attend(op, *args, **kwargs):
    return time_of(op, (), *args, **kwargs)


def expected(kernel, q_len=128, kv_len=128, causal=False, **options):
    sizes = {**dict(batch=2, heads=8, kv_heads=8, head_dim=64, value_dim=64), **options}
    return attention_time(kernel, **sizes, q_len=q_len, kv_len=kv_len, dtype="bfloat16",
                          device=H200, causal=causal)


FIRST, INSIDE, PACKED = half(2, 8, 128, 64), half(2, 128, 8, 64), half(256, 8, 64)
LSE, SEED, OFFSETS = spec(2, 8, 128, dtype=torch.float32), spec(2, dtype=torch.int64), spec(3, dtype=torch.int32)
MASK = half(2, 8, 128, 128)
ATTENTION = [
    (aten._scaled_dot_product_flash_attention.default, (FIRST,) * 3 + (0.0, True), "flash", dict(causal=True)),
    (aten._scaled_dot_product_flash_attention.default, (FIRST,) * 3 + (0.1,), "flash", dict(dropout=True)),
    (aten._scaled_dot_product_efficient_attention.default, (FIRST,) * 3 + (MASK, True, 0.0, False), "efficient",
     dict(masked=True)),
    (aten._scaled_dot_product_cudnn_attention.default, (FIRST,) * 3 + (None, True, 0.0, True), "cudnn",
     dict(causal=True)),
    (aten._scaled_dot_product_cudnn_attention.default, (FIRST, half(2, 2, 512, 64), half(2, 2, 512, 64), None, False),
     "cudnn", dict(kv_heads=2, kv_len=512)),
    (aten._scaled_dot_product_cudnn_attention_backward.default,
     (FIRST,) * 5 + (LSE, SEED, SEED, None, None, None, 128, 128, 0.1, True), "cudnn",
     dict(causal=True, backward=True, dropout=True)),
    (aten._cudnn_attention_forward.default, (FIRST,) * 3 + (None, None, None, 128, 128, True, 0.0, False), "cudnn", {}),
    (aten._cudnn_attention_backward.default,
     (FIRST,) * 5 + (LSE, SEED, SEED, MASK, None, None, 128, 128, 0.0, False), "cudnn",
     dict(backward=True, masked=True)),
    (aten._scaled_dot_product_flash_attention_backward.default,
     (FIRST,) * 5 + (LSE, OFFSETS, OFFSETS, 128, 128, 0.0, True, SEED, SEED), "flash",
     dict(causal=True, backward=True)),
    (aten._scaled_dot_product_efficient_attention_backward.default,
     (FIRST,) * 4 + (None, FIRST, LSE, SEED, SEED, 0.0, [True] * 4, True), "efficient",
     dict(causal=True, backward=True)),
    (aten._flash_attention_forward.default, (INSIDE,) * 3 + (None, None, 128, 128, 0.0, True, False), "flash",
     dict(causal=True)),
    (aten._flash_attention_forward.default, (PACKED,) * 3 + (OFFSETS, OFFSETS, 128, 128, 0.0, True, False), "flash",
     dict(causal=True)),
    (aten._efficient_attention_forward.default, (INSIDE,) * 3 + (None, None, None, 128, 128, 0.0, 1), "efficient",
     dict(causal=True)),
    (aten._efficient_attention_backward.default,
     (INSIDE,) * 4 + (None, INSIDE, None, None, 128, 128, LSE, 0.1, SEED, SEED, 0, False), "efficient",
     dict(backward=True, dropout=True)),
    (aten._flash_attention_backward.default,
     (INSIDE,) * 5 + (LSE, None, None, 128, 128, 0.0, False, SEED, SEED), "flash", dict(backward=True)),
    (aten._scaled_dot_product_fused_attention_overrideable.default, (FIRST,) * 3 + (None, 0.0, True), "flash",
     dict(causal=True)),
]


@pytest.mark.parametrize(("op", "args", "kernel", "options"), ATTENTION)
def test_sizes_and_options_are_read_from_the_arguments(op, args, kernel, options):
    assert attend(op, *args) == expected(kernel, **options)


def test_a_window_and_used_keys_are_read_from_keywords():
    got = attend(aten._flash_attention_forward.default, *(INSIDE,) * 3, None, None, 128, 128, 0.0, True, False,
                    window_size_left=32, window_size_right=0)
    assert got == expected("flash", causal=True, window=32)


def test_causal_keys_left_of_the_first_query_are_read():
    """FlashAttention has the mask at the bottom right: each query sees all keys but those behind its own place."""
    long = half(2, 8, 4096, 64)
    got = attend(aten._scaled_dot_product_flash_attention.default, FIRST, long, long, 0.0, True)
    assert got == expected("flash", kv_len=4096, causal=True)


CACHE = half(4, 1000, 2, 64)


def decode(query, keys, window=0, **options):
    got = attend(torch.ops.analyzer.cached_attention.default, query, keys, keys, window, 0)
    batch, new, heads, size = query
    return got, expected("paged", new, keys[1], True, batch=batch, heads=heads, kv_heads=keys[2], head_dim=size,
                         value_dim=size, stores_keys=False, **options)


def test_a_serving_engine_attends_to_the_used_part_of_its_cache():
    for query in (half(4, 1, 8, 64), half(4, 128, 8, 64)):
        got, wanted = decode(query, CACHE, kv_item_bytes=2)
        assert got == wanted


def test_latents_are_read_once():
    got = attend(torch.ops.analyzer.latent_attention.default, half(64, 1, 16, 576), half(64, 16384, 1, 512),
                    half(64, 16384, 1, 64), 512)
    least = 64 * 16384 * 576 * 2 / H200.memory_bandwidth
    assert least < got.seconds < 2 * least


def test_pages_are_read_up_to_the_longest_sequence():
    """Four pages of 256 keys and a query for each of two sequences."""
    query, pages = half(2, 8, 64), half(8, 256, 2, 64)
    got = attend(aten._flash_attention_forward.default, query, pages, pages, OFFSETS, OFFSETS, 1, 1000, 0.0, True,
                    False, block_table=spec(2, 4, dtype=torch.int32))
    assert got == expected("flash", 1, 1000, True, kv_heads=2)


def test_packed_sequences_are_as_many_as_their_tokens_fill():
    """300 tokens in sequences of up to 100: three full ones, whatever the number of offsets."""
    packed = half(300, 8, 64)
    got = attend(aten._flash_attention_forward.default, *(packed,) * 3, spec(9, dtype=torch.int32),
                    spec(9, dtype=torch.int32), 100, 100, 0.0, False, False)
    assert got == expected("flash", 100, 100, batch=3)


# ---- matrix products


PRODUCTS = [
    (aten.mm.default, (64, 256), [(64, 128), (128, 256)], (1, 64, 256, 128)),
    (aten.bmm.default, (6, 64, 256), [(6, 64, 128), (6, 128, 256)], (6, 64, 256, 128)),
    (aten.addmm.default, (64, 256), [(256,), (64, 128), (128, 256)], (1, 64, 256, 128)),
    (aten.linear.default, (3, 64, 256), [(3, 64, 128), (256, 128)], (1, 192, 256, 128)),
    (aten.matmul.default, (3, 64, 256), [(3, 64, 128), (128, 256)], (1, 192, 256, 128)),
    (aten.matmul.default, (3, 64, 256), [(3, 64, 128), (3, 128, 256)], (3, 64, 256, 128)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op,out,args,product", PRODUCTS)
def test_products(op, out, args, product, dtype):
    time = time_of(op, spec(*out, dtype=dtype), *(spec(*shape, dtype=dtype) for shape in args))
    dtype_name = str(dtype).removeprefix("torch.")
    assert time == matmul_time(*product, dtype_name, H200, has_weights=product[0] == 1)  # a batch has no parameters


def test_an_added_matrix_is_copied_first():
    a, b, added = spec(4, 64, 128), spec(4, 128, 256), spec(4, 64, 256)
    plain = time_of(aten.bmm.default, added, a, b)
    assert time_of(aten.baddbmm.default, added, added, a, b).kernels == plain.kernels + 1
    assert time_of(aten.baddbmm.default, added, added, a, b, beta=0) == plain
    assert time_of(aten.baddbmm_.default, added, added, a, b) == plain


@pytest.mark.parametrize("shape,stride,expected", [
    ((64, 128), (128, 1), 128), ((64, 128), (1, 64), 64), ((3, 64, 50), (3200, 50, 1), 50), ((64, 50), (200, 1), 200),
    ((1, 50), (50, 1), 0), ((7,), (1,), 0)])
def test_row_elements(shape, stride, expected):
    assert row_elements(spec(*shape, stride=stride)) == expected


def test_complex_numbers_take_the_time_of_their_parts():
    a = spec(512, 512, dtype=torch.complex64)
    assert time_of(aten.mm.default, a, a, a) == matmul_time(1, 512, 1024, 1024, "float32", H200)


def test_groups_share_the_rows():
    a, b = spec(1024, 512, dtype=HALF), spec(8, 512, 256, dtype=HALF)
    time = time_of(aten._grouped_mm.default, spec(1024, 256, dtype=HALF), a, b, spec(8, dtype=torch.int32))
    assert time == matmul_time(8, 128, 256, 512, "bfloat16", H200)


def test_a_weight_of_fewer_bits_is_read_sooner():
    x, out = spec(1, 8192, dtype=HALF), spec(1, 8192, dtype=HALF)
    whole = time_of(aten.mm.default, out, x, spec(8192, 8192, dtype=HALF))
    eighth = time_of(aten._weight_int8pack_mm.default, out, x, spec(8192, 8192, dtype=torch.int8),
                     spec(8192, dtype=HALF))
    assert 0.4 < eighth.seconds / whole.seconds < 0.75 and eighth.spread >= 0.5


def test_gradients_of_a_linear_layer_are_those_asked_for():
    x, grad, weight = spec(64, 128), spec(64, 256), spec(256, 128)
    only = [time_of(aten.linear_backward.default, x, x, grad, weight, mask)
            for mask in ([True, False, False], [False, True, False], [True, True, False])]
    assert only[2].seconds == pytest.approx(only[0].seconds + only[1].seconds)


def recurrent(units, steps=256, *, layers=1, gates=4, both_ways=False, lengths=(), dropout=0.0, projection=0,
              dtype=torch.float32, backward=False, mask=(True,) * 4, batch_first=False, batch=64, given=(True,) * 3,
              bias=True, flat=True):
    """The time of recurrent layers on 512 features; ``given``: of which results there is a gradient."""
    ways, out = 1 + both_ways, projection or units
    weights = []
    for layer in range(layers):
        one = [spec(gates * units, ways * out if layer else 512, dtype=dtype), spec(gates * units, out, dtype=dtype)]
        one += [spec(gates * units, dtype=dtype)] * 2 * bias + [spec(projection, units, dtype=dtype)] * (projection > 0)
        weights += one * ways
    shape = (sum(lengths), ) if lengths else (batch, steps) if batch_first else (steps, batch)
    x, y = spec(*shape, 512, dtype=dtype), spec(*shape, ways * out, dtype=dtype)
    h, c = (spec(ways * layers, batch, size, dtype=dtype) for size in (out, units))
    c = c if gates == 4 else None
    settings = ({4: 2, 3: 3, 1: 1}[gates], units, projection, layers, batch_first, dropout, True, both_ways,
                list(lengths), None)
    stride = 2 + 2 * bias + (projection > 0)
    if not backward:
        return time_of(aten._cudnn_rnn.default, x, x, weights, stride, y if flat else None, h, c, *settings)
    grads = [like if is_given else None for like, is_given in zip((y, h, c), given)]
    return time_of(aten._cudnn_rnn_backward.default, x, x, weights, stride, y, h, c, y, *grads, *settings, y,
                   list(mask))


def test_recurrent_layers_step_through_time():
    def lstm(steps, **settings):
        return recurrent(512, steps, batch=32, **settings).seconds

    assert 1.7 < lstm(400) / lstm(200) < 2.1
    assert lstm(200, both_ways=True) == pytest.approx(2 * lstm(200))
    assert lstm(200, lengths=[32] * 200) == lstm(200)
    assert lstm(200, backward=True) > lstm(200)


@pytest.mark.parametrize(("settings", "kernels"), [
    # Of 256 steps in 8 groups: two transposed matrices, a product for each group, a product and a cell for each step
    ({}, 2 + 8 + 512), ({"gates": 3}, 2 + 8 + 512), ({"gates": 1, "both_ways": True}, 2 * (2 + 8 + 512)),
    ({"steps": 33}, 2 + 2 + 66), ({"lengths": [64, 64, 2]}, 2 + 1 + 6),
    ({"projection": 256}, 3 + 8 + 3 * 256),  # a product more in each step
    # as an H200 ran them: batch first a copy, and with dropout a mask that is applied to each group
    ({"layers": 2, "batch_first": True, "dropout": 0.1}, 2 * (2 + 8 + 512) + 1 + 1 + 8),
    # backward 32 groups; zeros, sums for biases and three products for the weights' gradient
    ({"backward": True}, 32 + 512 + 1 + 1 + 3), ({"backward": True, "mask": (True,) * 3 + (False,)}, 32 + 512),
    # on an H200 1120 kernels for the data, and 9; copies of input and gradient, another of the input; thrice zeros
    ({"layers": 2, "dropout": 0.1, "batch_first": True, "backward": True, "given": (True, False, False)},
     1120 + 9 + 3 + 3),
    ({"projection": 256, "backward": True}, 32 + 3 * 256 + 1 + 1 + 4),
    # a buffer of weights that lie apart: zeros and four copies; of gradients without biases two copies
    ({"flat": False}, 2 + 8 + 512 + 5), ({"bias": False, "backward": True}, 32 + 512 + 1 + 1 + 3 + 2)])
def test_recurrent_layers_run_so_many_kernels(settings, kernels):
    assert recurrent(1024, **settings).kernels == kernels


@pytest.mark.parametrize(("units", "settings", "is_one"), [
    (192, {}, True), (193, {}, False), (128, {"backward": True}, True), (129, {"backward": True}, False),
    (384, {"gates": 1}, True), (385, {"gates": 1}, False), (192, {"dtype": torch.float64}, False),
    (192, {"lengths": [64] * 256}, False), (192, {"projection": 64}, False),
    (1024, {"dtype": torch.float16}, True), (1152, {"dtype": torch.float16}, False),
    (1024, {"dtype": torch.float16, "gates": 3}, False), (1024, {"dtype": torch.float16, "layers": 2}, False),
    (896, {"dtype": torch.float16, "gates": 1, "batch": 96}, False), (896, {"dtype": HALF}, False)])
def test_one_kernel_runs_all_steps_of_small_layers(units, settings, is_one):
    without_gradient = {"mask": (True,) * 3 + (False,)} if "backward" in settings else {}
    assert (recurrent(units, **settings, **without_gradient).kernels < 40) == is_one


def test_cudnn_launches_the_steps_of_a_recurrent_layer_while_they_run():
    """As fast as a compiled program launches kernels, which is slower than steps run that are this small."""
    found = profile(nn.LSTM(256, 256), (torch.empty(400, 2, 256),), mode="infer", device="h200")
    kernels = 2 + 13 + 2 * 400
    loop = kernels * find_constants("inductor", H200)["kernel_seconds"]
    assert found.kernels == kernels + 2  # zeros for the states
    assert kernels * host_of(H200).gap_seconds + found.kernel_seconds < loop < found.step_seconds < loop + 2e-4


# ---- convolutions


X, W, Y = spec(32, 64, 56, 56), spec(128, 64, 3, 3), spec(32, 128, 56, 56)
GEOMETRY = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def forward(x=X, w=W, y=Y, bias=None, geometry=GEOMETRY, device=H200):
    return time_of(aten.convolution.default, y, x, w, bias, *geometry, device=device)


def backward(mask, x=X, w=W, y=Y, geometry=GEOMETRY):
    return time_of(aten.convolution_backward.default, (x, w), y, x, w, [0], *geometry, mask)


def test_output_mask():
    each = [backward([i == j for j in range(3)]) for i in range(3)]
    assert backward([True, True, True]).seconds == pytest.approx(sum(t.seconds for t in each))
    assert backward([True, True, True]).kernels == sum(t.kernels for t in each)
    assert backward([False, False, False]).kernels == 0


def test_bias_is_a_kernel_of_its_own():
    assert forward(bias=spec(128)).kernels == forward().kernels + 1


def test_channels_last():
    x, w, y = spec(32, 64, 56, 56, last=True), spec(128, 64, 3, 3, last=True), spec(32, 128, 56, 56, last=True)
    assert forward(x, w, y).kernels == 1
    assert forward(X, w, y).kernels == 2  # the input is copied by PyTorch
    assert forward(X, w, y).seconds < forward().seconds


def test_tf32_is_what_torch_is_set_to():
    before = torch.backends.cudnn.conv.fp32_precision
    tf32 = forward()
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert forward().seconds > tf32.seconds
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def test_transposed():
    geometry = ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    x, w, y = spec(8, 128, 28, 28), spec(128, 64, 2, 2), spec(8, 64, 56, 56)
    up = forward(x, w, y, geometry=geometry)
    down = backward([True, False, False], y, w, x, ([2, 2], [0, 0], [1, 1], False, [0, 0], 1))
    assert up.seconds == pytest.approx(down.seconds)


def test_depthwise_has_its_bias_inside():
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 64)
    assert forward(X, spec(64, 1, 3, 3), X, spec(64), geometry).kernels == 1


def test_depthwise_in_channels_last_is_of_cudnn():  # use_cudnn_depthwise, aten/src/ATen/native/Convolution.cpp
    geometry, w = ([1, 1], [3, 3], [1, 1], False, [0, 0], 64), spec(64, 1, 7, 7, dtype=HALF)
    first, last = spec(8, 64, 56, 56, dtype=HALF), spec(8, 64, 56, 56, dtype=HALF, last=True)
    own, of_cudnn = (forward(x, w, x, geometry=geometry) for x in (first, last))
    assert of_cudnn.seconds < own.seconds / 3 and of_cudnn.kernels == 1
    assert forward(last, w, last, spec(64), geometry).kernels == 2  # the bias afterwards
    assert backward([False, True, False], last, w, last, geometry).kernels == 2  # partial sums
    with torch.backends.cudnn.flags(enabled=False):
        assert forward(last, w, first, geometry=geometry).seconds > own.seconds  # a copy first


def test_sequences_and_devices():
    x, w, y = spec(8, 80, 3000), spec(512, 80, 3), spec(8, 512, 3000)
    assert forward(x, w, y, geometry=([1], [1], [1], False, [0], 1)).seconds > 0
    assert forward(device=find_device("cpu")) is None
    assert forward(spec(8, 4, 8, 8, dtype=torch.complex64), spec(4, 4, 3, 3, dtype=torch.complex64),
                   spec(8, 4, 8, 8, dtype=torch.complex64)) is None


def test_a_bias_gradient_is_a_sum_of_the_results_gradient():
    bias = backward([False, False, True])
    assert bias.kernels == 1 and Y.nbytes / H200.memory_bandwidth < bias.seconds < 3 * Y.nbytes / H200.memory_bandwidth
