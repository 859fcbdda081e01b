"""Which dimensions of a model's inputs vary, and the tensors of a step at given sizes."""
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from analyzer.errors import InputError
from analyzer.zoo.command_option import make_inputs
from analyzer.zoo.input_spec import InputSpec, Target, parse_inputs

from .batching import BATCH

_PLACE = re.compile(r"\{(\w+)\}")
MASK = "attention_mask"  #: what tokenizers of transformers call the mask of padding
#: what is assumed of such a mask, and where transformers asks for it
MASKED = f"batches have an {MASK}, in which some padding is masked"
MASKING = "transformers/masking_utils.py"

#: Dimensions by the inputs that have them, where none is named: of floating inputs with so many, by place.
_FLOATING = {2: {"samples": 1}, 3: {"frames": 2}, 4: {"height": 2, "width": 3}, 5: {"frames": 1}}


@dataclass(frozen=True)
class VariedInputs:
    """The inputs of a target with places for sizes: ``texts`` with ``{name}`` in place of each that varies, or specs of
    which the dimensions follow.
    """

    target: Target
    texts: tuple[str, ...]
    dims: tuple[str, ...]
    rows: int | None  #: of a batch, where the inputs say it
    is_train: bool
    dtype: torch.dtype | None = None
    has_mask: bool = False  #: whether padding is masked, by an input that is made up

    @classmethod
    def of(cls, target: Target, texts: Sequence[str], train: bool, dtype: torch.dtype | None) -> VariedInputs:
        """The dimensions that ``texts`` name, else those of the target's own inputs: of tokens the ``sequence``, of
        images ``height`` and ``width``, of videos and spectrograms ``frames``, of audio ``samples``. Raises InputError
        where none is known.
        """
        named = list(dict.fromkeys(name for text in texts for name in _PLACE.findall(text)))
        specs = None if named else target.choose_inputs(parse_inputs(texts), train=False)
        if not named and specs is None:
            raise InputError(f"{target.name}: its inputs are not known; give them with the sizes that vary in braces, "
                             "e.g. --input 'x={batch}x3x{height}x{width}'")
        dims = tuple(name for name in named if name != BATCH)
        if specs is not None:
            dims = _find_dims(specs)
        if not dims:
            raise InputError(f"{target.name}: none of its inputs {' '.join(map(str, specs or texts))} says which size "
                             "varies; name it, e.g. --input 'x={batch}x{sequence}x64'")
        rows = specs[0].shape[0] if specs and specs[0].shape else None
        if specs is None and BATCH not in named:
            rows = parse_inputs([_PLACE.sub("1", texts[0])])[0].shape[0]
        return cls(target, tuple(texts), dims, rows, train, dtype)

    def masking(self, model: torch.nn.Module) -> VariedInputs:
        """The same with a mask of padding, where the model takes tokens and one that is not given."""
        names = {spec.name for spec in self.list_specs(2, dict.fromkeys(self.dims, 8))}
        takes = MASK in inspect.signature(model.forward).parameters
        return replace(self, has_mask=takes and "input_ids" in names and MASK not in names)

    def list_specs(self, rows: int, sizes: Mapping[str, int]) -> tuple[InputSpec, ...]:
        """What the model is called with at these sizes."""
        given: Sequence[InputSpec]
        if any(_PLACE.search(text) for text in self.texts):
            values = {BATCH: rows, **sizes}
            given = parse_inputs([_PLACE.sub(lambda match: str(values[match[1]]), text) for text in self.texts])
        else:
            specs = self.target.choose_inputs(parse_inputs(self.texts), train=False)
            assert specs is not None
            given = [_resize(spec, rows, sizes) for spec in specs]
        chosen = self.target.choose_inputs(given, train=self.is_train)
        assert chosen is not None
        if self.has_mask:
            ids = next(spec for spec in chosen if spec.name == "input_ids")
            chosen = (*chosen, replace(ids, name=MASK))
        return chosen if self.dtype is None else tuple([spec.cast(self.dtype) for spec in chosen])

    def make(self, **sizes: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments of a call at these sizes, of which one is the ``batch``."""
        return make_inputs(self.list_specs(sizes.pop(BATCH), sizes))

    @property
    def assumptions(self) -> list[str]:
        several = [spec.name for spec in self.list_specs(2, dict.fromkeys(self.dims, 8))
                   if spec.find_dims("sequence") and not _is_like_tokens(spec.name)]
        return [*([MASKED] if self.has_mask else []),
                *([f"inputs {', '.join(map(str, several))} are as long as each other: name their sizes in --input for "
                   "others"] if len(several) > 1 and self.dims == ("sequence",) else [])]


def _is_like_tokens(name: str | None) -> bool:
    """Whether an input follows from the tokens beside it."""
    return name in (MASK, "labels", "token_type_ids", "position_ids")


def _dims_of(spec: InputSpec) -> Mapping[str, int]:
    if not spec.dtype.is_floating_point:
        return {"sequence": 1} if spec.find_dims("sequence") else {}
    return _FLOATING.get(len(spec.shape), {})


def _find_dims(specs: Sequence[InputSpec]) -> tuple[str, ...]:
    return next((tuple(found) for spec in specs if (found := _dims_of(spec))), ())


def _resize(spec: InputSpec, rows: int, sizes: Mapping[str, int]) -> InputSpec:
    shape = list(spec.shape)
    if shape:
        shape[0] = rows
    for name, place in _dims_of(spec).items():
        shape[place] = sizes.get(name, shape[place])
    return replace(spec, shape=tuple(shape))


def call_maker(make: Callable[..., Any], dims: Sequence[str], rows: int, sizes: Sequence[int]
               ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a user's ``make(batch=..., sequence=...)`` gives, as arguments: a tensor, a tuple of positional ones, a
    dictionary of named ones, or a pair of both.
    """
    found = make(**{BATCH: rows}, **dict(zip(dims, sizes)))
    if isinstance(found, dict):
        return (), found
    if isinstance(found, tuple):
        if len(found) == 2 and isinstance(found[0], tuple) and isinstance(found[1], dict):
            return found
        return found, {}
    return (found,), {}
