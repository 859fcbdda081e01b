"""A training or inference step whose model runs once, where a later run would do the same."""
from __future__ import annotations

import functools
from typing import Any

from torch.utils import _pytree as pytree

from analyzer.meta.structure import tensors_of
from analyzer.record.eager import EagerStep, default_loss
from analyzer.record.storage_lifetime import Event

from .block_key import LEAF_TYPES
from .match import USES_STREAMS
from .state_fingerprint import StateFingerprint
from .step_replay import StepReplay


class ReplayedStep(EagerStep):
    """A step of the built-in kind, with ``set_to_none``. Its model runs once where a later run would do the same; its
    optimizer runs in each step.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.step_reason: str | None = None  #: why steps after the first are run
        self.replay: StepReplay | None = None

    @property
    def runs_model(self) -> bool:
        """Whether the model runs, and is not replayed."""
        return self.replay is None

    def run_step(self, index: int) -> None:
        """Run or replay one step."""
        if self.replay is not None:
            self.replay.replay()
        elif index == 0 and self.options.steps > 1:
            self.replay = self._run_watched()
        else:
            super().run_step(index)

    def _run_watched(self) -> StepReplay | None:
        """Run the model once; the result replays it, None where a later step could differ from this one."""
        recorder = self.recorder
        before, marks = self._fingerprint(), len(recorder.log.streams)
        events: list[Event] = []
        recorder.events = events
        try:
            self.run_model()
            self.drop_gradients()
            recorder.end()
        except BaseException:  # the run may begin again: what it changed would be changed twice
            before.put_back()
            raise
        finally:
            recorder.events = None
        replay = StepReplay(recorder, events, first_node=recorder.first_node)
        for parameter in self.parameters:
            if parameter.grad is not None:
                replay.leave(parameter.grad, functools.partial(setattr, parameter, "grad"))
        self.step_reason = USES_STREAMS if len(recorder.log.streams) > marks else self._why_run_again(before)
        if self.step_reason is None and not replay.is_whole():
            self.step_reason = "something that it makes outlives it, or something older dies in it"
        return replay if self.step_reason is None else None

    def _why_run_again(self, before: StateFingerprint) -> str | None:
        """Why a second run of the model could differ from the one that just ended."""
        if not all(isinstance(leaf, LEAF_TYPES) for leaf in pytree.tree_leaves((self.args, self.kwargs))):
            return "an argument is an object that its forward pass could change"
        if before.unreadable:
            return before.unreadable
        change = before.change()
        if change is not None:
            return f"it changes {change}"
        groups = () if self.optimizer is None else self.optimizer.param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        if any(t.grad is not None and id(t) not in updated for t in (*self.parameters, *tensors_of(self.args))
               if t.is_leaf):  # as where a forward pass runs a backward pass of its own: the next one adds to it
            return "a gradient stays that the optimizer does not know"
        return None

    def _fingerprint(self) -> StateFingerprint:
        functions = () if self.loss_fn is default_loss else (self.loss_fn,)
        return StateFingerprint(self.recorder.modules(), functions, values=(self.args, self.kwargs))
