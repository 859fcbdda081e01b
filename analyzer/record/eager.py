"""Drives the recorder with the user's own module code: a training or inference step as eager PyTorch does it."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils import _pytree as pytree

from analyzer.errors import InputError
from analyzer.meta.dispatch.list_memo import ListMemo
from analyzer.meta.plain_type import ARGUMENTS
from analyzer.meta.tensor import template
from analyzer.replay.optimizer.eligibility import why_run
from analyzer.replay.reserved import Reserved, one_by_one
from analyzer.replay.state_fingerprint import StateFingerprint
from analyzer.replay.step_replay import StepReplay
from analyzer.replay.unseen_gradient import BlockGradients, UnseenGradients

from .event import Event
from .hold import Hold
from .optimizer_step import TORCHS_OWN, has_step_hooks
from .options import ProfileOptions
from .recorder import Recorder, tensors_in

if TYPE_CHECKING:
    from analyzer.replay.optimizer.replay import OptimizerReplay

# arguments that a forward pass cannot change
_PLAIN = (torch.Tensor, *ARGUMENTS)
OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

# The learning rate does not change a cost; momentum 0.9 is the value of every published recipe.
OPTIMIZERS: dict[str, OptimizerFactory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def find_optimizer(optimizer: str | OptimizerFactory | None) -> OptimizerFactory | None:
    """The factory that ``optimizer`` names or is. Raises InputError for an unknown name."""
    if optimizer is None or callable(optimizer):
        return optimizer
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise InputError(
            f"optimizer={optimizer!r}: not one of {', '.join(OPTIMIZERS)}, and not a callable `params -> torch.optim.Optimizer`"
        )
    return OPTIMIZERS[optimizer]


def default_loss(output: Any) -> torch.Tensor:
    """``output.loss`` where there is one, else the sum of the floating outputs that have a gradient."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = [t for t in tensors_in(output) if (t.is_floating_point() or t.is_complex()) and t.requires_grad]
    if not parts:
        raise InputError(
            f"the model returned {type(output).__name__} with no floating tensor that has a gradient: pass loss_fn=, "
            f"or mode='infer'")
    total = None
    for part in parts:
        one = (part.abs() if part.is_complex() else part).sum()
        total = one if total is None else total + one
    assert total is not None
    return total


class EagerStep:
    """One training or inference step, repeated under a recorder.

    ``parameters`` are those of the model where some are only reserved; ``lend`` makes the tensors of such a block. An
    optimizer that is given must not be looked at by anybody else then.
    """

    def __init__(self, recorder: Recorder, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *,
                 mode: str, loss_fn: Callable[[Any], torch.Tensor] | None, optimizer: OptimizerFactory | None,
                 autocast: torch.dtype | None, step: Callable[..., Any] | None, device_type: str,
                 options: ProfileOptions, reuse: bool = True,
                 parameters: Sequence[torch.Tensor | Reserved] | None = None,
                 lend: Callable[[torch.nn.Module], None] = lambda block: None) -> None:
        self.recorder, self.model, self.args, self.kwargs = recorder, model, args, kwargs
        self.mode, self.loss_fn, self.autocast, self.step = mode, loss_fn or default_loss, autocast, step
        self.device_type, self.options, self.reuse = device_type, options, reuse
        self.held = list(model.parameters()) if parameters is None else parameters
        self.make_optimizer, self.lend = optimizer, lend
        #: whether the optimizer has only some of the parameters
        self.is_partial = any(isinstance(p, Reserved) for p in self.held)
        self.optimizer = None if optimizer is None else optimizer(
            [cast(torch.nn.Parameter, p) for p in self.parameters if p.requires_grad])
        self.plays_updates = False                 #: whether that is tried
        self.updates: OptimizerReplay | None = None  #: plays the optimizer's steps
        self.update_reason: str | None = None        #: why the optimizer is run
        self.unseen = UnseenGradients(recorder)    #: gradients of the present step that were played
        self.holds = [Hold(t) for t in tensors_in((args, kwargs)) if t.layout is torch.strided]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those that are tensors."""
        return [p for p in one_by_one(self.held) if isinstance(p, torch.Tensor)]

    def run(self) -> None:
        """All steps; the first makes states, the last is the steady state."""
        self.recorder.planned_calls = self.options.steps * len(self.recorder.log.modules)
        replay: StepReplay | None = None
        self.update_reason = self._why_run_updates()
        self.plays_updates = self.optimizer is not None and self.update_reason is None
        with torch._C.DisableTorchFunction():  # what is read of tensors here is no call of the user's
            if not self.plays_updates:
                self._take_all()
            for index in range(self.options.steps):
                self.recorder.start_step(index, placeholders=replay is None)
                self.recorder.mode.state.random_seed = 0  # random control flow takes the same path in every step
                if replay is not None:
                    replay.play()
                elif self.mode == "train" and self.step is not None:
                    self._custom()
                elif index == 0 and self.reuse and (self.options.steps > 1 or self.plays_updates):
                    replay = self._run_watched()
                else:
                    self._run_model()
                    self._drop_gradients()
                if self.mode == "train" and self.step is None and self.optimizer is not None:
                    self._update()
            self.recorder.end()
            self.recorder.check()

    def _run_model(self) -> None:
        if self.mode == "infer":
            self._infer()
        else:
            self._train()

    def _run_watched(self) -> StepReplay | None:
        """Run the model once; the result plays it again, None where a later step could differ from this one."""
        recorder = self.recorder
        before = self._list_fingerprints()
        events: list[Event] = []
        recorder.events = events
        recorder.unseen_gradients = self.unseen if self.plays_updates or self._drops_gradients() else None
        try:
            self._run_model()
            self._drop_gradients()
            recorder.end()
        finally:
            recorder.events = recorder.unseen_gradients = None
        replay = StepReplay(recorder, events, first_node=recorder.first_node)
        plain = all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves((self.args, self.kwargs)))
        same = plain and all([state.is_same() if isinstance(state, StateFingerprint) else state.holds() for state in before])
        if self.optimizer is not None:  # else there are no gradients any more
            updated = {id(parameter) for group in self._updated() for parameter in group}
            same = same and all(self.unseen.look(p) is None or id(p) in updated for p in self.parameters)
        if self.plays_updates and self.optimizer is not None:
            self.unseen.check(self.parameters)
            if same and self._leave_unseen(replay) and replay.is_whole():
                from analyzer.replay.optimizer.replay import OptimizerReplay  # not needed by those who train nothing

                found = OptimizerReplay.make(recorder, self.optimizer, self._updated(), self.unseen, self.options.steps)
                if isinstance(found, OptimizerReplay):
                    self.updates = found
                    self._settle()
                    return replay
                self.update_reason = found
            else:
                self.update_reason = "a later step of the model could differ from the first, or leave other gradients"
            self._take_all()
            self.unseen.show(self.parameters)
            replay = StepReplay(recorder, events, first_node=recorder.first_node)
        for parameter in self.parameters:
            if parameter.grad is not None:
                replay.leave(parameter.grad, functools.partial(setattr, parameter, "grad"))
        if not same or not replay.is_whole():
            return None
        self._settle()
        return replay

    def _settle(self) -> None:
        """No code of the model's runs any more."""
        for block in self.held:
            if isinstance(block, Reserved):
                block.settle()

    def _why_run_updates(self) -> str | None:
        """Why the optimizer has to run, as far as that is known before the first step."""
        if self.optimizer is None:
            return None
        if not self.reuse:
            return "nothing is replayed with reuse=False"
        if self.step is not None:
            return "the steps are the caller's own"
        if not self.options.set_to_none:
            return "gradients are added to those of the step before"
        return why_run(self)

    def _take_all(self) -> None:
        """Let the optimizer have all parameters as tensors."""
        if self.make_optimizer is None or not self.is_partial:
            return
        for block in [p for p in one_by_one(self.held) if isinstance(p, Reserved)]:
            self.lend(block.twin.block)
            self.unseen.lend(block)
        self.optimizer = self.make_optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.is_partial = False

    def _updated(self) -> list[Sequence[torch.Tensor | Reserved]]:
        """The parameters of the optimizer's groups, in its order."""
        assert self.optimizer is not None
        if self.is_partial:  # then there is one group
            return [[p for p in one_by_one(self.held) if isinstance(p, Reserved) or p.requires_grad]]
        return [group["params"] for group in self.optimizer.param_groups]

    def _leave_unseen(self, replay: StepReplay) -> bool:
        """Let the replay leave gradients at which nobody looks; False where one is no plain tensor."""
        unseen = self.unseen
        for parameter in one_by_one(self.held):
            if isinstance(parameter, Reserved):
                if (found := unseen.of_block(parameter)) is not None:
                    replay.leave_unseen(found.numbers, functools.partial(_add_block, unseen, parameter, found))
            elif (like := unseen.look(parameter)) is not None:
                if like.layout is not torch.strided:
                    return False
                like = like if parameter.grad is None else template(like)
                replay.leave_unseen(unseen.numbers_of((parameter, )),
                                    functools.partial(unseen.add, (parameter, ), likes=(like, )))
        return True

    def _list_fingerprints(self) -> list[StateFingerprint | Reserved]:
        reserved = [p for p in self.held if isinstance(p, Reserved)]
        inside = {id(module) for block in reserved for module in block.twin.modules}
        modules = [module for module in self.recorder.modules() if id(module) not in inside]
        functions = () if self.loss_fn is default_loss else (self.loss_fn,)
        return [StateFingerprint(modules, functions, values=(self.args, self.kwargs), holds=False), *reserved]

    def _drops_gradients(self) -> bool:
        """Whether nobody looks at gradients before they are dropped."""
        return self.step is None and self.optimizer is None and self.options.set_to_none and type(
            self.model).zero_grad is torch.nn.Module.zero_grad

    def _drop_gradients(self) -> None:
        """What ends a step that has no optimizer."""
        if self.mode != "train" or self.optimizer is not None:
            return
        with self.recorder.during("zero_grad"):
            if self._drops_gradients():
                self.unseen.drop(self.held)
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
        if self.updates is not None:
            self.updates.play(self.unseen)
            with self.recorder.during("zero_grad"):
                self.unseen.drop(self.updates.holders)
            return
        state = self.recorder.mode.state
        plain = type(self.optimizer) in TORCHS_OWN and not has_step_hooks(self.optimizer, known=1)  # the recorder's own
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
        if self.optimizer is not None:
            self.recorder.mark_states(self.optimizer)

    def _note_saved_inputs(self) -> None:
        for hold in self.holds:
            storage = self.recorder.storage_of(hold.tensor)
            if storage is not None and hold.is_held():
                self.recorder.log.saved_inputs.add(storage.number)


def _add_block(unseen: UnseenGradients, reserved: Reserved, first: BlockGradients, numbers: list[int],
               places: list[Any]) -> None:
    """The gradients of a block that a replayed step left, like those of the ``first`` one."""
    unseen.add_block(reserved, first._replace(numbers=numbers, places=places))
