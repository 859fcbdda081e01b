"""Models that stack blocks, each in another way."""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .convention import Convention
from .feature import WIDTH


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
