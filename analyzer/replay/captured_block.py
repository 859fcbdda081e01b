"""What a captured block is, the ends of its capture, and its place in the log."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.address_space import MetaStorage, new_storage
from analyzer.meta.state import MetaState, active_state
from analyzer.meta.tensor import tensor_on
from analyzer.record.log import CALLER, Log, LogModuleCall, LogNode, Pending, identifier
from analyzer.record.recorder import Recorder
from analyzer.record.reference_count import ALONE, ALONE_VIEW, Holding
from analyzer.record.storage_lifetime import OUTSIDE

from .cache_slot import Slot
from .match import Mismatch
from .segment import Segment

# What a block does, as plain data: its arguments, its forward pass, and its backward passes by the gradients given.

BLOCK = "<block>"  #: stands for the path of a block, and of the model around it, in what a capture says
Borrow = Callable[[nn.Module, torch.device], AbstractContextManager[Any]]
GradSpec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, Holding] | None
"""Shape, stride and dtype of a gradient, and who holds it: only what autograd alone holds dies early, and of that only
what is no view may be added to in place.
"""


class InputLike:
    """A tensor argument of a block, without the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        assert isinstance(storage, MetaStorage)
        self.view = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        self.claim, self.nbytes, self.group = storage.device, storage.nbytes(), storage.number
        self.followed, self.requires_grad = storage.followed, tensor.requires_grad

    def make(self, state: MetaState, storages: dict[int, MetaStorage]) -> torch.Tensor:
        """A tensor like it; those that shared a storage share one in ``storages``."""
        storage = storages.get(self.group)
        if storage is None:
            storage = storages[self.group] = new_storage(self.nbytes, self.claim, state.space)
            storage.followed = self.followed
        return tensor_on(storage, *self.view)


class Arguments:
    """A call's arguments, without tensors; ``indices`` (path, name) may be no more than the index of a cache slot."""

    def __init__(self, leaves: list[Any], structure: pytree.TreeSpec, indices: list[tuple[str, str]]) -> None:
        self.structure, self.indices, self.trains = structure, indices, torch.is_grad_enabled()
        self.leaves = [InputLike(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        self.tensors = [x for x in self.leaves if isinstance(x, InputLike)]


class Output(NamedTuple):
    """A tensor that a block makes: its slot, a tensor like it, whether it has a gradient, and whether it is a view."""

    slot: int
    like: torch.Tensor
    requires_grad: bool
    is_view: bool


@dataclass(frozen=True)
class PassedOn:
    """An output that is the tensor argument number ``index`` itself."""

    index: int


@dataclass
class CapturedBackward:
    """The backward pass of a block for gradients of certain specs."""

    segment: Segment
    incoming: list[bool]  #: for each differentiable output, whether a gradient of it takes a slot
    #: per tensor input: slot, a tensor like its gradient, and whether that is a view
    returned: list[tuple[int, torch.Tensor, bool] | None]
    #: place of its module, name, slot and a tensor like its gradient
    parameters: list[tuple[int, str, int, torch.Tensor]]
    dying: set[int]  #: slots of inputs and outputs that autograd lets go of
    freed: dict[int, int]  #: slots of gradients of outputs that the segment itself frees, and the event
    #: positions in ``incoming`` of gradients that it neither writes to nor returns: they may as well be views
    only_read: frozenset[int]
    assumptions: list[str]

    def serves(self, own: tuple[GradSpec, ...], others: tuple[GradSpec, ...]) -> bool:
        """Whether it does for gradients of ``others`` what it does for those of ``own``, that it was captured with."""
        return len(own) == len(others) and all([
            a == b or a is not None and b is not None and i in self.only_read and a[:3] == b[:3]
            and (a[3], b[3]) == (ALONE, ALONE_VIEW) for i, (a, b) in enumerate(zip(own, others))])


@dataclass
class CapturedBlock:
    """What a block does. Slots number its storages: inputs, held ones, those of its forward and backward passes."""

    log: Log
    segment: Segment               #: of the forward pass
    inputs: int                    #: how many tensors go in
    held: list[str]                #: paths of parameters and buffers, in order of their slots
    outputs: list[Any]             #: leaves: `Output`, `PassedOn`, or a plain value
    structure: pytree.TreeSpec
    rows: list[int]                #: of log.nodes, those that the block adds to the table
    placeholders: list[tuple[int, int]]  #: the other rows: their index, and the slot of the input that each stands for
    writers: list[tuple[int, int]]  #: slot of an input, output or parameter, and the row that wrote it last
    first_call: int                #: of log.calls, of the forward pass
    sums: frozenset[int]  #: positions of arguments that it reads more than once: it adds their gradients up
    arguments: Arguments
    slot: Slot | None  #: of a cache, that it fills with the outputs beyond those of ``structure``
    assumptions: list[str]  #: what its forward pass takes for granted, with `BLOCK` for its path
    backwards: dict[tuple[GradSpec, ...], CapturedBackward] = field(default_factory=dict)
    stands_for: tuple[int, int, int] | None = None  #: call, module and row that the block's own autograd node goes for
    #: the same for what hooks on its output run before it; None where it has several outputs
    begins_at: tuple[int, int, int] | None = None

    @property
    def made(self) -> list[Output]:
        return [o for o in self.outputs if isinstance(o, Output)]

    @property
    def is_differentiable(self) -> bool:
        return any(o.requires_grad for o in self.made)


def number_of(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    if not isinstance(storage, MetaStorage):
        raise Mismatch("a tensor with data")
    return storage.number


@functools.lru_cache(4096)
def writes_in_place(op: Any) -> bool:
    """Whether an operator writes to one of its arguments, as its schema says, which never changes."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(a.alias_info and a.alias_info.is_write for a in schema.arguments)


# The ends of a block that is tried alone: autograd nodes that make its inputs and give its outputs gradients.

class Source(torch.autograd.Function):
    """Makes the inputs, which autograd then owns as it owns an earlier block's outputs; collects their gradients."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, capture: Any, make: Callable[[], list[torch.Tensor]]) -> Any:
        ctx.capture = capture
        tensors = make()
        ctx.mark_non_differentiable(*[t for t, x in zip(tensors, capture.arguments.tensors) if not x.requires_grad])
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.capture.returned = list(grads)
        return None, None, None


class Sink(torch.autograd.Function):
    """Takes the outputs; its backward gives each a fresh gradient that autograd alone owns."""

    @staticmethod
    def forward(ctx: Any, capture: Any, *outputs: torch.Tensor) -> torch.Tensor:
        """Give a tensor that stands for a loss: autograd's nodes make tensors on its device."""
        ctx.capture = capture
        return active_state().call_on(capture.claim, torch.empty, 0)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Make the gradients of the outputs; what follows is the block's."""
        capture, made = ctx.capture, list[torch.Tensor | None]()
        for spec in capture.grad_specs:
            if spec is None:
                made.append(None)
                continue
            shape, stride, dtype, holding = spec
            gradient = torch.empty_strided(shape, stride, dtype=dtype, device=capture.claim)
            if holding is ALONE_VIEW:
                gradient = gradient.as_strided(shape, stride)
            elif holding is not ALONE:
                capture.kept.append(gradient)
            made.append(gradient)
        capture.incoming = [None if g is None else number_of(g) for g in made]
        capture.recorder.events = capture.backward
        return (None, *made)


class BlockSite(Pending):
    """The place in the log of the model's block at ``path``. ``numbers`` of what it holds are labels until they are
    looked up; ``producers`` tell which node of the model made the input that a row stands for.
    """

    def __init__(self, captured: CapturedBlock, path: str, numbers: Iterable[Any], producers: dict[int, int | None],
                 recorder: Recorder) -> None:
        log = recorder.log
        self.path, self.numbers, self.producers, self.step = path, list(numbers), producers, recorder.step
        self.running_call, self.called_from = recorder.running_call(), recorder.source_line()
        self.source, self.own_rows, self.slot_of = captured.log, captured.rows, captured.segment.slot_of
        self.held = range(captured.inputs, captured.inputs + len(captured.held))
        self.index_of_path, self.first_module_call = log.index_of_path, len(log.module_call_slots)
        #: the index in `Log.nodes` of each of the record's rows
        self.rows = {OUTSIDE: OUTSIDE, **{row: i for i, row in enumerate(captured.rows, len(log.node_slots))}}
        self.call_offset = len(log.call_slots) - captured.first_call  #: from the record's forward calls to the log's
        self.modules: list[int] = []  #: index in `Log.modules` of each of the record's modules

    def module_of(self, module: int) -> int:
        below = self.source.modules[module].path
        if below == BLOCK:  # the model around it
            return 0
        return self.index_of_path[f"{self.path}.{below}" if below else self.path]

    def count_module_calls(self) -> int:
        return sum(m.calls if m.path else max(0, m.calls - 1) for m in self.source.modules)

    def expand(self, log: Log) -> None:
        numbers, source = self.numbers, self.source
        for slot in self.held:
            numbers[slot] = log.number_of_label[f"{self.path}.{numbers[slot]}"]
        self.modules = [self.module_of(i) for i in range(len(source.modules))]
        for i, theirs in zip(self.modules, source.modules):
            mine = log.modules[i]
            # the block's own call is counted where it is called
            mine.calls += theirs.calls if theirs.path else max(0, theirs.calls - 1)
            mine.inputs, mine.outputs = mine.inputs or theirs.inputs, mine.outputs or theirs.outputs
        before = self.first_module_call - 1
        for i, call in enumerate(source.module_calls[1:], before + 1):  # the first is the root's own
            parent = self.running_call if not call.parent else before + call.parent
            log.module_call_slots[i] = LogModuleCall(self.modules[call.module], parent, call.inputs, call.outputs)
        slot_of = self.slot_of
        for row in self.own_rows:
            node = source.node_slots[row]
            assert node is not None
            target, base = node.target, node.base
            if node.op == "call_module":  # "" is a module made in the forward pass: it runs for the block
                target = f"{self.path}.{target}" if target else self.path
                base = identifier(target)
            producers = [self.producers[j] if j in self.producers else self.rows[j] for j in node.inputs]
            log.node_slots[self.rows[row]] = LogNode(
                node.op, "", target, self.modules[node.module], base,
                self.called_from if node.source == CALLER else node.source,
                tuple([(numbers[slot_of[n]], spec) for n, spec in node.outputs]),
                tuple(dict.fromkeys(p for p in producers if p is not None)),
                tuple(dict.fromkeys(numbers[slot_of[n]] for n in node.reads)), node.region, self.step)
