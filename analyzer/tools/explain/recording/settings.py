"""What the recorded requests would reserve under other settings of the allocator."""
from __future__ import annotations

from dataclasses import dataclass

from analyzer.errors import InputError
from analyzer.memory.allocator import AllocatorOptions

from .growth import StepGrowth
from .history import History
from .replay import Fidelity, ReplayOutcome, RequestReplay
from .snapshot import Snapshot

#: The settings that are tried, each beside the recorded ones.
TRIED = ("expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512", "roundup_power2_divisions:8",
         "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95")


@dataclass(frozen=True)
class SettingRow:
    """The requests under one setting; without an outcome, ``note`` says why."""

    setting: str
    outcome: ReplayOutcome | None
    note: str = ""


@dataclass(frozen=True)
class Settings:
    """How exact the replay is with the recorded settings, and what others would give. ``refusal`` says why nothing
    could be replayed.
    """

    fidelity: Fidelity | None
    rows: list[SettingRow]
    refusal: str = ""


def try_settings(history: History, snapshot: Snapshot, growth: StepGrowth | None,
                 capacity_bytes: int | None = None) -> Settings:
    """Replay the requests as recorded and under each of `TRIED`, within ``capacity_bytes`` where that is known."""
    recorded = (snapshot.settings or {}).get("PYTORCH_CUDA_ALLOC_CONF") or ""
    try:
        options = AllocatorOptions.from_string(recorded)
    except InputError as error:
        return Settings(None, [], str(error))
    replay = RequestReplay(history, snapshot)
    fidelity = replay.check(options)
    as_it_was = replay.run(options, capacity_bytes=capacity_bytes)
    rows = [SettingRow(recorded or "PyTorch's defaults", as_it_was, "recorded")]
    for setting in TRIED:
        if setting.startswith("garbage") and capacity_bytes is None:
            rows.append(SettingRow(setting, None, "needs --device"))
        elif (changed := _change(recorded, setting)) is not None:
            rows.append(SettingRow(setting, replay.run(changed, capacity_bytes=capacity_bytes)))
    if growth is not None:
        rows.append(SettingRow("empty_cache() after each step", replay.run(
            options, empty_after=growth.ends, capacity_bytes=capacity_bytes)))
    return Settings(fidelity, rows)


def _change(recorded: str, setting: str) -> AllocatorOptions | None:
    """The recorded settings with another one; None where that is one of them, or both cannot be."""
    names = {part.partition(":")[0] for part in setting.split(",")}
    kept = [part for part in recorded.split(",") if part and part.partition(":")[0].strip() not in names]
    if setting in recorded.replace(" ", ""):
        return None
    try:
        return AllocatorOptions.from_string(",".join([*kept, setting]))
    except InputError:
        return None
