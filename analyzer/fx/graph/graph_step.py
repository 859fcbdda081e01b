"""Drives the recorder with a graph: one step of what a traced, perhaps transformed, model would do."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from analyzer.record.eager import casting, check_loss, default_loss, hold_inputs, note_saved_inputs
from analyzer.record.recorder import Recorder

from .interpreter import RecordingInterpreter


class GraphStep:
    """One forward pass, and in training its loss and backward pass, of a graph module under a recorder."""

    def __init__(self, recorder: Recorder, module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], *,
                 mode: str, loss_fn: Callable[[Any], torch.Tensor] | None, autocast: torch.dtype | None,
                 device_type: str) -> None:
        self.recorder, self.module, self.args, self.kwargs = recorder, module, args, kwargs
        self.mode, self.loss_fn, self.autocast, self.device_type = mode, loss_fn or default_loss, autocast, device_type
        self.interpreter = RecordingInterpreter(module, recorder)

    def run(self) -> dict[fx.Node, int]:
        """Run the step; the result is the row of each node in the log."""
        recorder = self.recorder
        holds = hold_inputs(self.args, self.kwargs)
        recorder.planned_calls = max(1, sum(n.op == "call_module" for n in self.module.graph.nodes))
        recorder.start_step(0, placeholders=False)
        self.interpreter.begin_step()
        recorder.begin("forward")
        with torch.set_grad_enabled(self.mode == "train"), casting(self.device_type, self.autocast):
            output = self.interpreter.run(*self.args, **self.kwargs)
            self.interpreter.env.clear()
            if self.mode == "infer":
                recorder.end()
                return self.interpreter.rows
            loss = recorder.compute_loss(self.loss_fn, output)
        check_loss(loss)
        del output
        recorder.mark([loss], "loss")
        note_saved_inputs(recorder, holds)
        loss.backward()
        recorder.mark([p.grad for p in self.module.parameters() if p.grad is not None], "gradient")
        recorder.end()
        return self.interpreter.rows
