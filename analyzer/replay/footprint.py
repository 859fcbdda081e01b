"""What a forward pass could change that a later one would see."""
from __future__ import annotations

import operator
import random
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn

_SIZED = frozenset({list, dict, set, OrderedDict})
_PLAIN = frozenset({str, int, float, bool, type(None), tuple})


class Footprint:
    """What a forward pass could change that a later step would see."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self._attributes: list[tuple[tuple[str, ...], tuple[Any, ...]]] = []
        self._containers: list[Any] = []
        for module in self.modules:
            contents = module.__dict__
            values = tuple(contents.values())
            self._attributes.append((tuple(contents), values))
            self._containers += [
                value for value in values
                if type(value) in _SIZED or type(value) not in _PLAIN and isinstance(value, (list, dict, set))
            ]
        self._sizes = list(map(len, self._containers))
        self._random = random.getstate()

    def is_like(self, other: Footprint) -> bool:
        """Whether another one, of the same or of other modules, saw the same."""
        return (self._random == other._random and self._sizes == other._sizes
                and len(self._attributes) == len(other._attributes)
                and all(names == other_names and all(map(operator.is_, values, other_values))
                        for (names, values), (other_names, other_values) in zip(self._attributes, other._attributes)))

    def holds(self) -> bool:
        """Whether nothing that is looked at changed: attributes of modules, sizes of their containers, Python's
        generator.
        """
        if self._sizes != list(map(len, self._containers)) or self._random != random.getstate():
            return False
        for module, (names, values) in zip(self.modules, self._attributes):
            contents = module.__dict__
            if tuple(contents) != names or not all(map(operator.is_, contents.values(), values)):
                return False
        return True
