"""A step of a short run: its model runs once where a later run would do the same; its optimizer runs always."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.memory.allocator import CachingAllocator
from analyzer.meta.structure import tensors_of
from analyzer.record.eager import EagerStep, default_loss
from analyzer.record.log import Log
from analyzer.record.recorder import Recorder
from analyzer.record.storage_lifetime import BEGAN, ENDED

from .block_key import LEAF_TYPES
from .chain import Chain, find_chains
from .match import CAPTURES
from .name import RunNames
from .placing import Before
from .repeat import Repeat
from .short_run import AGAIN, NotRepeated, ShortRun, Spec
from .state_fingerprint import StateFingerprint


class RepeatedStep(EagerStep):
    """A step of a model with ``chains``; after `run`, `write_log` gives the log of a run of all blocks."""

    chains: Sequence[Chain] = ()
    step_reason: str | None = "the steps are the caller's own"  #: why steps after the first are run
    _left: list[tuple[torch.Tensor, Spec]] | None = None  # parameters and their gradients, of a step that is repeated

    @property
    def runs_model(self) -> bool:
        return self._left is None

    def run(self) -> None:
        recorder = self.recorder
        functions = [f for f in (self.loss_fn, self.step) if f is not None and f is not default_loss]
        self._memory, self.short_run = Before.of(recorder), ShortRun(recorder, self.chains)
        take = partial(StateFingerprint, recorder.modules(), functions, values=(self.args, self.kwargs))
        self._before = self._state = take()
        recorder.mode.state.asks_memory = False
        with self._undone_where_refused(), self.short_run.running():
            if any(chain.differing for chain in self.chains):  # which is watched now: no change that a step makes
                self._state = take()
            super().run()

    @contextmanager
    def _undone_where_refused(self) -> Iterator[None]:
        """The run begins again after an exception: what it changed is put back, or it would be changed twice."""
        try:
            yield
        except BaseException:
            self._before.put_back()
            raise

    def run_step(self, index: int) -> None:
        if self._left is not None:
            self.short_run.events.append((AGAIN, index))
            with self.short_run.unheard(), torch.no_grad():
                for parameter, spec in self._left:
                    parameter.grad = self.short_run.make_again(spec)
        elif index or self.options.steps != 2 or self.step is not None or not self.options.set_to_none:
            super().run_step(index)
        else:
            self._run_watched()

    def _run_watched(self) -> None:
        self.run_model()
        self.recorder.end()
        self.step_reason = self._why_run_again()
        if self.step_reason is None:
            self._left = [(p, self.short_run.describe(p.grad)) for p in self.parameters if p.grad is not None]

    def _why_run_again(self) -> str | None:
        if not all(isinstance(leaf, LEAF_TYPES) for leaf in pytree.tree_leaves((self.args, self.kwargs))):
            return "an argument is an object that its forward pass could change"
        if self._state.unreadable:
            return self._state.unreadable
        if (change := self._state.change()) is not None:
            return f"it changes {change}"
        groups = () if self.optimizer is None else self.optimizer.param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        if any(t.grad is not None and id(t) not in updated for t in (*self.parameters, *tensors_of(self.args))
               if t.is_leaf):  # as where a forward pass runs a backward pass of its own: the next one adds to it
            return "a gradient stays that the optimizer does not know"
        return None

    def write_log(self) -> Log:
        """The log of the run as if all blocks had run. Raises NotRepeated where it cannot be told."""
        with self._undone_where_refused():
            return self._write_log()

    def _write_log(self) -> Log:
        recorder = self.recorder
        log = recorder.log
        if log.shortage is not None:
            raise NotRepeated("memory runs out")
        if next((kind for kind, _ in self.short_run.events if kind in (BEGAN, ENDED)), BEGAN) == ENDED:
            raise NotRepeated("its optimizer allocates memory before the first step")
        if log.journal is not None:
            raise NotRepeated("its tensors are used on other streams when they die (record_stream)")
        if any(call.cuda_graphs for call in log.compiled_calls):
            raise NotRepeated(CAPTURES)
        if log.compiled_calls:
            raise NotRepeated("it is compiled")
        if any(name.startswith("cuda:") and name != log.device for name in log.lifetime_table.code_of):
            raise NotRepeated("it uses several devices")
        if recorder.mode.state.asks_memory:
            raise NotRepeated("a step asks how much memory is in use, or gives it back")
        try:
            return Repeat(RunNames(self.short_run, log), self._memory).write()
        except torch.OutOfMemoryError as error:
            raise NotRepeated("memory runs out") from error


def chains_of(root: nn.Module, recorder: Recorder) -> list[Chain]:
    """The chains of a model of which a few blocks may stand for all; none on the host."""
    if not isinstance(recorder.memory, CachingAllocator) or any(
            isinstance(module, (nn.parallel.DistributedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel))
            for module in root.modules()):  # which hold the blocks' parameters in buffers of their own
        return []
    return find_chains(root)
