"""What the calls of a log find in memory, and what each writes."""
from __future__ import annotations

import numpy as np
import torch

from analyzer.record.call_table import OpCall
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import StorageLifetime

#: categories of what is there before a step
HELD_BEFORE = ("parameter", "buffer", "input", "workspace", "optimizer state")


def watched(log: Log) -> list[StorageLifetime]:
    return [lifetime for lifetime in log.storages.values() if lifetime.device == log.device]


def alive_bytes(lifetimes: list[StorageLifetime], calls: int) -> np.ndarray:
    change = np.zeros(calls + 1, dtype=np.int64)
    for lifetime in lifetimes:
        end = calls if lifetime.died_call is None else min(lifetime.died_call, calls)
        if lifetime.born_call < end:
            change[lifetime.born_call] += lifetime.block_bytes
            change[end] -= lifetime.block_bytes
    return np.cumsum(change)[:calls]


def written(call: OpCall) -> list[int]:
    op = call.signature.op
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return []
    return [v for v in call.outputs if v in call.inputs]
