"""Features that keep state on the block: counters, buffers that change, attributes made while it runs."""
from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place


class CallCounter(Feature):  # counts its calls
    def build(self, place: Place) -> None:
        super().build(place)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.linear(x)


class FirstCall(CallCounter):  # goes another way from the second call on
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.linear(x).relu() if self.calls > 1 else self.linear(x)


class LazyTable(Feature):  # keeps a table that the first call makes
    def build(self, place: Place) -> None:
        super().build(place)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.ones(x.shape[1], WIDTH, device=x.device)
        return self.linear(x) + self.table


class InitializedByData(Feature):  # sets its scale from the first batch, as ActNorm does
    def build(self, place: Place) -> None:
        super().build(place)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("is_set", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        if self.is_set.item() == 0:
            with torch.no_grad():
                self.scale.copy_(x.detach().std((0, 1)) + 1)
            self.is_set.fill_(1)
        return self.linear(x) * self.scale


class BufferCounter(Feature):  # counts its calls in a buffer
    def build(self, place: Place) -> None:
        super().build(place)
        self.calls_seen: Any
        self.register_buffer("calls_seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.calls_seen += 1
        return self.linear(x)


class BufferCounterRead(BufferCounter):  # counts its calls in a buffer and asks it
    def forward(self, x: Tensor) -> Any:
        self.calls_seen += 1
        return self.linear(x).relu() if int(self.calls_seen) > 1 else self.linear(x)


class MovingAverage(Feature):  # moves an average kept in a buffer, in place
    def build(self, place: Place) -> None:
        super().build(place)
        self.average: Any
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.linear(x) - self.average


class ReplacedAverage(MovingAverage):  # puts another buffer in place of the old one in each call
    def forward(self, x: Tensor) -> Any:
        self.average = self.average * 0.9 + x.detach().mean((0, 1)) * 0.1
        return self.linear(x) - self.average


class BufferValue(Feature):  # loops as often as a buffer says
    def build(self, place: Place) -> None:
        super().build(place)
        self.register_buffer("times", torch.tensor(1 + place.index % 2))

    def forward(self, x: Tensor) -> Any:
        for _ in range(int(self.times)):
            x = self.linear(x)
        return x


class QueuePointer(Feature):  # writes to a queue where a buffer points, and moves that on
    def build(self, place: Place) -> None:
        super().build(place)
        self.register_buffer("queue", torch.zeros(8, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        at = int(self.pointer)
        with torch.no_grad():
            self.queue[at:at + 2] = x.detach().mean(1)
            self.pointer[0] = (at + 2) % 8
        return self.linear(x) + self.queue[:at + 1].mean(0)


class KeepsOutput(Feature):  # keeps its last output as an attribute
    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        self.last = x
        return x


class OwnIterator(Feature):  # draws from an iterator that it holds
    def build(self, place: Place) -> None:
        super().build(place)
        self.numbers = itertools.cycle([0, 1, 1])

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if next(self.numbers) else self.linear(x)


class NestedState(Feature):  # changes a list inside of a dictionary inside of an object that it holds
    def build(self, place: Place) -> None:
        super().build(place)
        self.status = types.SimpleNamespace(inner={"counts": [0]})

    def forward(self, x: Tensor) -> Any:
        counts = self.status.inner["counts"]
        counts[0] += 1
        return self.linear(x).relu() if counts[0] % 2 else self.linear(x)


class OwnArray(Feature):  # changes a NumPy array that it holds, and asks it
    def build(self, place: Place) -> None:
        super().build(place)
        self.array = np.zeros(2)

    def forward(self, x: Tensor) -> Any:
        self.array[0] += 1
        return self.linear(x).relu() if self.array[0] % 2 else self.linear(x)


class RequiresGradToggle(Feature):  # freezes a child in its first call
    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.second.weight.requires_grad_(False)
        return self.second(self.linear(x))


class ParameterReplaced(Feature):  # puts another parameter in place of its weight in each call
    def forward(self, x: Tensor) -> Any:
        self.linear.weight = nn.Parameter(self.linear.weight.detach().clone())
        return self.linear(x)


class ParameterData(Feature):  # gives its weight other data in each call
    def forward(self, x: Tensor) -> Any:
        self.linear.weight.data = self.linear.weight.data * 0.99
        return self.linear(x)


class ChildReplaced(Feature):  # puts another module in place of its child in the second call
    def build(self, place: Place) -> None:
        super().build(place)
        self.act: nn.Module = nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.linear(x))
        self.act = nn.GELU() if isinstance(self.act, nn.ReLU) else self.act
        return x
