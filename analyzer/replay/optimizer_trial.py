"""Runs an optimizer on a few parameters of each kind, in a memory of their own, to learn what its steps do."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from analyzer.meta.mode import MetaTensorMode
from analyzer.record.event import BEGAN, DIED, ENDED, Event
from analyzer.record.recorder import Recorder, tensors_in

from .block_trial import number_of
from .known_optimizer import mark_states
from .optimizer_member import ParameterKind, contiguous_stride
from .optimizer_reading import NotUnderstood, Reading, Representative

# Two of a kind show a loop's order and where its rounds begin, a third one that no round is another than those between
# the first and the last.
REPRESENTATIVES = 3


class Trial:
    """The steps of ``optimizer`` on parameters of ``kinds``. Raises NotUnderstood where they cannot be told for others."""

    def __init__(self, main: Recorder, optimizer: torch.optim.Optimizer, kinds: Sequence[ParameterKind],
                 steps: int) -> None:
        self.main, self.original, self.kinds, self.steps = main, optimizer, kinds, steps
        self.claim = torch.device(main.log.device)

    def run(self) -> Reading:
        """Run and read."""
        state = self.main.mode.state
        mode = MetaTensorMode(state.options, adopted_claim=state.adopted_claim)
        with mode:
            self._make_parameters()
            root = nn.ParameterList(self.parameters)
            recorder = Recorder(mode, root, self.claim)
            with recorder.recording():
                recorder.register_existing(self.parameters)
                recorder.own_parameters(root)
                found = self._run(recorder)
            if mode.state.assumptions:
                raise NotUnderstood("something is taken for granted")
        return found

    def _make_parameters(self) -> None:
        self.representatives: list[Representative] = []
        self.parameters: list[nn.Parameter] = []
        groups = self.original.param_groups
        of_group: list[list[nn.Parameter]] = [[] for _ in groups]
        for group in range(len(groups)):
            mine = [(i, kind) for i, kind in enumerate(self.kinds) if kind.group == group]
            for number in range(REPRESENTATIVES):
                for i, kind in mine:
                    shape = _make_shape(kind, number)
                    stride = contiguous_stride(shape) if kind.stride is None else kind.stride
                    parameter = nn.Parameter(torch.empty_strided(shape, stride, dtype=kind.dtype, device=self.claim))
                    self.representatives.append(
                        Representative(i, shape, stride, parameter.numel(), len(self.parameters)))
                    self.parameters.append(parameter)
                    of_group[group].append(parameter)
        optimizer = self.optimizer = object.__new__(type(self.original))
        vars(optimizer).update(vars(self.original))
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [{**group, "params": own} for group, own in zip(groups, of_group)]

    def _run(self, recorder: Recorder) -> Reading:
        log = recorder.log
        gradients: list[list[int]] = []
        steps: list[list[Event]] = []
        states: dict[int, int] = {}
        for step in range(self.steps):
            recorder.start_step(step)
            gradients.append(self._make_gradients())
            recorder.events = []
            try:
                with torch._C._EnableTorchFunction():
                    self.optimizer.step()
            except Exception as error:  # what it raises here it raises again when it runs
                raise NotUnderstood(str(error)) from error
            steps.append([e for e in recorder.events if e[0] not in (BEGAN, ENDED)])
            mark_states(recorder, self.optimizer)
            for i, parameter in enumerate(self.parameters):
                states.update((number_of(t), i) for t in tensors_in(self.optimizer.state.get(parameter)))
            recorder.events = []
            for parameter in self.parameters:
                parameter.grad = None
            if recorder.events != [(DIED, number) for number in gradients[-1]]:
                raise NotUnderstood("a gradient outlives the step")
            recorder.events = None
        left = {
            n for n, life in log.storage_table.items()
            if life.died is None and life.category not in ("parameter", "optimizer state")
        }
        if left:
            raise NotUnderstood(f"{len(left)} tensors outlive a step that are no states")
        return Reading(log, self.representatives, [number_of(p) for p in self.parameters], gradients, states, steps)

    def _make_gradients(self) -> list[int]:
        numbers = []
        for mine, parameter in zip(self.representatives, self.parameters):
            kind = self.kinds[mine.kind]
            parameter.grad = torch.empty_strided(mine.shape,
                                                 mine.stride if kind.grad_stride is None else kind.grad_stride,
                                                 dtype=kind.grad_dtype, device=self.claim)
            numbers.append(number_of(parameter.grad))
        return numbers


def _make_shape(kind: ParameterKind, number: int) -> tuple[int, ...]:
    """The shape of one of a kind's representatives: where sizes do not matter, others than those of the next one."""
    return tuple([2 + number + REPRESENTATIVES * i if size is None else size for i, size in enumerate(kind.shape)])
