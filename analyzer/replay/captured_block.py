"""What a block does, as plain data: its arguments, its forward pass, and its backward passes by the gradients given."""
from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from analyzer.meta.state import MetaState
from analyzer.meta.storage import MetaStorage
from analyzer.meta.tensor import new_storage, tensor_on
from analyzer.record.log import Log
from analyzer.record.reference_count import ALONE, ALONE_VIEW, Holding

from .cache_slot import Slot
from .match import Mismatch
from .segment import Segment

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
        self.shape, self.stride, self.dtype, self.offset = tuple(
            tensor.shape), tensor.stride(), tensor.dtype, tensor.storage_offset()
        self.claim, self.nbytes, self.group = storage.device, storage.nbytes(), storage.number
        self.known, self.drawn_from, self.density = storage.known, storage.drawn_from, storage.density
        self.requires_grad = tensor.requires_grad

    def make(self, state: MetaState, storages: dict[int, MetaStorage]) -> torch.Tensor:
        """A tensor like it; those that shared a storage share one in ``storages``."""
        storage = storages.get(self.group)
        if storage is None:
            storage = storages[self.group] = new_storage(self.nbytes, self.claim, state.space)
            storage.known, storage.drawn_from, storage.density = self.known, self.drawn_from, self.density
        return tensor_on(storage, self.dtype, self.offset, self.shape, self.stride)


class Arguments:
    """The arguments of a block's call, without its tensors.

    ``indices`` are attributes (path, name) that may be no more than the index of a cache slot.
    """

    def __init__(self, leaves: list[Any], structure: pytree.TreeSpec, indices: list[tuple[str, str]]) -> None:
        self.indices = indices
        self.leaves = [InputLike(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        self.structure = structure
        self.tensors = [x for x in self.leaves if isinstance(x, InputLike)]
        self.trains = torch.is_grad_enabled()


@dataclass(frozen=True)
class PassedOn:
    """An output that is the tensor argument number ``index`` itself."""

    index: int


@dataclass
class CapturedBackward:
    """The backward pass of a block for gradients of certain specs."""

    segment: Segment
    #: for each differentiable output, whether a gradient of it takes a slot
    incoming: list[bool]
    #: per tensor input: slot, a tensor like its gradient, and whether that is a view
    returned: list[tuple[int, torch.Tensor, bool] | None]
    #: place of its module, name, slot and a tensor like its gradient
    parameters: list[tuple[int, str, int, torch.Tensor]]
    dying: set[int]                                   #: slots of inputs and outputs that autograd lets go of
    #: slots of gradients of outputs that the segment itself frees, and the event
    freed: dict[int, int]
    #: positions in ``incoming`` of gradients that it neither writes to nor returns: they may as well be views
    only_read: frozenset[int] = frozenset()
    assumptions: list[str] = field(default_factory=list)

    def serves(self, own: tuple[GradSpec, ...], others: tuple[GradSpec, ...]) -> bool:
        """Whether it does for gradients of ``others`` what it does for those of ``own``, that it was captured with."""
        return len(own) == len(others) and all([
            a == b or a is not None and b is not None and i in self.only_read and a[:3] == b[:3]
            and (a[3], b[3]) == (ALONE, ALONE_VIEW) for i, (a, b) in enumerate(zip(own, others))])


@dataclass
class CapturedBlock:
    """What a block does. Slots number its storages: inputs, what it holds, what its forward pass makes, then those of a
    backward pass.
    """

    log: Log
    segment: Segment                                        #: of the forward pass
    inputs: int                                       #: how many tensors go in
    held: list[str]                                   #: paths of parameters and buffers, in order of their slots
    #: leaves: (slot, tensor like it, requires_grad, whether it is a view), PassedOn, or a plain value
    outputs: list[Any]
    structure: pytree.TreeSpec
    rows: list[int]                                   #: of log.nodes, those that the block adds to the table
    #: the other rows: their index, and the slot of the input that each stands for
    placeholders: list[tuple[int, int]]
    #: slot of an input, output or parameter, and the row that wrote it last
    writers: list[tuple[int, int]]
    first_call: int                                   #: of log.calls, of the forward pass
    #: positions of arguments that it reads more than once: it adds their gradients up
    sums: frozenset[int]
    arguments: Arguments
    #: of a cache, that it fills with the outputs beyond those of ``structure``
    slot: Slot | None = None
    #: what its forward pass takes for granted, with `BLOCK` for its path
    assumptions: list[str] = field(default_factory=list)
    backwards: dict[tuple[GradSpec, ...], CapturedBackward] = field(default_factory=dict)
    #: call, module and row that the block's own autograd node goes for
    stands_for: tuple[int, int, int] | None = None
    #: the same for what hooks on its output run before it; None where it has several outputs
    begins_at: tuple[int, int, int] | None = None

    def dying(self) -> set[int]:
        """Slots of inputs and outputs that autograd lets go of in one of the backward passes that are known."""
        return set().union(*(backward.dying for backward in self.backwards.values()))

    @property
    def shows_held(self) -> bool:
        """Whether rows of it stand for parameters or buffers, as views of these do."""
        return any(self.inputs <= slot < self.inputs + len(self.held) for slot, _ in self.writers)

    @property
    def differentiable(self) -> list[int]:
        """Positions of the outputs that have gradients."""
        return [i for i, o in enumerate(self.outputs) if isinstance(o, tuple) and o[2]]


def number_of(tensor: torch.Tensor) -> int:
    """The number of the storage of a tensor of the mode's."""
    storage = tensor.untyped_storage()
    if not isinstance(storage, MetaStorage):
        raise Mismatch("a tensor with data")
    return storage.number


@functools.lru_cache(4096)
def writes_in_place(op: Any) -> bool:
    """Whether an operator writes to one of its arguments, as its schema says, which never changes."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
