"""Features whose state lies where a block does not hold it: globals, closures, classes, generators, the process."""
from __future__ import annotations

import contextvars
import functools
import itertools
import os
import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .feature import Feature, branch, feature

VARIABLE = "ANALYZER_RANDOM_PROGRAM"
count = 0
tensors: dict[str, Tensor] = {}
context: contextvars.ContextVar[int] = contextvars.ContextVar("context", default=0)
of_thread = threading.local()
generator = np.random.default_rng(0)
seen_ids: set[int] = set()


@branch  # counts in a global
def GlobalInteger(self: Any, x: Tensor) -> Any:
    global count
    count += 1
    return count % 3 == 0


@branch  # counts in a variable of the process's environment
def Environment(self: Any, x: Tensor) -> Any:
    os.environ[VARIABLE] = str(int(os.environ.get(VARIABLE, "0")) + 1)
    return int(os.environ[VARIABLE]) % 2 == 1


class ClassCounter(Feature):  # counts in an attribute of its class
    calls_of_all: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Any:
        type(self).calls_of_all += 1
        return self.linear(x).relu() if type(self).calls_of_all % 2 else self.linear(x)


@branch  # counts in a context variable
def ContextVariable(self: Any, x: Tensor) -> Any:
    context.set(context.get() + 1)
    return context.get() % 2


@branch  # counts in the thread's own state
def ThreadLocal(self: Any, x: Tensor) -> Any:
    of_thread.calls = getattr(of_thread, "calls", 0) + 1
    return of_thread.calls % 2


def _make_counter() -> Callable[[], int]:
    calls = 0

    def advance() -> int:
        nonlocal calls
        calls += 1
        return calls

    return advance


advance_closure = _make_counter()


def advance_default(calls: list[int] = [0]) -> int:  # noqa: B006  # the state that is tried
    """Count in a default argument."""
    calls[0] += 1
    return calls[0]


generated = (number for number in itertools.cycle((0, 0, 1)))
# count in a cell of a global function, and in a function's default argument
GlobalClosure = branch(lambda self, x: advance_closure() % 2)
DefaultArgument = branch(lambda self, x: advance_default() % 2)
# draws from a generator function, whose frame is the state
GeneratorFrame = branch(lambda self, x: next(generated))
# ask a global NumPy generator, a Python generator of their own, and torch's generator in training
NumpyGenerator = branch(lambda self, x: generator.random() < 0.5)
OwnPythonGenerator = branch(lambda self, x: self.generator.random() < 0.5, generator=lambda at: random.Random(at.index))
TorchChance = branch(lambda self, x: self.training and torch.rand(1).item() < 0.3)


@branch  # notes its weight in a global set, and asks whether it was there
def SeenIdentities(self: Any, x: Tensor) -> Any:
    known = id(self.linear.weight) in seen_ids
    seen_ids.add(id(self.linear.weight))
    return known


# ask how much memory is allocated, and for the state of torch's generator
AllocatedMemory = branch(lambda self, x: torch.cuda.is_available() and torch.cuda.memory_allocated() > 20_000)
RandomState = branch(lambda self, x: torch.get_rng_state()[0] % 2)


@feature  # adds what the block before it left in a global dictionary
def GlobalTensorRead(self: Any, x: Tensor) -> Any:
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


# takes a table from a cached function
FunctionCache = feature(lambda self, x: self.linear(x) + make_table(x.shape[1]).to(x.device))
