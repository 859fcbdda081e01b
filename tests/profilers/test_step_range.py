"""The range of a step, by a device on which each kernel takes as long, and is as far off, as the test says, and holds
no multiprocessors that others lack.
"""
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives

from analyzer import Profile, ProfileOptions, profile
from analyzer.hardware.cluster_spec import HostSpec
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime, common_share
from analyzer.parallel import world
from analyzer.profilers import call_sequence, host_time
from analyzer.profilers.latency import SLOWEST_RANK
from tests.call import Call

US = 1e-6
LOAD = {"sin": 10}  #: microseconds longer under load
#: microseconds of a kernel, and how far it may be off
TIMES = {"sin": (40, 0.25), "cos": (100, 0.5), "all_reduce": (200, 1.0)}
ZERO = HostSpec(**{field.name: 0.0 for field in dataclasses.fields(HostSpec)})


@pytest.fixture
def group() -> Iterator[None]:
    with world(2, devices_per_host=2):
        yield


def run(monkeypatch: pytest.MonkeyPatch, forward: Any, host: HostSpec = ZERO, mode: str = "infer",
        device: str = "h100") -> Profile:
    def time(call: Any, spec: Any, log: Any) -> KernelTime:
        name = call.signature.op.__name__.partition(".")[0]
        seconds, spread = TIMES.get(name, (0, 0.0))
        bound = "communication" if name == "all_reduce" else "arithmetic"
        return KernelTime(seconds * US, spread, bound, load_seconds=LOAD.get(name, 0) * US) if seconds else NO_TIME

    monkeypatch.setattr(call_sequence, "kernel_time", time)
    monkeypatch.setattr(host_time, "host_of", lambda spec: host)
    monkeypatch.setattr(call_sequence, "find_share", lambda *given: 0.0)
    x = torch.empty(8, requires_grad=mode == "train")
    return profile(Call(lambda m, x: forward(x)), (x, ), device=device, mode=mode,
                   options=ProfileOptions(steps=1))


def sines(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            y = x.sin()
        return y

    return forward


def ends(p: Profile) -> tuple[float, float]:
    assert p.step_seconds_range is not None
    low, high = p.step_seconds_range
    return round(low / US, 3), round(high / US, 3)


@pytest.mark.parametrize(("repeats", "other"), [(1, False), (4, False), (1, True)])
def test_a_kernel_goes_with_itself_and_partly_with_others(monkeypatch: pytest.MonkeyPatch, repeats: int, other: bool
                                                          ) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = sines(repeats)(x)
        return y + x.cos() if other else y

    own, others = repeats * 40 * 0.25, 100 * 0.5 * other
    error = math.sqrt(common_share() * (own + others)**2 + (1 - common_share()) * (own**2 + others**2))
    step = repeats * 40 + 100 * other
    high = step + error
    assert ends(run(monkeypatch, forward)) == pytest.approx((step * step / high, high), abs=0.002)


def test_kernels_hide_behind_a_host_that_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten operators of 100 us each on the host, whose kernels take 40: all but the last one are waited for."""
    host = dataclasses.replace(ZERO, forward_seconds=100 * US, spread=0.5)

    slower, faster = 10 * 150 + 40, 10 * 100 / 1.5 + 40
    kernel = 1000 + 50  # a quarter more of the last
    low = 1040 / (1 + math.hypot(1040 / faster - 1, 1040 / 1032 - 1))
    high = 1040 * (1 + math.hypot(slower / 1040 - 1, kernel / 1040 - 1))
    assert ends(run(monkeypatch, sines(10), host)) == pytest.approx((low, high), abs=0.01)


def test_a_host_that_just_keeps_up_would_not_if_it_were_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for nothing as predicted, so that a rule of waits would say that it cannot be off."""
    host = dataclasses.replace(ZERO, forward_seconds=38 * US, spread=0.5)

    p = run(monkeypatch, sines(100), host)
    assert p.step_seconds == pytest.approx((100 * 40 + 38) * US)
    low, high = ends(p)
    assert high > 100 * 57 and low > 0.75 * 4038  # kernels are a quarter off, and leave no more to win


@pytest.mark.parametrize(("hidden", "expected"), [
    (True, (480 / 1.25, 480 * (1 + math.hypot(0.25, SLOWEST_RANK)))), (False, (100, 400))])
def test_communication_is_off_by_what_is_not_hidden(monkeypatch: pytest.MonkeyPatch, group: None, hidden: bool,
                                                    expected: tuple[float, float]) -> None:
    """The other rank may be slower at what it computes, and is waited for; that it is faster is no gain."""
    def forward(x: torch.Tensor) -> Any:
        reduced = collectives.all_reduce(x, "sum", dist.group.WORLD)  # 0 to 200, or to 400
        other = [x.sin() for _ in range(12)] if hidden else []        # 0 to 480
        return reduced + 1, other

    assert ends(run(monkeypatch, forward)) == pytest.approx(expected, abs=0.01)


@pytest.mark.usefixtures("replaying_torch")
def test_replayed_layers_have_the_range_of_layers_that_were_run() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    replayed, ran = (profile(model, (torch.empty(4, 16, 64, device="meta"), ), device="h100", optimizer="adamw",
                             reuse=reuse) for reuse in (True, False))
    assert any(row.replayed for row in replayed.replay)
    assert replayed.step_seconds_range == ran.step_seconds_range


@pytest.mark.parametrize(("count", "device", "launch", "share"), [
    (1, "h100", 0, 0.1),                   # of 10 us that the kernel takes longer, 9 % of 100 are left by the other
    (5, "h100", 0, 0.82),                  # 9 of 50
    (5, "h100_sxm,power=500", 0, 1.0),     # of a board of less power the other takes all
    (1, "h100", 200, 0.0)])                # the device waits
def test_kernels_of_a_training_step_take_what_the_power_limit_leaves(monkeypatch: pytest.MonkeyPatch, count: int,
                                                                     device: str, launch: int, share: float) -> None:
    """Its backward pass has one kernel, a cosine of 100 us."""
    host = dataclasses.replace(ZERO, launch_seconds=launch * US)
    p = run(monkeypatch, sines(count), host, "train", device)
    assert p.kernel_seconds == pytest.approx((count * (40 + 10 * share) + 100) * US)
    assert p.phases["forward"].seconds == pytest.approx(max(count * (40 + 10 * share), launch + 40) * US)
    assert run(monkeypatch, sines(count), host, "infer", device).kernel_seconds == pytest.approx(count * 40 * US)
