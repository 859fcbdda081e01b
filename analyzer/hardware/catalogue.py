"""Specs that can be named: those that come with the package, how to add one, and the device that is simulated."""
from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from analyzer.errors import DuplicateRegistrationError, InputError, UnknownDeviceError
from analyzer.registry import Registry
from analyzer.units import parse_bytes

from .device_spec import DeviceSpec, PeakRates, is_device_file, list_shipped, read_device, read_shipped, suggest


class Named(Protocol):
    """What a catalogue holds."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def aliases(self) -> tuple[str, ...]: ...  # noqa: D102


S = TypeVar("S", bound=Named)
A = TypeVar("A")
B = TypeVar("B")
P = ParamSpec("P")


def fold_name(name: str) -> str:
    """A name as names are compared: case, spaces, hyphens and underscores do not tell them apart.

    >>> fold_name(" NVIDIA A100-SXM4-80GB")
    'nvidia_a100_sxm4_80gb'
    """
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


class SpecCatalogue(Generic[S]):
    """Specs of ``kind`` by name and alias, as ``fold`` compares them; ``read`` gives those that come with the package,
    which are read at the first use. Calling it registers a spec and returns it. A name that is taken is refused, unless
    ``override`` is true or the call stands inside ``scope()``, which undoes its registrations at the end; an alias of
    another spec always is. ``noun`` and ``example`` stand in errors.
    """

    def __init__(self, kind: type[S], noun: str, example: str, read: Callable[[], Iterable[S]],
                 fold: Callable[[str], str] = fold_name) -> None:
        self.kind, self.noun, self.example, self.fold, self._read = kind, noun, example, fold, read
        self.is_filled = False  #: whether what comes with the package has been read
        self._specs: Registry[str, Any] = Registry(f"register_{noun}")  # Any: elsewhere a registry's values are called
        self._lock = threading.RLock()
        self._named: dict[str, S] = {}
        self._named_version = -1

    def _fill(self) -> Registry[str, Any]:
        with self._lock:
            if not self.is_filled:
                shipped = list(self._read())
                self.is_filled = True
                for spec in shipped:
                    self._specs.add(self.fold(spec.name), spec)
        return self._specs

    def __call__(self, spec: S, *, override: bool = False) -> S:
        """Raises InputError for what is no spec of this kind, DuplicateRegistrationError if a name of it is taken."""
        if not isinstance(spec, self.kind):
            raise InputError(
                f"register_{self.noun}({spec!r}): takes a {self.kind.__name__}, for example {self.example}")
        key = self.fold(spec.name)
        for name in (spec.name, *spec.aliases):
            other = self.find(name)
            if other is not None and self.fold(other.name) != key:
                raise DuplicateRegistrationError(
                    f"register_{self.noun}({spec!r}): {name!r} already stands for {other!r}; give this {self.noun} "
                    "another name or alias")
        self._specs.add(key, spec, override)
        return spec

    def scope(self) -> AbstractContextManager[None]:
        """Undo, at the end of the block, every registration made inside it."""
        return self._fill().scope()

    def __iter__(self) -> Iterator[S]:
        specs: Any = self._fill()
        return iter([specs.find(key) for key in specs])

    def find(self, name: str) -> S | None:
        """The spec of that name or alias."""
        if self._named_version != self._fill().version:
            version = self._specs.version
            self._named = {self.fold(known): spec for spec in self for known in (*spec.aliases, spec.name)}
            self._named_version = version
        return self._named.get(self.fold(name))

    def list_near(self, name: str, most: int) -> str:
        """What an error says after an unknown ``name``: the nearest ones, and all that the catalogue holds."""
        keys = difflib.get_close_matches(self.fold(name), self._named, most, 0.5)
        close = dict.fromkeys(self._named[key].name for key in keys)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        return f"{hint}The catalogue holds {', '.join(spec.name for spec in self)}"


_VENDORS = ("NVIDIA", "AMD", "Apple", None)  # the order of the catalogue; the last is the host


def _place(spec: DeviceSpec) -> tuple[Any, ...]:
    """By vendor, the newest generation first, the largest memory first."""
    major, minor = spec.compute_capability or (0, 0)
    vendor = _VENDORS.index(spec.vendor) if spec.vendor in _VENDORS else len(_VENDORS)
    return vendor, -major, -minor, -(spec.memory_bytes or 0), spec.name


register_device = SpecCatalogue(
    DeviceSpec, "device", "DeviceSpec('lab_card', memory_bytes=24 * 2**30)",
    lambda: sorted((spec for name in list_shipped() if (spec := read_shipped(name)) is not None), key=_place))
"""Add a `DeviceSpec` to the catalogue, so that its name is known wherever a device is named."""


@contextmanager
def knowing(device: object) -> Iterator[None]:
    """For a block, know the device of a file by its name, which is all that a profile keeps of it."""
    if not isinstance(device, str) or not is_device_file(device):
        yield
        return
    with register_device.scope():
        spec = find_device(device)
        if register_device.find(spec.name) is None:
            register_device(dataclasses.replace(spec, aliases=()))  # those may be the catalogue's
        yield


#: What may follow a device's name, by its key: the figure of `DeviceSpec`, and its unit.
_BOARD = {"power": ("power_watts", "W"), "bandwidth": ("memory_bandwidth", "B/s"), "memory": ("memory_bytes", "bytes"),
          "clock": ("clock_hertz", "Hz"), "nvlink": ("nvlink_bandwidth", "B/s"), "pcie": ("pcie_bandwidth", "B/s")}


def split_devices(text: str) -> list[str]:
    """The names in a list between commas, each with what is told of its board.

    >>> split_devices("h100_sxm,power=500,memory=96GB, l4")
    ['h100_sxm,power=500,memory=96GB', 'l4']
    """
    return [name.strip() for name in re.split(r",(?!\s*\w+\s*=)", text) if name.strip()]


def split_figures(text: str) -> tuple[str, dict[str, str]]:
    """The name in ``NAME,KEY=VALUE,...``, and what is told of it by key.

    >>> split_figures("h100_sxm, power=500,memory = 96GB")
    ('h100_sxm', {'power': '500', 'memory': '96GB'})
    """
    name, *words = text.split(",")
    return name.strip(), {key.strip(): value.strip() for key, _, value in (word.partition("=") for word in words)}


def _read_board(device: str) -> DeviceSpec:
    """The board that ``NAME,KEY=VALUE,...`` tells: the device of that name, but for these figures."""
    name, words = split_figures(device)
    spec = find_device(name)
    figures: dict[str, float] = {}
    for key, value in words.items():
        if key not in _BOARD:
            raise InputError(f"device {device!r}: {key!r} is no figure of a board{suggest(key, _BOARD)}; those are "
                             f"{', '.join(f'{known} ({unit})' for known, (_, unit) in _BOARD.items())}")
        figure, unit = _BOARD[key]
        try:
            figures[figure] = round(float(value)) if key == "memory" else float(value)
        except (ValueError, OverflowError):
            if key != "memory":
                raise InputError(f"device {device!r}: {key}={value} must be a number, in {unit}") from None
            figures[figure] = parse_bytes(value)
    rates, clock = dict(vars(spec.flops_per_second)), figures.get("clock_hertz")
    if clock is not None:
        if spec.clock_hertz is None:
            raise InputError(f"device {device!r}: the boost clock of {spec.name!r} is not known, nor then what its "
                             "rates are at another; describe the device with DeviceSpec")
        rates = {kind: rate and rate * clock / spec.clock_hertz for kind, rate in rates.items()}
    board = ",".join([spec.name, *map("=".join, words.items())])
    told = dict.fromkeys(figures, f"told by {board!r}") | ({} if clock is None else {
        "flops_per_second": f"those of {spec.name!r} at the clock told by {board!r}"})
    kept = {figure: source for figure, source in spec.sources.items()
            if clock is None or not figure.startswith("flops_per_second")}
    return dataclasses.replace(
        spec, **figures, name=board, board_of=spec.chip,  # type: ignore[arg-type]
        flops_per_second=PeakRates(**rates), sources=kept | told)


def find_device(device: str | os.PathLike[str] | DeviceSpec) -> DeviceSpec:
    """The spec that ``device`` is or names: a name of the catalogue, an alias, what ``torch.cuda.get_device_name()``
    returns, or the path of a JSON file as `read_device` reads it. Figures of a board may follow the name: its power
    limit in watts, its memory in bytes (``96GB``) and memory bandwidth in bytes/s, the clock at which it runs in hertz
    (rates are in proportion to it), its links in bytes/s in one direction. Raises UnknownDeviceError with the nearest
    names, InputError for something that is not a name, a figure that is none, and a file that describes no device.

    >>> find_device("H100"), find_device("NVIDIA A100-SXM4-80GB").name
    (DeviceSpec('h100_sxm', cuda, 79.19 GiB), 'a100_80gb')
    >>> find_device("h100_sxm,power=500,bandwidth=2.4e12,memory=96e9")
    DeviceSpec('h100_sxm,power=500,bandwidth=2.4e12,memory=96e9', cuda, 89.41 GiB)
    """
    if isinstance(device, DeviceSpec):
        return device
    if isinstance(device, os.PathLike):
        return read_device(device)
    if not isinstance(device, str):
        raise InputError(f"find_device({device!r}): takes a name, for example 'h200', the path of a "
                         "file, or a DeviceSpec")
    # what comes with the package is read one by one until a list is asked for
    shipped = None if register_device.is_filled else read_shipped(fold_name(device))
    spec = shipped or register_device.find(device)
    if spec is None and "=" in device.partition(",")[2]:
        return _read_board(device)
    if spec is None and is_device_file(device):
        return read_device(device)
    if spec is None and device.partition(":")[0].lower() in ("cuda", "gpu", "mps", "hip", "rocm"):
        raise UnknownDeviceError(f"device {device!r}: a prediction is for one model of device; give its name, e.g. "
                                 "rtx_4090, h100 or m2_max, or what torch.cuda.get_device_name() says where it is; "
                                 "`analyzer devices` lists those that are known")
    if spec is None:
        raise UnknownDeviceError(f"unknown device {device!r}: {register_device.list_near(device, 6)}; describe another "
                                 "one with DeviceSpec and pass it, or add it with register_device")
    return spec


# The device that this thread simulates: rules that depend on a device's generation read it here.


class Alike:
    """Devices for which a run has gone as it goes for the one that is simulated: each gives every answer that the run
    asked for. ``specs`` are those left; ``varied`` the names of those whose answers to `ask_apart` were others.
    """

    def __init__(self, specs: Iterable[DeviceSpec]) -> None:
        self.specs = list(specs)
        self.is_asking = False
        self.varied: set[str] = set()
        self._asked: set[Any] = set()
        self._joined: dict[Any, Any] = {}

    def ask(self, rule: Callable[..., A], args: tuple[Any, ...], once: bool) -> A:
        """What ``rule`` answers for the simulated device; devices of another answer are left out."""
        self.is_asking = True
        try:
            answer = rule(*args)
            if not once or (rule, args) not in self._asked:
                self.specs = [spec for spec in self.specs if self._answer(spec, rule, args) == answer]
                if once:
                    self._asked.add((rule, args))
            return answer
        finally:
            self.is_asking = False

    def ask_apart(self, rule: Callable[..., A], args: tuple[Any, ...],
                  join: Callable[[A, dict[str, A]], tuple[B, Collection[str]]]) -> B:
        """As the function `ask_apart`."""
        if (rule, args) not in self._joined:
            self.is_asking = True
            try:
                answer = rule(*args)
                answers = [(spec.name, self._answer(spec, rule, args)) for spec in self.specs]
            finally:
                self.is_asking = False
            others = {name: other for name, other in answers if other != answer}
            self._joined[rule, args], refused = join(answer, others)
            self.varied |= others.keys() - refused
            if refused:
                self.specs = [spec for spec in self.specs if spec.name not in refused]
        found: B = self._joined[rule, args]
        return found

    def _answer(self, spec: DeviceSpec, rule: Callable[..., A], args: tuple[Any, ...]) -> A:
        before, _simulated.spec = _simulated.spec, spec
        try:
            return rule(*args)
        finally:
            _simulated.spec = before


class _Simulated(threading.local):
    spec: DeviceSpec | None = None
    alike: Alike | None = None


_simulated = _Simulated()


def named_spec() -> DeviceSpec | None:
    """The device that `simulating` names, if any."""
    return _simulated.spec


def simulated_spec() -> DeviceSpec:
    """The device that is simulated; an H200 unless `simulating` named another. What is read of it outside of a rule
    that is `asked` may be any figure: no other device is alike then.
    """
    alike = _simulated.alike
    if alike is not None and alike.specs and not alike.is_asking:
        alike.specs.clear()
    return _simulated.spec or find_device("h200")


def asked(rule: Callable[P, A]) -> Callable[P, A]:
    """A rule of hashable arguments whose answer is all that its caller learns of the simulated device. It has no
    effects, and other devices are asked once for the same arguments.
    """
    return _watch(rule, once=True)


def asked_each_time(rule: Callable[P, A]) -> Callable[P, A]:
    """Such a rule whose arguments are not kept, as tensors must not be: other devices are asked at every call."""
    return _watch(rule, once=False)


def ask_apart(rule: Callable[..., A], args: tuple[Any, ...],
              join: Callable[[A, dict[str, A]], tuple[B, Collection[str]]]) -> B:
    """What a rule of hashable arguments, without effects, answers for the simulated device, ``join``ed with the other
    answers of devices that may share the run, by name: these make another run of it only where ``join`` names them.
    """
    alike = _simulated.alike
    if alike is None or not alike.specs or alike.is_asking:
        return join(rule(*args), {})[0]
    return alike.ask_apart(rule, args, join)


def _watch(rule: Callable[P, A], once: bool) -> Callable[P, A]:
    @functools.wraps(rule)
    def ask(*args: P.args, **kwargs: P.kwargs) -> A:
        alike = _simulated.alike
        if alike is None or not alike.specs or alike.is_asking:
            return rule(*args, **kwargs)
        assert not kwargs, f"{rule.__name__} is asked with positional arguments"
        return alike.ask(rule, args, once)

    return ask


@asked
def simulated_kind() -> str:
    """The kind of the simulated device."""
    return simulated_spec().kind


@asked
def simulated_memory() -> int | None:
    """The memory of the simulated device in bytes, None where it is not known."""
    return simulated_spec().memory_bytes


@contextmanager
def simulating(spec: DeviceSpec, alike: Alike | None = None) -> Iterator[None]:
    """Simulate ``spec`` for the length of a block, in which it is watched which other devices are ``alike``."""
    before = _simulated.spec, _simulated.alike
    _simulated.spec, _simulated.alike = spec, alike
    try:
        yield
    finally:
        _simulated.spec, _simulated.alike = before
