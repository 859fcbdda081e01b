"""Models that stack blocks, each in another way."""
from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .convention import Convention
from .feature import WIDTH


class Plain(nn.Module):
    """Calls one block after the other. ``call`` is the `Convention` of one forward pass."""

    def __init__(self, blocks: Sequence[nn.Module], convention: type[Convention]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.convention = convention
        self.extra = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        """Run the blocks under the convention."""
        return self.stack(self.convention(self, x), x)

    def stack(self, call: Convention, x: Tensor) -> Any:
        """Run the blocks on ``x``."""
        for block in self.blocks:
            x = call(block, x)
        return call.end(x)


class Residual(Plain):
    """Adds what each block returns."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + call(block, x)
        return call.end(x)


class Reversed(Plain):
    """Calls the last block first."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in reversed(self.blocks):
            x = call(block, x)
        return call.end(x)


class Shuffled(Plain):
    """Calls blocks in an order drawn from Python's generator."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in random.sample(list(self.blocks), len(self.blocks)):
            x = call(block, x)
        return call.end(x)


class Indexed(Plain):
    """Calls blocks by their index."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index in range(len(self.blocks)):
            x = call(self.blocks[index], x)
        return call.end(x)


class EachTwice(Plain):
    """Calls each block twice in a row."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = call(block, call(block, x))
        return call.end(x)


class AllTwice(Plain):
    """Calls all blocks, and all again."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for _ in range(2):
            for block in self.blocks:
                x = call(block, x)
        return call.end(x)


class HiddenStates(Plain):
    """Adds what all blocks returned."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        hidden = []
        for block in self.blocks:
            x = call(block, x)
            hidden.append(x)
        return call.end(torch.stack(hidden).sum(0))


class ReturnsList(Plain):
    """Returns what all blocks returned."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        hidden = []
        for block in self.blocks:
            x = call(block, x)
            hidden.append(x)
        return hidden


class ReturnsMiddle(Plain):
    """Returns the result of a middle block in a dictionary besides."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        middle = x
        for index, block in enumerate(self.blocks):
            x = call(block, x)
            middle = x if index == 2 else middle
        return {"last": call.end(x), "middle": middle}


class UShape(Plain):
    """Hands results of the first half over to the second."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        hidden, half = [], len(self.blocks) // 2
        for block in list(self.blocks)[:half]:
            x = call(block, x)
            hidden.append(x)
        for block in list(self.blocks)[half:]:
            x = call(block, x + hidden.pop()) if hidden else call(block, x)
        return call.end(x)


class Dense(Plain):
    """Gives each block the mean of all results before it."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        hidden = [x]
        for block in self.blocks:
            hidden.append(call(block, torch.stack(hidden).mean(0)))
        return call.end(hidden[-1])


class DetachedMiddle(Plain):
    """Detaches in the middle: earlier blocks have no backward pass."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x.detach() if index == 2 else x)
        return call.end(x)


class DroppedResult(Plain):
    """Drops the result of one block: it has no backward pass."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            y = call(block, x)
            x = x if index == 1 else y
        return call.end(x)


class ComparedResult(Plain):
    """Uses one block's result in a comparison only: it has no backward pass."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            y = call(block, x)
            x = x * (y > 0) + self.gain if index == 2 else y
        return call.end(x)


class NoGradFirst(Plain):
    """Runs the first two blocks without gradients."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        with torch.no_grad():
            for block in list(self.blocks)[:2]:
                x = call(block, x)
        for block in list(self.blocks)[2:]:
            x = call(block, x)
        return call.end(x)


class InferenceFirst(Plain):
    """Runs the first block in inference mode."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        with torch.inference_mode():
            x = call(self.blocks[0], x)
        x = x.clone()
        for block in list(self.blocks)[1:]:
            x = call(block, x)
        return call.end(x)


class CheckpointSome(Plain):
    """Checkpoints odd blocks."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = checkpoint(call, block, x, use_reentrant=False) if index % 2 else call(block, x)
        return call.end(x)


class CheckpointAll(Plain):
    """Checkpoints each block."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(call, block, x, use_reentrant=False)
        return call.end(x)


class CheckpointReentrant(Plain):
    """Checkpoints each block in the old way."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        x = x + self.gain
        for block in self.blocks:
            x = checkpoint(call, block, x, use_reentrant=True)
        return call.end(x)


class CheckpointGroups(Plain):
    """Checkpoints blocks two by two."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        def run(first: int, x: Tensor) -> Tensor:
            for block in list(self.blocks)[first:first + 2]:
                x = call(block, x)
            return x

        for first in range(0, len(self.blocks), 2):
            x = checkpoint(run, first, x, use_reentrant=False)
        return call.end(x)


class CheckpointSequential(Plain):
    """Checkpoints in two segments by the library's function."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        functions = [lambda t, block=block: call(block, t) for block in self.blocks]
        return call.end(checkpoint_sequential(functions, 2, x, use_reentrant=False))


class SkipsOne(Plain):
    """Never calls the second block."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = x if index == 1 else call(block, x)
        return call.end(x)


class LayerDrop(Plain):
    """Skips blocks by Python's generator in training."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            if not (self.training and random.random() < 0.2):
                x = call(block, x)
        return call.end(x)


class TorchLayerDrop(Plain):
    """Skips blocks by torch's generator in training."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            if not (self.training and torch.rand([]) < 0.2):
                x = call(block, x)
        return call.end(x)


class WritesAfter(Plain):
    """Writes to what each block returned."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = call(block, x)
            x = x + 1 if x._is_view() or x.is_leaf else x.add_(1)
        return call.end(x)


class WritesBefore(Plain):
    """Writes to what each block was given, after its call."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            given = x * 1.5
            x = call(block, given)
            with torch.no_grad():
                given.detach().add_(1)
        return call.end(x)


class Scaled(Plain):
    """Multiplies by the index before each block."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x * (index + 1))
        return call.end(x)


class ThenOthers(Plain):
    """Calls other blocks after these."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        return self.extra(super().stack(call, x))


class UsesParametersAfter(Plain):
    """Adds the parameters of one block after all."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        x = super().stack(call, x)
        return x + sum(p.abs().sum() for p in self.blocks[1].parameters()) * 0.1


class UsesParametersBefore(Plain):
    """Adds the parameters of one block before all."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        return super().stack(call, x + sum(p.abs().sum() for p in self.blocks[1].parameters()) * 0.1)


class AutocastSome(Plain):
    """Runs later blocks under autocast."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=index >= 3):
                x = call(block, x).float()
        return call.end(x)


class TwoWays(Plain):
    """Calls odd and even blocks in two ways side by side."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        y = x * 2
        for index, block in enumerate(self.blocks):
            x, y = (call(block, x), y) if index % 2 else (x, call(block, y))
        return call.end(x + y)


class SameInput(Plain):
    """Gives all blocks one input."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        return call.end(torch.stack([call(block, x) for block in self.blocks]).sum(0))


class SameInputDetached(Plain):
    """Gives all blocks one input, and most results are detached."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        rest = torch.stack([call(block, x).detach() for block in self.blocks]).sum(0)
        return call.end(x + rest + call(self.blocks[0], x))


class Slices(Plain):
    """Gives blocks a part of the batch."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.cat([call(block, x[:1]), x[1:]])
        return call.end(x)


class Chunks(Plain):
    """Calls each block for each part of the batch."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.cat([call(block, part) for part in x.chunk(2)])
        return call.end(x)


class Growing(Plain):
    """Gives later blocks longer inputs."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = call(block, torch.cat([x, x[:, :1]], 1) if x.shape[1] < 7 else x)
        return call.end(x)


class Retaining(Plain):
    """Retains the gradients of all results."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = call(block, x)
            if x.requires_grad and not x.is_leaf:
                x.retain_grad()
        return call.end(x)


class HookBetween(Plain):
    """Puts a hook on one result."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x)
            if x.requires_grad and index == 1:
                x.register_hook(lambda grad: grad * 2)
        return call.end(x)


class HoldsResults(Plain):
    """Keeps detached results as attributes."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        held = {}
        for index, block in enumerate(self.blocks):
            x = call(block, x)
            held[index] = x.detach()
        self.held = held
        return call.end(x)


class EarlyExit(Plain):
    """Asks after each block whether to go on."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in self.blocks:
            x = call(block, x)
            if x.mean() > 1e9:
                break
        return call.end(x)


class InnerGradient(Plain):
    """Asks for the gradient of one block's parameter in the middle."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x)
            if index == 1 and x.requires_grad:
                (grad,) = torch.autograd.grad(x.sum(), next(p for p in block.parameters() if p.requires_grad),
                                              retain_graph=True, allow_unused=True)
                x = x if grad is None else x + grad.sum() * 0
        return call.end(x)


class Penalty(Plain):
    """Adds the norm of the output's gradient by the input."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        x = x + self.gain
        y = super().stack(call, x)
        if not y.requires_grad:
            return y
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True, allow_unused=True)
        return y if grad is None else y + grad.square().mean()


class BackwardBetween(Plain):
    """Runs a backward pass of its own after the first blocks."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block, x)
            if index == 2 and x.requires_grad:
                x.sum().backward()
                x = x.detach()
        return call.end(x)


class DropsGradients(Plain):
    """Drops the gradients of one block in each forward pass."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        self.blocks[0].zero_grad()
        return super().stack(call, x)


class FunctionalBlock(Plain):
    """Calls one block with scaled parameters of its own."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            if index == 1:
                scaled = {name: p * 2 for name, p in block.named_parameters()}
                x = torch.func.functional_call(self, {f"blocks.1.{n}": p for n, p in scaled.items()}, (block, call, x))
            else:
                x = call(block, x)
        return call.end(x)

    def forward(self, x: Any, *rest: Any) -> Any:
        return rest[0](x, rest[1]) if rest else super().forward(x)


class DoubleHeads(Plain):
    """Returns two results, of which the default loss takes both."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for block in list(self.blocks)[:-1]:
            x = call(block, x)
        return call.end(call(self.blocks[-1], x)), x.argmax(-1)


class CallsForward(Plain):
    """Calls the forward of odd blocks, past hooks."""

    def stack(self, call: Convention, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = call(block.forward if index % 2 else block, x)
        return call.end(x)
