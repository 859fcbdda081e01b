"""Models that stack blocks, each in another way."""
from __future__ import annotations

import random
from collections.abc import Sequence
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
        for block in self.blocks:
            x = call(block, x)
        return call.end(x)


class Residual(Plain):  # adds what each block returns
    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + call(block, x)
        return call.end(x)


class Reversed(Plain):  # calls the last block first
    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in reversed(self.blocks):
            x = call(block, x)
        return call.end(x)


class Shuffled(Plain):  # calls blocks in an order drawn from Python's generator
    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in random.sample(list(self.blocks), len(self.blocks)):
            x = call(block, x)
        return call.end(x)


class EachTwice(Plain):  # calls each block twice in a row
    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = call(block, call(block, x))
        return call.end(x)


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


class DetachedMiddle(Plain):  # detaches in the middle: earlier blocks have no backward pass
    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x.detach() if index == 2 else x)
        return call.end(x)


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


class NoGradFirst(Plain):  # runs the first two blocks without gradients
    def stack(self, call: Convention, x: Tensor) -> Any:
        with torch.no_grad():
            for block in list(self.blocks)[:2]:
                x = call(block, x)
        for block in list(self.blocks)[2:]:
            x = call(block, x)
        return call.end(x)


class CheckpointSome(Plain):  # checkpoints odd blocks
    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = checkpoint(call, block, x, use_reentrant=False) if index % 2 else call(block, x)
        return call.end(x)


class CheckpointReentrant(Plain):  # checkpoints each block in the old way
    def stack(self, call: Convention, x: Tensor) -> Any:
        x = x + self.gain
        for block in self.blocks:
            x = checkpoint(call, block, x, use_reentrant=True)
        return call.end(x)


class CheckpointGroups(Plain):  # checkpoints blocks two by two
    def stack(self, call: Convention, x: Tensor) -> Any:
        def run(first: int, x: Tensor) -> Tensor:
            for block in list(self.blocks)[first:first + 2]:
                x = call(block, x)
            return x

        for first in range(0, len(self.blocks), 2):
            x = checkpoint(run, first, x, use_reentrant=False)
        return call.end(x)


class LayerDrop(Plain):  # skips blocks by Python's generator in training
    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            if not (self.training and random.random() < 0.2):
                x = call(block, x)
        return call.end(x)


class WritesAfter(Plain):  # writes to what each block returned
    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = call(block, x)
            x = x + 1 if x._is_view() or x.is_leaf else x.add_(1)
        return call.end(x)


class WritesBefore(Plain):  # writes to what each block was given, after its call
    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            given = x * 1.5
            x = call(block, given)
            with torch.no_grad():
                given.detach().add_(1)
        return call.end(x)


class Scaled(Plain):  # multiplies by the index before each block
    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x * (index + 1))
        return call.end(x)


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


class Chunks(Plain):  # calls each block for each part of the batch
    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.cat([call(block, part) for part in x.chunk(2)])
        return call.end(x)


class Growing(Plain):  # gives later blocks longer inputs
    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = call(block, torch.cat([x, x[:, :1]], 1) if x.shape[1] < 7 else x)
        return call.end(x)


class HookBetween(Plain):  # puts a hook on one result
    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x)
            if x.requires_grad and index == 1:
                x.register_hook(lambda grad: grad * 2)
        return call.end(x)


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
