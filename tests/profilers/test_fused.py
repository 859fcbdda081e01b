"""FLOPs, traffic and time of kernels that a compiler generates, and the host's time for a compiled graph."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from analyzer import Profile, profile
from analyzer.hardware import find_device
from analyzer.hardware.kernel_time.generated import KINDS, generated_time
from analyzer.meta.fused_kernel import FusedKernel
from analyzer.meta.spec import Launch, Signature, TensorSpec
from analyzer.profilers.flop_registry import count_call, find_formula, is_zero_flop_op
from analyzer.profilers.host_time import HostTime
from analyzer.profilers.kernel_time import signature_time
from analyzer.profilers.operator.fused import count_instructions, list_uncounted
from analyzer.profilers.traffic import CallTraffic, plan_of
from analyzer.record.log import Log

aten = torch.ops.aten
H200 = find_device("h200")
SIZE = 1 << 24


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * shape[i + 1]
    return TensorSpec.of(shape, tuple(stride), dtype, "cuda:0")


def call(op: Any, *args: Any, out: TensorSpec | None = None) -> Signature:
    inputs = tuple(a for a in args if isinstance(a, TensorSpec))
    return Signature(op, args, {}, inputs, (out if out is not None else inputs[0],))


X = spec(SIZE)
ADD, ERF = call(aten.add.Tensor, X, X), call(aten.erf.default, X)


def fused(*parts: Signature, **fields: Any) -> Signature:
    kernel = FusedKernel("poi_fused", SIZE, 1, (X.nbytes,), (X.nbytes,), (), parts)
    return Signature(dataclasses.replace(kernel, **fields), (), {}, (X,), (X,))  # type: ignore[arg-type]


def seconds(signature: Signature) -> float:
    time = signature_time(signature, H200)
    assert time is not None
    return time.seconds


def test_flops_of_a_kernel_are_those_of_its_parts() -> None:
    count = count_call(fused(ADD, ERF))
    assert count is not None and (count.flops, count.macs) == (2 * SIZE, 0)


def test_a_part_without_a_formula_is_listed_by_its_own_name() -> None:
    unknown = call(aten._assert_scalar.default, X)
    signature = fused(ADD, unknown)
    assert count_call(signature) is None
    assert list_uncounted(signature, count_call) == ["aten._assert_scalar.default"]
    assert list_uncounted(unknown, count_call) == ["aten._assert_scalar.default"]


def test_traffic_is_what_the_kernel_says() -> None:
    plan = plan_of(fused(ADD, read_bytes=(100,), written_bytes=(30,)))
    assert (plan.reads, plan.total, plan.may_be_view) == ((100,), CallTraffic(100, 30), False)


def test_a_stream_takes_the_time_of_its_bytes() -> None:
    assert seconds(fused(ADD)) == pytest.approx(2 * X.nbytes / (4.8e12 * 0.9073), rel=0.1)


def test_functions_that_take_long_bound_a_kernel() -> None:
    few = {"read_bytes": (X.nbytes // 4,), "written_bytes": (X.nbytes // 4,)}
    plain, costly = signature_time(fused(ADD, **few), H200), signature_time(fused(ERF, **few), H200)
    assert plain is not None and costly is not None
    assert (plain.bound, costly.bound) == ("memory", "arithmetic") and costly.seconds > 1.5 * plain.seconds


def test_a_kernel_takes_no_longer_than_its_parts_alone() -> None:
    slow = fused(ADD, read_bytes=(100 * X.nbytes,))
    assert seconds(slow) == pytest.approx(seconds(ADD))


@pytest.mark.parametrize(("device", "instructions"), [("h200", 34.34 * 67 / 34 / 2), ("l40s", 34.34 * 32)])
def test_quotients_in_float64_of_a_vector_take_instructions_for_each_element(device: str, instructions: float) -> None:
    """An L40S has one double for 64 numbers in float32, an H200 one for two; the exponential is that of one power."""
    kernel = dataclasses.replace(fused(ADD).op, spread=(("double", 10), ("exp2", 20)))  # type: ignore[call-overload]
    powers = dataclasses.replace(kernel, spread=(("exp2", 20), ))
    found = count_instructions(kernel, find_device(device)) - count_instructions(powers, find_device(device))
    assert found == pytest.approx(10 * instructions, rel=0.01)


def test_transposed_copies_that_are_written_element_by_element_are_slower_than_copies_alone() -> None:
    """What an H200 took: 1,772 us for three of 8,192 x 4,096 float8 numbers beside 400 MB, 599 us for one."""
    copies = 8192 * 4096
    for number, measured in ((3, 1771.7e-6), (1, 599.5e-6)):
        time = generated_time("mixed", 8192, 4096, 15 * copies, 0, 0, H200, number * copies)
        assert time is not None and time.seconds == pytest.approx(measured, rel=0.08)
    assert seconds(fused(ADD, scattered=10 * SIZE)) > 5 * seconds(ADD)


def test_rows_that_no_cache_holds_are_read_again() -> None:
    def time_of(rows: int) -> float:
        time = generated_time("inner", rows, SIZE // rows, X.nbytes, X.nbytes, 0, H200)
        assert time is not None
        return time.seconds

    assert time_of(SIZE // 2048) < 1.1 * time_of(SIZE // 1024) and time_of(16) > 1.4 * time_of(SIZE // 2048)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_kernel_has_a_time_on_each_kind_of_device(kind: str) -> None:
    for name in ("h200", "mi300x", "xeon_8480"):
        time = generated_time(kind, 1000, 8, 40000, 0, 0, find_device(name))
        assert time is not None and time.seconds > 0 and time.kernels == 1
    assert generated_time(kind, 8, 8, 64, 0, 0, dataclasses.replace(H200, memory_bandwidth=None)) is None


def test_operators_of_graphs_of_inductor_are_counted() -> None:
    import torch._inductor.inductor_prims  # defines them

    for name in ("fma", "prepare_softmax_online", "inductor_random", "_low_memory_max_pool_with_offsets"):
        assert find_formula(getattr(torch.ops.prims, name).default) is not None, name
    for name in ("inductor_seeds", "inductor_lookup_seed", "inductor_force_stride_order", "inductor_randint"):
        assert is_zero_flop_op(getattr(torch.ops.prims, name).default), name
    softmax = call(torch.ops.prims.prepare_softmax_online.default, spec(4, 8), 1, out=spec(4, 1))
    count = count_call(softmax)
    assert count is not None and count.flops == 4 * 32


# ---- the host


def test_a_signature_has_one_copy_for_each_way_to_be_launched() -> None:
    assert ADD.launch is None
    assert ADD.launched(Launch()) is ADD.launched(Launch()) is not ADD.launched(Launch(True))
    assert ADD.launched(Launch(inputs=3)).op is ADD.op and ADD.launched(Launch(inputs=3)).launch == Launch(inputs=3)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def profile_narrow(wrap: Callable[[Any], Any], **options: Any) -> Profile:
    return profile(wrap(Narrow()), (torch.rand(8, 32),), device="h200", optimizer="sgd", **options)


def test_a_compiled_step_that_the_host_bounds_is_faster_and_one_of_cuda_graphs_more_so() -> None:
    eager = profile_narrow(lambda model: model)
    compiled = profile_narrow(torch.compile)
    captured = profile_narrow(lambda model: torch.compile(model, mode="reduce-overhead"))
    assert eager.step_seconds and compiled.step_seconds and captured.step_seconds
    assert captured.step_seconds < compiled.step_seconds < eager.step_seconds
    assert captured.kernel_seconds == pytest.approx(compiled.kernel_seconds, rel=0.2)


def test_the_entry_of_a_graph_costs_the_more_the_more_it_is_given() -> None:
    host = HostTime(H200, Log())

    def cost(launch: Launch | None) -> int:
        found: Any = type("Call", (), {"signature": ADD if launch is None else ADD.launched(launch),
                                       "phase": "forward", "recomputed": False})
        return host.picoseconds(found, 1)

    assert cost(Launch()) < cost(Launch(inputs=1)) < cost(Launch(inputs=100))
    assert cost(Launch(True)) == 0 < cost(Launch(True, 1)) < cost(Launch(inputs=1))
