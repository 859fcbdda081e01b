"""Private torch API: ``torch.distributed._tools``' `RuntimeEstimator` and `SACEstimator` with the predicted seconds of
this project. Where theirs ask the GPU that is there for its speed, these take a device of the catalogue.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.distributed._tools import runtime_estimator, sac_estimator
from torch.distributed._tools.sac_estimator import MSPS, SACGreedyOrderMeta, SACStats, SACTradeOffStats
from torch.utils._python_dispatch import TorchDispatchMode

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.current_spec import simulated_spec
from analyzer.meta.operator_info import describe_operator
from analyzer.meta.state import current
from analyzer.profilers.latency import call_seconds
from analyzer.record.op_call import OpCall
from analyzer.runtime.dispatch import describe_call

__all__ = ["MSPS", "RuntimeEstimator", "SACEstimator", "SACGreedyOrderMeta", "SACStats", "SACTradeOffStats"]
_COST_MODEL = "operator-level-cost-model"


def estimate_milliseconds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any,
                          device: DeviceSpec) -> float:
    """What a call of an operator is predicted to take on ``device``. Raises InputError where a figure of the device
    that it takes is not known.

    >>> x = torch.empty(4096, 4096, device="meta")
    >>> call = torch.ops.aten.mm.default, (x, x), {}, x @ x
    >>> f"{estimate_milliseconds(*call, find_device('h100')):.1f}"  # 2.05 at the peak rate of float32
    '2.7'
    """
    if func.namespace == "prim":  # what torch's fake tensors ask of each other
        return 0.0
    with torch._C.DisableTorchFunction():
        found = None if describe_operator(func).silent else describe_call(func, args, kwargs, result)
        if found is None:
            return 0.0
        signature, inputs, outputs = found
        reads, writes = (tuple(t.untyped_storage()._cdata if t.layout is torch.strided else id(t) for t in tensors)
                         for tensors in (inputs, outputs))
    seconds = call_seconds(OpCall(signature, reads, writes, 0, "forward", 0, 0, None, False), device)
    if seconds is None:
        raise InputError(f"{device.name}: a figure that {func} takes is not known: its memory bandwidth, or its peak "
                         "rate for this dtype")
    return 1e3 * seconds


class _Estimating:
    """How both estimators take their time: by the models of a device's kernels, under tensors that have no data."""

    device: DeviceSpec | None
    _spec: DeviceSpec

    def _take(self, device: str | DeviceSpec | None) -> None:
        self.device = None if device is None else find_device(device)

    def _estimate_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, float]:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        return result, estimate_milliseconds(func, args, kwargs, result, self._spec)

    def _check_mode(self, kind: str) -> None:
        if kind != _COST_MODEL:
            raise NotImplementedError(f"estimate_mode_type={kind!r}: only {_COST_MODEL!r} needs no GPU; to measure "
                                      "operators on one, see analyzer.runtime.measure")

    def _check_entered(self) -> None:
        if current() is None and active_fake_mode() is None:
            raise InputError(f"{type(self).__name__}: enter analyzer.MetaTensorMode() (or torch's FakeTensorMode()) "
                             "first, and make the model and its inputs in it")
        self._spec = self.device or simulated_spec()


class RuntimeEstimator(_Estimating, runtime_estimator.RuntimeEstimator):
    """torch's `RuntimeEstimator`, used as that: what runs in its block is estimated, by module, forward and backward.

    ``device`` is a name of the catalogue or a `DeviceSpec`, by default the simulated one (an H200 outside of a dry
    run). The model is made under `analyzer.MetaTensorMode` or torch's `FakeTensorMode`. ``total_runtime`` and
    ``mod_runtimes`` are milliseconds. Raises InputError outside of these modes, UnknownDeviceError, and
    NotImplementedError for the mode that measures.

    >>> from analyzer import MetaTensorMode
    >>> estimator = RuntimeEstimator(device="h100")
    >>> with MetaTensorMode():
    ...     model, x = torch.nn.Sequential(torch.nn.Linear(4096, 4096)).cuda(), torch.rand(4096, 4096, device="cuda")
    ...     with estimator("operator-level-cost-model"):
    ...         model(x).sum().backward()
    Estimated (operator-level-cost-model)total_time: 5.4... ms
    >>> {way: round(ms, 1) for way, ms in estimator.mod_runtimes["Sequential.0"].items()}
    {'fw': 2.7, 'bw': 2.7}
    """

    def __init__(self, device: str | DeviceSpec | None = None) -> None:
        super().__init__()
        self._take(device)

    def __call__(self, estimate_mode_type: str) -> RuntimeEstimator:
        """Choose the way to estimate, of which there is one."""
        self._check_mode(estimate_mode_type)
        self._estimate, self._estimate_mode_type = self._estimate_call, estimate_mode_type
        return self

    def __enter__(self) -> RuntimeEstimator:
        self._check_entered()
        if not hasattr(self, "_estimate"):
            self(_COST_MODEL)
        self.total_runtime = 0.0
        self.mod_runtimes = defaultdict(lambda: defaultdict(lambda: 0.0))

        def note(order: list[str]) -> Callable[..., None]:
            order.clear()
            return lambda module, *_: order.append(tracker.get_known_fqn(module))

        tracker = self._mod_tracker
        tracker.register_user_hooks(
            pre_fw_hook=note(self.mod_fw_pre_order), pre_bw_hook=note(self.mod_bw_pre_order),
            post_fw_hook=note(self.mod_fw_post_order), post_bw_hook=note(self.mod_bw_post_order))
        tracker.__enter__()
        TorchDispatchMode.__enter__(self)
        return self


class SACEstimator(_Estimating, sac_estimator.SACEstimator):
    """torch's `SACEstimator`, used as that: what recomputing each operator of a module in backward would save and cost.

    ``device`` and the modes to make the model in are as for `RuntimeEstimator`. ``sac_mod_stats`` has times in
    milliseconds and memory in bytes, by module; ``sac_mod_greedy_order_meta`` the order in which to recompute.

    >>> from analyzer import MetaTensorMode
    >>> estimator = SACEstimator(device="h100")
    >>> with MetaTensorMode():
    ...     model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()
    ...     with estimator("operator-level-cost-model"):
    ...         out = model(torch.rand(32, 64, device="cuda"))
    >>> stats = estimator.sac_mod_stats["Sequential"]
    >>> [(name, nbytes) for name, nbytes in zip(stats.func_names, stats.memory) if name != "t"]
    [('addmm', 8192), ('gelu', 8192), ('addmm', 0)]
    """

    def __init__(self, device: str | DeviceSpec | None = None) -> None:
        super().__init__()
        self._take(device)
        self._estimate_runtime = self._estimate_call

    def __call__(self, estimate_mode_type: str) -> SACEstimator:
        """Choose the way to estimate, of which there is one."""
        self._check_mode(estimate_mode_type)
        return self

    def __enter__(self) -> SACEstimator:
        self._check_entered()
        self._mod_tracker.register_user_hooks(pre_fw_hook=self._pre_fw_hook, post_fw_hook=self._post_fw_hook)
        self._mod_tracker.__enter__()
        self._saved_tensor_hook_ctx.__enter__()
        TorchDispatchMode.__enter__(self)
        return self
