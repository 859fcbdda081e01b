"""The largest batch, or the longest sequence, whose step fits in the memory of a device.

Memory grows nearly linearly with either, in pieces (a kernel or an allocator's rounding changes), so the search follows
the lines of the phases' peaks and keeps the answer between the largest size known to fit and the smallest known not to.
Each size is profiled on a device with a limit, so what counts as fitting is what the allocator would do when it gives
cached memory back and tries again. The answer and the size after it have always been profiled.
"""
from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from analyzer.api.argument import build_model
from analyzer.api.fits import fits
from analyzer.api.profile import ProfileOptions, profile
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, UnseenMemory, find_device, list_unseen
from analyzer.hardware.price import read_prices
from analyzer.record.progress import progress_part
from analyzer.report.fit_table import describe_fits
from analyzer.report.page.document import Headline
from analyzer.report.page.notebook import fold, write_answer, write_fragment, write_rows
from analyzer.report.text_table import format_quantity, print_rows
from analyzer.report.verdict import judge
from analyzer.results.info import OutOfMemoryInfo
from analyzer.results.verdict import Headroom
from analyzer.tools.sweep.configuration import Configuration, resolve_inputs
from analyzer.units import parse_bytes
from analyzer.zoo.command_option import choose_inputs, find_step, make_inputs, read_recipe
from analyzer.zoo.target import load_target, model_errors

_FLAT_FACTOR = 64    # how far to go on where a larger size needs no more memory
_FRAGMENTED = 0.99
_FAR = 8             # a bracket this wide is narrowed by its orders of magnitude
_ENDLESS = 1 << 32   # no device holds so many times the smallest size


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One profiled size. ``peak_reserved_bytes`` of one that does not fit: what was reserved when memory ran out."""

    size: int
    fits: bool
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    out_of_memory: OutOfMemoryInfo | None = None


@dataclass(frozen=True, slots=True, repr=False)
class FitResult:
    """The largest ``size`` that fits, with a profile at it and at the next one, and every size that was tried."""

    what: str                        #: "batch size" or "sequence length"
    device: str
    capacity_bytes: int              #: what the allocator may take
    size: int                        #: 0 if not even the smallest size fits
    at_most: int | None              #: the bound that the caller gave
    at_limit: Profile | None         #: None if nothing fits
    beyond: Profile | None           #: of the next size, which does not fit; None where ``size`` is the caller's bound
    evaluations: tuple[Evaluation, ...]
    unseen: tuple[UnseenMemory, ...] = ()

    def __repr__(self) -> str:
        return f"FitResult({str(self).partition(chr(10))[0]})"

    def __str__(self) -> str:
        return "\n".join([f"{self.device}: {self._name_largest()}", *self._list_limits(),
                          print_rows(*self._list_rows(), left=(1, 4))])

    def _name_largest(self) -> str:
        if not self.size:
            return f"no {self.what} fits: {self.evaluations[0].size:,} does not"
        return f"the largest {self.what} that fits is {self.size:,}" + (
            "" if self.beyond is not None else f" or more: no larger size than {self.at_most:,} was asked for")

    def _list_limits(self) -> tuple[str, str]:
        unknown = [line.what for line in self.unseen if line.bytes is None]
        return (f"the allocator may take {format_quantity(self.capacity_bytes, 'bytes')}" +
                (f" (nothing is taken off for what is not known: {', '.join(unknown)})" if unknown else ""),
                "a size also counts as fitting if PyTorch must free its cache first")

    def _list_rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        return (self.what, "Fits", "Peak allocated", "Peak reserved", "Ends at"), [
            (f"{e.size:,}", "yes" if e.fits else "no", format_quantity(e.peak_allocated_bytes, "bytes"),
             format_quantity(e.peak_reserved_bytes, "bytes"), _describe_end(e.out_of_memory))
            for e in sorted(self.evaluations, key=lambda e: e.size)]

    def _repr_html_(self) -> str:
        answer = Headline.of(bool(self.size), self._name_largest(), self._list_limits())
        return write_fragment(f"{self.what} on {self.device}", write_answer(answer),
                              fold(f"Sizes that were tried ({len(self.evaluations)})",
                                   write_rows(*self._list_rows(), left=(1, 4))))


def _describe_end(info: OutOfMemoryInfo | None) -> str:
    return "" if info is None else f"{info.operator} in {info.phase}" + (
        f", {info.module_path}" if info.module_path else "")


def max_batch_size(model: torch.nn.Module | Callable[[], torch.nn.Module], make_inputs: Callable[[int], Any], *,
                   device: str | DeviceSpec = "h200", start: int = 1, multiple_of: int = 1, at_most: int | None = None,
                   options: ProfileOptions | None = None, world_size: int = 1, **profile_options: Any) -> FitResult:
    """The largest batch whose step fits on ``device``.

    ``make_inputs(size)`` gives the arguments for a batch of that size: a tensor, a tuple of positional ones, a
    dictionary of named ones, or a pair ``(tuple, dict)``. Only multiples of ``multiple_of`` are tried, from ``start``
    (2 where batch norm needs it) to ``at_most``.
    ``options`` and ``profile_options`` are those of `analyzer.profile`; ``options.capacity_bytes`` takes the place
    of the device's memory. ``world_size`` above 1 takes communication buffers off it where their size is known.

    Raises InputError where memory does not grow with the size and ``at_most`` is not given, or for bounds that cannot
    be; what `profile` raises.

    >>> import torch
    >>> model, make = torch.nn.Linear(1024, 1024), lambda n: torch.empty(n, 1024, device="meta")
    >>> found = max_batch_size(model, make, mode="infer", device="t4", multiple_of=1024)
    >>> found.at_limit.out_of_memory is None, found.beyond.out_of_memory.operator, len(found.evaluations) < 10
    (True, 'aten.addmm.default', True)
    """
    return _search("batch size", model, make_inputs, device=device, start=start, multiple_of=multiple_of,
                   at_most=at_most, options=options, world_size=world_size, **profile_options)


def max_sequence_length(model: torch.nn.Module | Callable[[], torch.nn.Module], make_inputs: Callable[[int], Any],
                        **options: Any) -> FitResult:
    """The longest sequence whose step fits on a device; as `max_batch_size`, with ``make_inputs(length)``.

    Give ``at_most`` where the model has a longest sequence of its own (a table of positions), beyond which it raises.
    """
    return _search("sequence length", model, make_inputs, **options)


class _SizeSearch:
    """Profiles sizes, given in steps of ``multiple_of``, and keeps the bracket."""

    def __init__(self, what: str, run: Callable[[int], Profile], multiple_of: int, last: int | None,
                 capacity_bytes: int) -> None:
        self.what = what
        self.run, self.multiple_of, self.last, self.capacity_bytes = run, multiple_of, last, capacity_bytes
        self.profiles: dict[int, Profile] = {}  # of the two ends of the bracket
        self.evaluations: list[Evaluation] = []
        # steps, peak allocated bytes by step of training and phase, reserved
        self.fitting: list[tuple[int, dict[tuple[int, str], int], int]] = []
        self.low, self.high = 0, 0  # largest that fits, smallest that does not; 0: none yet

    @property
    def is_closed(self) -> bool:
        """Whether the size after the largest that fits is known not to fit, or is beyond the caller's bound."""
        return self.high == self.low + 1 or self.low == self.last

    def fits(self, steps: int) -> bool:
        steps = max(steps, self.low + 1)
        if self.high:
            steps = min(steps, self.high - 1)
        if self.last is not None:
            steps = min(steps, self.last)
        # how many are to come is not known: each takes a quarter of what is left
        start, stop = (1 - 0.75**n for n in (len(self.evaluations), len(self.evaluations) + 1))
        with progress_part(start, stop, f"{self.what} {steps * self.multiple_of:,}"):
            found = self.run(steps * self.multiple_of)
        info = found.out_of_memory
        reserved = found.peak_reserved_bytes if info is None or info.reserved_bytes is None else info.reserved_bytes
        self.evaluations.append(
            Evaluation(steps * self.multiple_of, info is None, found.peak_allocated_bytes, reserved, info))
        self.profiles[steps] = found
        if info is None:
            self.low = steps
            self.fitting.append((steps, {(i, name): phase.peak_allocated_bytes or 0
                                         for i, phases in enumerate((found.first_step, found.phases))
                                         for name, phase in phases.items()}, found.peak_reserved_bytes or 0))
        else:
            self.high = steps
        self.profiles = {k: v for k, v in self.profiles.items() if k in (self.low, self.high)}
        return info is None

    def lines(self) -> list[tuple[int, float]]:
        """Bytes at the largest size that fits, and bytes per step from the one before, of each phase that rises.

        Each phase has a line of its own: at small sizes the peak is that of the optimizer, whatever the batch.
        """
        if len(self.fitting) < 2:
            return []
        (a, before, _), (b, now, _) = sorted(self.fitting, key=lambda row: row[0])[-2:]
        return [(now[key], slope) for key in now if key in before and (slope := (now[key] - before[key]) / (b - a)) > 0]

    def follow_lines(self, share: float) -> int:
        """Where the first of the lines meets this share of the capacity."""
        meets = [int((share * self.capacity_bytes - nbytes) / slope) for nbytes, slope in self.lines()]
        return self.low + min(meets) if meets else self.low * _FLAT_FACTOR

    def follow_reserved(self) -> int:
        """Where the line of reserved bytes meets the capacity: that fits even if the allocator gives nothing back."""
        (a, _, before), (b, _, now) = sorted(self.fitting, key=lambda row: row[0])[-2:]
        return b + int((self.capacity_bytes - now) * (b - a) / (now - before)) if now > before else b


def _search(what: str, model: Any, make_inputs: Callable[[int], Any], *, device: str | DeviceSpec = "h200",
            start: int = 1, multiple_of: int = 1, at_most: int | None = None, options: ProfileOptions | None = None,
            world_size: int = 1, **profile_options: Any) -> FitResult:
    if world_size < 1:
        raise InputError(f"world_size={world_size!r}: must be the number of processes that train together, at least 1")
    spec = find_device(device)
    options = options or ProfileOptions()
    unseen: tuple[UnseenMemory, ...] = ()
    capacity = options.capacity_bytes
    if capacity is None:
        if spec.memory_bytes is None:
            raise InputError(
                f"{what}: the memory of {spec.name!r} is not known; give options=ProfileOptions(capacity_bytes=...)")
        unseen = list_unseen(spec, world_size)
        capacity = spec.memory_bytes - sum(u.bytes or 0 for u in unseen)
    if multiple_of < 1 or start < 1:
        raise InputError(f"start={start!r}, multiple_of={multiple_of!r}: must be at least 1")
    first = -(-start // multiple_of)
    last = None if at_most is None else at_most // multiple_of
    if last is not None and last < first:
        raise InputError(f"at_most={at_most!r}: no multiple of {multiple_of} lies between start={start} and it")
    limited = replace(options, capacity_bytes=capacity, limit_to_device=False, keep_events=False)

    def run(size: int) -> Profile:
        args: Any = make_inputs(size)
        kwargs: dict[str, Any] = {}
        if isinstance(args, dict):
            args, kwargs = (), args
        elif not isinstance(args, tuple):
            args = (args,)
        elif len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], dict):
            args, kwargs = args
        return profile(model, args=args, kwargs=kwargs, device=spec, options=limited, **profile_options)

    search = _SizeSearch(what, run, multiple_of, last, capacity)
    if search.fits(first) and not search.is_closed:
        _close_in(search, first, what)
    return FitResult(what, spec.name, capacity, search.low * multiple_of, at_most, search.profiles.get(search.low),
                     search.profiles.get(search.high), tuple(search.evaluations), unseen)


def _close_in(search: _SizeSearch, first: int, what: str) -> None:
    search.fits(first + 1)
    if not search.is_closed and not search.high and (half := search.follow_lines(0.5)) > search.low:
        search.fits(half)  # near the limit, but far enough off to fit where memory fragments
    # the lines of small sizes lie low where memory rises faster than the size
    while not search.high and not search.is_closed:
        if search.low > _ENDLESS * first:
            raise InputError(
                f"{what}: {search.low * search.multiple_of:,} still fits; does make_inputs use its argument? Else give "
                f"at_most")
        guess = search.follow_lines(1.0)
        if search.fits(guess) and guess <= search.low and not search.is_closed:
            search.fits(search.low + 1)  # most often the line is right
    while search.high > _FAR * search.low and not search.is_closed:
        search.fits(math.isqrt(search.low * search.high))
    if not search.is_closed and (info := search.profiles[search.high].out_of_memory) is not None:
        slope = max((slope for _, slope in search.lines()), default=0.0)
        if slope > 0:
            search.fits(search.high - math.ceil(info.short_bytes / slope))
    if not search.is_closed:
        search.fits(int(_FRAGMENTED * search.high))  # what fragments is mostly a small share
    _narrow(search)


def _narrow(search: _SizeSearch) -> None:
    """Follow the line of the reserved bytes while that gains much, else halve what is left."""
    follows = True
    while not search.is_closed:
        middle = (search.low + search.high) // 2
        guess = search.follow_reserved() if follows and len(search.fitting) > 1 else middle
        guess = guess if search.low < guess < search.high else middle
        width = search.high - search.low
        search.fits(guess)
        follows = not follows or search.high - search.low <= width // 2


_SOUGHT = ("batch", "sequence", "memory", "start", "multiple_of", "at_most")


def run_fit(arguments: argparse.Namespace) -> int:
    devices = arguments.device or []
    for device in devices:
        find_device(device)  # before any work: a wrong name costs no waiting
    headroom = None if arguments.headroom is None else Headroom.parse(arguments.headroom)
    given = next((name for name in _SOUGHT if getattr(arguments, name) not in (None, False)), None)
    if len(devices) == 1 or given is not None and not devices:
        for name, usual in (("format", "text"), ("prices", None), ("sort", None)):
            if (value := getattr(arguments, name)) != usual:
                raise InputError(f"--{name.removesuffix('s')} {value}: is for the table of devices; leave it out, or "
                                 "leave out --device and what searches for a size")
        if arguments.batch and arguments.sequence:
            raise InputError("--batch --sequence: give one of them")
        return _find_largest(arguments, headroom, *devices)
    if given is not None:
        raise InputError(f"--{given.replace('_', '-')}: is for one device, and {len(devices)} are given; give one")
    sort = "memory" if arguments.sort is None else arguments.sort
    read_prices(arguments.prices, "--price ")
    if sort == "price" and arguments.prices is None:
        raise InputError("--sort price: no price is known; give --price, as h100=2.5,l40s=0.9")
    target = load_target(arguments.target)
    recipe = read_recipe(arguments)
    inputs = choose_inputs(target, arguments.input, arguments.mode == "train", recipe.dtype)
    with model_errors(arguments.target):
        several = arguments.devices or 1
        model = build_model(partial(recipe.build, target.build), devices=several).train(arguments.mode == "train")
        args, kwargs = make_inputs(inputs)
        found = fits(model, args, kwargs, devices=arguments.device, world_size=arguments.world_size,
                     options=ProfileOptions(devices=several), prices=arguments.prices, headroom=arguments.headroom,
                     **find_step(arguments, recipe))
    print(describe_fits(found, sort) if arguments.format == "text" else found.table(arguments.format, sort))
    known = [row for row in found if row.capacity_bytes is not None]
    return 3 if all(row.fits is False or row.fits and not found.headroom.is_left(row) for row in known) else 0


def _find_largest(arguments: argparse.Namespace, headroom: Headroom | None, device: str = "h200") -> int:
    what, start = "sequence" if arguments.sequence else "batch", 1 if arguments.start is None else arguments.start
    recipe = read_recipe(arguments)
    configuration = Configuration(mode=arguments.mode, autocast=arguments.autocast, dtype=arguments.dtype,
                                  device=device)
    target = load_target(arguments.target)

    def make(size: int) -> Any:
        sized: dict[str, Any] = {what: size}
        return make_inputs(resolve_inputs(target, arguments.input, replace(configuration, **sized)))

    make(max(1, start))  # before any work: an input without a place for the size costs no waiting
    several = arguments.devices or 1
    capacity = None if arguments.memory is None else parse_bytes(arguments.memory)
    if headroom is not None:
        capacity = _leave(headroom, configuration.device_spec, capacity, arguments.world_size)
    options = ProfileOptions(capacity_bytes=capacity, devices=several)
    search = max_batch_size if what == "batch" else max_sequence_length
    with model_errors(arguments.target):
        model = build_model(partial(recipe.build, target.build), None, configuration.device_spec, several).train(
            arguments.mode == "train")
        found = search(model, make, device=configuration.device_spec, start=start,
                       multiple_of=1 if arguments.multiple_of is None else arguments.multiple_of,
                       at_most=arguments.at_most, options=options, world_size=arguments.world_size,
                       **find_step(arguments, recipe))
    print(found)
    print(f"\n{_judge(found, arguments)}")
    return 0 if found.size else 3


def _leave(headroom: Headroom, spec: DeviceSpec, capacity: int | None, world_size: int) -> int | None:
    """What the allocator may take where so much is to be left; None where the device's memory is not known."""
    whole = spec.memory_bytes if capacity is None else capacity
    if whole is None:
        return None
    taken = sum(u.bytes or 0 for u in list_unseen(spec, world_size)) if capacity is None else 0
    return max(1, int(whole - taken - max(headroom.share * whole, headroom.bytes)))


def _judge(found: FitResult, arguments: argparse.Namespace) -> str:
    shown = found.beyond if found.at_limit is None else found.at_limit
    size = found.size or found.evaluations[0].size
    spec = find_device(found.device)
    if arguments.memory is not None:
        spec = replace(spec, kind="cpu", memory_bytes=found.capacity_bytes)  # nothing is taken beside the allocator
    verdict = None if shown is None else judge(shown, spec, arguments.world_size, is_brief=True)
    return f"{found.what} {size:,} {verdict}"
