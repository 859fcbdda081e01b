"""One run for many devices: whether each device has the figures that it has alone, and what a command for the whole
catalogue takes, set against that for one device.
"""
from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
from typing import Any, NamedTuple

from analyzer import Profile, profile
from analyzer.api import model_run
from analyzer.api.device_run import profile_each
from analyzer.hardware import DeviceSpec, register_device
from benchmarks.page import ROOT, markdown, processor_seconds
from benchmarks.speed.case import CASES, Prepared
from benchmarks.speed.runs import take_seconds
from benchmarks.speed.timing import Report, apart, format_ratio

COMMANDS = ("hf:qwen2.5-7b --lora 16", "resnet50", "hf:llama-3.1-8b --checkpointing")
#: worked out when they are read, and long: compared on each of so many devices
_ROWS = ("nodes", "modules", "module_calls", "operators", "spans", "timeline", "memory_events", "holders",
         "peak_by_category", "peak_allocated_bytes_range", "peak_reserved_bytes_range", "assumptions")
_WHOLE_EACH = 12


class Shared(NamedTuple):
    """How many devices and runs there were, how many devices with other figures than alone, and processor seconds."""

    devices: int
    runs: int
    others: int
    seconds: float
    alone_seconds: float


def list_devices() -> list[DeviceSpec]:
    """Those that `analyzer fit` tries."""
    return [spec for spec in register_device if spec.memory_bytes is not None or spec.name == "cpu"]


def _read(found: Profile, is_whole: bool) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)
            if is_whole or field.name not in _ROWS}


def compare_devices(name: str) -> Shared:
    """A training step of one of the models of the other sections, on all devices and on each."""
    case = Prepared(next(case for case in CASES if case.name == name))
    specs, runs, run = list_devices(), [0], model_run.run_repeating

    def count(*given: Any) -> Profile:
        runs[0] += 1
        return run(*given)

    model_run.run_repeating = count  # type: ignore[assignment]
    try:
        seconds, found = take_seconds(lambda: dict(profile_each(specs, case.model, case.args, case.kwargs,
                                                                optimizer="adamw")))
    finally:
        model_run.run_repeating = run
    others, alone_seconds = 0, 0.0
    for i, spec in enumerate(specs):
        taken, alone = take_seconds(lambda spec=spec: profile(  # type: ignore[misc]
            case.model, case.args, case.kwargs, optimizer="adamw", device=spec))
        alone_seconds += taken
        is_whole = i % _WHOLE_EACH == 0
        others += _read(alone, is_whole) != _read(found[i].profile, is_whole)
    return Shared(len(specs), runs[0], others, seconds, alone_seconds)


def time_command(words: str) -> float:
    """Processor seconds of a command, imports included."""
    before = processor_seconds(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "analyzer", *words.split()], cwd=ROOT, check=True, capture_output=True)
    return processor_seconds(resource.RUSAGE_CHILDREN) - before


def report_devices(report: Report) -> None:
    timed = [(words, time_command(f"profile {words}"), time_command(f"fit {words}")) for words in COMMANDS]
    ratios = [whole / one for _, one, whole in timed]
    found = {case.name: apart(compare_devices, case.name) for case in report.cases}
    report.targets += [("`analyzer fit` over the catalogue to `analyzer profile`, the worst of three", max(ratios),
                        max(ratios), 2.5),
                       ("devices with other figures than alone", sum(s.others for s in found.values()), None, 0)]
    commands = markdown(["command", "`profile`, s", "`fit`, s", "ratio"], [
        [f"`{words}`", f"{one:.1f}", f"{whole:.1f}", format_ratio(whole / one)]
        for words, one, whole in timed])
    rows = markdown(["model, a step with AdamW", "devices", "runs", "together, s", "each alone, s", "other figures"], [
        [name, str(s.devices), str(s.runs), f"{s.seconds:.1f}", f"{s.alone_seconds:.1f}", str(s.others)]
        for name, s in found.items()], cases="speed/devices")
    report.add("devices", "Processor seconds of whole commands, imports included, for one device and for all whose "
               "memory is known; and what a step on all of them takes in one process. All figures of each device are "
               "compared with those of a profile on it alone, rows and ranges of memory on every "
               f"{_WHOLE_EACH}th device.\n\n{commands}\n\n{rows}")
