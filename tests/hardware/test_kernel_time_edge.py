"""What every model of a kernel's time says of a device of which nothing is known, and of nothing to do."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.kernel_time import NO_TIME, KernelTime, norm, optimizer, pointwise, reduction
from analyzer.hardware.kernel_time import pointwise as gather
from analyzer.hardware.kernel_time import reduction as softmax

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
    "sort": lambda n, device: gather.sort_time(n, 8, 8, device),
    "rows": lambda n, device: gather.gather_rows_time(n, 64, 2, device),
    "sums": lambda n, device: gather.atomic_time(n, 4, 4.0 * n, device),
    "softmax": lambda n, device: softmax.softmax_time(n, 64, 2, device),
    "softmax of an inner dimension": lambda n, device: softmax.inner_softmax_time(n, 64, 4, 2, device),
    "reduction": lambda n, device: reduction.reduction_time(n, 64, 2, device),
    "optimizer": lambda n, device: optimizer.foreach_time([64] * n, 16, 4, device),
}
#: Those in which no work is not no kernel.
LAUNCHED: dict[str, Model] = {
    "losses of few": lambda n, device: gather.lone_block_time(n, device),
    "losses of images": lambda n, device: gather.position_loss_time(n, 64, device),
    "gradient of a table": lambda n, device: gather.embedding_backward_time(n, 64, 128, 2, device),
}


@pytest.mark.parametrize("name", [*MODELS, *LAUNCHED])
def test_edges(name: str) -> None:
    """Unknown is None; more work takes no less; no work takes nothing, or what clearing a table takes."""
    model, h200 = {**MODELS, **LAUNCHED}[name], find_device("h200")
    assert model(4, DeviceSpec("no_figures")) is None
    nothing, little, much = (model(count, h200) for count in (0, 4, 10**7))
    assert nothing is not None and little is not None and much is not None
    assert 0 < little.seconds < much.seconds
    assert nothing == NO_TIME if name in MODELS else nothing.seconds <= little.seconds


def test_a_statistic_that_is_known_is_one_pointwise_kernel() -> None:
    """Inference of batch norm needs no sums over the columns."""
    h200 = find_device("h200")
    trained = norm.channels_last_norm_time(2**20, h200)
    used = norm.channels_last_norm_time(2**20, h200, training=False)
    assert trained is not None and used is not None and used.seconds < trained.seconds
