"""Passes of models over their caches under one recorder, and what each of them cost."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from analyzer.api.session import Run, Session
from analyzer.record.recorder import Recorder

from .decoder import tensors_kept
from .forward_cost import fill_costs
from .stored_decoder import StoredDecoder


@dataclass(frozen=True, slots=True)
class PassCost:
    """One pass: the FLOPs, the bytes that all operators read and write, seconds by the roofline, peaks."""

    sequences: int
    tokens: int                              #: of each sequence that it reads
    context_tokens: int                      #: of each sequence after it
    flops: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    seconds: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    @property
    def intensity(self) -> float | None:
        """FLOPs for each byte moved."""
        if self.flops is None or self.read_bytes is None or self.written_bytes is None:
            return None
        moved = self.read_bytes + self.written_bytes
        return self.flops / moved if moved else None


_AMOUNTS = ("flops", "read_bytes", "written_bytes", "seconds", "peak_allocated_bytes", "peak_reserved_bytes")


class PassRecorder:
    """Runs passes one after the other, each a step of the recorder's log."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self.session, self.recorder = session, recorder
        self.passes: list[PassCost] = []

    def read(self, decoder: StoredDecoder, tokens: Tensor, keep: int = 1) -> None:
        """One pass over ``tokens``, and the choice of the next ones: the largest of the last ``keep`` logits."""
        recorder, step = self.recorder, len(self.passes)
        recorder.start_step(step, placeholders=step == 0)
        recorder.describe_step(step)
        recorder.begin("forward")
        with torch.no_grad(), self.session.casting():
            logits = decoder.read(tokens, keep)
            chosen = logits[:, -keep:, :].to(torch.float32, copy=True).argmax(dim=-1)
        del logits, chosen
        recorder.end()
        recorder.mark(tensors_kept(decoder.cache), "cache")
        self.passes.append(PassCost(tokens.shape[0], tokens.shape[1], decoder.context))

    def list_costs(self, run: Run) -> list[PassCost]:
        """The passes with what they cost."""
        return fill_costs(run, self.passes, _AMOUNTS)
