"""What the package says that a step does, in the same terms as what was observed."""
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from analyzer import Profile, ProfileOptions, profile
from analyzer.profilers.annotation import Annotation
from analyzer.record.log import Log

from .observe import Call, Seen


def predict(model: nn.Module, args: tuple[Any, ...], autocast: torch.dtype | None,
            trains: bool) -> tuple[Profile, Seen]:
    """The profile of a first step on a CPU, and the log that it came from."""
    logs: list[Log] = []

    def keep(log: Log) -> Annotation:
        logs.append(log)
        return Annotation()

    found = profile(model, args=args, mode="train" if trains else "infer", autocast=autocast, device="cpu", reuse=False,
                    options=ProfileOptions(steps=1), profilers={"keep": keep})
    return found, read_log(logs[0])


def read_log(log: Log) -> Seen:  # calls and storages of a log
    calls = [call for call in log.calls if call.phase in ("forward", "backward")]
    seen = Seen([Call(c.signature.op, _pair(c.inputs, c.signature.inputs), _pair(c.outputs, c.signature.outputs))
                 for c in calls])
    seen.forward_calls = sum(call.phase == "forward" for call in calls)
    for number, lifetime in log.storages.items():
        seen.storage_bytes[number] = lifetime.nbytes
        if lifetime.died_call is not None and lifetime.died is not None:
            seen.died[number] = lifetime.died_call
    return seen


def _pair(numbers: tuple[int, ...], specs: tuple[Any, ...]) -> tuple[tuple[int, Any], ...]:
    return tuple((number, (tuple(spec), spec.stride, spec.dtype)) for number, spec in zip(numbers, specs))
