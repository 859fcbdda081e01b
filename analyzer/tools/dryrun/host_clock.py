"""Clocks and libraries that scripts ask for and that a machine without a device lacks."""
from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.profiler
import torch.utils.benchmark

from analyzer.cuda.sdp_choice import simulated_capability
from analyzer.hardware import DeviceSpec
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.profilers.latency import call_seconds
from analyzer.record.log import Log
from analyzer.units import add_quantities

# Clocks of the host that scripts read: in a run without data they tell what Python takes, which is no measurement.

#: What a script's own clocks are, for the assumptions.
HOST_CLOCK = ("the script reads Python's clock: times that it prints are those of a run without data, not of the "
              "device; torch.cuda.Event answers predicted ones")
#: Classes that time what runs, with the method that begins to.
TIMERS: tuple[tuple[Any, str], ...] = ((torch.utils.benchmark.Timer, "__init__"), (torch.profiler.profile, "start"))
_CLOCKS = re.compile(r"\bperf_counter(_ns)?\b|\btime\.(time|monotonic|process_time)(_ns)?\b|\btimeit\b"
                     r"|\bfrom\s+time\s+import\b[^\n]*\b(time|monotonic|process_time)\b")


def reads_clock(script: Path) -> bool:
    return _CLOCKS.search(script.read_text(encoding="utf-8", errors="replace")) is not None


class PredictedTimer:
    """Sums the predicted kernels of the operators that ran on the device; a mark is how many had run."""

    def __init__(self, log: Log, spec: DeviceSpec) -> None:
        self.log, self.spec = log, spec

    def mark(self) -> int:
        return len(self.log.call_slots)

    def seconds(self, start: int, end: int) -> float | None:
        """From one mark to another, 0 where that is earlier; None where the time of an operator is not known."""
        return add_quantities([
            call_seconds(call, self.spec) for call in self.log.calls[start:end]
            if any(tensor.device.startswith(self.spec.kind)
                   for tensor in (*call.signature.outputs, *call.signature.inputs))])

    def describe(self) -> str:
        return f"times predicted for {self.spec.name}, of the kernels between the two events"


# torchao asks which GPU there is, and whether torch was built with CUDA: the simulated one is enough for both.

_LEAST = {"is_sm_at_least_89": (8, 9), "is_sm_at_least_90": (9, 0), "is_sm_at_least_100": (10, 0)}

#: What to answer instead of functions of modules, by their places in these.
CAPABILITIES: dict[str, dict[str, Callable[..., Any]]] = {"torchao.utils": {
    **{name: partial(lambda least: simulated_capability() >= least, least) for name, least in _LEAST.items()},
    "is_sm_version": lambda major, minor: simulated_capability() == (major, minor)}}

_OF_EXTRA = ("accelerate", "bitsandbytes", "datasets", "lightning", "peft", "torchao", "trl")  # `scripts` of pyproject


def advise_install(error: BaseException) -> str | None:
    """A sentence where ``error``, or what led to it, says that a package of the extra ``scripts`` is missing."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__context__, one.__cause__]
        for name in _OF_EXTRA if isinstance(one, ImportError) else ():
            if re.search(rf"\b{name}\b", str(one)) and importlib.util.find_spec(name) is None:
                return (f"{name} is not installed here; pip install 'symbolic-analyzer[scripts]' has what scripts "
                        f"import, {', '.join(_OF_EXTRA)}. A GPU is not needed for any of them.")
    return None


Make = Callable[[], Iterable[Undo]]


def answer_each(module: str, answers: Mapping[str, Callable[..., Any]]) -> Iterator[Undo]:
    """Answer instead of functions of a module, which must be imported; each result undoes one replacement."""
    for place, instead in answers.items():
        *path, name = place.split(".")
        owner = reduce(getattr, path, sys.modules[module])
        if hasattr(owner, name):  # versions differ
            yield answer(owner, name, instead)


class _Finder:
    """Finds the modules asked for as others do, and lets their loaders make the replacements at the end."""

    def __init__(self, makers: Mapping[str, Make], undo: ExitStack) -> None:
        self._makers, self._undo = makers, undo
        self._searching = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._makers or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                for undo in self._makers[name]() if module.__name__ == name else ():
                    self._undo.callback(undo)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def replaced_once_imported(makers: Mapping[str, Make]) -> Iterator[None]:
    """For the length of a block, make the replacements of each module in ``makers``: now, or when it is imported."""
    with ExitStack() as undo:
        later = {name: make for name, make in makers.items() if name not in sys.modules}
        for name in makers.keys() - later.keys():
            for one in makers[name]():
                undo.callback(one)
        finder = _Finder(later, undo)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        yield
