"""A training or inference step of which blocks, later repetitions and the optimizer's part are replayed."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from analyzer.meta.tensor import template
from analyzer.record.eager import EagerStep, default_loss
from analyzer.record.event import Event
from analyzer.record.module_walk import walk_modules

from .block_content import LEAF_TYPES
from .lazy_block import LazyBlock, one_by_one
from .match import USES_STREAMS
from .optimizer.eligibility import why_run
from .state_fingerprint import StateFingerprint
from .step_replay import StepReplay
from .unmaterialized_gradient import BlockGradients, UnmaterializedGradients

if TYPE_CHECKING:
    from .optimizer.replay import OptimizerReplay


class ReplayedStep(EagerStep):
    """A step of the built-in kind, with ``set_to_none``, whose model runs once where a later run would do the same.

    ``held`` are the model's parameters where some are only lazily materialized; ``materialize`` makes the tensors of
    such a block. An optimizer that is given must not be held elsewhere then.
    """

    def __init__(self, *args: Any, held: Sequence[torch.Tensor | LazyBlock] | None = None,
                 materialize: Callable[[torch.nn.Module], None] = lambda block: None, **settings: Any) -> None:
        self._held = held if held is not None and any(isinstance(p, LazyBlock) for p in held) else None
        self.materialize = materialize
        super().__init__(*args, **settings)
        #: whether the optimizer has only some of the parameters
        self.is_partial = self._held is not None
        self.replays_updates = False                 #: whether that is tried
        self.updates: OptimizerReplay | None = None  #: replays the optimizer's steps
        self.update_reason: str | None = None        #: why the optimizer is run
        self.step_reason: str | None = None          #: why steps after the first are run
        self.replay: StepReplay | None = None
        self.unmaterialized = UnmaterializedGradients(self.recorder) #: gradients of the present step that were replayed

    @property
    def held(self) -> Sequence[torch.Tensor | LazyBlock]:
        """The model's parameters, and in place of those of a block that was not materialized yet that block."""
        return list(self.model.parameters()) if self._held is None else self._held

    @property
    def lazy_blocks(self) -> list[LazyBlock]:
        """Those of `held` that are blocks."""
        return [] if self._held is None else [block for block in self._held if isinstance(block, LazyBlock)]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters that are tensors."""
        lazy = [block.isomorph for block in self.lazy_blocks if block.fake_tensors is None]
        if not lazy:
            return list(self.model.parameters())
        waiting = {id(tensor) for isomorph in lazy for tensor in isomorph.parameters}
        walked = walk_modules(self.model, left_out=[isomorph.block for isomorph in lazy])
        found = {id(p): p for _, module in walked for p in module._parameters.values() if p is not None}
        return [p for i, p in found.items() if i not in waiting]

    def run(self) -> None:
        """Run all steps, of which the optimizer's are replayed where it is known."""
        self.update_reason = None if self.optimizer is None else why_run(self)
        self.replays_updates = self.optimizer is not None and self.update_reason is None
        if not self.replays_updates:
            with torch._C.DisableTorchFunction():
                self._materialize_all()
        super().run()

    @property
    def runs_model(self) -> bool:
        """Whether the model runs, and is not replayed."""
        return self.replay is None

    def run_step(self, index: int) -> None:
        """Run or replay one step."""
        if self.replay is not None:
            self.replay.replay()
        elif index == 0 and (self.options.steps > 1 or self.replays_updates):
            self.replay = self._run_watched()
        else:
            super().run_step(index)

    def _run_watched(self) -> StepReplay | None:
        """Run the model once; the result replays it, None where a later step could differ from this one."""
        recorder = self.recorder
        before, marks = self._list_fingerprints(), len(recorder.log.streams)
        events: list[Event] = []
        recorder.events = events
        recorder.unmaterialized_gradients = self.unmaterialized if self.replays_updates or self._drops_gradients(
        ) else None
        try:
            self.run_model()
            self.drop_gradients()
            recorder.end()
        except BaseException:  # the run may begin again: what it changed would be changed twice
            for state in before:
                if isinstance(state, StateFingerprint):
                    state.put_back()
            raise
        finally:
            recorder.events = recorder.unmaterialized_gradients = None
        replay = StepReplay(recorder, events, first_node=recorder.first_node)
        self.step_reason = USES_STREAMS if len(recorder.log.streams) > marks else self._why_run_again(before)
        if self.replays_updates and self.optimizer is not None:
            self.unmaterialized.check(self.parameters)
            if self.step_reason is None and self._leave_unmaterialized(replay) and replay.is_whole():
                from .optimizer.replay import OptimizerReplay  # not needed by those who train nothing

                found = OptimizerReplay.make(recorder, self.optimizer, self._updated(), self.unmaterialized,
                                             self.options.steps)
                if isinstance(found, OptimizerReplay):
                    self.updates = found
                    self._settle()
                    return replay
                self.update_reason = str(found)
            else:
                self.update_reason = "a later step of the model could differ from the first, or leave other gradients"
            self._materialize_all()
            self.unmaterialized.show(self.parameters)
            replay = StepReplay(recorder, events, first_node=recorder.first_node)
        for parameter in self.parameters:
            if parameter.grad is not None:
                replay.leave(parameter.grad, functools.partial(setattr, parameter, "grad"))
        if self.step_reason is None and not replay.is_whole():
            self.step_reason = "something that it makes outlives it, or something older dies in it"
        if self.step_reason is not None:
            return None
        self._settle()
        return replay

    def _why_run_again(self, before: list[StateFingerprint | LazyBlock]) -> str | None:
        """Why a second run of the model could differ from the one that just ended."""
        if not all(isinstance(leaf, LEAF_TYPES) for leaf in pytree.tree_leaves((self.args, self.kwargs))):
            return "an argument is an object that its forward pass could change"
        for state in before:
            if isinstance(state, StateFingerprint):
                change = state.unreadable or state.change()
                if change is not None:
                    return change if state.unreadable else f"it changes {change}"
            elif not state.holds():
                return f"it changes a {type(state.isomorph.block).__name__} that was not replayed"
        if self.optimizer is not None:  # else there are no gradients any more
            updated = {id(parameter) for group in self._updated() for parameter in group}
            if any(self.unmaterialized.look(p) is not None and id(p) not in updated for p in self.parameters):
                return "a gradient stays that the optimizer does not know"
        return None

    def _settle(self) -> None:
        """Say that no code of the model's runs any more."""
        for block in self.lazy_blocks:
            block.settle()

    def _materialize_all(self) -> None:
        """Let the optimizer have all parameters as tensors."""
        if self.make_optimizer is None or not self.is_partial:
            return
        for block in [p for p in one_by_one(self.held) if isinstance(p, LazyBlock)]:
            self.materialize(block.isomorph.block)
            self.unmaterialized.materialize(block)
        # those that were there before the first step: a forward pass may have put others in their place
        parameters = [p for p in one_by_one(self.held) if isinstance(p, torch.nn.Parameter)]
        self.optimizer = self.make_optimizer([p for p in parameters if p.requires_grad], self.model)
        self.is_partial = False

    def _updated(self) -> list[Sequence[torch.Tensor | LazyBlock]]:
        """The parameters of the optimizer's groups, in its order."""
        assert self.optimizer is not None
        if self.is_partial:  # then there is one group
            return [[p for p in one_by_one(self.held) if isinstance(p, LazyBlock) or p.requires_grad]]
        return [group["params"] for group in self.optimizer.param_groups]

    def _leave_unmaterialized(self, replay: StepReplay) -> bool:
        """Let the replay leave gradients of which no tensors are made; False where one is no plain tensor."""
        unmaterialized = self.unmaterialized
        for parameter in one_by_one(self.held):
            if isinstance(parameter, LazyBlock):
                if (found := unmaterialized.of_block(parameter)) is not None:
                    replay.leave_unmaterialized(found.numbers,
                                                functools.partial(_add_block, unmaterialized, parameter, found))
            elif (like := unmaterialized.look(parameter)) is not None:
                if like.layout is not torch.strided:
                    return False
                like = like if parameter.grad is None else template(like)
                replay.leave_unmaterialized(unmaterialized.numbers_of((parameter, )),
                                    functools.partial(unmaterialized.add, (parameter, ), likes=(like, )))
        return True

    def _list_fingerprints(self) -> list[StateFingerprint | LazyBlock]:
        lazy = self.lazy_blocks
        inside = {id(module) for block in lazy for module in block.isomorph.modules}
        modules = [module for module in self.recorder.modules() if id(module) not in inside]
        functions = () if self.loss_fn is default_loss else (self.loss_fn,)
        return [StateFingerprint(modules, functions, values=(self.args, self.kwargs)), *lazy]

    def _drops_gradients(self) -> bool:
        """Whether gradients are dropped before any code could look at them."""
        return self.optimizer is None and type(self.model).zero_grad is torch.nn.Module.zero_grad

    def drop_gradients(self) -> None:
        """As ``zero_grad``, without tensors of gradients that were replayed."""
        if self.mode != "train" or not self._drops_gradients():
            super().drop_gradients()
            return
        # a forward pass may have put others in the place of those that were there before the first step
        is_lazy = any(block.fake_tensors is None for block in self.lazy_blocks)
        with self.recorder.during("zero_grad"):
            self.unmaterialized.drop([*self.held, *self.parameters] if is_lazy else self.model.parameters())

    def update(self) -> None:
        """Run or replay the optimizer's step, and drop the gradients."""
        if self.updates is None:
            super().update()
            return
        self.updates.replay(self.unmaterialized)
        with self.recorder.during("zero_grad"):
            self.unmaterialized.drop(self.updates.holders)


def _add_block(unmaterialized: UnmaterializedGradients, lazy: LazyBlock, first: BlockGradients, numbers: list[int],
               places: list[Any]) -> None:
    """The gradients of a block that a replayed step left, like those of the ``first`` one."""
    unmaterialized.add_block(lazy, first._replace(numbers=numbers, places=places))
