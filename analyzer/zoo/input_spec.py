"""What a TARGET stands for, and the tensors that its model is called with."""
from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import ModuleType

import torch
from torch import nn

from analyzer.errors import InputError, MissingExtraError, how_to_install

# The `--input` of the command line: which tensors a model is called with.
# A text is `[NAME=][DTYPE:]SIZES`, sizes joined by `x`: `8x3x224x224`, `int64:8x512`, `input_ids=int64:8x512`. Without
# a name the tensor is a positional argument, without a dtype it is float32; `scalar` is a tensor of no dimensions.

_SIZES = r"[0-9]+(x[0-9]+)*"
GRAMMAR = "[NAME=][DTYPE:]SIZES, like 8x3x224x224 or input_ids=int64:8x512"

_TORCH_NAMES = (
    "bool uint8 int8 int16 short uint16 int32 int uint32 int64 long uint64 bfloat16 float16 half float32 float float64 "
    "double complex64 complex128 float8_e4m3fn float8_e5m2")
_SHORT_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32", "fp64": "float64",
    "f64": "float64", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8"}
DTYPES: dict[str, torch.dtype] = {**{name: getattr(torch, name) for name in _TORCH_NAMES.split()},
                                  **{short: getattr(torch, name) for short, name in _SHORT_NAMES.items()}}


@dataclass(frozen=True)
class InputSpec:
    """One tensor to call a model with: positional if ``name`` is None.

    >>> spec = parse_input("input_ids=int64:8x512")
    >>> spec.name, spec.dtype, spec.shape
    ('input_ids', torch.int64, (8, 512))
    >>> spec.make().device, spec.make().shape
    (device(type='meta'), torch.Size([8, 512]))
    >>> str(spec)
    'input_ids=int64:8x512'
    """

    name: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    def make(self, device: str | torch.device = "meta") -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def fill(self, device: str | torch.device) -> torch.Tensor:
        """A tensor with data: random, of integers and flags 1 in masks, else 0, a token or class of any model."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(self.shape, device=device).to(self.dtype)
        return torch.full(self.shape, int("mask" in (self.name or "")), dtype=self.dtype, device=device)

    @property
    def assumption(self) -> str | None:
        """What is made up besides sizes and dtypes, in a sentence; None where nothing is."""
        return None

    def cast(self, dtype: torch.dtype) -> InputSpec:
        return replace(self, dtype=dtype) if self.dtype.is_floating_point else self

    def find_dims(self, size: str) -> tuple[int, ...]:
        """Which of its dimensions are the ``"batch"`` (the first), the ``"sequence"`` (the second of two, of indices
        and masks), or the height and width of an ``"image"`` (the last two of four or more, of floating ones).
        """
        is_floating, dims = self.dtype.is_floating_point, len(self.shape)
        return {"batch": (0,) if dims else (), "sequence": (1,) if dims == 2 and not is_floating else (),
                "image": (dims - 2, dims - 1) if dims >= 4 and is_floating else ()}[size]

    def resize(self, size: str, value: int) -> InputSpec:
        places = self.find_dims(size)
        return replace(self, shape=tuple([value if i in places else n for i, n in enumerate(self.shape)]))

    def __str__(self) -> str:
        name = "" if self.name is None else f"{self.name}="
        return f"{name}{str(self.dtype).removeprefix('torch.')}:{'x'.join(map(str, self.shape)) or 'scalar'}"


def parse_input(text: str) -> InputSpec:
    name, equals, rest = text.rpartition("=")
    if equals and not name.isidentifier():
        raise InputError(f"--input {text}: {name!r} is no argument name; write {GRAMMAR}")
    word, colon, sizes = rest.rpartition(":")
    dtype = DTYPES.get(word) if colon else torch.float32
    if dtype is None:
        near = get_close_matches(word, DTYPES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "take one of torch's, like float32, bfloat16 or int64"
        raise InputError(f"--input {text}: unknown dtype {word!r}; {hint}")
    if sizes != "scalar" and not re.fullmatch(_SIZES, sizes):
        mended = re.sub(r"[\s,*X×]+", "x", sizes.strip("()[] "))  # how people also write shapes
        hint = f"did you mean {mended}?" if re.fullmatch(_SIZES, mended) else f"write {GRAMMAR}"
        raise InputError(f"--input {text}: {sizes!r} is no shape; {hint}")
    shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
    if 0 in shape:
        raise InputError(f"--input {text}: a size of 0 leaves nothing to profile; every size must be at least 1")
    return InputSpec(name if equals else None, dtype, shape)


def parse_inputs(texts: Iterable[str]) -> tuple[InputSpec, ...]:
    specs: list[InputSpec] = []
    for text in texts:
        spec = parse_input(text)
        if spec.name is not None and any(spec.name == other.name for other in specs):
            raise InputError(f"--input {text}: {spec.name!r} is given twice")
        specs.append(spec)
    return tuple(specs)


DEFAULT_BATCH = 8  # any number serves; above 1, for batch norm over a pooled 1x1 map refuses to train on one sample


@dataclass(frozen=True)
class LabelRule:
    """A label that a model takes when it trains, shaped like an input (`dims` None) or like some of its dimensions."""

    name: str
    like: str
    dims: tuple[int, ...] | None = None

    def apply(self, inputs: Sequence[InputSpec]) -> InputSpec | None:
        """The label's spec, int64, or None where `like` is no input."""
        source = self.find_source(inputs)
        if source is None:
            return None
        shape = source.shape if self.dims is None else tuple(
            source.shape[d] for d in self.dims if d < len(source.shape))
        return InputSpec(self.name, torch.int64, shape)

    def find_source(self, inputs: Sequence[InputSpec]) -> InputSpec | None:
        """The input that the label is like; the first positional one stands for it."""
        return next((spec for spec in inputs if spec.name in (self.like, None)), None)


@dataclass(frozen=True)
class Target:
    """A model that can be built, and the tensors it is called with where the user does not say."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[InputSpec, ...] | None = None  #: None: not known
    labels: tuple[LabelRule, ...] = ()

    def choose_inputs(self, given: Sequence[InputSpec] = (), *, train: bool) -> tuple[InputSpec, ...] | None:
        """The inputs to profile with: those given, else the defaults; None if neither is known. If the main input is
        given by name, other inputs that the model needs follow with its batch size. In training, labels follow wherever
        the model takes them and they are not given.
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


def import_extra(library: str, target: str, extra: str = "zoo") -> ModuleType:
    """Import a library of an extra. Raises MissingExtraError, which names the extra, if it is not installed."""
    if importlib.util.find_spec(library) is None:
        raise MissingExtraError(f"{target}: {library} is not installed; {how_to_install(extra)}")
    if importlib.util.find_spec("torchvision") is not None:  # timm and transformers import it too
        from .torchvision_ops import define_torchvision_ops

        define_torchvision_ops()
    return importlib.import_module(library)
