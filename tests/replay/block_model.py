"""Small models of alike blocks, and which of them were replayed."""
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from analyzer.api.result import Profile
from analyzer.results.info import ReplayInfo

X = torch.ones(4, 16)
# Of nine checkpointed blocks, those that are not run. Torch 2.11 saves their inputs by a function of its own, which the
# first block calls otherwise.
CHECKPOINTED = 3 if hasattr(checkpoint, "_NoopSaveInputs") else 5


def list_replayed(profile: Profile, kind: str = "block") -> list[ReplayInfo]:
    """The blocks that were replayed; each of the others must say why it was run."""
    assert profile.replay is not None and all(row.reason for row in profile.replay if not row.replayed)
    return [row for row in profile.replay if row.replayed and row.kind == kind]


class Block(nn.Module):
    """Has a number that is not read, and one that is."""

    def __init__(self, index: int = 0, factor: int = 2) -> None:
        super().__init__()
        self.index, self.factor = index, factor
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * self.factor


class Sums(nn.Module):
    """Reads its input three times."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).T).softmax(-1) @ self.v(x)


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class PostNorm(Stack):
    """Reads each block's input again after the block."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__(blocks)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = (x + block(x)) * x
        return x


class Recurrent(nn.Module):
    """Holds weak references to its weights, which ask tensors whether they are equal; every second one has a hook."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = nn.GRU(16, 16)
        if index % 2:
            self.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]
