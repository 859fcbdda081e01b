"""What the coverage benchmark runs: a model that can be built, and what to call it with."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Candidate:
    """One way to build a model and to call it; ``make_inputs(model, train)`` gives real tensors of a small size."""

    label: str
    build: Callable[[], nn.Module]
    make_inputs: Callable[[nn.Module, bool], Inputs]
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    #: of the inputs; one that fails four times in the same way is not tried with other builds
    variant: str = ""
    may_be_large: bool = False  #: known to work as it is, also where it is too large for a run on data


@dataclass(frozen=True)
class Case:
    """A model by name; of its candidates the first is taken that PyTorch itself can run on data."""

    name: str    #: "timm:resnet18"
    family: str  #: row of the table
    group: str   #: stratum of the sample
    candidates: Callable[[], list[Candidate]]
