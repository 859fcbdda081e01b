"""Drives the recorder with the user's own module code: a training or inference step as eager PyTorch does it."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, cast

import torch

from analyzer.errors import InputError
from analyzer.meta.dispatch.call import ListMemo
from analyzer.meta.state import current
from analyzer.meta.structure import tensors_of

from .optimizer_step import TORCHS_OWN, has_step_hooks, takes_closure
from .options import ProfileOptions
from .progress import report_progress
from .recorder import Recorder
from .reference_count import ReferenceCount
from .tensor_walk import list_parameters, tensors_in

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
#: makes the optimizer of a step, from the parameters to train and the model that has them
StepOptimizer = Callable[[list[torch.nn.Parameter], torch.nn.Module], torch.optim.Optimizer]

RUNS_MODEL = "the optimizer runs the model itself"  #: why nothing is replayed then


def default_loss(output: Any) -> torch.Tensor:
    """``output.loss`` where there is one, else of the floating outputs that have a gradient the only scalar, else the
    sum of them; the assumptions say so where there are scalars among others.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = [t for t in _list_floating(output) if t.requires_grad]
    if not parts:
        raise InputError(
            f"the model returned {type(output).__name__} with no floating tensor that has a gradient: pass loss_fn=, "
            f"or mode='infer'")
    scalars, state = [t for t in parts if t.dim() == 0 and not t.is_complex()], current()
    if state is not None and 0 < len(scalars) < len(parts):
        state.assume(f"the only scalar of the model's {len(parts)} outputs is taken as the loss" if len(scalars) == 1
                     else f"the loss is taken as the sum of the model's {len(parts)} outputs, of which {len(scalars)} "
                          "are scalars; loss_fn= says otherwise")
    if len(scalars) == 1 < len(parts):
        return scalars[0]
    total = None
    for part in parts:
        one = (part.abs() if part.is_complex() else part).sum()
        total = one if total is None else total + one
    assert total is not None
    return total


def _list_floating(output: Any) -> list[torch.Tensor]:
    """The floating tensors of an output; those in an object, as a cache, only where there are no others."""
    return [t for t in tensors_in(output) or tensors_of(output) if t.is_floating_point() or t.is_complex()]


def check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = tuple(loss.shape) if isinstance(loss, torch.Tensor) else repr(loss)
        raise InputError(f"loss_fn must return a scalar tensor, got {shown}")


def casting(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def hold_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ReferenceCount]:
    """The tensors that a model is about to be given: who refers to them now."""
    holds = [ReferenceCount(t) for t in tensors_of((args, kwargs)) if t.layout is torch.strided]
    for hold in holds:  # when nothing walks over the arguments any more
        hold.start()
    return holds


def note_saved_inputs(recorder: Recorder, holds: Iterable[ReferenceCount]) -> None:
    for hold in holds:
        storage = recorder.memory.storage_of(hold.tensor)
        if storage is not None and hold.has_grown():
            recorder.log.saved_inputs.add(storage.number)


class GradientFound(BaseException):
    """A step that was to run forward alone has something to train. No Exception: nothing but a driver handles it."""


class EagerStep:
    """One training or inference step, repeated under a recorder. An inference step that ``looks_for_gradient`` runs
    with gradients enabled, and the loss function that is given with it; it raises GradientFound where there is one.
    The built-in step trains ``further`` modules with the model.
    """

    def __init__(self, recorder: Recorder, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *,
                 mode: str, loss_fn: Callable[[Any], torch.Tensor] | None, optimizer: StepOptimizer | None,
                 autocast: torch.dtype | None, step: Callable[..., Any] | None, device_type: str,
                 options: ProfileOptions, looks_for_gradient: bool = False,
                 further: Iterable[torch.nn.Module] = ()) -> None:
        self.recorder, self.model, self.args, self.kwargs = recorder, model, args, kwargs
        self.mode, self.loss_fn, self.autocast, self.step = mode, loss_fn or default_loss, autocast, step
        self.device_type, self.options, self.make_optimizer = device_type, options, optimizer
        self.looks_for_gradient, self.further = looks_for_gradient, list(further)
        self.trained: list[torch.Tensor] = self.parameters if step is None else [*model.parameters()]  #: at the start
        self.optimizer = None if optimizer is None else optimizer(
            [cast(torch.nn.Parameter, p) for p in self.trained if p.requires_grad], model)
        #: whether the optimizer's step runs the model itself, as often as it likes
        self.takes_closure = step is None and self.optimizer is not None and takes_closure(self.optimizer)
        self._history: str | None = None
        self.with_gradients: list[torch.Tensor] = []  #: parameters that had some when the last backward pass ended
        self.answers_numbers = True  #: that only data could tell, where a step of the caller's own asks for them

    @property
    def parameters(self) -> list[torch.Tensor]:
        if not self.further:
            return [*list_parameters(self.model)]
        return list({id(p): p for module in (self.model, *self.further) for p in list_parameters(module)}.values())

    @property
    def runs_model(self) -> bool:
        return True

    def run(self) -> None:
        """All steps; the first makes states, the last is the steady state."""
        self.recorder.modules.planned_calls = self.options.steps * len(self.recorder.log.modules)
        with torch._C.DisableTorchFunction():  # what is read of tensors here is no call of the user's
            for index in count():
                report_progress(index / self.options.steps, f"step {index + 1}")
                self.recorder.start_step(index, placeholders=self.runs_model)
                self.recorder.mode.state.random_seed = 0  # random control flow takes the same path in every step
                self.run_step(index)
                if self.mode == "train" and self.step is None and self.optimizer is not None:
                    self.update()
                if self.is_last(index):
                    break
            self.recorder.memory.end()

    def is_last(self, index: int) -> bool:
        """Whether no step follows that of an index: of more than one, as many as LBFGS takes to have its history."""
        before, self._history = self._history, self.recorder.history
        grows = self._history is not None and self._history != before and self.options.steps > 1
        return index + 1 >= self.options.steps and not grows

    def run_step(self, index: int) -> None:
        """A step but for the optimizer's part."""
        if self.mode == "train" and self.step is not None:
            self._custom()
        elif not self.takes_closure:
            self.run_model()

    def run_model(self) -> None:
        """The forward pass and, in training, its loss and backward pass; without an optimizer gradients are dropped."""
        if self.mode == "infer":
            self._infer()
            return
        self._train()
        if self.optimizer is None:
            with self.recorder.memory.during("zero_grad"), torch._C._EnableTorchFunction():
                for module in (self.model, *self.further):
                    module.zero_grad(set_to_none=self.options.set_to_none)

    def _infer(self) -> None:
        self.recorder.memory.begin("forward")
        grad_mode: AbstractContextManager[object] = (
            nullcontext() if self.looks_for_gradient else self.options.without_gradients())
        with torch._C._EnableTorchFunction(), grad_mode, casting(self.device_type, self.autocast):
            output = self.model(*self.args, **self.kwargs)
            if self.looks_for_gradient:
                self._look_for_gradient(output)
        self.recorder.memory.end()
        del output

    def _look_for_gradient(self, output: Any) -> None:
        """Raise GradientFound where the loss or an output has a gradient, InputError where none could."""
        if self.loss_fn is not default_loss:
            output = self.recorder.modules.compute_loss(self.loss_fn, output)
        found = _list_floating(output)
        if not found:
            default_loss(output)  # which says what is missing
        if any(t.requires_grad for t in found):
            raise GradientFound

    def _evaluate(self) -> Any:
        """The loss, with gradients: what an optimizer is given that runs the model itself."""
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=self.options.set_to_none)
        with torch._C.DisableTorchFunction():
            return self._train()

    def _train(self) -> torch.Tensor:
        recorder = self.recorder
        recorder.memory.begin("forward")
        holds = hold_inputs(self.args, self.kwargs)
        with torch._C._EnableTorchFunction(), casting(self.device_type, self.autocast):
            output = self.model(*self.args, **self.kwargs)
            loss = recorder.modules.compute_loss(self.loss_fn, output)
        check_loss(loss)
        del output
        recorder.memory.mark([loss], "loss")
        note_saved_inputs(recorder, holds)
        with torch._C._EnableTorchFunction():
            loss.backward()
        recorder.memory.mark(self._gradients(), "gradient")
        return cast(torch.Tensor, loss)

    def update(self) -> None:
        assert self.optimizer is not None
        if self.takes_closure:
            with torch._C._EnableTorchFunction():
                self.optimizer.step(self._evaluate)
            self.recorder.memory.mark_states(self.optimizer)
            return
        state = self.recorder.mode.state
        plain = type(self.optimizer) in TORCHS_OWN and not has_step_hooks(self.optimizer)
        state.lists = ListMemo() if plain else None
        try:
            with torch._C._EnableTorchFunction():
                self.optimizer.step()
        finally:
            state.lists = None
        self.recorder.memory.mark_states(self.optimizer)
        with torch._C._EnableTorchFunction():
            self.optimizer.zero_grad(set_to_none=self.options.set_to_none)

    def _custom(self) -> None:
        assert self.step is not None
        self.recorder.has_own_steps = True
        self.recorder.memory.begin("forward")
        before = self.recorder.calls.count()
        state = self.recorder.mode.state
        state.answers_numbers = self.answers_numbers
        try:
            with torch._C._EnableTorchFunction(), casting(self.device_type, self.autocast):
                self.step(self.model, self.optimizer, *self.args, **self.kwargs)
        finally:
            state.answers_numbers = False
        if self.recorder.calls.count() == before:
            name, step = getattr(self.step, "__name__", self.step), self.recorder.run.step + 1
            raise InputError(
                f"step={name}: step {step} of {self.options.steps} ran no operator. Where it loops over a loader or an "
                "iterator, that gave no batch: give it a list of batches, or let the step make the iterator, as each "
                "step begins anew")
        self.recorder.memory.mark(self._gradients(), "gradient")

    def _gradients(self) -> Iterable[torch.Tensor]:
        self.with_gradients = [p for p in self.parameters if p.grad is not None]
        return [p.grad for p in self.with_gradients if p.grad is not None]
