"""Runs an optimizer on a few prototypes of each kind of parameter, in a memory of their own."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.storage import find_storage
from analyzer.record.event import BEGAN, BORN, CALLED, DIED, ENDED, Event
from analyzer.record.recorder import Recorder
from analyzer.record.tensor_walk import tensors_in

from ..match import USES_STREAMS, Mismatch
from .expansion import Birth
from .parameter import ParameterInfo, ParameterKind, contiguous_stride

# Two of a kind show a loop's order and where its rounds begin, a third one that no round is another than those between
# the first and the last.
PROTOTYPES = 3


class CapturedSteps(NamedTuple):
    """What an optimizer's steps did to prototypes: events, and numbers of storages, as in `Expansion`."""

    prototypes: list[ParameterInfo]
    steps: list[list[tuple[Any, ...]]]
    owner_of_state: dict[int, int]  #: by number, the index of the prototype


class Capture:
    """The steps of an optimizer like ``original`` on prototypes of ``kinds``; ``main`` is the run that it is for."""

    def __init__(self, main: Recorder, original: torch.optim.Optimizer, kinds: Sequence[ParameterKind]) -> None:
        state = main.mode.state
        self.mode = MetaTensorMode(state.options, adopted_device=state.adopted_device)
        self.device = torch.device(main.log.device)
        self.original, self.given_kinds = original, kinds
        self.kinds: list[ParameterKind] = []  # of the prototypes
        self.prototypes: list[ParameterInfo] = []
        self.parameters: list[nn.Parameter] = []
        self.steps: list[list[Event]] = []
        self.number_of: dict[int, int] = {}       # from the numbers of the log of this run
        self.owner_of_state: dict[int, int] = {}  # by number in that log

    def run(self, steps: int) -> CapturedSteps:
        """Run so many steps. Raises Mismatch where they do more than update parameters."""
        with self.mode:
            self._make_optimizer()
            root = nn.ParameterList(self.parameters)
            recorder = Recorder(self.mode, root, self.device)
            with recorder.recording():
                recorder.register_existing(self.parameters)
                recorder.own_parameters(root)
                for step in range(steps):
                    recorder.start_step(step)
                    self._run_step(recorder)
            if self.mode.state.assumptions:
                raise Mismatch("its step takes something for granted")
        if recorder.log.streams:
            raise Mismatch(USES_STREAMS)
        if any(lifetime.died is None and lifetime.category not in ("parameter", "optimizer state")
               for lifetime in recorder.log.storage_table.values()):
            raise Mismatch("a tensor outlives the step that is no state")
        return self._describe(recorder)

    def _make_optimizer(self) -> None:
        """One like the original, whose groups hold prototypes of the kinds that theirs do."""
        groups: list[dict[str, Any]] = []
        for index, group in enumerate(self.original.param_groups):
            first = len(self.parameters)
            for number in range(PROTOTYPES):
                for i, kind in enumerate(self.given_kinds):
                    if kind.group == index:
                        self._add_prototype(i, kind, number)
            groups.append({**group, "params": self.parameters[first:]})
        self.optimizer = object.__new__(type(self.original))
        vars(self.optimizer).update(vars(self.original), state=defaultdict(dict), param_groups=groups)

    def _add_prototype(self, index: int, kind: ParameterKind, number: int) -> None:
        """Where sizes do not matter they are others than those of the next one."""
        shape = tuple([2 + number + PROTOTYPES * i if size is None else size for i, size in enumerate(kind.shape)])
        stride = contiguous_stride(shape) if kind.stride is None else kind.stride
        parameter = nn.Parameter(torch.empty_strided(shape, stride, dtype=kind.dtype, device=self.device))
        self.number_of[_number(parameter)] = len(self.parameters)
        self.kinds.append(kind)
        self.prototypes.append(ParameterInfo(index, shape, stride, parameter.numel(), 0, 0))
        self.parameters.append(parameter)

    def _run_step(self, recorder: Recorder) -> None:
        gradients = [self._make_gradient(kind, parameter) for kind, parameter in zip(self.kinds, self.parameters)]
        self.number_of.update({number: i for i, number in enumerate(gradients, len(gradients))})
        recorder.events = []
        try:
            with torch._C._EnableTorchFunction():
                self.optimizer.step()
        except Exception as error:  # what it raises here it raises again when it runs
            raise Mismatch(f"its step raises {type(error).__name__}") from error
        self.steps.append([event for event in recorder.events if event[0] not in (BEGAN, ENDED)])
        recorder.mark_states(self.optimizer)
        for i, parameter in enumerate(self.parameters):
            self.owner_of_state.update((_number(t), i) for t in tensors_in(self.optimizer.state.get(parameter)))
        recorder.events = []
        for parameter in self.parameters:
            parameter.grad = None
        if recorder.events != [(DIED, number) for number in gradients]:
            raise Mismatch("a gradient outlives the step")
        recorder.events = None

    def _make_gradient(self, kind: ParameterKind, parameter: nn.Parameter) -> int:
        stride = parameter.stride() if kind.grad_stride is None else kind.grad_stride
        parameter.grad = torch.empty_strided(parameter.shape, stride, dtype=kind.grad_dtype, device=self.device)
        return _number(parameter.grad)

    def _describe(self, recorder: Recorder) -> CapturedSteps:
        log, number_of = recorder.log, self.number_of
        made = [what for events in self.steps for kind, what in events if kind == BORN]
        number_of.update({number: i for i, number in enumerate(made, 2 * len(self.parameters))})

        def number(known: int) -> int:
            if known not in number_of:
                raise Mismatch("its step uses a tensor that it did not make")
            return number_of[known]

        def describe(kind: int, what: Any) -> tuple[Any, ...]:
            if kind == BORN:
                lifetime = log.storage_table[what]
                return BORN, number(what), Birth(lifetime.nbytes, lifetime.device, lifetime.category,
                                                 lifetime.requires_grad)
            if kind == DIED:
                return DIED, number(what)
            if kind != CALLED:
                raise Mismatch("a kernel takes a workspace")
            call = log.call_slots[what]
            return CALLED, call.signature, tuple(map(number, call.inputs)), tuple(map(number, call.outputs))

        steps = [[describe(*event) for event in events] for events in self.steps]
        return CapturedSteps(self.prototypes, steps, {number(n): owner for n, owner in self.owner_of_state.items()})


def _number(tensor: torch.Tensor) -> int:
    """The number of a tensor's storage."""
    storage: Any = find_storage(tensor)
    return int(storage.number)
