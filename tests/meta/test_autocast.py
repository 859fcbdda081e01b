"""``torch.autocast`` without data: the lists, the casts, the cache of weights."""
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from analyzer import MetaTensorMode
from analyzer.cuda.autocast import BANNED, FLOAT, FLOAT_APPENDED, FLOAT_IF_UNSET, LOWER, WIDEST, read_policies

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def lists_of_the_header():
    """The operators of torch's own header, by the name of the list."""
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    found = {}
    for name, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)\s*\\\n((?:.*\\\n)*.*)", text):
        found[name] = {
            ".".join(filter(None, map(str.strip, entry.split(","))))
            for entry in re.findall(r"_\((\w+(?:,\s*\w+)?)\)", body)
        }
    return found


def test_the_lists_are_those_of_torchs_header():
    header, cuda = lists_of_the_header(), read_policies()["cuda"]
    named = {policy: {n for n, p in cuda.items() if p == policy} for policy in set(cuda.values())}
    # autocast_mode.cpp adds two convolutions, a root from 2.14 on, and the loss that it refuses
    assert named[LOWER] - {"cudnn_convolution", "cudnn_convolution_transpose"} == header["LOWER_PRECISION_FP"]
    assert named[FLOAT] - {"linalg_matrix_sqrth"} == header["FP32"]
    assert (named[FLOAT_IF_UNSET], named[WIDEST]) == (header["FP32_SET_OPT_DTYPE"], header["PROMOTE"])
    assert named[FLOAT_APPENDED] - {"norm.names_ScalarOpt_dim"} == {"norm.Scalar", "norm.ScalarOpt_dim"}
    assert named[BANNED] == {"binary_cross_entropy"}


@pytest.mark.parametrize(("device_type", "key"), [("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")])
def test_every_operator_that_the_dispatcher_casts_has_a_policy(device_type, key):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    registered = {
        n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names()
        if n.startswith("aten::") and has(n, key)
    }
    # cuDNN's recurrent networks cast what they are given themselves, in builds with CUDA
    # (aten/src/ATen/cudnn/AutocastRNN.cpp)
    assert set(read_policies()[device_type]) == registered - {"_cudnn_rnn"}


def rand(*shape, dtype=FP32, device="cuda", grad=False):
    return torch.rand(*shape, device=device).to(dtype).requires_grad_(grad)


# What a region of bfloat16 makes of float32 (f) and bfloat16 (b) matrices; the rows name each entry point of an
# operator once.
DTYPES = [
    *((run, BF16) for run in [
        lambda f, b: f @ f, lambda f, b: F.linear(f, b), lambda f, b: torch.einsum("ij,jk->ik", f, f),
        lambda f, b: nn.Conv2d(4, 4, 1, padding="same").cuda()(f[None, :, :, None]), lambda f, b: F.prelu(f, f[0, :1]),
        lambda f, b: nn.GRUCell(4, 4).cuda()(f),
        lambda f, b: nn.MultiheadAttention(4, 1).cuda()(f, f, f)[0]]),
    *((run, FP32) for run in [
        lambda f, b: torch.exp(b), lambda f, b: b**2, lambda f, b: F.layer_norm(b, (4,)), lambda f, b: F.mse_loss(b, b),
        lambda f, b: F.interpolate(b[None, None], scale_factor=2), lambda f, b: torch.softmax(b, -1),
        lambda f, b: b.sum(0), lambda f, b: b.prod(), lambda f, b: b.norm(), lambda f, b: b.norm(dim=0),
        lambda f, b: F.cross_entropy(b, torch.zeros(4, dtype=torch.int64, device="cuda")),  # by the nll_loss inside
        lambda f, b: torch.atan2(f, b), lambda f, b: torch.dot(b[0], f[0]), lambda f, b: torch.cat([b, f]),
        lambda f, b: F.gelu(f)]),  # on no list: torch's own promotion
    (lambda f, b: F.rms_norm(b, (4, )), FP32 if "rms_norm" in read_policies()["cuda"] else BF16),  # not in torch 2.9
    *((lambda f, b, x=x: nn.LSTM(4, 4).cuda()((f, b)[x][None])[0], FP16) for x in (0, 1)),  # cuDNN's, always
    (lambda f, b: torch.softmax(b, -1, dtype=BF16), BF16), (lambda f, b: b.sum(dtype=FP64), FP64),  # the caller said
    (lambda f, b: torch.ones(3, dtype=torch.int64, device="cuda").sum(), torch.int64),
    (lambda f, b: torch.atan2(b, b), BF16), (lambda f, b: F.relu(b), BF16), (lambda f, b: b.mean(), BF16),
    (lambda f, b: F.batch_norm(b, f[0], f[0]), BF16),
    (lambda f, b: f.to(FP64) @ f.to(FP64), FP64),  # autocast leaves float64 alone
]


@pytest.mark.parametrize(("run", "dtype"), DTYPES)
def test_an_operator_gives_the_dtype_of_its_list(mode, run, dtype):
    with torch.autocast("cuda", BF16):
        assert run(rand(4, 4), rand(4, 4, dtype=BF16)).dtype is dtype


def test_dtypes_on_the_claimed_host_are_those_of_torchs_own_run():
    """The oracle is torch itself, on data: autocast for the CPU works in any build."""
    runs = [
        lambda f: f @ f, lambda f: f.exp(), lambda f: F.mse_loss(f, f), lambda f: torch.cat([f, f.bfloat16()]),
        lambda f: F.binary_cross_entropy(f.bfloat16(), f), lambda f: F.conv1d(f[None], f[:, :, None]),
        lambda f: torch.stack([f.bfloat16(), f.bfloat16()]), lambda f: f.bfloat16().prod(), nn.Linear(4, 4)]

    def dtypes():
        with torch.autocast("cpu", BF16):
            return [run(torch.full((4, 4), 0.5)).dtype for run in runs]

    real = dtypes()
    with MetaTensorMode():
        assert dtypes() == real
    assert {BF16, FP32} == set(real)


def test_cuda_and_host_follow_their_own_switch(mode):
    with torch.autocast("cuda", BF16):
        assert (rand(2, 2, device="cpu") @ rand(2, 2, device="cpu")).dtype is FP32
    with torch.autocast("cpu", BF16):
        assert (rand(2, 2) @ rand(2, 2)).dtype is FP32
    with torch.autocast("cuda", BF16):
        with torch.autocast("cuda", enabled=False):
            assert (rand(2, 2) @ rand(2, 2)).dtype is FP32
        assert (rand(2, 2) @ rand(2, 2)).dtype is BF16


def test_a_weight_is_cast_once_per_region_and_its_gradient_once(mode):
    layer, x = nn.Linear(8, 8, bias=False).cuda(), rand(4, 8)
    for _ in range(2):
        mode.state.recorder.calls.clear()
        with torch.autocast("cuda", BF16):
            loss = layer(layer(x)).sum()
        loss.backward()
        # the weight (once for two products), the input; back: the gradient of the float32 sum, that of the weight
        assert mode.state.recorder.casts() == [((8, 8), BF16), ((4, 8), BF16), ((4, 8), BF16), ((8, 8), FP32)]


@pytest.mark.parametrize(("make", "kept"), [
    (lambda: rand(64, 64, grad=True), True),
    (lambda: rand(64, 64), False),                              # needs no gradient
    (lambda: rand(64, 64, grad=True) * 1.0, False),             # no leaf
    (lambda: rand(2, 64, 64)[0].requires_grad_(), False),       # a view
    (lambda: rand(64, 64, dtype=FP16, grad=True), False),       # not float32
])
def test_the_cast_of_a_float32_leaf_lives_as_long_as_the_outermost_region(mode, make, kept):
    weight, x = make(), rand(1, 64)
    with torch.autocast("cuda", BF16):
        with torch.no_grad():
            x = x.to(BF16)
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", BF16):
            x @ weight
            first = torch.cuda.memory_allocated()
            x @ weight
            second = torch.cuda.memory_allocated()
        inner_left = torch.cuda.memory_allocated()
    workspace = first - before - (64 * 64 * 2 if kept else 0)  # of the first product, kept for good
    assert (second, inner_left) == (first, first)
    assert torch.cuda.memory_allocated() == before + workspace
    assert len([c for c in mode.state.recorder.casts() if c == ((64, 64), BF16)]) == (1 if kept else 2)


def test_what_is_cast_without_gradients_is_used_with_them_as_torch_does():
    """The oracle is torch itself, on data: since 2.11 a cast is kept with its gradient, and none in inference mode."""
    def run():
        weight, x = torch.rand(4, 4, requires_grad=True), torch.rand(2, 4)
        with torch.autocast("cpu", BF16):
            with torch.no_grad():
                first = x @ weight
            return first.requires_grad, (x @ weight).requires_grad

    real = run()
    with MetaTensorMode():
        assert run() == real == (False, torch.__version__ >= "2.11")


@pytest.mark.parametrize(("outer", "settings"), [(nullcontext, dict(cache_enabled=False)), pytest.param(
    torch.inference_mode, {}, marks=pytest.mark.skipif(torch.__version__ < "2.11", reason="torch kept casts there"))])
def test_no_cast_is_kept(mode, outer, settings):
    weight, x = rand(8, 8, grad=True), rand(4, 8)
    with outer(), torch.autocast("cuda", BF16, **settings):
        x @ weight, x @ weight
    assert mode.state.recorder.casts().count(((8, 8), BF16)) == 2


def test_a_weight_that_dies_inside_the_region_gives_its_place_to_another(mode):
    with torch.autocast("cuda", BF16):
        for size in (4, 6):
            assert (rand(2, size) @ rand(size, size, grad=True)).shape == (2, size)


def test_the_mode_may_start_inside_a_region():
    with torch.autocast("cpu", BF16):
        with MetaTensorMode():
            assert (torch.rand(2, 2) @ torch.rand(2, 2)).dtype is BF16
        assert (torch.rand(2, 2) @ torch.rand(2, 2)).dtype is BF16  # torch's own again, on data
    assert (torch.rand(2, 2) @ torch.rand(2, 2)).dtype is FP32


def test_what_a_cast_operator_calls_is_not_cast_again(mode):
    x = rand(2, 2, 8, 8, dtype=BF16)
    with torch.autocast("cuda", BF16), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        F.scaled_dot_product_attention(x, x, x)
    products = mode.state.recorder.find("bmm")
    assert {s.dtype for c in products for s in c.inputs} == {FP32}  # the plain products compute halves in float32


@pytest.mark.parametrize(("run", "text"), [
    (lambda: F.binary_cross_entropy(rand(4), rand(4)), "unsafe to autocast.*binary_cross_entropy_with_logits"),
    (lambda: torch.atan2(rand(4, dtype=FP16), rand(4, dtype=BF16)), "torch.float16 in a region of torch.bfloat16")])
def test_what_torch_refuses_is_refused(mode, run, text):
    with torch.autocast("cuda", BF16), pytest.raises(RuntimeError, match=text):
        run()


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_steps_and_says_that_gradients_are_finite(mode, fused):
    layer = nn.Linear(4, 4).cuda()
    optimizer, scaler = torch.optim.AdamW(layer.parameters(), fused=fused), torch.amp.GradScaler(
        "cuda", growth_interval=2)
    for _ in range(2):
        with torch.autocast("cuda", FP16):
            loss = layer(rand(2, 4)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [int(s["step"].item()) for s in optimizer.state.values()] == [2, 2]
    assert scaler.get_scale() == 2.0**17  # doubled after two steps
    assert "gradients are assumed to be finite: GradScaler skips no step" in mode.state.assumptions


def test_a_checkpointed_region_is_cast_alike_when_it_runs_again(mode):
    layer, x = nn.Linear(8, 8).cuda(), rand(4, 8, grad=True)
    with torch.autocast("cuda", BF16):
        out = torch.utils.checkpoint.checkpoint(lambda a: layer(a).relu(), x, use_reentrant=False)
    out.float().sum().backward()
    products = mode.state.recorder.find("addmm")
    assert [c.outputs[0].dtype for c in products] == [BF16, BF16]
    assert (x.grad.dtype, layer.weight.grad.dtype) == (FP32, FP32)


def test_torchs_switches_are_its_own_again_after_an_error():
    before = (torch.set_autocast_enabled, torch.clear_autocast_cache)
    with pytest.raises(ZeroDivisionError), MetaTensorMode(), torch.autocast("cuda", BF16):
        raise ZeroDivisionError
    assert before == (torch.set_autocast_enabled, torch.clear_autocast_cache)
    assert not torch.is_autocast_enabled("cuda")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linear", "AutocastHPU")
