"""Features whose state lies where a block does not hold it: globals, closures, classes, generators, the process."""
from __future__ import annotations

import contextvars
import functools
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .feature import Feature, Place

VARIABLE = "ANALYZER_RANDOM_PROGRAM"
count = 0
tensors: dict[str, Tensor] = {}
context: contextvars.ContextVar[int] = contextvars.ContextVar("context", default=0)
of_thread = threading.local()
generator = np.random.default_rng(0)
seen_ids: set[int] = set()


class _Alternating(Feature):  # goes another way where the subclass's state says so
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if self.is_other_way() else self.linear(x)

    def is_other_way(self) -> Any:  # read the state, and change it
        raise NotImplementedError


class GlobalInteger(_Alternating):  # counts in a global
    def is_other_way(self) -> Any:
        global count
        count += 1
        return count % 3 == 0


class Environment(_Alternating):  # counts in a variable of the process's environment
    def is_other_way(self) -> Any:
        os.environ[VARIABLE] = str(int(os.environ.get(VARIABLE, "0")) + 1)
        return int(os.environ[VARIABLE]) % 2 == 1


class ClassCounter(_Alternating):  # counts in an attribute of its class
    calls_of_all: ClassVar[int] = 0

    def is_other_way(self) -> Any:
        type(self).calls_of_all += 1
        return type(self).calls_of_all % 2 == 1


class ContextVariable(_Alternating):  # counts in a context variable
    def is_other_way(self) -> Any:
        context.set(context.get() + 1)
        return context.get() % 2 == 1


class ThreadLocal(_Alternating):  # counts in the thread's own state
    def is_other_way(self) -> Any:
        of_thread.calls = getattr(of_thread, "calls", 0) + 1
        return bool(of_thread.calls % 2)


def _make_counter() -> Callable[[], int]:
    calls = 0

    def advance() -> int:
        nonlocal calls
        calls += 1
        return calls

    return advance


advance_closure = _make_counter()


class GlobalClosure(_Alternating):  # counts in a cell of a global function
    def is_other_way(self) -> Any:
        return advance_closure() % 2 == 1


def advance_default(calls: list[int] = [0]) -> int:  # noqa: B006  # the state that is tried
    """Count in a default argument."""
    calls[0] += 1
    return calls[0]


class DefaultArgument(_Alternating):  # counts in a function's default argument
    def is_other_way(self) -> Any:
        return advance_default() % 2 == 1


def _generate() -> Iterator[int]:
    yield from itertools.cycle((0, 0, 1))


generated = _generate()


class GeneratorFrame(_Alternating):  # draws from a generator function, whose frame is the state
    def is_other_way(self) -> Any:
        return next(generated) == 1


class NumpyGenerator(_Alternating):  # asks a global NumPy generator
    def is_other_way(self) -> Any:
        return generator.random() < 0.5


class OwnPythonGenerator(_Alternating):  # asks a Python generator of its own
    def build(self, place: Place) -> None:
        super().build(place)
        self.generator = random.Random(place.index)

    def is_other_way(self) -> Any:
        return self.generator.random() < 0.5


class TorchChance(_Alternating):  # asks torch's generator in training
    def is_other_way(self) -> Any:
        return self.training and torch.rand(1).item() < 0.3


class SeenIdentities(_Alternating):  # notes its weight in a global set, and asks whether it was there
    def is_other_way(self) -> Any:
        known = id(self.linear.weight) in seen_ids
        seen_ids.add(id(self.linear.weight))
        return known


class AllocatedMemory(_Alternating):  # asks how much memory is allocated
    def is_other_way(self) -> Any:
        return torch.cuda.is_available() and torch.cuda.memory_allocated() > 20_000


class RandomState(_Alternating):  # asks for the state of torch's generator
    def is_other_way(self) -> Any:
        return bool(torch.get_rng_state()[0] % 2)


class GlobalTensorRead(Feature):  # adds what the block before it left in a global dictionary
    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        if "read" in tensors:
            x = x + tensors["read"].mean()
        tensors["read"] = x.detach()
        return x


class ClassCache(Feature):  # keeps a table of each length on its class
    tables: ClassVar[dict[int, Tensor]] = {}

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.ones(x.shape[1], 1, device=x.device)
        return self.linear(x) + self.tables[x.shape[1]]


@functools.cache
def make_table(length: int) -> Tensor:  # a column of positions, made once for each length
    return torch.arange(length).float()[:, None]


class FunctionCache(Feature):  # takes a table from a cached function
    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + make_table(x.shape[1]).to(x.device)
