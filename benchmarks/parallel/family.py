"""Which rebuild a published row has, and what is predicted of it."""
from __future__ import annotations

import gc
import importlib
import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from analyzer import Profile, ProfileOptions, profile
from analyzer.memory.allocator_options import AllocatorOptions
from analyzer.parallel import world


class Note(NamedTuple):  # a sentence, and the rows that it is of
    parts: tuple[str, ...]
    text: str

    def is_of(self, row: dict[str, Any]) -> bool:
        return any(part in row["id"] for part in self.parts)


#: Why rows are off or set apart, and under which licences their sources are.
_TOLD = json.loads(Path(__file__).with_name("notes.json").read_text())
NOTES, APART = ([Note(tuple(note["parts"]), note["text"]) for note in _TOLD[kind]] for kind in ("notes", "apart"))
LICENCES: dict[str, str] = _TOLD["licences"]


def note_of(row: dict[str, Any], notes: list[Note]) -> Note | None:
    return next((note for note in notes if note.is_of(row)), None)


Settings = dict[str, Any]
#: Arguments of Megatron whose work the rebuild does not do, and what that is.
_LACKING = {
    "--export-kd-cfg": "a second model, the teacher, whose shape its checkpoint tells"}


def find_lacking(row: Settings) -> str | None:
    """What of a row its rebuild does not do: it is refused, and is none of those that are averaged."""
    given = row["training"].get("other_args") or {}
    for flag, text in _LACKING.items():
        if flag in given:
            return text
    return None


@dataclass(frozen=True)
class Family:  # rows that one file rebuilds: its ``prepare`` makes a job of a row, one rank with ``build`` and ``step``
    name: str
    module: str
    package: str                                     #: what is imported, of the extra
    peak: str                                        #: allocated or reserved
    last_rank: bool = False

    def code_of(self, row: Settings) -> Any:  # what of the family's code is another at the date of a row
        if self.module == "speedrun":
            return row["id"]  # which names its script
        if self.module != "torchtitan":
            return None
        from benchmarks.parallel.torchtitan import code_of
        return asdict(code_of(row))


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
    job: str = ""                                    #: what is the same for rows of which the same is predicted
    low: int | None = None                           #: of the peak that the row is of, where it has a range
    high: int | None = None

    @property
    def predicted(self) -> int:
        return self.allocated if self.figure == "allocated" else self.reserved


FAMILIES = {"MooreThreads/SimuMax": Family("megatron", "megatron", "megatron", "allocated"),
            "NVIDIA/Megatron-LM": Family("megatron", "megatron", "megatron", "allocated", last_rank=True),
            "NVIDIA-NeMo/Megatron-Bridge": Family("megatron", "megatron", "megatron", "allocated"),
            "KellerJordan/modded-nanogpt": Family("modded-nanogpt", "speedrun", "torch", "allocated"),
            "pytorch/torchtitan": Family("torchtitan", "torchtitan", "torchtitan", "reserved"),
            "pytorch/ao": Family("torchao", "torchtitan", "torchtitan", "reserved"),
            "foundation-model-stack/fms-acceleration": Family("fms", "transformers_lora", "transformers", "allocated"),
            "foundation-model-stack/fms-fsdp": Family("fms-fsdp", "fms_fsdp", "torch", "allocated")}

DEVICES = {"A100": "a100_80gb", "H100": "h100_sxm", "H200": "h200", "GB200": "gb200", "B200": "b200",
           "MI300X": "mi300x"}


def family_of(row: Settings) -> Family | None:  # the family of a row; None where there is no rebuild
    return FAMILIES.get(row["source"]["repo"])


def device_of(row: Settings) -> str:
    gpu = row["hardware"]["gpu"]
    return "h100_96gb_hbm2e" if gpu.startswith("H100") and "96GB" in gpu else DEVICES[gpu.split()[0]]


def predict(row: Settings) -> Prediction:  # the peaks of the rank that was measured, over a first and a steady step
    family = family_of(row)
    assert family is not None, row["id"]
    if (lacking := find_lacking(row)) is not None:
        raise NotImplementedError(f"{row['id']}: the rebuild does not do {lacking}")
    began = time.perf_counter()
    module = importlib.import_module(f"benchmarks.parallel.{family.module}")
    if hasattr(module, "run"):  # a script, which tells its peaks
        allocated, reserved = module.run(row, device_of(row))
        return Prediction(row["id"], allocated, reserved, time.perf_counter() - began, family.peak)
    p = profile_row(row, family)
    allocated, reserved = p.peak_allocated_bytes, p.peak_reserved_bytes
    assert allocated is not None and reserved is not None
    name = f"peak_{family.peak}_bytes"
    ends = list(getattr(p, f"{name}_range") or ())
    # the rank's experts are those that are chosen most, or least
    if row["parallel"]["ep"] > 1 and family.module == "megatron":
        from benchmarks.parallel.megatron import UNEVEN, skew_of
        skew = skew_of(row["model"]["moe"]["experts"], UNEVEN)
        ends += [getattr(one, name) for one in (
            p, profile_row(row, family, skew=skew), profile_row(row, family, skew=-skew))]
    step_low, step_high = p.step_seconds_range or (None, None)
    return Prediction(row["id"], allocated, reserved, time.perf_counter() - began, family.peak, p.step_seconds,
                      step_low, step_high, low=min(ends, default=None), high=max(ends, default=None))


def profile_row(row: Settings, family: Family, **settings: Any) -> Profile:  # of its rank, by a job with ``settings``
    size = row["hardware"]["gpus"]
    rank = row.get("rank", size - 1 if family.last_rank else 0)
    module = importlib.import_module(f"benchmarks.parallel.{family.module}")
    # ROCm's builds ignored the setting: c10/cuda/CUDAAllocatorConfig.h, PYTORCH_C10_DRIVER_API_SUPPORTED
    expandable = "expandable_segments:True" in str(row["training"].get("allocator")) and device_of(row) != "mi300x"
    options = ProfileOptions(steps=2, allocator=AllocatorOptions(expandable_segments=expandable), keep_events=False,
                             unknown_value="placeholder")  # of a norm that is printed
    context = getattr(module, "environment", nullcontext)(row)
    cluster = getattr(module, "CLUSTERS", {}).get(row["hardware"]["gpu"].split()[0])
    with context, world(size, rank, row["hardware"]["gpus_per_node"], cluster):
        job = module.prepare(row, **settings)
        p = profile(job.build, step=lambda model, optimizer: job.step(), device=device_of(row), options=options)
    gc.collect()
    return p
