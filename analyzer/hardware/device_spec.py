"""What is known of a device, figure by figure, with where each figure comes from; and a device as a file.

A file is a JSON record of what ``DeviceSpec.to_dict`` gives. Those of the catalogue stand in ``devices/``. What a
record leaves out is unknown; that of a board which is ``board_of`` another holds what differs. Rates are dense: where a
data sheet prints only the figure with sparsity, half of it stands there. Memory sizes are what the driver gave a
program on one such machine; they differ by some MiB between driver versions. No document gives the cost of a kernel
launch, so it is unknown throughout. Compute capabilities: developer.nvidia.com/cuda-gpus.
"""
from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, NamedTuple, TypeVar

from analyzer.errors import InputError, ProfileFormatError, UnknownDeviceError
from analyzer.saved_format import SavedFormat, load_json
from analyzer.units import format_bytes

S = TypeVar("S")


@dataclass(frozen=True)
class PeakRates:
    """Peak arithmetic rates in FLOP/s (operations per second for int8), dense: never the figures with sparsity.
    ``fp64`` and ``fp32`` are those of the CUDA cores (of the vector units, for a CPU), the others of the tensor cores,
    accumulating in float32 where the device has several accumulators, as PyTorch does by default. None where the device
    lacks the format or the figure is unknown.
    """

    fp64: float | None = None
    fp64_tensor: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    int8: float | None = None


class Figure(NamedTuple):
    """One figure: ``value`` in ``unit``, None if unknown or absent; ``source`` says where from, or why not."""

    name: str
    value: float | None
    unit: str
    source: str | None


_UNITS = {"memory_bytes": "B", "memory_bandwidth": "B/s",
          **{f"flops_per_second.{f.name}": "FLOP/s" for f in dataclasses.fields(PeakRates)}, "multiprocessors": "",
          "l2_bytes": "B", "clock_hertz": "Hz", "power_watts": "W", "nvlink_bandwidth": "B/s", "pcie_bandwidth": "B/s",
          "launch_seconds": "s"}
_MOST = 1e60  #: no rate is as large, and powers of one that were would be no floating-point numbers
_COUNTS = ("memory_bytes", "multiprocessors", "l2_bytes")
_RATES = ("memory_bandwidth", "clock_hertz", "power_watts", "nvlink_bandwidth", "pcie_bandwidth", "launch_seconds")
_KINDS = ("cuda", "cpu", "mps")


@dataclass(frozen=True, repr=False)
class DeviceSpec:
    """A device that a model may be profiled for. Every figure may be None: unknown, or the device has no such part.
    Raises InputError for a value that cannot be.

    - ``name``, ``aliases``: what ``find_device`` knows it by. ``kind``: the type of its tensors' ``device`` in PyTorch.
    - ``compute_capability``: what ``torch.cuda.get_device_capability()`` says.
    - ``memory_bytes``: what the driver reports, less than the box says. ``memory_bandwidth``: bytes/s.
    - ``flops_per_second``: dense peak rates, see PeakRates.
    - ``multiprocessors`` (compute units, cores), ``l2_bytes``: size of the last cache before memory.
    - ``clock_hertz``: boost clock of the multiprocessors. ``power_watts``: the power limit.
    - ``nvlink_bandwidth`` (of AMD: Infinity Fabric), ``pcie_bandwidth`` (or what stands in its place to the host):
      bytes/s of all links together in one direction, half of the sum of both that data sheets print.
    - ``launch_seconds``: what starting one kernel costs the host.
    - ``sources``: figure name to where it comes from; rates are ``"flops_per_second.bf16"``, or ``"flops_per_second"``
      for all of them that have no entry of their own.
    - ``calibration``: constants of kernel models measured on this device, by family and name (see `kernel_time`).
    - ``board_of``: the device of the catalogue with the same chip on another board: what was fitted to its kernels
      holds here.

    >>> DeviceSpec("lab_card", memory_bytes=24 * 2**30, sources={"memory_bytes": "what nvidia-smi says"})
    DeviceSpec('lab_card', cuda, 24.00 GiB)
    """

    name: str
    kind: str = "cuda"
    vendor: str | None = None
    architecture: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    memory_bandwidth: float | None = None
    flops_per_second: PeakRates = field(default_factory=PeakRates)
    multiprocessors: int | None = None
    l2_bytes: int | None = None
    clock_hertz: float | None = None
    power_watts: float | None = None
    nvlink_bandwidth: float | None = None
    pcie_bandwidth: float | None = None
    launch_seconds: float | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    calibration: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    board_of: str | None = None

    @property
    def chip(self) -> str:
        """The device of the catalogue that has this chip; a device that is no board of another names itself."""
        return self.board_of or self.name

    def __hash__(self) -> int:
        return hash(self.name)  # that of all figures is slow, and tables by device are read for each operator

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InputError(f"DeviceSpec(name={self.name!r}): must be a name that is not blank")
        pair, aliases = self.compute_capability, self.aliases
        for field_name, is_right, problem in (
                ("kind", self.kind in _KINDS, f"must be one of {', '.join(map(repr, _KINDS))}"),
                ("aliases", isinstance(aliases, (tuple, list))
                 and all(isinstance(a, str) and a.strip() for a in aliases), "must be a tuple of names"),
                ("compute_capability", pair is None or isinstance(pair, (tuple, list)) and len(pair) == 2
                 and all(type(n) is int and n >= 0 for n in pair), "must be a pair of ints such as (9, 0)"),
                ("flops_per_second", isinstance(self.flops_per_second, PeakRates), "must be a PeakRates, in JSON "
                 "rates by format: {\"fp32\": 35e12}")):
            if not is_right:
                raise self._error(field_name, getattr(self, field_name), problem)
        object.__setattr__(self, "aliases", tuple(aliases))  # JSON brings lists
        object.__setattr__(self, "compute_capability", None if pair is None else tuple(pair))
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value <= 0):
                hint = "; analyzer.units.parse_bytes reads '80GiB'" if name.endswith("_bytes") else ""
                raise self._error(name, value, f"must be a positive int or None if unknown{hint}")
        rates = {f"flops_per_second.{name}": rate for name, rate in vars(self.flops_per_second).items()}
        for name, value in {**{name: getattr(self, name) for name in _RATES}, **rates}.items():
            if value is not None and (type(value) not in (int, float) or not 0 < value < _MOST):
                raise self._error(name, value, f"must be a positive number, in {_UNITS[name]}, or None if unknown")
        for field_name in ("vendor", "architecture", "board_of"):
            if not isinstance(getattr(self, field_name), str | None):
                raise self._error(field_name, getattr(self, field_name), "must be a text, or None if unknown")
        if not is_text_by_name(self.sources):
            raise self._error("sources", self.sources, "must say by the names of figures where each comes from")
        for name in self.sources:
            if name not in _UNITS and name != "flops_per_second":
                raise self._error("sources", name,
                                  f"not a figure{suggest(name, _UNITS)}; the figures are {', '.join(_UNITS)}")
        object.__setattr__(self, "sources", dict(self.sources))  # a copy: the caller's dict may change
        object.__setattr__(self, "calibration", self._check_calibration())

    def _check_calibration(self) -> dict[str, dict[str, float]]:
        families = self.calibration
        if not isinstance(families, Mapping):
            raise self._error("calibration", families, "must be constants by family and name, such as "
                              "{'matmul': {'spread': 0.1}}")
        for family, constants in families.items():
            if not isinstance(family, str) or not isinstance(constants, Mapping):
                raise self._error("calibration", {family: constants}, "must be constants by family and name, such as "
                                  "{'matmul': {'spread': 0.1}}")
            for name, value in constants.items():
                if not isinstance(name, str) or type(value) not in (int, float) or not math.isfinite(value):
                    raise self._error(f"calibration[{family!r}]", {name: value}, "must be a finite number by its name")
        return {family: dict(constants) for family, constants in families.items()}

    def _error(self, field_name: str, value: object, problem: str) -> InputError:
        return InputError(f"DeviceSpec({self.name!r}, {field_name}={value!r}): {problem}")

    def __repr__(self) -> str:
        return f"DeviceSpec({self.name!r}, {self.kind}, {format_bytes(self.memory_bytes)})"

    def figures(self) -> Iterator[Figure]:
        """Every figure, known or not, in the order of the fields."""
        for name, unit in _UNITS.items():
            table, _, rate = name.partition(".")
            value = getattr(getattr(self, table), rate) if rate else getattr(self, name)
            yield Figure(name, value, unit, self.sources.get(name, self.sources.get(table)))

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain data that ``json.dumps`` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceSpec:
        """The spec that ``to_dict`` gave, also after JSON. Raises InputError as the class does."""
        fields = known_fields("DeviceSpec", cls, data, "name")
        rates = fields.get("flops_per_second")
        if isinstance(rates, Mapping):
            fields["flops_per_second"] = PeakRates(**known_fields("PeakRates", PeakRates, rates))
        return cls(**fields)

    @classmethod
    def from_measurement(cls, name: str, figures: Mapping[str, float | None], *, command: str, date: str,
                         like: DeviceSpec | None = None, **fields: Any) -> DeviceSpec:
        """A spec of measured ``figures``, by their names in `figures()`, whose source is the ``command`` and ``date``.
        What was not measured, or came out as None, is as in ``like`` with its source, else unknown. ``fields``: others,
        such as ``kind`` and ``calibration``. Raises InputError for an unknown figure and a value that cannot be.
        """
        known = {} if like is None else {f.name: getattr(like, f.name) for f in dataclasses.fields(like)}
        rates, sources = dict(vars(known.get("flops_per_second", PeakRates()))), dict(known.get("sources", {}))
        for figure, value in figures.items():
            if figure not in _UNITS:
                raise InputError(f"DeviceSpec.from_measurement({figure!r}): not a figure{suggest(figure, _UNITS)}; "
                                 f"the figures are {', '.join(_UNITS)}")
            if value is None:
                continue
            table, _, rate = figure.partition(".")
            (rates if rate else known)[rate or table] = value
            sources[figure] = f"measured by `{command}` on {date}"
        return cls(**{**known, "name": name, **fields, "flops_per_second": PeakRates(**rates), "sources": sources})


def known_fields(owner: str, cls: type[Any], data: Mapping[str, Any], *needed: str) -> dict[str, Any]:
    """``data``, whose names are all fields of ``cls``. Raises InputError for one that is not, or is ``needed``."""
    known = [f.name for f in dataclasses.fields(cls)]
    for name in data:
        if name not in known:
            raise InputError(
                f"{owner}.from_dict: unknown field {name!r}{suggest(name, known)}; the fields are {', '.join(known)}")
    for name in needed:
        if name not in data:
            raise InputError(f"{owner}.from_dict({dict(data)!r}): has no {name!r}")
    return dict(data)


def is_text_by_name(value: object) -> bool:
    """Whether ``value`` maps texts to texts."""
    return isinstance(value, Mapping) and all(isinstance(word, str) for item in value.items() for word in item)


def suggest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """What to add to an error about ``name``: the nearest of ``known``, if one is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


FORMAT = SavedFormat("analyzer.device", 1, "device", "run `analyzer calibrate` again")


def list_shipped(folder: str = "devices") -> list[str]:
    """The names of the records in a folder of the package, sorted."""
    files = resources.files(__package__).joinpath(folder).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


@functools.cache
def read_shipped(name: str) -> DeviceSpec | None:
    """The device of that name that comes with the package, or None. The file is read at the first call."""
    file = resources.files(__package__).joinpath(f"devices/{name}.json")
    if not name.isidentifier() or not file.is_file():
        return None
    record = json.loads(file.read_text("utf-8"))
    chip = read_shipped(record["board_of"]) if "board_of" in record else None
    if chip is None:
        return DeviceSpec.from_dict(record)
    known = chip.to_dict() | {"aliases": ()}
    for table in ("flops_per_second", "sources"):
        record[table] = known[table] | record.get(table, {})
    return DeviceSpec.from_dict(known | record)


def is_device_file(name: str) -> bool:
    """Whether ``name`` is that of a file and not of a device: it ends in ``.json`` or names a folder on the way.

    >>> [is_device_file(name) for name in ("h200", "lab_card.json", "cards/lab_card")]
    [False, True, True]
    """
    return name.endswith(".json") or os.sep in name


def read_device(path: str | os.PathLike[str]) -> DeviceSpec:
    """The device of a file, JSON of `DeviceSpec.to_dict` or `analyzer calibrate`'s. Raises InputError for others."""
    try:
        data = load_json(path)
    except OSError as error:
        raise InputError(f"device file {os.fspath(path)!r}: cannot be read: {error.strerror}; `analyzer calibrate` "
                         "writes one, `analyzer devices` lists the names that need no file") from error
    except ValueError as error:
        raise InputError(f"device file {os.fspath(path)!r}: {error}; write it by json.dump of "
                         "DeviceSpec.to_dict()") from error
    # one that was written by hand need not say its format
    return make_spec(f"device file {os.fspath(path)!r}", data, DeviceSpec, lambda fields: DeviceSpec.from_dict(
        FORMAT.read(fields) if "format" in fields or "version" in fields else fields))


def make_spec(where: str, data: Any, kind: type[S], make: Callable[[dict[str, Any]], S]) -> S:
    """The spec that ``make`` makes of what a file holds. Raises InputError, which begins with ``where``."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: holds a {type(data).__name__}, not the fields of a {kind.__name__} by name")
    try:
        return make(data)
    except (InputError, ProfileFormatError, UnknownDeviceError) as error:
        raise InputError(f"{where}: {error}") from error


def encode_device(spec: DeviceSpec) -> str:
    """The text of a device's file."""
    return json.dumps({**FORMAT.head, **spec.to_dict()}, indent=1) + "\n"


# torch dtype to the format whose peak applies; complex numbers are computed in their real parts.
_FORMATS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8",
            "float8_e5m2": "fp8", "float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "fp8", "int8": "int8", "uint8": "int8",
            "complex128": "fp64", "complex64": "fp32", "complex32": "fp16"}
_FORMATS |= {name: name for name in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")}

# First compute capability whose tensor cores take the format: CUDA C++ Programming Guide, Compute Capabilities,
# table "Feature Support per Compute Capability" and section on 7.x and 8.x tensor cores.
_FIRST_CAPABILITY = {"fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0)}


def find_peak(dtype: object, device: DeviceSpec, uses_tensor_cores: bool, allow_tf32: bool = False) -> float | None:
    """Dense peak in FLOP/s that bounds an operation on ``dtype`` (a torch.dtype or its name), or None if unknown.
    ``uses_tensor_cores``: whether it is one of matrix products (linear, matmul, convolution, attention).
    ``allow_tf32``: whether float32 products may use TF32; in PyTorch convolutions may by default. Other operations on
    16-bit and 8-bit floats compute in float32 on the CUDA cores (PyTorch's ``OpMathType.h``), as do products in a
    format that the device's tensor cores lack.
    """
    name = str(dtype).removeprefix("torch.")
    kind = _FORMATS.get(name)
    if kind is None:
        import torch  # `analyzer devices` needs none of it

        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise InputError(f"find_peak({dtype!r}): not a dtype; those with a peak are {', '.join(_FORMATS)}")
        return None  # data sheets give no peak for it
    rates = device.flops_per_second
    if kind == "fp64":
        return rates.fp64_tensor if uses_tensor_cores and rates.fp64_tensor is not None else rates.fp64
    if kind == "fp32" and allow_tf32:
        kind = "tf32"
    if kind in _FIRST_CAPABILITY and not (uses_tensor_cores and _has_tensor_cores(device, kind)):
        return rates.fp32
    if kind == "fp8" and not uses_tensor_cores:
        return rates.fp32
    if kind == "int8" and not uses_tensor_cores:
        return None
    peak: float | None = getattr(rates, kind)
    return peak


def _has_tensor_cores(device: DeviceSpec, kind: str) -> bool:
    if device.kind == "cpu":  # matrix units (AMX) are there only if the spec says so
        return getattr(device.flops_per_second, kind) is not None
    return device.compute_capability is None or device.compute_capability >= _FIRST_CAPABILITY[kind]
