"""Whether replay is right with the installed torch, why something is not replayed, and what two blocks do alike."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.meta.state import Restart
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import BORN, CALLED

_OLDEST = (2, 11)  # with 2.9.1 a random program aborted the process
CAPTURES = "it captures CUDA graphs, and a step that replays them is another than the one before"
USES_STREAMS = "it uses streams or events, or waits for the device"
_DETACH = torch.ops.aten.detach.default  # autograd calls it for some results that it saves: of no gradient, of none


@functools.cache
def why_unsupported() -> str | None:
    """Why nothing is replayed with this torch; None where replay is right."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        return f"replay is tested from torch {_OLDEST[0]}.{_OLDEST[1]} on, and this is {torch.__version__}"
    return None


class Mismatch(Exception):
    """Something may not be replayed, and is run; the message says why."""


class NotRepeated(Restart):
    """The run begins again with all blocks: ``reason`` says why some of them do not tell what all do."""


class BlocksDiffer(NotRepeated):
    """The blocks beside those that were not run did different things, as a second block may that the first prepares
    something for: more blocks at the ends of chains may tell.
    """


def list_done(log: Log, events: Sequence[tuple[int, Any]]) -> tuple[list[Any], list[Any]]:
    """The calls and the births among events, to compare those of two blocks."""
    signatures = [log.call_slots[what].signature for kind, what in events if kind == CALLED]
    born = [log.storages[what] for kind, what in events if kind == BORN]
    return ([comparable_signature(log, signature) for signature in signatures if signature.op is not _DETACH],
            [(life.nbytes, life.device) for life in born])


def comparable_signature(log: Log, signature: Signature) -> Any:
    """What is the same of two calls that do the same. Each is given an object of its own for its process group."""
    found: tuple[Any, ...] | None = signature.memo.get("comparable")
    if found is None:
        found = signature.memo["comparable"] = (
            signature.op, *map(comparable, (signature.args, signature.kwargs, signature.outputs)))
    return found, log.groups.get(signature)


def comparable(value: Any) -> Any:
    """Arguments or results to compare: specs, of which there is one object each, by their identity."""
    if isinstance(value, TensorSpec):
        return id(value)
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    if isinstance(value, dict):
        return {name: comparable(item) for name, item in value.items()}
    return type(value) if isinstance(value, torch.ScriptObject) else value
