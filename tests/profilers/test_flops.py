"""Counts of what other counters get wrong, each derived by hand; checkpointing; conventions; utilization."""
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from analyzer import profile
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.profilers.flops import CONVENTIONS, make_flops_profiler
from tests.call import Call

B, S, D, H = 2, 6, 8, 2  # batch, tokens, width, heads


def x(*shape):
    return torch.empty(*shape, requires_grad=True)


def macs(p):
    return p.fwd_macs, p.bwd_macs


# ---- what other counters get wrong


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_attention_is_counted_once_on_every_device(device):
    attention = Call(lambda self, q: F.scaled_dot_product_attention(q, q, q))
    p = profile(attention, args=(x(B, H, S, D),), device=device)
    pairs = B * H * S * S * D
    assert p.fwd_macs == 2 * pairs
    fused = any("_scaled_dot_product" in o.operator for o in p.operators)
    assert p.bwd_macs == (5 if fused else 4) * pairs  # a fused backward makes the scores again


def test_causal_attention_executes_what_the_mask_leaves():
    attention = Call(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    p = profile(attention, args=tuple(x(B, H, S, D).bfloat16() for _ in range(3)))
    dense, left = 2 * B * H * D * S * S, 2 * B * H * D * (S * (S + 1) // 2)
    loss = B * H * S * D  # the sum that is differentiated
    assert (p.fwd_flops - loss, p.fwd_macs) == (2 * dense, dense)
    # and the gradients of q, k and v, which nothing clears: each is added to that of the step before
    rest = loss + 3 * loss
    assert p.hardware_flops == 7 * dense + rest == p.model_flops
    assert p.executed_flops == 7 * left + rest


def test_a_shared_module_counts_each_call_once():
    layer = nn.Linear(D, D, bias=False)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    p = profile(model, args=(x(B, D),))
    assert macs(p) == (2 * B * D * D, 4 * B * D * D)
    first, _, second = p.modules.children
    assert (first.fwd_macs, first.calls, second.fwd_macs, second.shared_with) == (2 * B * D * D, 2, 0, "0")
    assert p.params == D * D


def test_tied_weights_count_as_work_twice_and_as_parameters_once():
    model = nn.Sequential(nn.Embedding(11, D), nn.Linear(D, 11, bias=False))
    model[1].weight = model[0].weight
    p = profile(model, args=(torch.zeros(B, S, dtype=torch.int64),))
    assert (p.params, macs(p)) == (11 * D, (B * S * D * 11, 2 * B * S * D * 11))


def attention_macs():
    return 4 * B * S * D * D + 2 * B * S * S * D


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_multi_head_attention(need_weights, mode):
    model = Call(lambda self, q: self.attention(q, q, q, need_weights=need_weights)[0], attention=nn.MultiheadAttention(
        D, H, batch_first=True))
    p = profile(model.train(mode == "train"), args=(x(B, S, D),), mode=mode)
    assert p.fwd_macs == attention_macs()


@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_under_checkpointing(reentrant):
    def attend(q):
        return F.scaled_dot_product_attention(q, q, q)

    q = x(B, H, S, D).bfloat16()
    plain = profile(Call(lambda self, q: attend(q)), args=(q,))
    saved = profile(Call(lambda self, q: checkpoint(attend, q, use_reentrant=reentrant)), args=(q,))
    assert macs(saved) == macs(plain)
    assert (plain.recompute_macs, saved.recompute_macs) == (0, 2 * B * H * S * S * D)


# ---- recomputation


class Nested(nn.Module):
    """Two linear layers inside a block of three, each block perhaps checkpointed."""

    def __init__(self, depth, reentrant):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.depth, self.options = depth, {"use_reentrant": reentrant}

    def inner(self, h):
        return self.b(self.a(h).relu())

    def outer(self, h):
        return self.c(checkpoint(self.inner, h, **self.options) if self.depth > 1 else self.inner(h)).relu()

    def forward(self, h):
        return checkpoint(self.outer, h, **self.options) if self.depth else self.outer(h)


# (depth, reentrant): products and ReLUs run again. Where not reentrant, a block stops once it has what backward needs:
# the inner one after the ReLU that b reads, b's own result being needed by nobody.
RECOMPUTED = {(0, True): (0, 0), (1, True): (3, 2), (2, True): (5, 3), (0, False): (0, 0), (1, False): (3, 2),
              (2, False): (4, 3)}


@pytest.mark.parametrize("depth, reentrant", RECOMPUTED)
def test_nested_checkpoints(depth, reentrant):
    products, relus = RECOMPUTED[depth, reentrant]
    once = B * D * D
    p = profile(Nested(depth, reentrant), args=(x(B, D),))
    assert macs(p) == (3 * once, 6 * once)
    assert (p.recompute_macs, p.recompute_flops) == (products * once, 2 * products * once + relus * B * D)
    assert p.hardware_flops - p.model_flops == p.recompute_flops == p.modules.recompute_flops == sum(n.recompute_flops
                                                                                                     for n in p.nodes)
    again = [o for o in p.operators if o.phase == "recompute"]
    assert sum(o.flops for o in again) == p.recompute_flops
    assert sum(o.calls for o in again if o.operator == "aten.mm.default") == products


class Twice(torch.autograd.Function):
    """x w, whose forward and backward both run without gradients."""

    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h, w)
        return h @ w

    @staticmethod
    def backward(ctx, grad):
        h, w = ctx.saved_tensors
        return grad @ w.t(), h.t() @ grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_custom_function_inside_a_checkpoint_is_recomputed_not_differentiated(reentrant):
    model = Call(lambda self, h: checkpoint(lambda h: Twice.apply(h, self.w).relu(), h, use_reentrant=reentrant),
                 w=torch.empty(D, D))
    p = profile(model, args=(x(B, D),))
    once = B * D * D
    assert (macs(p), p.recompute_macs) == ((once, 2 * once), once)


def test_a_gradient_that_is_differentiated_is_no_recomputation():
    """A gradient penalty: grad = w ⊗ (one row a sample) is itself trained on."""
    def step(model, optimizer, h):
        out = model(h).sum()
        (grad,) = torch.autograd.grad(out, h, create_graph=True)
        grad.square().sum().backward()

    p = profile(nn.Linear(D, 3, bias=False), args=(x(B, D),), step=step)
    assert (p.recompute_flops, p.fwd_macs) == (0, B * D * 3)
    assert p.bwd_macs >= 2 * B * D * 3


# ---- sums


def test_every_view_adds_up():
    p = profile(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D)), args=(x(B, D),), optimizer="adamw")
    for part, flops, count in (("forward", p.fwd_flops, p.fwd_macs), ("backward", p.bwd_flops, p.bwd_macs),
                               ("optimizer", p.optimizer_flops, 0)):
        rows = [o for o in p.operators if o.phase == part]
        assert (sum(o.flops for o in rows), sum(o.macs for o in rows)) == (flops, count)
        assert (p.phases[part].flops, p.phases[part].macs) == (flops, count)
        assert sum(o.read_bytes for o in rows if o.read_bytes) == p.phases[part].read_bytes > 0
        assert sum(o.written_bytes for o in rows if o.written_bytes) == p.phases[part].written_bytes > 0
    for way, part in (("fwd", "forward"), ("bwd", "backward")):
        for name in ("read_bytes", "written_bytes"):
            assert getattr(p.modules, f"{way}_{name}") == getattr(p.phases[part], name)
    linear = p.modules.children[0]
    assert sum(o.flops for o in linear.operators if o.phase == "forward") == linear.fwd_flops
    assert linear.fwd_read_bytes == 4 * (D * D + D + B * D) and linear.fwd_written_bytes == 4 * B * D
    assert p.optimizer_flops == p.phases["optimizer"].flops > 0


def test_an_operator_without_a_formula_is_listed_with_its_bytes():
    p = profile(Call(lambda self, h: torch.poisson(h)), args=(torch.empty(4, 8),), mode="infer")
    (info,) = p.uncounted
    assert (info.operator, info.calls, info.bytes) == ("aten.poisson.default", 1, 2 * 4 * 4 * 8)
    (row,) = [o for o in p.operators if "poisson" in o.operator]
    assert (row.flops, row.macs, row.written_bytes) == (None, None, 128)


# ---- utilization


def test_utilization_counts_products_alone():
    p = profile(nn.Linear(512, 512, bias=False), args=(torch.empty(64, 512),), autocast=torch.bfloat16, device="h100")
    once = 64 * 512 * 512  # the input asks for no gradient: backward does as much as forward
    assert macs(p) == (once, once)
    assert p.mfu(1e-3) == p.hfu(1e-3) == 4 * once / (1e-3 * 989.4e12)
    assert p.mfu(1e-3, dtype="float32") == 4 * once / (1e-3 * 66.9e12)
    assert p.mfu(1e-3, device="a100") == 4 * once / (1e-3 * 312e12)


def test_utilization_with_recomputation():
    p = Profile(name="p", mode="train", device="h100", autocast="bfloat16", fwd_macs=100, bwd_macs=200,
                recompute_macs=50)
    assert p.hfu(1.0) / p.mfu(1.0) == pytest.approx(350 / 300, rel=1e-12)
    assert Profile(name="p", mode="infer", device="h100", autocast="bfloat16", fwd_macs=100).mfu(1.0) == 200 / 989.4e12


def test_utilization_of_the_unknown():
    bare = Profile(name="p", mode="train", device="h100", autocast="bfloat16")
    assert bare.mfu(1.0) is None and bare.hfu(1.0) is None and bare.model_flops is None and bare.hardware_flops is None
    assert Profile(name="p", mode="train", device="h100", fwd_macs=1, bwd_macs=1).mfu(1.0) is None  # no dtype
    with pytest.raises(InputError, match=r"mfu\(seconds=0\): must be the positive time"):
        bare.mfu(0)
    with pytest.raises(InputError, match="names no device; pass device="):
        Profile(name="p", mode="train").hfu(1.0)


# ---- conventions


def under(convention, model, *args, **options):
    return profile(model.eval(), args=args, mode=options.pop("mode", "infer"),
                   profilers={"flops": make_flops_profiler(convention)}, **options)


N = B * 8 * 6 * 6  # elements of the convolution's result
CONVENTION_CASES = {
    # a convolution with bias, 3 to 8 channels of 6×6: N · 27 multiply-adds
    "convolution": (nn.Conv2d(3, 8, 3, padding=1), (B, 3, 6, 6), 2 * N * 27 + N),
    "convolution without bias": (nn.Conv2d(3, 8, 3, padding=1, bias=False), (B, 3, 6, 6), 2 * N * 27),
    "batch norm": (nn.BatchNorm2d(8), (B, 8, 6, 6), 2 * N),
    "plain batch norm": (nn.BatchNorm2d(8, affine=False), (B, 8, 6, 6), N),
    "group norm": (nn.GroupNorm(2, 8), (B, 8, 6, 6), 5 * N),
    "layer norm": (nn.LayerNorm(6), (B, 8, 6, 6), 5 * N),
    "plain layer norm": (nn.LayerNorm(6, elementwise_affine=False), (B, 8, 6, 6), 4 * N),
    "relu": (nn.ReLU(), (B, 8, 6, 6), N),
    "softmax": (nn.Softmax(-1), (B, 8, 6, 6), N),
    "sigmoid": (nn.Sigmoid(), (B, 8, 6, 6), None),
    "global pooling": (nn.AdaptiveAvgPool2d(1), (B, 8, 6, 6), N),
    "adaptive pooling": (nn.AdaptiveAvgPool2d(3), (B, 8, 6, 6), N),
    "pooling": (nn.MaxPool2d(2), (B, 8, 6, 6), N),
    "a mean": (Call(lambda self, h: h.mean([2, 3])), (B, 8, 6, 6), None),
    "upsampling by scale": (nn.Upsample(scale_factor=2), (B, 8, 6, 6), 4 * N),
    "upsampling to size": (nn.Upsample(size=(9, 9)), (B, 8, 6, 6), 81),
    "bilinear upsampling": (nn.Upsample(scale_factor=2, mode="bilinear"), (B, 8, 6, 6), 4 * N),
    "linear": (nn.Linear(6, 5), (B, 6), 2 * B * 30),
    "attention": (Call(lambda self, q: F.scaled_dot_product_attention(q, q, q)), (B, H, S, D), 4 * B * H * S * S * D),
    # 25 inputs each met by 4 · 6 filters of 9; the bias counts the 3×3 outputs of the convolution that it is not
    "transposed": (nn.ConvTranspose2d(4, 6, 3), (B, 4, 5, 5), 2 * B * 25 * 4 * 6 * 9 + B * 6 * 9),
    # each of 4 · 3 rows: 2 weights less the gates, biases, and 10 a hidden element
    "lstm": (nn.LSTM(5, 7), (4, 3, 5), 12 * (2 * 28 * 5 - 28 + 2 * 28 * 7 - 28 + 2 * 28 + 70)),
}


@pytest.mark.parametrize("name", CONVENTION_CASES)
def test_conventions(name):
    """Forward FLOPs under DeepSpeed's convention; None is not seen."""
    module, shape, expected = CONVENTION_CASES[name]
    p = under("deepspeed", module, torch.empty(*shape))
    assert (p.fwd_flops, bool(p.uncounted), p.flop_convention) == (expected or 0, expected is None, "deepspeed")


def test_what_a_convention_says_nothing_of_is_unknown():
    p = profile(nn.Linear(D, D), args=(x(B, D), ), optimizer="sgd",
                profilers={"flops": make_flops_profiler("deepspeed")})
    unknown = (p.bwd_flops, p.bwd_macs, p.recompute_flops, p.recompute_macs, p.optimizer_flops, p.executed_flops,
               p.model_flops)
    assert unknown == (None,) * 7
    assert p.phases["backward"].flops is None and p.phases["forward"].flops == 2 * B * D * D
    assert p.modules.bwd_flops is None and p.modules.fwd_macs == B * D * D
    assert "as deepspeed counts it" in p.summary() and "deepspeed does not see it" in p.summary()
    assert Profile.from_json(p.to_json()) == p


def test_conventions_leave_each_other_alone():
    """Counts are remembered by signature: one convention must not see another's."""
    model = nn.ReLU()
    counts = [under(c, model, torch.empty(4, 4)).fwd_flops for c in (*CONVENTIONS, *CONVENTIONS)]
    assert counts == [16, 16] * 2


def test_unknown_convention():
    with pytest.raises(InputError, match="convention='ptflops': must be one of 'own', 'deepspeed'"):
        make_flops_profiler("ptflops")


def test_convention_on_the_command_line(capsys):
    from analyzer.cli import main

    assert main([
        "profile", "resnet18", "--input", "2x3x32x32", "--mode", "infer", "--convention", "deepspeed", "--show",
        "summary"
    ]) == 0
    assert "as deepspeed counts it" in capsys.readouterr().out


def test_of_a_step_that_memory_ran_out_in_only_what_ended_is_told():
    from analyzer.record.options import ProfileOptions

    # 16 MiB of weights and the workspace of cuBLAS fit; the workspace of the backward thread does not
    p = profile(nn.Linear(2048, 2048, bias=False), args=(torch.empty(64, 2048), ),
                options=ProfileOptions(capacity_bytes=60 * 2**20))
    assert p.out_of_memory.phase == "backward"
    assert p.fwd_macs == 64 * 2048 * 2048
    assert (p.bwd_flops, p.executed_flops, p.recompute_macs, p.hardware_flops) == (None,) * 4
    assert {o.phase for o in p.operators} == {"forward"}


def test_threads_that_ask_for_rules_at_once_find_them_all():
    """In a process of its own: here they are imported already. Also, an import reads no device of the catalogue."""
    code = """
import analyzer, threading, torch
from analyzer.hardware.device_spec import read_shipped
misses = read_shipped.cache_info().misses
analyzer.hardware.find_device("a100_80gb")
assert (misses, read_shipped.cache_info().misses) == (0, 1)
from analyzer.profilers.kernel_time import find_rule
from analyzer.profilers.flop_registry import find_formula
found, gate = [], threading.Barrier(8)
def ask():
    gate.wait()
    found.append(find_rule(torch.ops.aten.mm.default) is not None
                 and find_formula(torch.ops.aten.mm.default) is not None)
threads = [threading.Thread(target=ask) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert found == [True] * 8, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
