"""One run for many devices: what a command for the whole catalogue takes, set against that for one device. That each
device has the figures that it has alone is tested (tests/api/test_device_run.py).
"""
from __future__ import annotations

import resource
import subprocess
import sys

from benchmarks.page import ROOT, markdown, processor_seconds
from benchmarks.speed.timing import Report, format_ratio

COMMANDS = ("hf:qwen2.5-7b --lora 16", "resnet50", "hf:llama-3.1-8b --checkpointing")


def time_command(words: str) -> float:
    """Processor seconds of a command, imports included."""
    before = processor_seconds(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "analyzer", *words.split()], cwd=ROOT, check=True, capture_output=True)
    return processor_seconds(resource.RUSAGE_CHILDREN) - before


def report_devices(report: Report) -> None:
    timed = [(words, time_command(f"profile {words}"), time_command(f"fit {words}")) for words in COMMANDS]
    most = max(whole / one for _, one, whole in timed)
    report.targets.append(("`analyzer fit` over the catalogue to `analyzer profile`, the worst of three",
                           most, most, 2.5))
    report.add("devices", "Processor seconds of whole commands, imports included, for one device and for all whose "
               "memory is known.", markdown(["command", "`profile`, s", "`fit`, s", "ratio"], [
                   [f"`{words}`", f"{one:.1f}", f"{whole:.1f}", format_ratio(whole / one)]
                   for words, one, whole in timed]))
