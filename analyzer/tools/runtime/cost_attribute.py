"""What DeepSpeed's profiler and flops-profiler leave on modules while they profile: ``__flops__`` and its like."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from analyzer.profilers.flops import find_convention
from analyzer.profilers.latency import call_seconds
from analyzer.profilers.operator.registration import FlopCount
from analyzer.report.compat.deepspeed import name_function
from analyzer.report.module_tree import list_holders
from analyzer.results.info import ModuleInfo
from analyzer.units import add_quantities

from .recorder import RuntimeRecorder

_ZERO = ("__flops__", "__macs__", "__duration__", "__start_time__", "__expert_params__", "__model_expert_params__")


@dataclass
class FunctionCost:
    """What the calls of one function in one module cost."""

    flops: int = 0
    macs: int = 0
    duration: float | None = 0.0


class CostAttributes:
    """Attributes of the modules of one model. A module's ``__flops__`` and ``__macs__`` are of what it does itself, its
    ``__params__`` and ``__duration__`` (seconds of the forward pass, of a simulated device predicted for its kernels;
    None where neither is known) of all below it too, its ``__profile_table__`` has a `FunctionCost` a function.
    """

    def __init__(self, model: nn.Module, convention: str) -> None:
        self._convention, self._by_path = find_convention(convention), dict(model.named_modules())
        self._counts: dict[Any, FlopCount | None] = {}
        self._calls = self._laps = 0        # how much of the recording was read
        self._seconds: dict[str, float | None] = defaultdict(float)
        for module in self._by_path.values():
            module.__dict__.update({name: 0 for name in _ZERO}, __params__=sum(p.numel() for p in module.parameters()),
                                   __profile_table__=defaultdict(FunctionCost))

    def remove(self) -> None:
        for module in self._by_path.values():
            for name in (*_ZERO, "__params__", "__profile_table__"):
                module.__dict__.pop(name, None)

    def fill(self, recorder: RuntimeRecorder) -> None:
        """Add what ran since the last time."""
        log, calls = recorder.log, recorder.log.calls
        if not recorder.is_simulated:
            recorder.clock.settle()
        for index in range(self._calls, len(calls)):
            kind = log.modules[calls[index].module]
            module = self._by_path.get(kind.path)
            if calls[index].phase == "forward" and module is not None:
                self._add_call(recorder, index, kind, module)
        self._calls = len(calls)
        if not recorder.is_simulated:
            for (_, start), (lap, end) in pairwise(recorder.laps[max(0, self._laps - 1):]):
                if lap is not None and lap[1] == "forward":
                    path = log.modules[lap[2]].path
                    self._seconds[path] = add_quantities((self._seconds[path], recorder.clock.seconds(start, end)))
            self._laps = len(recorder.laps)
        is_untimed = recorder.is_simulated and recorder.spec is None
        whole: dict[str, float | None] = defaultdict(lambda: None if is_untimed else 0.0)
        for path, seconds in self._seconds.items():
            for holder in list_holders(path):
                whole[holder] = add_quantities((whole[holder], seconds))
        for path, module in self._by_path.items():
            module.__dict__["__duration__"] = whole[path]

    def _add_call(self, recorder: RuntimeRecorder, index: int, kind: Any, module: nn.Module) -> None:
        """Add one call: measured, or predicted for the device that is simulated."""
        call = recorder.log.calls[index]
        if recorder.is_simulated:
            seconds = None if recorder.spec is None else call_seconds(call, recorder.spec)
            self._seconds[kind.path] = add_quantities((self._seconds[kind.path], seconds))
        else:
            seconds = recorder.clock.seconds(*recorder.spans[index])
        key = call.signature, kind.type
        if key not in self._counts:
            self._counts[key] = self._convention.count(call, recorder.log)
        count = self._counts[key] or FlopCount(0)
        if not count.flops:
            return
        module.__dict__["__flops__"] += count.flops
        module.__dict__["__macs__"] += count.macs
        kernel = getattr(module, "kernel_size", None)
        described = ModuleInfo(path="", type=type(module).__name__,
                               kernel_size=tuple(kernel) if isinstance(kernel, (tuple, list)) else None)
        entry = module.__dict__["__profile_table__"][name_function(str(call.signature.op), described)]
        entry.flops, entry.macs = entry.flops + count.flops, entry.macs + count.macs
        entry.duration = add_quantities((entry.duration, seconds))
