"""How a model calls its blocks: what it hands over, what comes back, what both change."""
from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
