"""Tokens of sampled answers: given, or the least that a mean and a maximum say."""
from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from analyzer.errors import InputError, is_count
from analyzer.tools.lengths import Lengths

_SEED = 11      # the same answers are drawn each time
_STEEPEST = 1e6 # of an exponential law, times its longest
_MOST_EXPONENT = 500.0  # above which the maximum cuts nothing off
_GRID = 2000    # answers by which a law is told


@dataclass(frozen=True)
class Answers:
    """Tokens of answers, the shortest first, each as likely as the others; none is longer than ``longest``.

    >>> answers = Answers.of(1000, 4096)
    >>> answers.longest, round(answers.mean), answers.draw(4)
    (4096, 1000, (144, 502, 1038, 2120))
    """

    tokens: tuple[int, ...]
    longest: int
    source: str

    @classmethod
    def of(cls, mean: float, longest: int) -> Answers:
        """The law of most entropy among those with this mean and maximum, an exponential one that ends at the maximum
        (E. T. Jaynes, "Information theory and statistical mechanics", 1957): nothing else is assumed of answers.
        Raises InputError for a mean that is no answer's.
        """
        if not is_count(longest, 1) or not 1 <= mean <= longest:
            raise InputError(f"answers of {mean:g} tokens in the mean, {longest} at most: the mean lies between 1 and "
                             "the maximum")
        rate = _find_rate(mean / longest)
        places = [(i + 0.5) / _GRID for i in range(_GRID)]
        tokens = tuple(min(longest, max(1, round(longest * _quantile(place, rate)))) for place in places)
        return cls(tokens, longest, f"{mean:,.0f} tokens in the mean and {longest:,} at most; nothing else is known of "
                                    "them, so the law of most entropy is taken (exponential, up to the maximum)")

    @classmethod
    def read(cls, text: str, longest: int | None = None) -> Answers:
        """``MEAN,MAX``, or what `analyzer.tools.lengths` reads: a file, or ``lognormal:...``. Raises InputError."""
        words = text.split(",")
        if len(words) == 2 and all(word.strip().isdecimal() for word in words):
            return cls.of(int(words[0]), int(words[1]))
        if text.isdecimal():
            return cls((int(text),), int(text), f"{int(text):,} tokens each")
        found = Lengths.read(text)
        tokens = sorted(int(size) for size in (found if longest is None else found.at_most(longest)).sizes[:, 0])
        return cls(tuple(tokens), longest or tokens[-1], f"{text}: {found.describe()}")

    @property
    def mean(self) -> float:
        return sum(self.tokens) / len(self.tokens)

    def draw(self, count: int) -> tuple[int, ...]:
        """So many of them, spread evenly over the law, in an order by chance that is always the same."""
        known = self.tokens
        found = [known[min(len(known) - 1, int((i + 0.5) / count * len(known)))] for i in range(count)]
        random.Random(_SEED).shuffle(found)
        return tuple(found)


def _mean_of(rate: float) -> float:
    """The mean of an exponential law between 0 and 1."""
    if rate < 0:
        return 1 - _mean_of(-rate)
    if rate < 1e-4:
        return 0.5 - rate / 12
    if rate > _MOST_EXPONENT:
        return 1 / rate
    return 1 / rate - 1 / math.expm1(rate)


def _find_rate(mean: float) -> float:
    low, high = -_STEEPEST, _STEEPEST
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_of(middle) > mean else (low, middle)
    return (low + high) / 2


def _quantile(place: float, rate: float) -> float:
    if abs(rate) < 1e-4:
        return place
    if rate < 0:  # the mirror of the law with the other sign, whose exponential does not overflow
        return 1 - _quantile(1 - place, -rate)
    return -math.log1p(place * math.expm1(-rate)) / rate


def pack(lengths: Sequence[int], room: int) -> int:
    """Rows of ``room`` tokens that sequences fill, the longest first, each into the first row that has room for it
    (NVIDIA NeMo RL 0.5, nemo_rl/data/packing/algorithms.py, ``first_fit_decreasing``; verl's
    utils/seqlen_balancing.py divides them into as few parts).

    >>> pack([5, 4, 3, 3, 1], 8)
    2
    """
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((i for i, left in enumerate(free) if left >= length), None)
        if place is None:
            free.append(room - min(room, length))
        else:
            free[place] -= length
    return len(free)
