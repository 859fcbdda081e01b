"""Drives the recorder with the user's own module code: a training or inference step as eager PyTorch does it."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from analyzer.errors import InputError
from analyzer.meta.list_memo import ListMemo

from .hold import Hold
from .options import ProfileOptions
from .event import Event
from .footprint import Footprint
from .recorder import Recorder, tensors_in
from .reserved import Reserved, one_by_one
from .step_hook import has_step_hooks
from .step_replay import StepReplay
from .unseen_gradient import UnseenGradients

_PLAIN = (torch.Tensor, str, int, float, bool, complex, type(None), torch.dtype, torch.device)  # arguments that a forward pass cannot change
OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

# The learning rate does not change a cost; momentum 0.9 is the value of every published recipe.
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


# Optimizers whose code is known: within a step no tensor changes its shape or gets another storage.
_TORCHS_OWN = frozenset({torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW, torch.optim.ASGD,
                         torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD})


def find_optimizer(optimizer: str | OptimizerFactory | None) -> OptimizerFactory | None:
    """The factory that ``optimizer`` names or is. Raises InputError for an unknown name."""
    if optimizer is None or callable(optimizer):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer={optimizer!r}: not one of {', '.join(OPTIMIZERS)}, and not a callable `params -> torch.optim.Optimizer`")
    return OPTIMIZERS[optimizer]


def default_loss(output: Any) -> torch.Tensor:
    """``output.loss`` where there is one, else the sum of the floating outputs that have a gradient."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = [t for t in tensors_in(output) if (t.is_floating_point() or t.is_complex()) and t.requires_grad]
    if not parts:
        raise InputError(f"the model returned {type(output).__name__} with no floating tensor that has a gradient: pass loss_fn=, "
                         f"or mode='infer'")
    total = None
    for part in parts:
        one = (part.abs() if part.is_complex() else part).sum()
        total = one if total is None else total + one
    assert total is not None
    return total


class EagerStep:
    """One training or inference step, repeated under a recorder.

    ``parameters`` are those of the model where some are only reserved, which takes that there is no optimizer.
    """

    def __init__(self, recorder: Recorder, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, mode: str,
                 loss_fn: Callable[[Any], torch.Tensor] | None, optimizer: OptimizerFactory | None, autocast: torch.dtype | None,
                 step: Callable[..., Any] | None, device_type: str, options: ProfileOptions, reuse: bool = True,
                 parameters: Sequence[torch.Tensor | Reserved] | None = None) -> None:
        self.recorder, self.model, self.args, self.kwargs = recorder, model, args, kwargs
        self.mode, self.loss_fn, self.autocast, self.step = mode, loss_fn or default_loss, autocast, step
        self.device_type, self.options, self.reuse = device_type, options, reuse
        self.held = list(model.parameters()) if parameters is None else parameters
        self.optimizer = None if optimizer is None else optimizer([p for p in model.parameters() if p.requires_grad])
        self.holds = [Hold(t) for t in tensors_in((args, kwargs)) if t.layout is torch.strided]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those that are tensors."""
        return [p for p in one_by_one(self.held) if isinstance(p, torch.Tensor)]

    def run(self) -> None:
        """All steps; the first makes states, the last is the steady state."""
        self.recorder.planned_calls = self.options.steps * len(self.recorder.log.modules)
        replay: StepReplay | None = None
        with torch._C.DisableTorchFunction():  # what is read of tensors here is no call of the user's
            for index in range(self.options.steps):
                self.recorder.start_step(index, placeholders=replay is None)
                self.recorder.mode.state.random_seed = 0  # random control flow takes the same path in every step
                if replay is not None:
                    replay.play()
                elif self.mode == "train" and self.step is not None:
                    self._custom()
                elif index == 0 and self.reuse and self.options.steps > 1:
                    replay = self._run_watched()
                else:
                    self._run_model()
                    self._drop_gradients()
                if self.mode == "train" and self.step is None and self.optimizer is not None:
                    self._update()
            self.recorder.end()

    def _run_model(self) -> None:
        if self.mode == "infer":
            self._infer()
        else:
            self._train()

    def _run_watched(self) -> StepReplay | None:
        """Run the model once; the result plays it again, None where a later step could differ from this one."""
        recorder = self.recorder
        before = self._list_footprints()
        events: list[Event] = []
        recorder.events = events
        recorder.unseen_gradients = UnseenGradients(recorder) if self._drops_gradients() else None
        try:
            self._run_model()
            self._drop_gradients()
            recorder.end()
        finally:
            recorder.events = recorder.unseen_gradients = None
        replay = StepReplay(recorder, events, first_node=recorder.first_node)
        for parameter in self.parameters:
            if parameter.grad is not None:
                replay.leave(parameter.grad, functools.partial(setattr, parameter, "grad"))
        plain = all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves((self.args, self.kwargs)))
        if not plain or not replay.is_whole() or not all([footprint.holds() for footprint in before]):
            return None
        for block in self.held:
            if isinstance(block, Reserved):
                block.settle()
        return replay

    def _list_footprints(self) -> list[Footprint | Reserved]:
        reserved = [p for p in self.held if isinstance(p, Reserved)]
        inside = {id(module) for block in reserved for module in block.twin.modules}
        return [Footprint([module for module in self.recorder.modules() if id(module) not in inside]), *reserved]

    def _drops_gradients(self) -> bool:
        """Whether nobody looks at gradients before they are dropped."""
        return self.step is None and self.optimizer is None and self.options.set_to_none and type(self.model).zero_grad is torch.nn.Module.zero_grad

    def _drop_gradients(self) -> None:
        """What ends a step that has no optimizer."""
        if self.mode != "train" or self.optimizer is not None:
            return
        with self.recorder.during("zero_grad"):
            if self._drops_gradients():
                (self.recorder.unseen_gradients or UnseenGradients(self.recorder)).drop(self.held)
            else:
                with torch._C._EnableTorchFunction():
                    self.model.zero_grad(set_to_none=self.options.set_to_none)

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast)

    def _infer(self) -> None:
        self.recorder.begin("forward")
        with torch._C._EnableTorchFunction(), torch.no_grad(), self._casting():
            output = self.model(*self.args, **self.kwargs)
        self.recorder.end()
        del output

    def _train(self) -> None:
        recorder = self.recorder
        recorder.begin("forward")
        with torch._C._EnableTorchFunction(), self._casting():
            output = self.model(*self.args, **self.kwargs)
            recorder.forward_returned(output)
            with recorder.computing_loss(self.loss_fn):
                loss = self.loss_fn(output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, torch.Tensor) else repr(loss)
            raise InputError(f"loss_fn must return a scalar tensor, got {shown}")
        del output
        recorder.mark([loss], "loss")
        self._note_saved_inputs()
        with torch._C._EnableTorchFunction():
            loss.backward()
        del loss
        recorder.mark(self._gradients(), "gradient")

    def _update(self) -> None:
        assert self.optimizer is not None
        state = self.recorder.mode.state
        plain = type(self.optimizer) in _TORCHS_OWN and not has_step_hooks(self.optimizer, known=1)  # the recorder's own
        state.lists = ListMemo() if plain else None
        try:
            with torch._C._EnableTorchFunction():
                self.optimizer.step()
        finally:
            state.lists = None
        self._mark_states()
        with torch._C._EnableTorchFunction():
            self.optimizer.zero_grad(set_to_none=self.options.set_to_none)

    def _custom(self) -> None:
        assert self.step is not None
        self.recorder.begin("forward")
        with torch._C._EnableTorchFunction(), self._casting():
            self.step(self.model, self.optimizer, *self.args, **self.kwargs)
        self.recorder.mark(self._gradients(), "gradient")
        self._mark_states()

    def _gradients(self) -> Iterable[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _mark_states(self) -> None:
        if self.optimizer is None:
            return
        found: list[torch.Tensor] = []
        for state in self.optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else (state,):
                if isinstance(value, torch.Tensor):
                    found.append(value)
                elif not isinstance(value, (int, float, str)):
                    found += tensors_in(value)
        self.recorder.mark(found, "optimizer state")

    def _note_saved_inputs(self) -> None:
        for hold in self.holds:
            storage = self.recorder.storage_of(hold.tensor)
            if storage is not None and hold.is_held():
                self.recorder.log.saved_inputs.add(storage.number)
