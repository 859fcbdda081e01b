"""What a TARGET of the command line stands for, and what the finders of models share."""
from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import nn

from analyzer.errors import MissingExtraError

from .input_spec import InputSpec
from .torchvision_ops import define_torchvision_ops

DEFAULT_BATCH = 8  # any number serves; above 1, for batch norm over a pooled 1x1 map refuses to train on one sample


@dataclass(frozen=True)
class LabelRule:
    """A label that a model takes when it trains, shaped like an input (`dims` None) or like some of its dimensions."""

    name: str
    like: str
    dims: tuple[int, ...] | None = None

    def apply(self, inputs: Sequence[InputSpec]) -> InputSpec | None:
        """The label's spec, int64, or None where `like` is no input (the first positional one stands for it)."""
        source = next((spec for spec in inputs if spec.name in (self.like, None)), None)
        if source is None:
            return None
        shape = source.shape if self.dims is None else tuple(
            source.shape[d] for d in self.dims if d < len(source.shape))
        return InputSpec(self.name, torch.int64, shape)


@dataclass(frozen=True)
class Target:
    """A model that can be built, and the tensors it is called with where the user does not say."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[InputSpec, ...] | None = None  #: None: not known
    labels: tuple[LabelRule, ...] = ()

    def choose_inputs(self, given: Sequence[InputSpec] = (), *, train: bool) -> tuple[InputSpec, ...] | None:
        """The inputs to profile with: those given, else the defaults; None if neither is known.

        If the main input is given by name, other inputs the model needs follow with its batch size. In training, labels
        follow wherever the model takes them and they are not given.

        >>> ids, labels = InputSpec("ids", torch.int64, (8, 128)), LabelRule("labels", like="ids")
        >>> target = Target("demo", nn.Identity, (ids,), (labels,))
        >>> [str(spec) for spec in target.choose_inputs([InputSpec("ids", torch.int64, (2, 16))], train=True)]
        ['ids=int64:2x16', 'labels=int64:2x16']
        """
        chosen = list(given or self.inputs or ())
        if not chosen:
            return None
        names = {spec.name for spec in chosen if spec.name is not None}
        main = next((spec for spec in given if self.inputs and spec.name is not None
                     and spec.name == self.inputs[0].name), None)
        if main is not None and main.shape:
            for spec in (self.inputs or ())[1:]:
                if spec.name not in names:
                    chosen.append(replace(spec, shape=(main.shape[0], *spec.shape[1:])))
        if train:
            chosen += [
                label for rule in self.labels if rule.name not in names and (label := rule.apply(chosen)) is not None]
        return tuple(chosen)


def find_close(word: str, options: Iterable[str]) -> str:
    """A sentence with the options that resemble the word, for the end of an error; empty if none does.

    >>> find_close("resnet51", ["resnet50", "vgg16"])
    '; did you mean resnet50?'
    """
    by_lower = {option.lower(): option for option in options}
    near = difflib.get_close_matches(word.lower(), by_lower, n=4)
    return f"; did you mean {' or '.join(by_lower[lower] for lower in near)}?" if near else ""


def import_extra(library: str, target: str, extra: str = "zoo") -> ModuleType:
    """Import a library of an extra. Raises MissingExtraError, which names the extra, if it is not installed."""
    if importlib.util.find_spec(library) is None:
        raise MissingExtraError(f"{target}: {library} is not installed; pip install 'symbolic-analyzer[{extra}]'")
    define_torchvision_ops()  # timm and transformers import torchvision too
    return importlib.import_module(library)
