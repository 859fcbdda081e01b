"""`generate()` told apart: the prefill, which reads the prompt, and the decoding of one token after the other."""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.profile_data import Profile
from analyzer.report.column import format_quantity, print_rows

from .clock import Clock, choose_clock
from .measure import check_device, make_profile
from .recorder import RuntimeRecorder


@dataclass(frozen=True)
class Generation:
    """What one call of ``generate()`` cost.

    ``prefill`` is the first forward pass of the model, with what runs before it (an encoder). ``decode`` is one of the later passes:
    the mean seconds of all of them, and the FLOPs of the last one, which reads the longest cache; None where there were none.
    ``whole`` is all of it as one step.
    """

    prefill: Profile
    decode: Profile | None
    whole: Profile
    decode_steps: int

    @property
    def decode_seconds(self) -> float | None:
        """Of all tokens after the first."""
        return None if self.decode is None or self.decode.fwd_seconds is None else self.decode.fwd_seconds * self.decode_steps

    @property
    def steps_per_second(self) -> float | None:
        """Decoded tokens of each sequence in a second; None where nothing was decoded."""
        return None if self.decode is None or not self.decode.fwd_seconds else 1 / self.decode.fwd_seconds

    def summary(self) -> str:
        """A table of the parts."""
        parts = [("prefill", 1, self.prefill), *([("decode, a token", self.decode_steps, self.decode)] if self.decode is not None else []),
                 ("whole", 1, self.whole)]
        rows = [(name, str(count), format_quantity(p.fwd_macs, "count"), format_quantity(p.fwd_flops, "count"),
                 format_quantity(p.fwd_seconds, "seconds")) for name, count, p in parts]
        text = print_rows(("Part", "Passes", "MACs", "FLOPs", "Time"), rows)
        return text if self.steps_per_second is None else f"{text}\n{self.steps_per_second:.2f} tokens a second decoded of each sequence"


def measure_generate(model: torch.nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, method: str = "generate",
                     warm_up: int = 1, convention: str = "own", clock: Clock | None = None) -> Generation:
    """Measure ``model.generate(*args, **kwargs)``, after ``warm_up`` calls of it.

    Any ``method`` that calls the model again and again will do. Random number generators go on as they would.
    Raises InputError where the model has no such method, or the method never calls the model.
    """
    run: Callable[..., Any] | None = getattr(model, method, None)
    if not callable(run):
        raise InputError(f"measure_generate(method={method!r}): {type(model).__name__} has no such method")
    for _ in range(warm_up):
        run(*args, **dict(kwargs or {}))
    recorder = RuntimeRecorder(model, clock or choose_clock(check_device(model)), whole=False)
    with recorder.recording():
        run(*args, **dict(kwargs or {}))
    return split_generation(recorder, convention)


def split_generation(recorder: RuntimeRecorder, convention: str) -> Generation:
    """Tell the passes of a recording apart. The recording is of no other use afterwards."""
    if not recorder.root_calls:
        raise InputError(f"measure_generate(): what ran never called {type(recorder.root).__name__} itself")
    whole = make_profile(recorder, [0], convention, mode="infer")
    passes = number_passes(recorder)
    prefill = make_profile(recorder, [0], convention, mode="infer")
    decode = None if passes == 1 else make_profile(recorder, range(1, passes), convention, mode="infer")
    return Generation(prefill, decode, whole, passes - 1)


def number_passes(recorder: RuntimeRecorder) -> int:
    """Make each call of the model a step of its own, numbered from 0; the result is how many there are. What ran before the first is part of it."""
    log, starts = recorder.log, recorder.root_calls[1:]

    def step_of(position: int, field: int) -> int:
        return bisect_right(starts, position, key=itemgetter(field))

    for i, call in enumerate(log.calls):
        call.step = step_of(i, 0)
    recorder.laps = [(None if key is None else (step_of(i, 1), *key[1:]), mark) for i, (key, mark) in enumerate(recorder.laps)]
    for i, node in enumerate(log.nodes):
        node.step = step_of(i, 2)
    for i, record in enumerate(log.phases):
        record.step = step_of(i, 3)
    for life in log.storages.values():
        if life.step >= 0:
            life.step = step_of(life.born, 4)
    recorder.call_spans = {}  # `Log.module_calls` are those of all passes
    log.module_calls.clear()
    for module in log.modules:
        module.calls = -(-module.calls // (len(starts) + 1))
    return len(starts) + 1
