"""What a pass of a server reads."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """Part of a prompt that a pass reads: new tokens, and all tokens of the sequence after it."""

    tokens: int
    context: int

    def count_seen(self, most: int = 0) -> float:
        """Keys that each token sees in the mean, itself and those before it; ``most``: at most (0: all).

        >>> Chunk(4, 10).count_seen(), Chunk(4, 10).count_seen(8), Chunk(4, 10).count_seen(2)
        (8.5, 7.75, 2.0)
        """
        first = self.context - self.tokens + 1
        few = min(self.tokens, max(0, most - first)) if most else self.tokens  # tokens that see fewer
        return (few * (2 * first + few - 1) / 2 + (self.tokens - few) * most) / self.tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What one pass reads on one rank: the next token of ``sequences`` of a mean ``context``, and chunks of prompts.
    ``drafted``: tokens of each sequence that are read at once, more than 1 where drafts are verified.
    """

    sequences: int
    context: int
    chunks: tuple[Chunk, ...] = ()
    drafted: int = 1

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def tokens(self) -> int:
        return self.sequences * self.drafted + self.prompt_tokens

    @property
    def sampled(self) -> int:
        """Rows of the output head."""
        return self.sequences * self.drafted + len(self.chunks)
