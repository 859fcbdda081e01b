"""What bounds a step is told by phase, with what would help."""
from __future__ import annotations

import pytest
import torch

from analyzer import Profile, profile
from analyzer.report.speed import describe_bound, find_remedy, list_bounds
from analyzer.results.info import BOUNDS, PhaseInfo


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


def test_a_phase_that_only_waits_has_no_parts_to_tell() -> None:
    p = make(forward=PhaseInfo(seconds=1e-3, launch_seconds=0.0))
    assert list(list_bounds(p)) == [] and "None" not in p.summary()
