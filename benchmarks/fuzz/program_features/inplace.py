"""Features that write in place or hand on views, and those that compute under a context."""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .feature import WIDTH, branch, feature, linear

# writes to its input
InPlaceOnInput = feature(lambda self, x: x + self.linear(x) if x.is_leaf else x.add_(self.linear(x)))
# writes to what its child returned
InPlaceOnOutput = feature(lambda self, x: self.linear(x).add_(1))


@feature  # writes to parts of its output
def InPlaceOnView(self: Any, x: Tensor) -> Any:
    y = self.linear(x)
    y[:, 0] = 0
    y[..., :4] *= 2
    return y


# fills rows by an index made on the way
IndexFill = feature(lambda self, x: self.linear(x).index_fill(1, torch.tensor([0], device=x.device), 0.0))


@feature  # puts values where a mask of positions says
def IndexPut(self: Any, x: Tensor) -> Any:
    y = self.linear(x).clone()
    y[:, torch.arange(x.shape[1], device=x.device) % 2 == 0] = 0.5
    return y


# returns half of a wider result, which stays whole in memory
NarrowOutput = feature(lambda self, x: self.wide(x)[..., :WIDTH], alone=True, wide=lambda at: linear(WIDTH, 2 * WIDTH))
# return a view of their input, and the input itself, as it came
ViewOfInput = feature(lambda self, x: x.view(x.shape) if self.linear(x) is not None else x)
InputItself = feature(lambda self, x: x)
# returns an expanded tensor
ExpandedOutput = feature(lambda self, x: self.linear(x).mean(1, keepdim=True).expand_as(x))


@feature  # goes another way by its output's address
def AddressBranch(self: Any, x: Tensor) -> Any:
    x = self.linear(x)
    return x.relu() if (x.data_ptr() // 512) % 2 else x


# goes another way where its input is a view
BaseBranch = branch(lambda self, x: x._is_view())


@feature  # lets go of its input on the way
def DropsInput(self: Any, x: Tensor) -> Any:
    y = self.linear(x)
    del x
    large = y.new_empty(1 << 18)
    return y.relu() + large[0]


@feature  # frees and makes the storage of a value of its own
def StorageResized(self: Any, x: Tensor) -> Any:
    scratch = torch.empty(1 << 16, device=x.device)
    nbytes = scratch.untyped_storage().nbytes()
    scratch.untyped_storage().resize_(0)
    x = self.linear(x)
    scratch.untyped_storage().resize_(nbytes)
    return x * scratch.shape[0]


@feature  # holds views of a result in a list while it runs, and writes to one
def ListOfViews(self: Any, x: Tensor) -> Any:
    y = self.linear(x)
    rows = [y[:, at] for at in range(y.shape[1])]
    rows[0].mul_(2)
    return torch.stack(rows, 1)


@feature(casts=lambda at: at.is_odd)  # computes under autocast in odd blocks
def AutocastByIndex(self: Any, x: Tensor) -> Any:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.casts):
        y = self.linear(x)
    return x + y.float()


def _compute(self: Any, x: Tensor) -> Any:  # a feed-forward layer
    return self.down(F.gelu(self.up(x)))


_FEED_FORWARD: Any = {"alone": True, "up": lambda at: linear(WIDTH, 2 * WIDTH),
                      "down": lambda at: linear(2 * WIDTH, WIDTH)}
# checkpoint part of themselves: as is done today, in the old way, and in odd blocks
Checkpoint = feature(lambda self, x: x + checkpoint(partial(_compute, self), x, use_reentrant=False), **_FEED_FORWARD)
ReentrantCheckpoint = feature(lambda self, x: x + checkpoint(
    partial(_compute, self), x * self.up.bias.mean(), use_reentrant=True), **_FEED_FORWARD)
CheckpointByIndex = feature(lambda self, x: x + (checkpoint(partial(_compute, self), x, use_reentrant=False)
                                                 if self.checkpoints else _compute(self, x)),
                            checkpoints=lambda at: at.is_odd, **_FEED_FORWARD)


@feature  # packs what is saved
def SavedTensorHooks(self: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return self.linear(x).relu()


@feature  # keeps what is saved on the host
def SaveOnHost(self: Any, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return self.linear(x).relu()


@feature  # computes on a stream of its own
def OtherStream(self: Any, x: Tensor) -> Any:
    if not x.is_cuda:
        return self.linear(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = self.linear(x)
    torch.cuda.current_stream().wait_stream(stream)
    return y + 1


class _CountCalls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@feature  # computes under a mode that counts torch functions, and asks it
def FunctionMode(self: Any, x: Tensor) -> Any:
    with _CountCalls() as mode:
        y = self.linear(x)
    return y.relu() if mode.calls % 2 else y


# holds a compiled child
CompiledChild = feature(lambda self, x: self.compiled(x), alone=True,
                        compiled=lambda at: torch.compile(nn.Linear(WIDTH, WIDTH)))


@feature  # goes on after an error that it expects
def Handled(self: Any, x: Tensor) -> Any:
    try:
        y = x.view(-1, 7)
    except RuntimeError:
        y = self.linear(x)
    return y.view(x.shape)
