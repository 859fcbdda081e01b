"""Which rebuild a published row has, and what is predicted of it."""
from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from analyzer import ProfileOptions, profile
from analyzer.memory.allocator_options import AllocatorOptions
from analyzer.parallel import world

Settings = dict[str, Any]


class Job(Protocol):
    """One rank of a row."""

    def build(self) -> nn.Module:
        """The rank's modules, wrapped; what trains them is made here too."""

    def step(self, *_: Any) -> None:
        """A whole training step."""


@dataclass(frozen=True)
class Family:
    """Rows that one file rebuilds."""

    name: str
    package: str                                     #: what is imported, of the extra
    prepare: Callable[[Settings], Job]
    peak: str                                        #: allocated or reserved
    last_rank: bool = False
    context: Callable[[Settings], AbstractContextManager[Any]] = lambda row: nullcontext()


@dataclass(frozen=True)
class Prediction:
    """Of one row: peaks in bytes, and the step of the rank that was measured, with its range, where it is known."""

    row: str
    allocated: int
    reserved: int
    seconds: float                                   #: that the prediction took
    figure: str                                      #: which of the two peaks the row is of
    step_seconds: float | None = None
    step_low: float | None = None
    step_high: float | None = None

    @property
    def predicted(self) -> int:
        """What the published figure is of."""
        return self.allocated if self.figure == "allocated" else self.reserved


def _megatron(row: Settings) -> Job:
    from benchmarks.parallel import megatron
    return megatron.Job(row)


def _environment(row: Settings) -> AbstractContextManager[Any]:
    from benchmarks.parallel import megatron
    return megatron.environment(row)


def _torchtitan(row: Settings) -> Job:
    from benchmarks.parallel import torchtitan
    return torchtitan.prepare(row)


def _transformers(row: Settings) -> Job:
    from benchmarks.parallel import transformers_lora
    return transformers_lora.prepare(row)


FAMILIES = {
    "NVIDIA/Megatron-LM": Family("megatron", "megatron", _megatron, "allocated", last_rank=True,
                                 context=_environment),
    "pytorch/torchtitan": Family("torchtitan", "torchtitan", _torchtitan, "reserved"),
    "pytorch/ao": Family("torchao", "torchtitan", _torchtitan, "reserved"),
    "foundation-model-stack/fms-acceleration": Family("fms", "transformers", _transformers, "allocated"),
}

DEVICES = {"A100": "a100_80gb", "H100": "h100_sxm", "H200": "h200", "GB200": "gb200", "B200": "b200",
           "MI300X": "mi300x"}


def family_of(row: Settings) -> Family | None:
    """The family of a row; None where there is no rebuild."""
    return FAMILIES.get(row["source"]["repo"])


def device_of(row: Settings) -> str:
    """The catalogue's name of the row's GPU."""
    return DEVICES[row["hardware"]["gpu"].split()[0]]


def predict(row: Settings) -> Prediction:
    """The peaks of the rank that was measured, over a first and a steady step."""
    family = family_of(row)
    assert family is not None, row["id"]
    size = row["hardware"]["gpus"]
    rank = size - 1 if family.last_rank else 0
    # ROCm's builds ignored the setting: c10/cuda/CUDAAllocatorConfig.h, PYTORCH_C10_DRIVER_API_SUPPORTED
    expandable = "expandable_segments:True" in str(row["training"].get("allocator")) and device_of(row) != "mi300x"
    options = ProfileOptions(steps=2, allocator=AllocatorOptions(expandable_segments=expandable), keep_events=False)
    began = time.perf_counter()
    with family.context(row), world(size, rank, row["hardware"]["gpus_per_node"]):
        job = family.prepare(row)
        p = profile(job.build, step=lambda model, optimizer: job.step(), device=device_of(row), options=options)
    gc.collect()
    allocated, reserved = p.peak_allocated_bytes, p.peak_reserved_bytes
    assert allocated is not None and reserved is not None
    return Prediction(row["id"], allocated, reserved, time.perf_counter() - began, family.peak, p.step_seconds,
                      *(p.step_seconds_range or (None, None)))
