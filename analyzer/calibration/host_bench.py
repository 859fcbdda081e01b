"""Times what the host does for each operator, module and gradient, with tensors so small that nothing else counts."""
from __future__ import annotations

from collections.abc import Callable

import torch

from analyzer.hardware.cpu_measurement import fastest

_CALLS = 200


def time_host_call(call: str, budget_seconds: float, clock: Callable[[], float]) -> float:
    """Seconds of one ``call`` of `point.HOST_CALLS` on the host's own tensors: Python, dispatch, autograd.

    Raises KeyError for another name.
    """
    if call != "backward":
        run = {"forward": _run_forward, "gradient": _run_gradient, "update": _run_update, "module": _run_modules,
               "list_tensor": _run_lists}[call]
        return fastest(run, budget_seconds, clock) / _CALLS
    best = float("inf")
    start = clock()
    while best == float("inf") or clock() - start < budget_seconds:
        end = _run_gradient()
        before = clock()
        end.backward()
        best = min(best, (clock() - before) / _CALLS)
    return best


def time_device_call(call: str, device: torch.device, budget_seconds: float, clock: Callable[[], float]) -> float:
    """Seconds of the host for one ``"call"`` of an operator whose kernel is queued, or from the end of a kernel until
    the host goes on that waited for it (``"synchronize"``).
    """
    x = torch.zeros(1, device=device, dtype=torch.float32)
    torch.cuda.synchronize(device)
    if call == "call":
        best = float("inf")
        start = clock()
        while best == float("inf") or clock() - start < budget_seconds:
            before = clock()
            for _ in range(_CALLS):
                x.add_(1.0)
            best = min(best, (clock() - before) / _CALLS)
            torch.cuda.synchronize(device)  # outside of the measurement: the queue is empty before the next
        return best
    return fastest(lambda: torch.cuda.synchronize(device), budget_seconds, clock)


def _run_forward() -> torch.Tensor:
    with torch.no_grad():
        x = torch.zeros(1, dtype=torch.float32)
        for _ in range(_CALLS):
            x = torch.mul(x, 1.0)
    return x


def _run_gradient() -> torch.Tensor:
    with torch.enable_grad():
        x = torch.zeros(1, dtype=torch.float32, requires_grad=True)
        for _ in range(_CALLS):
            x = torch.mul(x, 1.0)
    return x


def _run_update() -> torch.Tensor:
    with torch.no_grad():
        x = torch.zeros(1, dtype=torch.float32)
        for _ in range(_CALLS):
            x.add_(x, alpha=0.1)
    return x


class _Nothing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


_module = _Nothing()


def _run_modules() -> torch.Tensor:
    x = torch.zeros(1, dtype=torch.float32)
    for _ in range(_CALLS):
        x = _module(x)
    return x


def _run_lists() -> torch.Tensor:
    tensors = [torch.zeros(1, dtype=torch.float32) for _ in range(_CALLS)]
    torch._foreach_add_(tensors, 1.0)
    return tensors[0]
