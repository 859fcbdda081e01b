"""Runs one block in a memory of its own, forward and backward, to learn what it does."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.mode_stack import without_modes
from analyzer.meta.state import MetaState
from analyzer.meta.storage import MetaStorage, attach, template
from analyzer.meta.tensor import META, MetaTensor

from .block_key import watch_reads
from .log import Log
from .recorder import BORN, CALLED, DIED, Event, Recorder
from .step_replay import Footprint

Borrow = Callable[[nn.Module, torch.device], AbstractContextManager[Any]]
GradSpec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool] | None
"""Shape, stride and dtype of a gradient, and whether autograd alone holds it (only then may it be added to in place, and dies early)."""


class InputLike:
    """A tensor argument of a block, without the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        assert isinstance(storage, MetaStorage)
        self.shape, self.stride, self.dtype, self.offset = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset()
        self.claim, self.nbytes, self.group = storage.claim, storage.nbytes(), storage.number
        self.known, self.drawn_from, self.density = storage.known, storage.drawn_from, storage.density
        self.requires_grad = tensor.requires_grad

    def make(self, state: MetaState, bases: dict[int, torch.Tensor]) -> torch.Tensor:
        """A tensor like it; those that shared a storage share one in ``bases``."""
        base = bases.get(self.group)
        if base is None:
            base = bases[self.group] = torch.empty(self.nbytes, dtype=torch.uint8, device=META)
            storage = attach(base, self.claim, state.space)
            storage.known, storage.drawn_from, storage.density = self.known, self.drawn_from, self.density
        out = torch.empty(0, dtype=self.dtype, device=META)
        out.set_(base.untyped_storage(), self.offset, self.shape, self.stride)
        out.__class__ = MetaTensor
        return out


class Arguments:
    """The arguments of a block's call, without its tensors."""

    def __init__(self, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        self.leaves = [InputLike(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        self.structure = structure
        self.tensors = [x for x in self.leaves if isinstance(x, InputLike)]
        self.trains = torch.is_grad_enabled()


@dataclass(frozen=True)
class PassedOn:
    """An output that is the tensor argument number ``index`` itself."""

    index: int


@dataclass
class Backward:
    """The backward pass of a block for gradients of certain specs, in storage numbers of the trial that showed it."""

    log: Log
    forward: dict[int, int]                           #: its numbers of what the forward pass made -> those of the segment
    events: list[Event]
    incoming: list[int | None]                        #: storage numbers of the gradients of its differentiable outputs
    returned: list[tuple[int, torch.Tensor] | None]   #: per tensor input: storage number and a tensor like its gradient
    parameters: list[tuple[str, int, torch.Tensor]]   #: path, storage number and a tensor like its gradient


@dataclass
class Segment:
    """What a block does, in storage numbers of its trial."""

    log: Log
    forward: list[Event]
    inputs: list[int]                                 #: storage numbers of the tensor inputs
    held: dict[int, str]                              #: numbers of parameters and buffers -> their paths
    outputs: list[Any]                                #: leaves: (number, tensor like it, requires_grad), PassedOn, or a plain value
    structure: pytree.TreeSpec
    nodes: tuple[int, int]                            #: the rows of the forward pass in log.nodes
    born: list[int]                                   #: numbers of all that the forward pass used, in an order that every trial keeps
    arguments: Arguments | None = None
    backwards: dict[tuple[GradSpec, ...], Backward] = field(default_factory=dict)

    @property
    def differentiable(self) -> list[int]:
        """Positions of the outputs that have gradients."""
        return [i for i, o in enumerate(self.outputs) if isinstance(o, tuple) and o[2]]


class Refused(Exception):
    """This block cannot be played again: it does something that a log does not tell."""


class _Source(torch.autograd.Function):
    """Makes the inputs, so that autograd owns them as it owns what an earlier block returned; collects their gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, trial: Any, make: Callable[[], list[torch.Tensor]]) -> Any:
        ctx.trial = trial
        tensors = make()
        ctx.mark_non_differentiable(*[t for t, needs in zip(tensors, trial.needs_grad) if not needs])
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.trial.returned = list(grads)
        return None, None, None


class _Sink(torch.autograd.Function):
    """Takes the outputs; its backward gives each a fresh gradient that autograd alone owns."""

    @staticmethod
    def forward(ctx: Any, trial: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.trial = trial
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        made = [None if s is None else torch.empty_strided(s[0], s[1], dtype=s[2], device=ctx.trial.claim) for s in ctx.trial.grad_specs]
        ctx.trial.kept = [g for g, s in zip(made, ctx.trial.grad_specs) if s is not None and not s[3]]
        ctx.trial.incoming = [None if g is None else number_of(g) for g in made]
        ctx.trial.start_backward()
        return (None, *made)


class Trial:
    """One run of a block in a sandbox."""

    def __init__(self, recorder: Recorder, block: nn.Module, arguments: Arguments, borrow: Borrow, grad_specs: tuple[GradSpec, ...] | None) -> None:
        self.main, self.block, self.borrow = recorder, block, borrow
        self.claim = torch.device(recorder.log.device)
        self.arguments = arguments
        self.needs_grad = [x.requires_grad for x in arguments.tensors]
        self.given_grad_specs = grad_specs
        self.grad_specs: tuple[GradSpec, ...] = ()
        self.incoming: list[int | None] = []
        self.returned: list[torch.Tensor | None] = [None] * len(arguments.tensors)
        self.kept: list[torch.Tensor] = []
        self.reads: set[tuple[str, str]] = set()

    def run(self) -> Segment:
        """The block's segment, with the backward pass where gradients are wanted. Raises Refused where it cannot be played."""
        main_state = self.main.mode.state
        mode = MetaTensorMode(main_state.options, adopted_claim=main_state.adopted_claim)
        with mode:
            mode.state.assumptions = main_state.assumptions
            with self.borrow(self.block, self.claim) as borrowed, torch.set_grad_enabled(self.arguments.trains):
                recorder = self.recorder = Recorder(mode, self.block, self.claim, self.main.is_leaf, self.main.find_leaf_impl)
                with recorder.recording():
                    recorder.register_existing([s for triples in (borrowed.parameters, borrowed.buffers) for _, s, _ in triples])
                    recorder.own_parameters(self.block)
                    return self._run(mode.state)

    def _run(self, state: MetaState) -> Segment:
        recorder, log = self.recorder, self.recorder.log
        trains = self.arguments.trains
        held = {n: life.label for n, life in log.storages.items() if life.category in ("parameter", "buffer")}
        bases: dict[int, torch.Tensor] = {}

        def make() -> list[torch.Tensor]:
            with without_modes():
                made = [x.make(state, bases) for x in self.arguments.tensors]
            for i, (tensor, needs) in enumerate(zip(made, self.needs_grad)):
                recorder.mark([tensor], "input", f"input{i}")
                life = log.storages[number_of(tensor)]
                life.requires_grad = life.requires_grad or needs
            bases.clear()
            return made

        token = torch.empty(0, requires_grad=True)
        with torch._C.DisableTorchFunction():
            inputs = list(_Source.apply(token, self, make)) if self.arguments.tensors else []  # type: ignore[no-untyped-call]
        numbers = [number_of(t) for t in inputs]
        known_alive = set(log.storages)
        recorder.start_step(0)
        first_node = recorder.first_node
        before, seed = Footprint(self.block.modules()), state.random_seed
        recorder.begin("forward")
        recorder.skip_sequence()
        forward: list[Event] = []
        recorder.events = forward
        remaining = iter(inputs)
        leaves = [next(remaining) if isinstance(x, InputLike) else x for x in self.arguments.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.arguments.structure)
        places = {id(t): i for i, t in enumerate(inputs)}
        given = [id(x) for x in leaves]
        del leaves, remaining, inputs
        with torch._C._EnableTorchFunction(), watch_reads(self.block) as self.reads:
            result = self.block(*args, **kwargs)
        recorder.events = None
        if not Footprint(self.block.modules()).is_like(before) or seed != state.random_seed:
            raise Refused("its forward pass changes a module")
        taken, shape = pytree.tree_flatten((args, kwargs))
        if shape != self.arguments.structure or [id(x) for x in taken] != given:
            raise Refused("its forward pass changes a list or a dictionary that it was given")
        del taken
        out_leaves, structure = pytree.tree_flatten(result)
        del result
        outputs = self._describe_outputs(out_leaves, known_alive, places)
        del args, kwargs
        born = [*numbers, *held, *(what for kind, what in forward if kind == BORN)]
        segment = Segment(log, [e for e in forward if e[0] < 4], numbers, held, outputs, structure, (first_node, len(log.nodes)), born)
        self._check(forward, segment)
        if not trains or not segment.differentiable:
            return segment
        self.grad_specs = self.given_grad_specs or tuple(
            (tuple(o[1].shape), o[1].stride(), o[1].dtype, True) for o in outputs if isinstance(o, tuple) and o[2])
        ends = [x for x, o in zip(out_leaves, outputs) if isinstance(o, tuple) and o[2]]
        del out_leaves
        with torch._C.DisableTorchFunction():
            end = _Sink.apply(self, *ends)  # type: ignore[no-untyped-call]
        del ends
        self._backward: list[Event] = []
        with torch._C._EnableTorchFunction():
            end.backward(torch.empty(0))
        recorder.events = None
        del end
        segment.arguments = self.arguments
        segment.backwards[self.grad_specs] = self._finish(segment)
        return segment

    def start_backward(self) -> None:
        """The gradients of the outputs are there; what follows is the block's."""
        self.recorder.events = self._backward

    def _describe_outputs(self, leaves: list[Any], known_alive: set[int], places: dict[int, int]) -> list[Any]:
        outputs: list[Any] = []
        seen: set[int] = set()
        for x in leaves:
            if not isinstance(x, torch.Tensor):
                if not isinstance(x, (int, float, bool, str, type(None))):
                    raise Refused(f"it returns a {type(x).__name__}")
                outputs.append(x)
                continue
            if id(x) in places:
                outputs.append(PassedOn(places[id(x)]))
                continue
            number = number_of(x)
            storage: Any = x.untyped_storage()
            followed = storage.known is not None or storage.drawn_from is not None or storage.density is not None
            if number in known_alive or number in seen or followed:
                raise Refused("an output shares memory with an input, a parameter or another output, or its contents are known")
            seen.add(number)
            outputs.append((number, template(x), x.requires_grad))
        return outputs

    def _check(self, forward: list[Event], segment: Segment) -> None:
        """Refuse a block that touches what is not its own."""
        log = self.recorder.log
        born = {what for kind, what in forward if kind == BORN}
        local = born | set(segment.inputs) | set(segment.held)
        for kind, what in forward:
            if kind == CALLED:
                call = log.calls[what]
                if not local.issuperset(call.inputs) or not local.issuperset(call.outputs):
                    raise Refused("it reads a tensor that is neither an input nor its own")
                for number in _written(call):
                    if number in segment.inputs:
                        raise Refused("it writes to an input")
            elif kind == DIED and what not in born:
                raise Refused("something older dies in it")

    def _finish(self, segment: Segment) -> Backward:
        log = self.recorder.log
        events = [e for e in self._backward if e[0] < 4]
        returned: list[tuple[int, torch.Tensor] | None] = []
        for grad in self.returned:
            returned.append(None if grad is None else (number_of(grad), template(grad)))
        kept = {r[0] for r in returned if r is not None}
        parameters = []
        for path, parameter in self.block.named_parameters():
            if parameter.grad is not None:
                number = number_of(parameter.grad)
                if number in kept:
                    raise Refused("gradients share memory")
                kept.add(number)
                parameters.append((path, number, template(parameter.grad)))
        self.kept.clear()
        ours = {n for n, life in log.storages.items()
                if life.died is None and n >= 0 and life.nbytes and life.category not in ("parameter", "buffer")}
        started = {what for kind, what in segment.forward + events if kind == BORN} | {n for n in self.incoming if n is not None}
        left = (ours & started) - kept
        if left:
            raise Refused(f"{len(left)} tensors outlive its backward pass")
        born = {what for kind, what in events if kind == BORN}
        if not {n for _, n, _ in parameters} <= born or not kept <= born | {n for n in self.incoming if n is not None}:
            raise Refused("a gradient was not made in its backward pass")
        return Backward(log, {n: n for n in segment.born}, events, self.incoming, returned, parameters)


def number_of(tensor: torch.Tensor) -> int:
    """The number of the storage of a tensor of the mode's."""
    storage = tensor.untyped_storage()
    if not isinstance(storage, MetaStorage):
        raise Refused("a tensor with data")
    return storage.number


def _written(call: Any) -> list[int]:
    """Numbers of the storages that a call writes in place."""
    schema = getattr(call.signature.op, "_schema", None)
    if schema is None or not any(a.alias_info and a.alias_info.is_write for a in schema.arguments):
        return []
    return [n for n in call.outputs if n in call.inputs] or list(call.inputs[:1])
