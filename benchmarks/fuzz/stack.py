"""How a model calls its blocks: what it hands over, what comes back, what both change; and how it stacks them."""
from __future__ import annotations

import random
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Convention:
    """A tensor in, a tensor out. One is made for each forward pass of a model; `forward` becomes the blocks' own."""

    def __init__(self, model: Any, x: Tensor) -> None:
        self.calls = 0
        self.start(model, x)

    def start(self, model: Any, x: Tensor) -> None:
        """Make what a pass hands over to all blocks."""

    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        """Call ``block``, a module or its forward, and take the tensor that goes on out of its result."""
        return block(x)

    def end(self, x: Tensor) -> Tensor:  # what the model returns for the last block's ``x``
        return x

    forward: Callable[..., Any] = staticmethod(lambda block, x: block.run(x))  # that of a block that runs its features


def convention(call: Callable[..., Any], forward: Callable[..., Any], **kept: Callable[[Any, Tensor], Any]) -> Any:
    """How a model calls blocks with such a ``forward``; ``kept`` are functions of the model and its input that make
    what a pass keeps.
    """
    def start(self: Any, model: Any, x: Tensor) -> None:
        vars(self).update({name: make(model, x) for name, make in kept.items()})

    return type("Convention", (Convention,), {"__call__": call, "forward": staticmethod(forward), "start": start,
                                              "__module__": __name__})


# blocks return a tuple with nothing in its second place
TupleResult = convention(lambda self, block, x: block(x)[0], lambda block, x: (block.run(x), None))


class AuxiliaryLoss(Convention):  # blocks return a loss besides, and the model adds all of them
    def start(self, model: Any, x: Tensor) -> None:
        self.losses: list[Tensor] = []

    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        x, loss = block(x)
        self.losses.append(loss)
        return x

    def end(self, x: Tensor) -> Tensor:
        return x + sum(self.losses) if self.losses else x

    @staticmethod
    def forward(block: Any, x: Tensor) -> Any:
        x = block.run(x)
        return x, x.mean()


class _Output(NamedTuple):
    hidden: Tensor
    kind: int


@dataclass
class _Record:
    hidden: Tensor
    count: int = 1


# blocks return a named tuple, and a dataclass
NamedResult = convention(lambda self, block, x: block(x).hidden, lambda block, x: _Output(block.run(x), 1))
DataclassResult = convention(lambda self, block, x: block(x).hidden, lambda block, x: _Record(block.run(x)))
# blocks take a mask that is None, and one mask that the model makes
OptionalMask = convention(lambda self, block, x: block(x, mask=None),
                          lambda block, x, mask=None: block.run(x) if mask is None else block.run(x) * mask)
SharedMask = convention(lambda self, block, x: block(x, self.mask[:x.shape[1]]),
                        lambda block, x, mask: block.run(x) * mask,
                        mask=lambda model, x: torch.ones(x.shape[1], 1, device=x.device))
# blocks take their input twice, and the model's first input besides
InputTwice = convention(lambda self, block, x: block(x, x), lambda block, x, skip: block.run(x) + skip)
FirstInput = convention(lambda self, block, x: block(x, self.first.mean()), lambda block, x, skip: block.run(x) + skip,
                        first=lambda model, x: x * 3)


class IndexArgument(Convention):  # blocks take a number that grows, and multiply by it
    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        self.calls += 1
        return block(x, self.calls)

    @staticmethod
    def forward(block: Any, x: Tensor, index: int) -> Any:
        return block.run(x) * index


# blocks take a number that grows, and go another way by it
IndexBranch = convention(IndexArgument.__call__,
                         lambda block, x, index: block.run(x).relu() if index % 2 else block.run(x))


class FunctionArgument(Convention):  # blocks take a function of the model's, which counts
    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x, self.act)

    def act(self, x: Tensor) -> Tensor:  # go another way in every second call
        self.calls += 1
        return x.relu() if self.calls % 2 else x

    @staticmethod
    def forward(block: Any, x: Tensor, act: Any) -> Any:
        return act(block.run(x))


def _append(block: Any, x: Tensor, cache: list[Tensor]) -> Any:
    cache.append(x.detach())
    return block.run(x)


def _append_and_read(block: Any, x: Tensor, cache: list[Tensor]) -> Any:
    x = block.run(x)
    cache.append(x)
    return x if len(cache) < 3 else x + cache[-3].mean()


# blocks append to a list that the model hands over, and read what others appended
CacheList = convention(lambda self, block, x: block(x, self.cache), _append, cache=lambda model, x: [])
CacheListRead = convention(lambda self, block, x: block(x, self.cache), _append_and_read, cache=lambda model, x: [])


def _count_calls(block: Any, x: Tensor, state: Any) -> Any:
    state.calls += 1
    return block.run(x) * state.calls


# blocks count in an object that the model hands over
StateObject = convention(lambda self, block, x: block(x, self.state), _count_calls,
                         state=lambda model, x: types.SimpleNamespace(calls=0))


def _write_total(block: Any, x: Tensor, total: Tensor) -> Any:
    with torch.no_grad():
        total.add_(1)
    return block.run(x)


# blocks take a buffer of the model's, and write to it
BufferArgument = convention(lambda self, block, x: block(x, self.total), _write_total,
                            total=lambda model, x: model.total)


# ---- models


class Plain(nn.Module):  # calls one block after the other. ``call`` is the `Convention` of one forward pass
    def __init__(self, blocks: Sequence[nn.Module], convention: type[Convention]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.convention = convention
        self.extra = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:  # run the blocks under the convention
        return self.stack(self.convention(self, x), x)

    def stack(self, call: Convention, x: Tensor) -> Any:  # run the blocks on ``x``
        for index, block in enumerate(self.order()):
            x = self.step(call, block, x, index)
        return call.end(x)

    def order(self) -> Sequence[nn.Module]:  # the blocks as they are called
        return [*self.blocks]

    def step(self, call: Convention, block: nn.Module, x: Tensor, index: int) -> Any:
        return call(block, x)


def by_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """A model that goes from block to block by a function of the model, the convention, the block, ``x`` and the
    block's place. Its name is that of the variable it stands in.
    """
    return type("Stack", (Plain,), {"step": step, "__module__": __name__})


def by_order(order: Callable[[Any], Sequence[nn.Module]]) -> Any:
    return type("Stack", (Plain,), {"order": order, "__module__": __name__})


# adds what each block returns
Residual = by_step(lambda self, call, block, x, index: x + call(block, x))
# call the last block first, and blocks in an order drawn from Python's generator
Reversed = by_order(lambda self: [*reversed(self.blocks)])
Shuffled = by_order(lambda self: random.sample(list(self.blocks), len(self.blocks)))
# calls each block twice in a row
EachTwice = by_step(lambda self, call, block, x, index: call(block, call(block, x)))


class ReturnsMiddle(Plain):  # returns the result of a middle block in a dictionary besides
    def stack(self, call: Convention, x: Tensor) -> Any:
        middle = x
        for index, block in enumerate(self.blocks):
            x = call(block, x)
            middle = x if index == 2 else middle
        return {"last": call.end(x), "middle": middle}


class UShape(Plain):  # hands results of the first half over to the second
    def stack(self, call: Convention, x: Tensor) -> Any:
        hidden, half = [], len(self.blocks) // 2
        for block in list(self.blocks)[:half]:
            x = call(block, x)
            hidden.append(x)
        for block in list(self.blocks)[half:]:
            x = call(block, x + hidden.pop()) if hidden else call(block, x)
        return call.end(x)


# detaches in the middle: earlier blocks have no backward pass
DetachedMiddle = by_step(lambda self, call, block, x, index: call(block, x.detach() if index == 2 else x))


class DroppedResult(Plain):  # drops the result of one block: it has no backward pass
    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            y = call(block, x)
            x = x if index == 1 else y
        return call.end(x)


class ComparedResult(Plain):  # uses one block's result in a comparison only: it has no backward pass
    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            y = call(block, x)
            x = x * (y > 0) + self.gain if index == 2 else y
        return call.end(x)


@by_step  # runs the first two blocks without gradients
def NoGradFirst(self: Any, call: Convention, block: nn.Module, x: Tensor, index: int) -> Any:
    with torch.set_grad_enabled(torch.is_grad_enabled() and index > 1):
        return call(block, x)


# checkpoints odd blocks
CheckpointSome = by_step(lambda self, call, block, x, index: checkpoint(
    call, block, x, use_reentrant=False) if index % 2 else call(block, x))
# checkpoints each block in the old way
CheckpointReentrant = by_step(lambda self, call, block, x, index: checkpoint(
    call, block, x if index else x + self.gain, use_reentrant=True))


class CheckpointGroups(Plain):  # checkpoints blocks two by two
    def stack(self, call: Convention, x: Tensor) -> Any:
        def run(first: int, x: Tensor) -> Tensor:
            for block in list(self.blocks)[first:first + 2]:
                x = call(block, x)
            return x

        for first in range(0, len(self.blocks), 2):
            x = checkpoint(run, first, x, use_reentrant=False)
        return call.end(x)


# skips blocks by Python's generator in training
LayerDrop = by_step(
    lambda self, call, block, x, index: x if self.training and random.random() < 0.2 else call(block, x))


@by_step  # writes to what each block returned
def WritesAfter(self: Any, call: Convention, block: nn.Module, x: Tensor, index: int) -> Any:
    x = call(block, x)
    return x + 1 if x._is_view() or x.is_leaf else x.add_(1)


@by_step  # writes to what each block was given, after its call
def WritesBefore(self: Any, call: Convention, block: nn.Module, x: Tensor, index: int) -> Any:
    given = x * 1.5
    x = call(block, given)
    with torch.no_grad():
        given.detach().add_(1)
    return x


# multiplies by the index before each block
Scaled = by_step(lambda self, call, block, x, index: call(block, x * (index + 1)))


class UsesParametersAfter(Plain):  # adds the parameters of one block after all
    def stack(self, call: Convention, x: Tensor) -> Any:
        x = super().stack(call, x)
        return x + sum(p.abs().sum() for p in self.blocks[1].parameters()) * 0.1


class AutocastSome(Plain):  # runs later blocks under autocast
    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=index >= 3):
                x = call(block, x).float()
        return call.end(x)


class SameInputDetached(Plain):  # gives all blocks one input, and most results are detached
    def stack(self, call: Convention, x: Tensor) -> Any:
        rest = torch.stack([call(block, x).detach() for block in self.blocks]).sum(0)
        return call.end(x + rest + call(self.blocks[0], x))


# calls each block for each part of the batch
Chunks = by_step(lambda self, call, block, x, index: torch.cat([call(block, part) for part in x.chunk(2)]))
# gives later blocks longer inputs
Growing = by_step(lambda self, call, block, x, index: call(
    block, torch.cat([x, x[:, :1]], 1) if x.shape[1] < 7 else x))


@by_step  # puts a hook on one result
def HookBetween(self: Any, call: Convention, block: nn.Module, x: Tensor, index: int) -> Any:
    x = call(block, x)
    if x.requires_grad and index == 1:
        x.register_hook(lambda grad: grad * 2)
    return x


class InnerGradient(Plain):  # asks for the gradient of one block's parameter in the middle
    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x)
            if index == 1 and x.requires_grad:
                (grad,) = torch.autograd.grad(x.sum(), next(p for p in block.parameters() if p.requires_grad),
                                              retain_graph=True, allow_unused=True)
                x = x if grad is None else x + grad.sum() * 0
        return call.end(x)


class BackwardBetween(Plain):  # runs a backward pass of its own after the first blocks
    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x)
            if index == 2 and x.requires_grad:
                x.sum().backward()
                x = x.detach()
        return call.end(x)
