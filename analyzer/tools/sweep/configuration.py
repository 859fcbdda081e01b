"""The grid: which configurations a sweep profiles, and what the model is called with in each."""
from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, find_device
from analyzer.recipe.optimizer import fold_optimizer
from analyzer.recipe.quantize import Quantization
from analyzer.recipe.recipe import LoraSpec, Recipe
from analyzer.zoo.input_spec import DTYPES, InputSpec, parse_inputs
from analyzer.zoo.target import Target

_AUTOCAST = ("bfloat16", "float16")  # what torch.autocast takes on CUDA
_SIZES = ("batch", "sequence")


@dataclass(frozen=True)
class Configuration:
    """One point of the grid. None leaves a size or dtype as the target has it, and means no optimizer or autocast.

    Names are brought to one form, and what an inference step does not use is dropped, so that equal work compares
    equal. Raises InputError or UnknownDeviceError for a value that no run could use.

    >>> Configuration(dtype="bf16", device="H100").dtype
    'bfloat16'
    >>> Configuration(mode="infer", optimizer="adamw") == Configuration(mode="infer")
    True
    """

    batch: int | None = None          #: first dimension of every input
    sequence: int | None = None       #: second dimension of every input of token indices or masks
    dtype: str | None = None          #: of the parameters and floating inputs
    optimizer: str | None = None
    autocast: str | None = None
    checkpointing: bool = False       #: recompute each block in the backward pass
    device: DeviceSpec | str = "h200"
    mode: Literal["train", "infer"] = "train"
    quantize: Quantization | None = None       #: how the weights of linear layers are held
    lora: str | None = None           #: adapters, as ``--lora`` says them
    accumulate: int = 1               #: micro-batches of a step

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise InputError(f"{name}={size!r}: must be a whole number of at least 1, or None for the target's own")
        if self.mode not in ("train", "infer"):
            raise InputError(f"mode={self.mode!r}: must be 'train' or 'infer'")
        if not isinstance(self.checkpointing, bool):
            raise InputError(f"checkpointing={self.checkpointing!r}: must be True or False")
        if self.optimizer is not None and not isinstance(self.optimizer, str):
            raise InputError(f"optimizer={self.optimizer!r}: a sweep takes the name of an optimizer, or None")
        vars(self).update(optimizer=fold_optimizer(self.optimizer), device=find_device(self.device),
                          dtype=_name_dtype("dtype", self.dtype), autocast=_name_dtype("autocast", self.autocast))
        self.recipe  # noqa: B018  # refuses values that no model could take
        if self.mode == "infer":
            vars(self).update(optimizer=None, checkpointing=False, accumulate=1)

    @property
    def device_spec(self) -> DeviceSpec:
        return find_device(self.device)

    @property
    def recipe(self) -> Recipe:
        return Recipe(dtype=None if self.dtype is None else DTYPES[self.dtype], quantize=self.quantize,
                      lora=None if self.lora is None else LoraSpec.parse(self.lora), checkpointing=self.checkpointing,
                      optimizer=self.optimizer, accumulate=self.accumulate)

    def describe(self) -> dict[str, Any]:
        """Its values as plain data, the device by its name."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"device": self.device_spec.name}


AXES = tuple(f.name for f in fields(Configuration))


def _name_dtype(axis: str, value: Any) -> str | None:
    if value is None:
        return None
    dtype = DTYPES.get(str(value).removeprefix("torch."))
    name = str(dtype).removeprefix("torch.")
    if dtype is None or (name not in _AUTOCAST if axis == "autocast" else not dtype.is_floating_point):
        choice = " or ".join(_AUTOCAST) if axis == "autocast" else "a floating dtype such as float32 or bfloat16"
        raise InputError(f"{axis}={value!r}: must be {choice}, or None")
    return name


def expand_grid(grid: Mapping[str, Any]) -> list[Configuration]:
    """Every combination of the values in ``grid``, the last axis fastest, each once.

    A value is one of an axis of `Configuration`, or a sequence of them. Raises InputError for an unknown axis, an empty
    one or a bad value.

    >>> [(c.batch, c.optimizer) for c in expand_grid({"batch": [1, 2], "optimizer": ["sgd", "adamw"]})]
    [(1, 'sgd'), (1, 'adamw'), (2, 'sgd'), (2, 'adamw')]
    """
    axes: dict[str, Sequence[Any]] = {}
    for name, given in grid.items():
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, n=1)
            raise InputError(f"sweep: the grid has no axis {name!r}; " + (f"did you mean {near[0]!r}? " if near else "")
                             + f"axes are {', '.join(AXES)}")
        single = given is None or isinstance(given, (str, DeviceSpec)) or not isinstance(given, Iterable)
        axes[name] = [given] if single else list(given)
        if not axes[name]:
            raise InputError(f"sweep: the axis {name!r} of the grid holds no values")
    found = [Configuration(**dict(zip(axes, values))) for values in itertools.product(*axes.values())]
    devices: dict[str, DeviceSpec] = {}
    for configuration in found:
        spec = configuration.device_spec
        if devices.setdefault(spec.name, spec) != spec:
            raise InputError(
                f"sweep: two different devices of the grid are called {spec.name!r}; rows could not be told apart")
    return list(dict.fromkeys(found))


def resolve_inputs(target: Target, texts: Sequence[str], configuration: Configuration) -> tuple[InputSpec, ...]:
    """What the model is called with: ``texts`` (as `--input`) or the target's inputs, sized as ``configuration`` says.

    A text that holds ``{batch}`` or ``{sequence}`` says itself where that size goes; else the batch is the first
    dimension of every input, the sequence the second of every two-dimensional one that is not floating. Raises
    InputError where a size has no place.
    """
    sizes = {name: getattr(configuration, name) for name in _SIZES}
    placed = {name for name in _SIZES if any(f"{{{name}}}" in text for text in texts)}
    for name in placed:
        if sizes[name] is None:
            raise InputError(
                f"--input {' '.join(texts)}: {{{name}}} stands for a value of the grid, which has none for {name}")
        texts = [text.replace(f"{{{name}}}", str(sizes[name])) for text in texts]
    specs = target.choose_inputs(parse_inputs(texts), train=False)
    if specs is None:
        raise InputError(
            f"{target.name}: its inputs are not known; give them, e.g. --input {{batch}}x3x224x224")
    for name in _SIZES:
        if sizes[name] is not None and name not in placed:
            resized = tuple(spec.resize(name, sizes[name]) for spec in specs)
            if not any(spec.find_dims(name) for spec in specs):
                raise InputError(
                    f"{target.name}: none of its inputs {' '.join(map(str, specs))} has a {name} dimension; "
                    f"say where it goes, e.g. --input x={{batch}}x{{sequence}}x64")
            specs = resized
    if configuration.dtype is not None:
        dtype = DTYPES[configuration.dtype]
        specs = tuple(replace(spec, dtype=dtype) if spec.dtype.is_floating_point else spec for spec in specs)
    chosen = target.choose_inputs(specs, train=configuration.mode == "train")
    assert chosen is not None  # some are given
    return chosen
