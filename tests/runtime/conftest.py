"""A device whose time is told by hand, and a model whose parts take known times on it."""
import pytest
import torch
from torch import nn

from analyzer.tools.runtime.clock import EventClock


class Stream:
    """What a device's stream is to events: a time that only work moves on."""

    def __init__(self):
        self.milliseconds = 0.0
        self.synchronized = 0

    def work(self, milliseconds):
        self.milliseconds += milliseconds

    def make_event(self):
        return Event(self)

    def synchronize(self):
        self.synchronized += 1

    def clock(self):
        return EventClock(self.make_event, self.synchronize)


class Event:
    def __init__(self, stream):
        self.stream, self.at = stream, None

    def record(self):
        self.at = self.stream.milliseconds

    def elapsed_time(self, end):
        assert self.stream.synchronized, "asked before the device was done"
        return end.at - self.at


class Work(torch.autograd.Function):
    """Takes a time forward and another one backward."""

    @staticmethod
    def forward(ctx, x, stream, fwd, bwd):
        ctx.stream, ctx.bwd = stream, bwd
        stream.work(fwd)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.stream.work(ctx.bwd)
        return grad * 2, None, None, None


class Busy(nn.Module):
    """Takes ``fwd`` and ``bwd`` milliseconds, and holds ``inner``."""

    def __init__(self, stream, fwd, bwd, *inner):
        super().__init__()
        self.stream, self.fwd, self.bwd = stream, fwd, bwd
        self.inner = nn.ModuleList(inner)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = Work.apply(x * self.weight, self.stream, self.fwd, self.bwd)
        for module in self.inner:
            x = module(x)
        return x


@pytest.fixture
def stream():
    return Stream()


@pytest.fixture
def busy(stream):
    """5 ms of its own, and parts of 1 and 3 ms, the second of which holds one of 7; twice as long backward."""
    return Busy(stream, 5, 10, Busy(stream, 1, 2), Busy(stream, 3, 6, Busy(stream, 7, 14)))


def own_milliseconds(profile, name):
    """By path, what each module takes itself."""
    return {m.path: round(1e3 * getattr(m.own, name), 6) for m in profile.modules.walk() if m.type == "Busy"}
