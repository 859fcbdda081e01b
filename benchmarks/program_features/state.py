"""Features that keep state on the block: counters, buffers that change, attributes made while it runs."""
from __future__ import annotations

import collections
import functools
import itertools
import time
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place


class CallCounter(Feature):
    """Counts its calls."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.linear(x)


class FirstCall(CallCounter):
    """Goes another way from the second call on."""

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.linear(x).relu() if self.calls > 1 else self.linear(x)


class EverySecondCall(CallCounter):
    """Goes another way in every second call."""

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.linear(x).relu() if self.calls % 2 else self.linear(x)


class LazyTable(Feature):
    """Keeps a table that the first call makes."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.ones(x.shape[1], WIDTH, device=x.device)
        return self.linear(x) + self.table


class InitializedByData(Feature):
    """Sets its scale from the first batch, as ActNorm does."""

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


class LazyLinear(Feature):
    """Materializes its weight in the first call."""

    def build(self, place: Place) -> None:
        self.lazy = nn.LazyLinear(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.lazy(x)


class ReadyFlag(Feature):
    """Sets a flag in the first call, which it asks."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.ready = False

    def forward(self, x: Tensor) -> Any:
        if not self.ready:
            self.ready = True
            x = x * 2
        return self.linear(x)


class BufferCounter(Feature):
    """Counts its calls in a buffer."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.calls_seen: Any
        self.register_buffer("calls_seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        self.calls_seen += 1
        return self.linear(x)


class BufferCounterRead(BufferCounter):
    """Counts its calls in a buffer and asks it."""

    def forward(self, x: Tensor) -> Any:
        self.calls_seen += 1
        return self.linear(x).relu() if int(self.calls_seen) > 1 else self.linear(x)


class MovingAverage(Feature):
    """Moves an average kept in a buffer, in place."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.average: Any
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.linear(x) - self.average


class ReplacedAverage(MovingAverage):
    """Puts another buffer in place of the old one in each call."""

    def forward(self, x: Tensor) -> Any:
        self.average = self.average * 0.9 + x.detach().mean((0, 1)) * 0.1
        return self.linear(x) - self.average


class BufferValue(Feature):
    """Loops as often as a buffer says."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.register_buffer("times", torch.tensor(1 + place.index % 2))

    def forward(self, x: Tensor) -> Any:
        for _ in range(int(self.times)):
            x = self.linear(x)
        return x


class BufferFlag(Feature):
    """Asks a buffer whether to run."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.register_buffer("flag", torch.tensor(place.index % 2 == 0))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) if self.flag else x


class QueuePointer(Feature):
    """Writes to a queue where a buffer points, and moves that on."""

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


class KeepsOutput(Feature):
    """Keeps its last output as an attribute."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        self.last = x
        return x


class KeepsMean(Feature):
    """Keeps a small detached tensor as an attribute."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        self.last_mean = x.detach().mean()
        return x


class KeepsHistory(Feature):
    """Appends to a list of its own, which it never asks."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.history: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        self.history.append(float(x.shape[0]))
        return self.linear(x)


class KeepsOutputs(KeepsHistory):
    """Appends each output to a list of its own."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        self.history.append(x.detach())
        return x


class KeepsTwo(Feature):
    """Keeps the last two inputs in a deque."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=2)

    def forward(self, x: Tensor) -> Any:
        self.recent.append(x.detach())
        return self.linear(x) + self.recent[0].mean()


class KeepsTime(Feature):
    """Keeps how long its calls take, in its __dict__."""

    def forward(self, x: Tensor) -> Any:
        start = time.perf_counter()
        x = self.linear(x)
        self.__dict__.setdefault("elapsed", []).append(time.perf_counter() - start)
        return x


class OwnIterator(Feature):
    """Draws from an iterator that it holds."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.numbers = itertools.cycle([0, 1, 1])

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if next(self.numbers) else self.linear(x)


class OwnDictionary(Feature):
    """Changes an entry of a dictionary that it holds."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.counts = {"calls": 0}

    def forward(self, x: Tensor) -> Any:
        self.counts["calls"] += 1
        return self.linear(x).relu() if self.counts["calls"] % 2 else self.linear(x)


class NestedState(Feature):
    """Changes a list inside of a dictionary inside of an object that it holds."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.status = types.SimpleNamespace(inner={"counts": [0]})

    def forward(self, x: Tensor) -> Any:
        counts = self.status.inner["counts"]
        counts[0] += 1
        return self.linear(x).relu() if counts[0] % 2 else self.linear(x)


class OwnArray(Feature):
    """Changes a NumPy array that it holds, and asks it."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.array = np.zeros(2)

    def forward(self, x: Tensor) -> Any:
        self.array[0] += 1
        return self.linear(x).relu() if self.array[0] % 2 else self.linear(x)


@dataclass
class Schedule:
    """A plain object with a method that changes it."""

    step: int = 0

    def advance(self) -> int:
        """Go one step on."""
        self.step += 1
        return self.step


class OwnObject(Feature):
    """Calls a method of a plain object, which changes it."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.schedule = Schedule()

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.schedule.advance() % 2 else self.linear(x)


class PartialState(Feature):
    """Holds a partial function around a list that it changes."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.advance = functools.partial(_append_and_count, [])

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.advance() % 2 else self.linear(x)


def _append_and_count(seen: list[int]) -> int:
    seen.append(1)
    return len(seen)


class TrainingToggle(Feature):
    """Switches the training flag of a child in each call."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        self.dropout.train(not self.dropout.training)
        return self.dropout(self.linear(x))


class RequiresGradToggle(Feature):
    """Freezes a child in its first call."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.second.weight.requires_grad_(False)
        return self.second(self.linear(x))


class ParameterReplaced(Feature):
    """Puts another parameter in place of its weight in each call."""

    def forward(self, x: Tensor) -> Any:
        self.linear.weight = nn.Parameter(self.linear.weight.detach().clone())
        return self.linear(x)


class ParameterData(Feature):
    """Gives its weight other data in each call."""

    def forward(self, x: Tensor) -> Any:
        self.linear.weight.data = self.linear.weight.data * 0.99
        return self.linear(x)


class ParameterClamped(Feature):
    """Writes to its weight in each call."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.linear.weight.clamp_(-1, 1)
        return self.linear(x)


class ChildReplaced(Feature):
    """Puts another module in place of its child in the second call."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.act: nn.Module = nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.linear(x))
        self.act = nn.GELU() if isinstance(self.act, nn.ReLU) else self.act
        return x


class ChildAdded(Feature):
    """Adds a child without parameters in the first call."""

    def forward(self, x: Tensor) -> Any:
        if "late" not in self._modules:
            self.add_module("late", nn.Tanh())
        return self.get_submodule("late")(self.linear(x))


class BufferRegistered(Feature):
    """Registers a buffer in the first call."""

    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "late_mask"):
            self.register_buffer("late_mask", torch.ones(x.shape[1], 1, device=x.device), persistent=False)
        return self.linear(x) * self.late_mask


class SharedCache(Feature):
    """Keeps the largest length met as a table that grows, as rotary embeddings do."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.longest = 0
        self.register_buffer("angles", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.angles = torch.outer(torch.arange(self.longest, device=x.device).float(), x.new_ones(WIDTH))
        return self.linear(x) * F.silu(self.angles[:x.shape[1]])
