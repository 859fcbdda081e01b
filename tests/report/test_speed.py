"""Rates of a step: samples, tokens, FLOPs, utilization, and how they are told."""
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import profile
from analyzer.api.result import Profile
from analyzer.hardware import find_device, kernel_time
from analyzer.report.quantity import read_quantity
from analyzer.report.speed import (
    describe_bound,
    describe_speed,
    find_remedy,
    format_step,
    list_bounds,
    list_faster_formats,
    list_rates,
)
from analyzer.report.summary import describe_shortly, model_table
from analyzer.results.info import BOUNDS, PhaseInfo

H100 = find_device("h100").flops_per_second
STEP = Profile(name="p", mode="train", device="h100", autocast="bfloat16", fwd_macs=10**12, bwd_macs=2 * 10**12,
               recompute_macs=10**12, fwd_flops=2 * 10**12, bwd_flops=4 * 10**12, recompute_flops=2 * 10**12,
               step_seconds=0.02, batch_size=4, tokens=4096, data_parallel_size=2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 16), nn.Linear(16, 100)

    def forward(self, tokens, attention_mask=None, labels=None):
        return self.head(self.embed(tokens))


def ids(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def test_rates():
    assert STEP.mfu() == pytest.approx(6e12 / (0.02 * H100.bf16))
    assert STEP.hfu() == pytest.approx(8e12 / (0.02 * H100.bf16))
    assert (STEP.samples_per_second, STEP.tokens_per_second) == (400, 409_600)  # of both copies
    assert STEP.model_flops_per_second == 6e12 / 0.02
    assert read_quantity(STEP, "mfu") == STEP.mfu() and read_quantity(STEP, "tokens_per_second") == 409_600
    table = model_table([("p", STEP)], ["tokens_per_second", "mfu", "hfu"])
    assert "Tokens/s" in table and "409.60 K" in table and f"{100 * STEP.mfu():.1f} %" in table


@pytest.mark.parametrize("lack", [{"step_seconds": None}, {"device": None}, {"device": "a card of their own"},
                                  {"fwd_macs": None}])
def test_what_is_unknown_is_none(lack):
    p = replace(STEP, **lack)
    assert read_quantity(p, "mfu") is None and read_quantity(p, "hfu") is None
    assert not any("MFU" in line for line in describe_speed(p))
    if "step_seconds" in lack:
        assert (p.mfu(), p.tokens_per_second, p.samples_per_second, p.model_flops_per_second) == (None,) * 4
        assert list(list_rates(p)) == [] == describe_speed(p)


def test_a_profile_knows_what_ran_in_tf32():
    """Also where PyTorch is set otherwise when it is read: a script's setting ends with its run."""
    plain = replace(STEP, autocast=None, product_dtype="float32", tf32=())
    fast = replace(plain, tf32=("matmul",))
    assert plain.mfu() == pytest.approx(6e12 / (0.02 * H100.fp32))
    assert fast.mfu() == pytest.approx(6e12 / (0.02 * H100.tf32))
    assert list_faster_formats(plain)[0] == "TF32" and "TF32" not in list_faster_formats(fast)
    model = nn.Sequential(nn.Linear(64, 64))
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        made = profile(model, torch.empty(8, 64), device="h100")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert made.tf32 == ("matmul", "conv", "rnn")
    assert Profile.from_json(made.to_json()).mfu() == made.mfu()


def test_where_copies_are_unknown_the_rate_is_that_of_the_rank():
    """A script that reduces its gradients by calls of its own: 4096 tokens, or 4 samples, in 0.02 s."""
    unknown = replace(STEP, data_parallel_size=None, world_size=8)
    assert describe_speed(unknown)[-1].startswith("speed: 204.80 K tokens of this rank a second, ")
    assert describe_speed(replace(unknown, tokens=None))[-1].startswith("speed: 200 samples of this rank a second, ")


def test_float32_convolutions_run_in_tf32_and_products_do_not():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 30 * 30, 10))
    p = profile(model, torch.empty(4, 3, 32, 32), mode="infer", device="h100")
    conv, linear = 4 * 8 * 30 * 30 * 27, 4 * 7200 * 10
    assert p.mfu(1.0) == pytest.approx(2 * conv / H100.tf32 + 2 * linear / H100.fp32)
    assert p.mfu(1.0, dtype="float32") == pytest.approx(2 * (conv + linear) / H100.fp32)


@pytest.mark.parametrize(("args", "kwargs", "tokens"), [
    ((ids(4, 32),), {}, 128), ((), {"attention_mask": ids(4, 32), "tokens": ids(4, 31)}, 124),
    ((ids(4, 32),), {"labels": ids(4, 32)}, 128),
])
def test_tokens_are_those_of_the_input(args, kwargs, tokens):
    assert profile(Decoder, args, kwargs, device="h100").tokens == tokens


def test_the_saved_profile_has_what_follows_from_its_figures():
    text = STEP.to_json()
    assert json.loads(text)["derived"] == {
        "samples_per_second": 400, "tokens_per_second": 409_600, "model_flops_per_second": 3e14, "mfu": STEP.mfu(),
        "hfu": STEP.hfu()}
    assert Profile.from_json(text) == STEP


def test_the_range_stands_beside_the_step():
    ranged = replace(STEP, step_seconds_range=(0.018, 0.0225), kernel_seconds=0.015)
    assert format_step(ranged) == "20.00 ms (18.00 to 22.50)"
    assert format_step(replace(ranged, step_seconds=0.00095, step_seconds_range=(0.0009, 0.0011))) == (
        "950.00 us (900.00 us to 1.10 ms)")
    assert "  time: 20.00 ms predicted (18.00 to 22.50), 15.00 ms of kernels\n" in describe_shortly(ranged)
    lines = ranged.summary().splitlines()
    assert "  step (wall time)     20.00 ms (18.00 to 22.50)" in lines
    assert "  kernels (their sum)                   15.00 ms" in lines
    assert "Time (predicted for h100: models of kernels and host)" in lines


def test_a_measured_time_is_not_called_predicted():
    measured = replace(STEP, device="cpu", measured_steps=3,
                       seconds_method="measured on cpu with 2 threads (host clock)")
    assert "predicted" not in measured.summary() + describe_shortly(measured)
    assert describe_speed(measured)[0] == "time: 20.00 ms measured"
    assert "Time (measured on cpu with 2 threads (host clock))" in measured.summary()


def test_the_peak_is_that_of_the_dtype_in_which_products_are_computed():
    class Cast(torch.nn.Linear):  # as FSDP's mixed precision: parameters stay float32, products are of bfloat16
        def forward(self, x):
            return torch.nn.functional.linear(x.bfloat16(), self.weight.bfloat16())

    p = profile(Cast(1024, 1024, bias=False), args=(torch.empty(256, 1024),), mode="infer", device="h100_sxm")
    assert p.product_dtype == "bfloat16"
    assert p.mfu() == p.mfu(dtype="bfloat16")


# ---- what bounds a step is told by phase, with what would help


def test_a_record_has_seconds_for_all_that_bounds_kernels():
    assert BOUNDS == ("launch", *kernel_time.BOUNDS)


def phase(**seconds: float) -> PhaseInfo:
    parts = {f"{bound}_seconds": seconds.get(bound, 0.0) for bound in BOUNDS}
    return PhaseInfo(seconds=sum(seconds.values()), kernel_seconds=sum(seconds.values()) - seconds.get("launch", 0.0),
                     **parts)


def make(**phases: PhaseInfo) -> Profile:
    return Profile(name="Net", mode="train", phases=phases)


def test_rows_tell_seconds_and_shares() -> None:
    p = make(forward=phase(launch=1e-3, memory=3e-3), backward=phase(arithmetic=2e-3), zero_grad=PhaseInfo())
    assert list(list_bounds(p)) == [("forward", "1.00 ms 25.0 %", "-", "3.00 ms 75.0 %", "-", "-"),
                                    ("backward", "-", "2.00 ms 100.0 %", "-", "-", "-")]
    assert find_remedy(p) == f"memory, 50.0 %: {describe_bound(p, 'memory')}"
    assert [p.phases[name].bound for name in p.phases] == ["memory", "arithmetic", None]


def test_only_what_a_step_has_is_suggested_to_be_less() -> None:
    plain = make(forward=phase(arithmetic=2e-3))
    assert describe_bound(plain, "arithmetic").endswith(": narrower formats, a device with a higher peak rate")
    assert "recomputation" in describe_bound(replace(plain, recompute_flops=1), "arithmetic")
    updated = make(forward=phase(memory=2e-3), optimizer=phase(memory=1e-3))
    for bound in ("launch", "memory"):
        assert "optimizers" not in describe_bound(plain, bound)
        assert "fused optimizers, " in describe_bound(updated, bound)


def test_nothing_is_said_where_no_time_is_known() -> None:
    p = make(forward=PhaseInfo())
    assert list(list_bounds(p)) == [] and find_remedy(p) is None and "What bounds it" not in p.summary()


@pytest.mark.parametrize(("batch", "bound"), [(1, "launch"), (65536, "arithmetic")])
def test_a_large_batch_is_bound_by_arithmetic_and_a_small_one_by_launches(batch: int, bound: str) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)])
    p = profile(model, args=(torch.empty(batch, 2048),), mode="infer", device="a100")
    assert p.phases["forward"].bound == bound and f"Most: {bound}" in p.summary()
    assert p.modules is not None and p.modules.bound == bound
    parts = [getattr(p.phases["forward"], f"{name}_seconds") for name in BOUNDS]
    assert sum(parts) == pytest.approx(p.fwd_seconds)
