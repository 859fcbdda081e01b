"""Features that keep state on the block: counters, buffers that change, attributes made while it runs."""
from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .feature import WIDTH, branch, feature, linear


@feature(calls=0)  # counts its calls
def CallCounter(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return self.linear(x)


@branch(calls=0)  # goes another way from the second call on
def FirstCall(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return self.calls > 1


@feature(table=None)  # keeps a table that the first call makes
def LazyTable(self: Any, x: Tensor) -> Any:
    if self.table is None:
        self.table = torch.ones(x.shape[1], WIDTH, device=x.device)
    return self.linear(x) + self.table


# sets its scale from the first batch, as ActNorm does
@feature(scale=lambda at: nn.Parameter(torch.ones(WIDTH)), is_set=lambda at: nn.Buffer(torch.tensor(0)))
def InitializedByData(self: Any, x: Tensor) -> Any:
    if self.is_set.item() == 0:
        with torch.no_grad():
            self.scale.copy_(x.detach().std((0, 1)) + 1)
        self.is_set.fill_(1)
    return self.linear(x) * self.scale


@feature(calls_seen=lambda at: nn.Buffer(torch.zeros((), dtype=torch.long)))  # counts its calls in a buffer
def BufferCounter(self: Any, x: Tensor) -> Any:
    self.calls_seen += 1
    return self.linear(x)


@branch(calls_seen=lambda at: nn.Buffer(torch.zeros((), dtype=torch.long)))  # and asks it
def BufferCounterRead(self: Any, x: Tensor) -> Any:
    self.calls_seen += 1
    return int(self.calls_seen) > 1


@feature(average=lambda at: nn.Buffer(torch.zeros(WIDTH)))  # moves an average kept in a buffer, in place
def MovingAverage(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
    return self.linear(x) - self.average


@feature(average=lambda at: nn.Buffer(torch.zeros(WIDTH)))  # puts another buffer in place of the old one in each call
def ReplacedAverage(self: Any, x: Tensor) -> Any:
    self.average = self.average * 0.9 + x.detach().mean((0, 1)) * 0.1
    return self.linear(x) - self.average


@feature(times=lambda at: nn.Buffer(torch.tensor(1 + at.index % 2)))  # loops as often as a buffer says
def BufferValue(self: Any, x: Tensor) -> Any:
    for _ in range(int(self.times)):
        x = self.linear(x)
    return x


# writes to a queue where a buffer points, and moves that on
@feature(queue=lambda at: nn.Buffer(torch.zeros(8, WIDTH)),
         pointer=lambda at: nn.Buffer(torch.zeros(1, dtype=torch.long)))
def QueuePointer(self: Any, x: Tensor) -> Any:
    at = int(self.pointer)
    with torch.no_grad():
        self.queue[at:at + 2] = x.detach().mean(1)
        self.pointer[0] = (at + 2) % 8
    return self.linear(x) + self.queue[:at + 1].mean(0)


@feature  # keeps its last output as an attribute
def KeepsOutput(self: Any, x: Tensor) -> Any:
    x = self.linear(x)
    self.last = x
    return x


# draws from an iterator that it holds
OwnIterator = branch(lambda self, x: next(self.numbers), numbers=lambda at: itertools.cycle([0, 1, 1]))


# changes a list inside of a dictionary inside of an object that it holds
@branch(status=lambda at: types.SimpleNamespace(inner={"counts": [0]}))
def NestedState(self: Any, x: Tensor) -> Any:
    counts = self.status.inner["counts"]
    counts[0] += 1
    return counts[0] % 2


@branch(array=lambda at: np.zeros(2))  # changes a NumPy array that it holds, and asks it
def OwnArray(self: Any, x: Tensor) -> Any:
    self.array[0] += 1
    return self.array[0] % 2


@feature(second=lambda at: linear())  # freezes a child in its first call
def RequiresGradToggle(self: Any, x: Tensor) -> Any:
    self.second.weight.requires_grad_(False)
    return self.second(self.linear(x))


@feature  # puts another parameter in place of its weight in each call
def ParameterReplaced(self: Any, x: Tensor) -> Any:
    self.linear.weight = nn.Parameter(self.linear.weight.detach().clone())
    return self.linear(x)


@feature  # gives its weight other data in each call
def ParameterData(self: Any, x: Tensor) -> Any:
    self.linear.weight.data = self.linear.weight.data * 0.99
    return self.linear(x)


@feature(act=lambda at: nn.ReLU())  # puts another module in place of its child in the second call
def ChildReplaced(self: Any, x: Tensor) -> Any:
    x = self.act(self.linear(x))
    self.act = nn.GELU() if isinstance(self.act, nn.ReLU) else self.act
    return x
