"""A step of a short run: its model runs once where a later run would do the same; its optimizer runs always."""
from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.spec import ARGUMENTS
from analyzer.meta.structure import tensors_of
from analyzer.record.eager import EagerStep, default_loss
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import BEGAN, BORN, DIED, ENDED
from analyzer.state.fingerprint import StateFingerprint

from .chain import Chain, find_chains
from .match import RUNS_OUT, USES_STREAMS, NotRepeated, Spec
from .name import RunNames, compare_laps
from .placing import Before
from .repeat import Repeat
from .short_run import AGAIN, KEPT, ShortRun
from .update import is_update_alike


class RepeatedStep(EagerStep):
    """A step whose model runs once where a later run would do the same, and of each of its ``chains`` a few blocks.
    After `run`, `write_log` gives the log of a run of all blocks and steps.
    """

    chains: list[Chain]
    repeats_update = True   #: whether the optimizer may step for the blocks alone that run
    shares_run = False  #: whether logs for other devices may be asked for
    step_reason: str | None = None  #: why the model runs in steps after the first
    _repeat: Repeat | None = None
    _places_later = False  # whether addresses of the run's own log are none of an allocator's
    _left: list[tuple[torch.Tensor, Spec]] | None = None  # parameters and their gradients, of a step that is repeated

    @property
    def runs_model(self) -> bool:
        return self._left is None

    def run(self) -> None:
        recorder = self.recorder
        functions = [f for f in (self.loss_fn, self.step) if f is not None and f is not default_loss]
        self._memory = Before.of(recorder)
        skipped = {id(module) for chain in self.chains for place in chain.skipped
                   for module in chain.modules[place]}
        with torch._C.DisableTorchFunction():
            self._state = StateFingerprint([m for m in recorder.modules.listed if id(m) not in skipped], functions,
                                           values=(self.args, self.kwargs))
        if self.chains and self._state.unreadable is not None:  # which could not be put back
            raise NotRepeated(self._state.unreadable)
        self.short_run = ShortRun(recorder, self.chains, state=self._state)
        if self.repeats_update and self._can_repeat_update():
            self.short_run.states = {} if self.optimizer is None else self.optimizer.state
        # where something may be repeated, the log that is told is one that is placed anew
        self._places_later = bool(self.chains) or self.step_reason is None and self._state.unreadable is None
        places_later = recorder.memory.space.placing_later() if self._places_later else nullcontext()
        with self._undone_where_refused(), places_later, self.short_run.running():
            super().run()

    def _can_repeat_update(self) -> bool:
        return bool(self.chains) and self.mode == "train" and self.step is None and self.options.set_to_none and (
            is_update_alike(self.optimizer, self.trained, self.short_run.runs))

    @contextmanager
    def _undone_where_refused(self) -> Iterator[None]:
        """The run begins again after an exception: what it changed is put back, or it would be changed twice."""
        try:
            yield
        except BaseException:
            self._state.put_back()
            raise

    def run_step(self, index: int) -> None:
        if self._left is not None:
            self.short_run.events.append((AGAIN, index))
            with self.short_run.unheard(), torch.no_grad():
                for parameter, spec in self._left:
                    parameter.grad = self.short_run.make(spec, -1, None, repetition=index)
        elif index or self.step_reason is not None:
            with self.short_run.watching_reads():
                super().run_step(index)
        else:
            self._run_watched()

    def _run_watched(self) -> None:
        with self.short_run.watching_reads():
            self.run_model()
        self.recorder.memory.end()
        reason = self._why_not_written()
        if reason is not None and self.short_run.list_repeated():
            raise NotRepeated(reason)
        left = [(p, self.short_run.describe(p.grad)) for p in (
            self.with_gradients if self.mode == "train" else self.parameters) if p.grad is not None]
        self.step_reason = reason or self._why_run_again(left)
        if self.step_reason is None:
            self._left = [(p, spec) for p, spec in left if spec is not None]

    def _why_run_again(self, left: Sequence[tuple[torch.Tensor, Spec | None]]) -> str | None:
        """Why the model of a later step is run; None where it does what the first did, which ``left`` parameters with
        gradients.
        """
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        if not all(isinstance(leaf, (torch.Tensor, *ARGUMENTS)) for leaf in leaves):
            return "an argument is an object that its forward pass could change"
        if self._state.unreadable:
            return self._state.unreadable
        if (change := self._state.change()) is not None:
            return f"it changes {change}"
        groups = () if self.optimizer is None else self.optimizer.param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        if any(t.grad is not None and id(t) not in updated for t in (*[p for p, _ in left], *tensors_of(self.args))
               if t.is_leaf):  # as where a forward pass runs a backward pass of its own: the next one adds to it
            return "a gradient stays that the optimizer does not know"
        if not self._is_all_that_is_left([spec for _, spec in left]):
            return "something that it makes outlives it, or something older dies in it"
        return None

    def _is_all_that_is_left(self, specs: Sequence[Spec | None]) -> bool:
        """Whether all that outlives the model's run are gradients of these ``specs``, each by itself, and nothing older
        dies in it.
        """
        gradients, alive = {spec.number for spec in specs if spec is not None}, set[int]()
        if len(gradients) < len(specs):
            return False
        for kind, what in self.short_run.events:
            if kind in (BORN, DIED) and what not in self.short_run.stand_ins and what not in self.short_run.dropped:
                if (kind == BORN) == (what in alive):  # it was resized, or is older
                    return False
                alive ^= {what}
        return alive == gradients - self.short_run.stand_ins.keys()

    def write_log(self) -> Log:
        """The log of the run as if all blocks had run. Raises NotRepeated where it cannot be told."""
        log = self.recorder.log
        if not self._places_later:
            return log
        with self._undone_where_refused():
            reason = self._why_not_written()
            if reason is not None:
                raise NotRepeated(reason)
            self._repeat, found = write_repeated(self.short_run, self._memory)
            return found

    def write_limited(self, capacity_bytes: int, device: str = "") -> Log | None:
        """The log that `write_log` gave, or `write_for`, of a device with less memory; None where the step has to run
        there.
        """
        if self._repeat is None or not self._memory.takes_capacity():
            return None
        try:
            return self._repeat.write(self._memory, device, capacity_bytes)
        except torch.OutOfMemoryError:
            return None

    def group_devices(self, names: Collection[str]) -> list[list[str]]:
        """The devices that share the run and differ from its own in workspaces alone, those together that have the same
        ones: `write_for` gives the log of each. Empty where a log cannot be written.
        """
        recorder = self.recorder
        if not names or self._why_not_written() is not None:
            return []
        try:
            if self._repeat is None:
                self._repeat, _ = write_repeated(self.short_run, self._memory)
        except NotRepeated:
            return []
        if not recorder.run.kept_elsewhere.keys() <= {what for kind, what in self.short_run.events if kind == KEPT}:
            return []  # of those that were taken before, other devices have other places
        groups: dict[Any, list[str]] = {}
        for name in names:
            groups.setdefault(self._repeat.workspaces_on(name), []).append(name)
        return list(groups.values())

    def write_for(self, device: str) -> Log:
        """The log that `write_log` gave, with the workspaces of another device that shares the run."""
        assert self._repeat is not None
        return self._repeat.write(self._memory, device)

    def _why_not_written(self) -> str | None:
        """Why the log of this run tells nothing of one of all blocks and steps."""
        log = self.recorder.log
        if (reason := self.short_run.why_not_written()) is not None:
            return reason
        if next((kind for kind, _ in self.short_run.events if kind in (BEGAN, ENDED)), BEGAN) == ENDED:
            return "its optimizer allocates memory before the first step"
        if self.short_run.is_ordered or log.streams:  # as where tensors are used on streams when they die
            return USES_STREAMS
        if log.compiled_calls and self.short_run.list_repeated():
            return "it is compiled"
        if any(name.startswith("cuda:") and name != log.device for name in log.lifetime_table.code_of):
            return "it uses several devices"
        return None


def write_repeated(short_run: ShortRun, before: Before) -> tuple[Repeat, Log]:
    """The log of a run of all blocks and steps, placed in the memory of ``before``, and what wrote it. Raises
    NotRepeated.
    """
    names = RunNames(short_run, short_run.recorder.log)
    compare_laps(names)
    repeat = Repeat(names)
    try:
        return repeat, repeat.write(before)
    except torch.OutOfMemoryError as error:
        raise NotRepeated(RUNS_OUT) from error


def chains_of(walked: Sequence[tuple[str, nn.Module]]) -> list[Chain]:
    """The chains of a model, of these modules with their paths, of which a few blocks may stand for all."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import: before something did, it wraps nothing
    wrappers = nn.parallel.DistributedDataParallel, *(() if fsdp is None else (fsdp.FullyShardedDataParallel,))
    if any([isinstance(module, wrappers) for _, module in walked]):  # in whose buffers the blocks' parameters are
        return []
    return find_chains(walked)
