"""How a model calls its blocks: what it hands over, what comes back, what both change."""
from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


def run_block(block: Any, x: Tensor) -> Any:
    """The forward of a block that takes and returns a tensor: ``block.run`` runs its features."""
    return block.run(x)


class Convention:
    """A tensor in, a tensor out. One is made for each forward pass of a model; `forward` becomes the blocks' own."""

    def __init__(self, model: Any, x: Tensor) -> None:
        self.calls = 0

    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        """Call ``block``, a module or its forward, and take the tensor that goes on out of its result."""
        return block(x)

    def end(self, x: Tensor) -> Tensor:  # what the model returns for the last block's ``x``
        return x

    forward: Callable[..., Any] = staticmethod(run_block)


class TupleResult(Convention):  # blocks return a tuple with nothing in its second place
    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x)[0]

    @staticmethod
    def forward(block: Any, x: Tensor) -> Any:
        return block.run(x), None


class AuxiliaryLoss(Convention):  # blocks return a loss besides, and the model adds all of them
    def __init__(self, model: Any, x: Tensor) -> None:
        super().__init__(model, x)
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


class NamedResult(Convention):  # blocks return a named tuple
    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x).hidden

    @staticmethod
    def forward(block: Any, x: Tensor) -> Any:
        return _Output(block.run(x), 1)


@dataclass
class _Record:
    hidden: Tensor
    count: int = 1


class DataclassResult(NamedResult):  # blocks return a dataclass
    @staticmethod
    def forward(block: Any, x: Tensor) -> Any:
        return _Record(block.run(x))


class OptionalMask(Convention):  # blocks take a mask that is None
    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x, mask=None)

    @staticmethod
    def forward(block: Any, x: Tensor, mask: Tensor | None = None) -> Any:
        return block.run(x) if mask is None else block.run(x) * mask


class SharedMask(Convention):  # blocks take one mask that the model makes
    def __init__(self, model: Any, x: Tensor) -> None:
        super().__init__(model, x)
        self.mask = torch.ones(x.shape[1], 1, device=x.device)

    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x, self.mask[:x.shape[1]])

    @staticmethod
    def forward(block: Any, x: Tensor, mask: Tensor) -> Any:
        return block.run(x) * mask


class InputTwice(Convention):  # blocks take their input twice
    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x, x)

    @staticmethod
    def forward(block: Any, x: Tensor, skip: Tensor) -> Any:
        return block.run(x) + skip


class FirstInput(InputTwice):  # blocks take the model's first input besides
    def __init__(self, model: Any, x: Tensor) -> None:
        super().__init__(model, x)
        self.first = x * 3

    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x, self.first.mean())


class IndexArgument(Convention):  # blocks take a number that grows, and multiply by it
    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        self.calls += 1
        return block(x, self.calls)

    @staticmethod
    def forward(block: Any, x: Tensor, index: int) -> Any:
        return block.run(x) * index


class IndexBranch(IndexArgument):  # blocks take a number that grows, and go another way by it
    @staticmethod
    def forward(block: Any, x: Tensor, index: int) -> Any:
        return block.run(x).relu() if index % 2 else block.run(x)


class FunctionArgument(Convention):  # blocks take a function of the model's, which counts
    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x, self.act)

    def act(self, x: Tensor) -> Tensor:  # go another way in every second call
        self.calls += 1
        return x.relu() if self.calls % 2 else x

    @staticmethod
    def forward(block: Any, x: Tensor, act: Any) -> Any:
        return act(block.run(x))


class CacheList(Convention):  # blocks append to a list that the model hands over
    def __init__(self, model: Any, x: Tensor) -> None:
        super().__init__(model, x)
        self.cache: list[Tensor] = []

    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x, self.cache)

    @staticmethod
    def forward(block: Any, x: Tensor, cache: list[Tensor]) -> Any:
        cache.append(x.detach())
        return block.run(x)


class CacheListRead(CacheList):  # blocks append to a list that the model hands over, and read what others appended
    @staticmethod
    def forward(block: Any, x: Tensor, cache: list[Tensor]) -> Any:
        x = block.run(x)
        cache.append(x)
        return x if len(cache) < 3 else x + cache[-3].mean()


class StateObject(Convention):  # blocks count in an object that the model hands over
    def __init__(self, model: Any, x: Tensor) -> None:
        super().__init__(model, x)
        self.state = types.SimpleNamespace(calls=0)

    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x, self.state)

    @staticmethod
    def forward(block: Any, x: Tensor, state: Any) -> Any:
        state.calls += 1
        return block.run(x) * state.calls


class BufferArgument(Convention):  # blocks take a buffer of the model's, and write to it
    def __init__(self, model: Any, x: Tensor) -> None:
        super().__init__(model, x)
        self.total = model.total

    def __call__(self, block: Callable[..., Any], x: Tensor) -> Any:
        return block(x, self.total)

    @staticmethod
    def forward(block: Any, x: Tensor, total: Tensor) -> Any:
        with torch.no_grad():
            total.add_(1)
        return block.run(x)
