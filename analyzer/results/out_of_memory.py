"""What can be said of a step that ended for want of memory."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.record.log import Log

from .info import OutOfMemoryInfo
from .wrapper import ModulePaths

PHASES = ("forward", "backward", "optimizer", "zero_grad")  #: of a step, in order
# In which phase a quantity is complete; those of the whole step never are in a step that was not finished.
_BORN_IN_FORWARD = ("accumulate_bytes", "incremental_bytes", "output_bytes", "temp_bytes", "backward_bytes",
                    "activation_bytes", "saved_bytes")
_WHOLE_STEP = ("step_seconds", "kernel_seconds")


def describe_shortage(log: Log, paths: ModulePaths) -> OutOfMemoryInfo | None:
    """Where the run ended for want of memory, None where it did not."""
    short = log.shortage
    if short is None:
        return None
    return OutOfMemoryInfo(
        operator=short.operator, phase=short.phase, node=log.nodes[short.node].name if short.node >= 0 else None,
        module_path=paths.find(log.modules[short.module].path) or None, step=short.step,
        requested_bytes=short.requested_bytes, short_bytes=short.short_bytes, allocated_bytes=short.allocated_bytes,
        reserved_bytes=short.reserved_bytes, capacity_bytes=short.capacity_bytes)


def list_finished_phases(log: Log) -> tuple[str, ...]:
    """The finished phases of the log's last step, which is the last whole one where there is one."""
    short = log.shortage
    if short is None or short.step:
        return PHASES
    return PHASES[:PHASES.index(short.phase)] if short.phase in PHASES else ()


def find_unfinished(log: Log) -> Callable[[str], bool] | None:
    """Tells of a quantity whether the run ended before it was complete; None where all are complete."""
    finished = list_finished_phases(log)
    if finished is PHASES:
        return None
    return lambda name: name in _WHOLE_STEP or _phase_of(name) not in (*finished, "zero_grad")


def _phase_of(name: str) -> str:
    if name.startswith("fwd_") or name in _BORN_IN_FORWARD:
        return "forward"
    if name.startswith(("bwd_", "recompute_")) or name in ("executed_flops", "saved_tensors"):
        return "backward"
    return "optimizer" if name.startswith("optimizer_") else "zero_grad"


def describe_placement(module: torch.nn.Module, error: DeviceOutOfMemoryError) -> dict[str, Any]:
    """The fields of the profile of a model that does not even fit before its first step."""
    tensors = list(module.parameters())
    return {"params": sum(p.numel() for p in tensors),
            "param_bytes": sum(p.numel() * p.element_size() for p in tensors),
            "out_of_memory": OutOfMemoryInfo(operator="placing the model and its inputs", phase="setup",
                                             requested_bytes=error.requested_bytes, short_bytes=error.short_bytes,
                                             allocated_bytes=error.allocated_bytes, reserved_bytes=error.reserved_bytes,
                                             capacity_bytes=error.capacity_bytes)}
