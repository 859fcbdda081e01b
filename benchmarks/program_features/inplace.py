"""Features that write in place, return views, or depend on where and how tensors lie in memory."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .feature import WIDTH, Feature, Place


class InPlaceInside(Feature):
    """Writes to a value of its own."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        y += 1
        y.mul_(2)
        return x + y


class InPlaceOnInput(Feature):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x) if x.is_leaf else x.add_(self.linear(x))


class InPlaceOnOutput(Feature):
    """Writes to what its child returned."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        x += 1
        return x


class InPlaceOnView(Feature):
    """Writes to parts of its output."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        y[:, 0] = 0
        y[..., :4] *= 2
        return y


class InPlaceOnDetached(Feature):
    """Writes to its output past autograd."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        y.detach().zero_()
        return y


class InPlaceOnData(Feature):
    """Writes to the data of its input."""

    def forward(self, x: Tensor) -> Any:
        x.data.mul_(2)
        return self.linear(x)


class IndexFill(Feature):
    """Fills rows by an index made on the way."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).index_fill(1, torch.tensor([0], device=x.device), 0.0)


class IndexPut(Feature):
    """Puts values where a mask of positions says."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x).clone()
        y[:, torch.arange(x.shape[1], device=x.device) % 2 == 0] = 0.5
        return y


class OutArgument(Feature):
    """Writes to a tensor given as ``out=``, without gradients."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            out = torch.empty_like(x)
            torch.mul(x, 2, out=out)
        return self.linear(x) + out


class SliceOutput(Feature):
    """Returns a slice of its child's output that is all of it."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)[:]


class NarrowOutput(Feature):
    """Returns half of a wider result, which stays whole in memory."""

    def build(self, place: Place) -> None:
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.wide(x)[..., :WIDTH]


class ViewOfInput(Feature):
    """Returns a view of its input, as it came."""

    def forward(self, x: Tensor) -> Any:
        self.linear(x)
        return x.view(x.shape)


class InputItself(Feature):
    """Returns its input, as it came."""

    def forward(self, x: Tensor) -> Any:
        return x


class TransposedOutput(Feature):
    """Returns an output that is not contiguous."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).transpose(0, 1).contiguous().transpose(0, 1)


class ExpandedParameter(Feature):
    """Multiplies by an expanded parameter."""

    def build(self, place: Place) -> None:
        super().build(place)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.gain.expand_as(x)


class ExpandedOutput(Feature):
    """Returns an expanded tensor."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).mean(1, keepdim=True).expand_as(x)


class StrideBranch(Feature):
    """Goes another way by the strides of its input."""

    def forward(self, x: Tensor) -> Any:
        if x.stride(-1) == 1 and x.is_contiguous():
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        return self.linear(x)


class OffsetBranch(Feature):
    """Goes another way by its input's offset in memory."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if x.storage_offset() else self.linear(x)


class AddressBranch(Feature):
    """Goes another way by its output's address."""

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x.relu() if (x.data_ptr() // 512) % 2 else x


class SharesMemoryBranch(Feature):
    """Goes another way where its input lies at its storage's start and fills it."""

    def forward(self, x: Tensor) -> Any:
        is_whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
        return self.linear(x).relu() if is_whole else self.linear(x)


class BaseBranch(Feature):
    """Goes another way where its input is a view."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).relu() if x._is_view() else self.linear(x)


class LargeTemporary(Feature):
    """Makes large values that die on the way."""

    def forward(self, x: Tensor) -> Any:
        first = torch.empty(1 << 20, device=x.device)
        x = self.linear(x)
        del first
        second = torch.empty(3 << 19, device=x.device)
        return x + second.sum() * 0


class DropsInput(Feature):
    """Lets go of its input on the way."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        del x
        large = y.new_empty(1 << 18)
        return y.relu() + large[0]


class StorageResized(Feature):
    """Frees and makes the storage of a value of its own."""

    def forward(self, x: Tensor) -> Any:
        scratch = torch.empty(1 << 16, device=x.device)
        nbytes = scratch.untyped_storage().nbytes()
        scratch.untyped_storage().resize_(0)
        x = self.linear(x)
        scratch.untyped_storage().resize_(nbytes)
        return x * scratch.shape[0]


class SetData(Feature):
    """Puts one value's memory under another."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        with torch.no_grad():
            other = torch.empty_like(y)
            other.set_(y.detach().clone())
        return y + other


class Chunks(Feature):
    """Gates one half of a result by the other."""

    def build(self, place: Place) -> None:
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        value, gate = self.wide(x).chunk(2, -1)
        return value * gate.sigmoid()


class SplitAndJoin(Feature):
    """Splits a result and joins its parts again."""

    def forward(self, x: Tensor) -> Any:
        return torch.cat([part.relu() for part in self.linear(x).split(4, -1)], -1)


class ChannelsLast(Feature):
    """Changes the memory format on the way."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)[..., None].to(memory_format=torch.channels_last)
        return y.squeeze(-1)


class ListOfViews(Feature):
    """Holds views of a result in a list while it runs, and writes to one."""

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        rows = [y[:, at] for at in range(y.shape[1])]
        rows[0].mul_(2)
        return torch.stack(rows, 1)
