"""What every model of a kernel's time says of a device of which nothing is known, and of nothing to do."""
from collections.abc import Callable

import pytest
import torch

from analyzer import profile
from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.kernel_time import NO_TIME, KernelTime, norm, pointwise, reduction

Model = Callable[[int, DeviceSpec], KernelTime | None]
#: A model of so much work, of which 0 is none.
MODELS: dict[str, Model] = {
    "layer norm": lambda n, device: norm.layer_norm_time(n, 64, 2, device),
    "its gradients": lambda n, device: norm.layer_norm_backward_time(n, 64, 2, device),
    "batch norm": lambda n, device: norm.native_batch_norm_time(n, 8, 16, 2, device),
    "its gradient": lambda n, device: norm.native_batch_norm_backward_time(n, 8, 16, 2, device),
    "batch norm of cuDNN": lambda n, device: norm.cudnn_batch_norm_time(n, 8, 16, 2, device),
    "in inference": lambda n, device: norm.cudnn_normalize_time(n, 8, 16, 2, device),
    "channels last": lambda n, device: norm.channels_last_norm_time(128 * n, device),
    "moments": lambda n, device: norm.moments_time(n, 32, 2, device),
    "pointwise": lambda n, device: pointwise.pointwise_time(n, 4.0 * n, device),
    "random": lambda n, device: pointwise.random_time(n, 4.0 * n, device),
    "cast": lambda n, device: pointwise.cast_time(n, 6.0 * n, device, converts=True),
    "sort": lambda n, device: pointwise.sort_time(n, 8, 8, device),
    "rows": lambda n, device: pointwise.gather_rows_time(n, 64, 2, device),
    "sums": lambda n, device: pointwise.atomic_time(n, 4, 4.0 * n, device),
    "softmax": lambda n, device: reduction.softmax_time(n, 64, 2, device),
    "softmax of an inner dimension": lambda n, device: reduction.inner_softmax_time(n, 64, 4, 2, device),
    "reduction": lambda n, device: reduction.reduction_time(n, 64, 2, device),
    "optimizer": lambda n, device: pointwise.foreach_time([64] * n, 16, 4, device)}
#: Those in which no work is not no kernel.
LAUNCHED: dict[str, Model] = {
    "losses of few": lambda n, device: pointwise.lone_block_time(n, device),
    "losses of images": lambda n, device: pointwise.position_loss_time(n, 64, device),
    "gradient of a table": lambda n, device: pointwise.embedding_backward_time(n, 64, 128, 2, device)}


@pytest.mark.parametrize("name", [*MODELS, *LAUNCHED])
def test_edges(name: str) -> None:
    """Unknown is None; more work takes no less; no work takes nothing, or what clearing a table takes."""
    model, h200 = {**MODELS, **LAUNCHED}[name], find_device("h200")
    assert model(4, DeviceSpec("no_figures")) is None
    nothing, little, much = (model(count, h200) for count in (0, 4, 10**6))
    assert nothing is not None and little is not None and much is not None
    assert 0 < little.seconds < much.seconds
    assert nothing == NO_TIME if name in MODELS else nothing.seconds <= little.seconds


def test_a_statistic_that_is_known_is_one_pointwise_kernel() -> None:
    """Inference of batch norm needs no sums over the columns."""
    h200 = find_device("h200")
    trained = norm.channels_last_norm_time(2**20, h200)
    used = norm.channels_last_norm_time(2**20, h200, training=False)
    assert trained is not None and used is not None and used.seconds < trained.seconds


# A device of each generation has a time that is not 0.

@pytest.mark.parametrize("name", ["b200", "h100_nvl", "rtx_4090", "a30", "t4", "v100_sxm2_16gb", "p4", "mi250x", "m1",
                                  "xeon_8480"])
def test_a_step_has_a_time_within_its_range(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
                                torch.nn.Flatten(), torch.nn.Linear(32 * 30 * 30, 10))
    p = profile(model, args=(torch.empty(64, 3, 32, 32),), optimizer="adamw", device=name)
    assert p.step_seconds is not None and p.kernel_seconds is not None and p.step_seconds_range is not None
    low, high = p.step_seconds_range
    assert 0 < low < p.step_seconds < high and 0 < p.kernel_seconds
    told = [line for line in p.assumptions if "those of CUDA" in line]
    assert len(told) == (find_device(name).vendor not in ("NVIDIA", "Intel"))


def test_a_faster_device_of_a_generation_is_not_slower() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(4)])
    x = torch.empty(8192, 4096, dtype=torch.bfloat16)
    seconds = {name: profile(model, args=(x,), mode="infer", device=name).kernel_seconds
               for name in ("t4", "v100_sxm2_32gb", "a100_80gb", "h100_sxm", "b200")}
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)
