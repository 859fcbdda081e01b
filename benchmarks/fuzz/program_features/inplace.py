"""Features that write in place or hand on views, and those that compute under a context."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .feature import WIDTH, Feature, Place


class InPlaceOnInput(Feature):  # writes to its input
    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x) if x.is_leaf else x.add_(self.linear(x))


class InPlaceOnOutput(Feature):  # writes to what its child returned
    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        x += 1
        return x


class InPlaceOnView(Feature):  # writes to parts of its output
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        y[:, 0] = 0
        y[..., :4] *= 2
        return y


class IndexFill(Feature):  # fills rows by an index made on the way
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).index_fill(1, torch.tensor([0], device=x.device), 0.0)


class IndexPut(Feature):  # puts values where a mask of positions says
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x).clone()
        y[:, torch.arange(x.shape[1], device=x.device) % 2 == 0] = 0.5
        return y


class NarrowOutput(Feature):  # returns half of a wider result, which stays whole in memory
    def build(self, place: Place) -> None:
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.wide(x)[..., :WIDTH]


class ViewOfInput(Feature):  # returns a view of its input, as it came
    def forward(self, x: Tensor) -> Any:
        self.linear(x)
        return x.view(x.shape)


class InputItself(Feature):  # returns its input, as it came
    def forward(self, x: Tensor) -> Any:
        return x


class ExpandedOutput(Feature):  # returns an expanded tensor
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).mean(1, keepdim=True).expand_as(x)


class AddressBranch(Feature):  # goes another way by its output's address
    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x.relu() if (x.data_ptr() // 512) % 2 else x


class BaseBranch(Feature):  # goes another way where its input is a view
    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if x._is_view() else self.linear(x)


class DropsInput(Feature):  # lets go of its input on the way
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        del x
        large = y.new_empty(1 << 18)
        return y.relu() + large[0]


class StorageResized(Feature):  # frees and makes the storage of a value of its own
    def forward(self, x: Tensor) -> Any:
        scratch = torch.empty(1 << 16, device=x.device)
        nbytes = scratch.untyped_storage().nbytes()
        scratch.untyped_storage().resize_(0)
        x = self.linear(x)
        scratch.untyped_storage().resize_(nbytes)
        return x * scratch.shape[0]


class ListOfViews(Feature):  # holds views of a result in a list while it runs, and writes to one
    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        rows = [y[:, at] for at in range(y.shape[1])]
        rows[0].mul_(2)
        return torch.stack(rows, 1)


class AutocastByIndex(Feature):  # computes under autocast in odd blocks
    def build(self, place: Place) -> None:
        super().build(place)
        self.casts = place.is_odd

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.casts):
            y = self.linear(x)
        return x + y.float()


class _FeedForward(Feature):
    def build(self, place: Place) -> None:
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def compute(self, x: Tensor) -> Any:  # the layer itself
        return self.down(F.gelu(self.up(x)))


class Checkpoint(_FeedForward):  # checkpoints part of itself
    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(self.compute, x, use_reentrant=False)


class ReentrantCheckpoint(_FeedForward):  # checkpoints part of itself in the old way
    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(self.compute, x * self.up.bias.mean(), use_reentrant=True)


class CheckpointByIndex(_FeedForward):  # checkpoints part of itself in odd blocks
    def build(self, place: Place) -> None:
        super().build(place)
        self.checkpoints = place.is_odd

    def forward(self, x: Tensor) -> Any:
        return x + (checkpoint(self.compute, x, use_reentrant=False) if self.checkpoints else self.compute(x))


class SavedTensorHooks(Feature):  # packs what is saved
    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return self.linear(x).relu()


class SaveOnHost(Feature):  # keeps what is saved on the host
    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return self.linear(x).relu()


class OtherStream(Feature):  # computes on a stream of its own
    def forward(self, x: Tensor) -> Any:
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


class FunctionMode(Feature):  # computes under a mode that counts torch functions, and asks it
    def forward(self, x: Tensor) -> Any:
        with _CountCalls() as mode:
            y = self.linear(x)
        return y.relu() if mode.calls % 2 else y


class CompiledChild(Feature):  # holds a compiled child
    def build(self, place: Place) -> None:
        self.compiled = torch.compile(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.compiled(x)


class Handled(Feature):  # goes on after an error that it expects
    def forward(self, x: Tensor) -> Any:
        try:
            y = x.view(-1, 7)
        except RuntimeError:
            y = self.linear(x)
        return y.view(x.shape)
