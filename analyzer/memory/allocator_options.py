"""The settings of PyTorch's CUDA caching allocator, and the sizes that follow from them.

Sources, named in the comments: ``c10/core/AllocatorConfig.{h,cpp}`` (constants, options, their checks) and
``c10/cuda/CUDACachingAllocator.cpp`` (rounding), as of PyTorch 2.11 to 2.13.
"""
from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from analyzer.errors import InputError

MIB = 1024 * 1024

# AllocatorConfig.h, named there kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kRoundLarge.
MIN_BLOCK_BYTES = 512  # every block is a multiple of this
SMALL_BYTES = MIB  # the largest request that the small pool serves
SMALL_SEGMENT_BYTES = 2 * MIB  # what the small pool takes from the device at a time
MIN_LARGE_BYTES = 10 * MIB  # from here on a request gets a segment of its own size...
LARGE_ROUNDING_BYTES = 2 * MIB  # ...rounded up to this
ADDRESS_RANGE_BYTES = 32 * MIB  # cudaMalloc reserves addresses in multiples of this: CachingAllocator._find_address

# AllocatorConfig.cpp: kRoundUpPowerOfTwoIntervals, one per power of two from 1 MiB (kRoundUpPowerOfTwoStart) to 64 GiB.
_INTERVALS = 16
_FIRST_INTERVAL_LOG2 = 20

# Keys that PyTorch 2.14 knows (AllocatorConfig.cpp, CUDAAllocatorConfig.h) and that change no size on the device.
_WITHOUT_EFFECT = frozenset(
    {"graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_max_cached_size_mb",
     "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
     "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
     "release_lock_on_cudamalloc", "release_lock_on_hipmalloc"})

# Those of them that a memory snapshot tells, off by default (memory_snapshot.cpp).
_FLAGS = ("release_lock_on_cudamalloc", "pinned_use_cuda_host_register", "graph_capture_record_stream_reuse")

# The first version that has a key, where that is later than 2.9: the strings in libc10.so and libc10_cuda.so of the
# packages of 2.9.1, 2.10.0, 2.11.0, 2.12.0, 2.13.0 and 2.14.0.
_SINCE = {"per_process_memory_fraction": (2, 10), "pinned_reserve_segment_size_mb": (2, 10),
          "large_segment_size_mb": (2, 11), "throw_on_cudamalloc_oom": (2, 12), "pinned_free_catch_all": (2, 12),
          "pinned_max_cached_size_mb": (2, 13), "pinned_max_round_threshold_mb": (2, 13)}

# AllocatorConfig.cpp and CUDAAllocatorConfig.h: 2.9 reads the first variable alone, later versions the first of all
# that is there, also where it is empty.
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_ALL_VARIABLES_SINCE = (2, 10)


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _name(torch_version: tuple[int, int]) -> str:
    return ".".join(map(str, torch_version))


def _parse_bool(text: str) -> bool:
    if text not in ("True", "False"):  # ConfigTokenizer::toBool knows no other spelling
        raise ValueError("must be True or False")
    return text == "True"


def _split(settings: str) -> list[str]:
    """ConfigTokenizer drops white space; commas inside brackets belong to the value."""
    items = re.split(r",(?![^\[]*\])", re.sub(r"\s", "", settings).removesuffix(","))
    return items if items != [""] else []


def _write(value: Any) -> str:
    """A setting as `_PARSERS` read it."""
    return f"[{','.join([f'{key}:{one}' for key, one in value.items()])}]" if isinstance(value, Mapping) else str(value)


def _parse_divisions(text: str) -> int | dict[int | str, int]:
    if not text.startswith("["):
        return int(text)
    if not text.endswith("]"):
        raise ValueError("lacks its closing bracket ']'")
    divisions: dict[int | str, int] = {}
    for entry in filter(None, text[1:-1].split(",")):
        boundary, colon, value = entry.partition(":")
        if not colon:
            raise ValueError(f"has the entry {entry!r}, which is not MIB:DIVISIONS or >:DIVISIONS")
        divisions[boundary if boundary == ">" else int(boundary)] = int(value)
    return divisions


_PARSERS: dict[str, Callable[[str], Any]] = {
    "expandable_segments": _parse_bool, "max_split_size_mb": int, "roundup_power2_divisions": _parse_divisions,
    "garbage_collection_threshold": float, "max_non_split_rounding_mb": int, "large_segment_size_mb": int,
    "per_process_memory_fraction": float, "throw_on_cudamalloc_oom": _parse_bool}


@dataclass(frozen=True)
class AllocatorOptions:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` sets; the defaults are PyTorch's. ``_mb`` counts MiB, as PyTorch does. Raises
    InputError where PyTorch would refuse the setting.

    - ``expandable_segments``: one growing segment per stream and pool, in place of one segment per request.
    - ``max_split_size_mb``: free blocks of this size or more are not split; None: all are.
    - ``roundup_power2_divisions``: round requests up to one of so many steps between powers of two; a mapping gives the
      number of steps by size, ``{256: 1, 512: 2, ">": 8}``, keys being MiB and ``">"`` all that is larger.
    - ``garbage_collection_threshold``: share of the allowed memory above which idle segments are freed; 0: never. As in
      PyTorch it acts only where ``per_process_memory_fraction`` is below 1.
    - ``max_non_split_rounding_mb``: how much larger than the request an unsplittable block may be; None: as
      ``large_segment_size_mb``, what requests above 1 MiB and below 10 MiB take from the device.
    - ``per_process_memory_fraction``: share of the device's memory that may be reserved.
    - ``throw_on_cudamalloc_oom``: beyond that share, fail at once, without freeing the cache first.

    >>> AllocatorOptions(expandable_segments=True) == AllocatorOptions.from_string("expandable_segments:True")
    True
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    # Mappings have no hash; equal options still hash equal.
    roundup_power2_divisions: int | Mapping[int | str, int] | None = field(default=None, hash=False)
    garbage_collection_threshold: float = 0.0
    max_non_split_rounding_mb: int | None = None
    large_segment_size_mb: int = 20
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    _given: ClassVar[str | None] = None  # of an instance: the text that it was made of

    def __post_init__(self) -> None:
        if self.large_segment_size_mb * MIB <= MIN_LARGE_BYTES:  # parseLargeSegmentSize
            raise self._refusal("large_segment_size_mb", "must be above 10")
        # parseMaxSplitSize, parseMaxNonSplitRoundingSize
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            size_mb = getattr(self, name)
            if size_mb is not None and size_mb < self.large_segment_size_mb:
                raise self._refusal(name,
                                    f"must be None or at least large_segment_size_mb, {self.large_segment_size_mb}")
        if not 0.0 <= self.garbage_collection_threshold < 1.0:  # parseGarbageCollectionThreshold
            raise self._refusal("garbage_collection_threshold", "must lie between 0 and 1; 0 switches it off")
        if not 0.0 <= self.per_process_memory_fraction <= 1.0:  # parsePerProcessMemoryFraction
            raise self._refusal("per_process_memory_fraction", "must lie between 0 and 1")
        if isinstance(self.roundup_power2_divisions, Mapping):
            # theirs may change
            object.__setattr__(self, "roundup_power2_divisions", dict(self.roundup_power2_divisions))
        _ = self.divisions_by_interval  # checks them

    def _refusal(self, name: str, reason: str) -> InputError:
        return InputError(f"{name}={getattr(self, name)!r}: {reason}")

    @classmethod
    def from_string(cls, settings: str, torch_version: tuple[int, int] | None = None) -> AllocatorOptions:
        """Parse the value of ``PYTORCH_CUDA_ALLOC_CONF`` (or ``PYTORCH_ALLOC_CONF``): ``key:value,key:value``. Options
        that change no size (pinned memory, locks) are accepted and have no effect. Raises InputError for unknown keys,
        also those that the ``torch_version`` does not have yet, values that PyTorch refuses, and the
        ``cudaMallocAsync`` backend, which is the driver's.
        """
        values: dict[str, Any] = {}
        for item in _split(settings):
            key, colon, value = item.partition(":")
            if not (key and colon and value):
                raise InputError(f"allocator settings {settings!r}: {item!r} is not of the form key:value")
            if torch_version is not None and torch_version < (since := _SINCE.get(key, torch_version)):
                raise InputError(f"allocator settings {settings!r}: torch {_name(torch_version)} has no key {key!r} "
                                 f"and raises: it came with {_name(since)}; leave it out")
            if key == "backend":
                if value != "native":
                    raise InputError(
                        f"allocator settings {settings!r}: only backend:native is simulated; with {value} the CUDA "
                        "driver pools the memory by rules that are not public")
            elif key in _PARSERS:
                try:
                    values[key] = _PARSERS[key](value)
                except ValueError as error:
                    raise InputError(f"allocator settings {settings!r}: {key}:{value}: {error}") from None
            elif key not in _WITHOUT_EFFECT:
                raise InputError(
                    f"allocator settings {settings!r}: unknown key {key!r}; use one of {', '.join(sorted(_PARSERS))}")
        try:
            made = cls(**values)
        except InputError as error:
            raise InputError(f"allocator settings {settings!r}: {error}") from None
        object.__setattr__(made, "_given", settings)
        return made

    @classmethod
    def from_environment(cls, torch_version: tuple[int, int]) -> tuple[AllocatorOptions, str | None]:
        """The settings that this version reads of the environment, and a sentence about them; PyTorch's defaults and
        None where there are none. Raises InputError as `from_string`, with the variable.
        """
        read = _VARIABLES if torch_version >= _ALL_VARIABLES_SINCE else _VARIABLES[:1]
        name = next((name for name in read if name in os.environ), None)
        text = "" if name is None else os.environ[name].strip()
        if not text:
            ignored = [f"{name}={os.environ[name]}" for name in _VARIABLES if name not in read and os.environ.get(name)]
            return cls(), None if not ignored else (
                f"{' and '.join(ignored)}: torch {_name(torch_version)} reads {' and '.join(read)} alone, so the "
                "allocator's settings are its defaults")
        if re.search(r"backend\s*:\s*cudaMallocAsync", text):
            return cls(), (f"{name}={text}: the CUDA driver would pool the memory, by rules that are not public; it is "
                           "told as of PyTorch's own allocator")
        try:
            return (cls.from_string(text, torch_version),
                    f"the allocator's settings are those of {name}: {text}")
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    @cached_property
    def divisions_by_interval(self) -> tuple[int, ...] | None:
        """Steps between powers of two, one entry per power of two from 1 MiB on; None where nothing is rounded so.

        Rule: ``AcceleratorAllocatorConfig::parseRoundUpPower2Divisions``. Boundaries fill only their own interval,
        the first one also all below it, ``">"`` all above the last one; intervals left out keep 0.
        """
        given = self.roundup_power2_divisions
        if given is None:
            return None
        if not isinstance(given, Mapping):
            if not _is_power_of_two(given):
                raise self._refusal("roundup_power2_divisions", "must be a power of two")
            return (given,) * _INTERVALS
        table = [0] * _INTERVALS
        last = 0
        is_first = True
        for boundary, divisions in given.items():
            if divisions != 0 and not _is_power_of_two(divisions):
                raise self._refusal("roundup_power2_divisions",
                                    f"the divisions {divisions!r} must be 0 or a power of two")
            if boundary == ">":
                table[last + 1:] = [divisions] * (_INTERVALS - last - 1)
                continue
            if not isinstance(boundary, int) or not _is_power_of_two(boundary):
                raise self._refusal("roundup_power2_divisions",
                                    f"the boundary {boundary!r} must be '>' or a power of two, in MiB")
            last = min(boundary.bit_length() - 1, _INTERVALS - 1)
            if is_first:
                table[:last] = [divisions] * last
                is_first = False
            table[last] = divisions
        return tuple(table)

    @cached_property
    def text(self) -> str:
        """The settings as ``PYTORCH_CUDA_ALLOC_CONF`` says them: as they were given, else those that are no defaults.

        >>> AllocatorOptions(expandable_segments=True, roundup_power2_divisions={256: 1, ">": 8}).text
        'expandable_segments:True,roundup_power2_divisions:[256:1,>:8]'
        """
        if self._given is not None:
            return self._given
        values = [(key, getattr(self, key)) for key in _PARSERS if getattr(self, key) != getattr(AllocatorOptions, key)]
        return ",".join([f"{key}:{_write(value)}" for key, value in values])

    def snapshot(self) -> dict[str, Any]:
        """What of the settings a memory snapshot tells. Source: ``torch/csrc/cuda/memory_snapshot.cpp``."""
        given = dict(item.split(":", 1) for item in _split(self.text))
        return {"PYTORCH_CUDA_ALLOC_CONF": self.text,
                "pinned_num_register_threads": int(given.get("pinned_num_register_threads", 1)),
                **{key: given.get(key) == "True" for key in _FLAGS},
                "max_split_size": -1 if self.max_split_bytes is None else self.max_split_bytes,
                "garbage_collection_threshold": self.garbage_collection_threshold,
                "expandable_segments": self.expandable_segments,
                "roundup_power2_divisions": {
                    str(1 << i): steps for i, steps in enumerate(self.divisions_by_interval or (0,) * _INTERVALS)}}

    @property
    def max_split_bytes(self) -> int | None:
        """``max_split_size_mb`` in bytes."""
        return None if self.max_split_size_mb is None else self.max_split_size_mb * MIB

    @property
    def large_segment_bytes(self) -> int:
        """``large_segment_size_mb`` in bytes."""
        return self.large_segment_size_mb * MIB

    def rounded_bytes(self, requested_bytes: int) -> int:
        """The size of the block that a request gets, in bytes. Rule: ``round_size``."""
        if requested_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        if self.divisions_by_interval is not None:
            # AcceleratorAllocatorConfig::roundup_power2_divisions(size): sizes beyond the table use its ends.
            interval = min(max(requested_bytes.bit_length() - 1 - _FIRST_INTERVAL_LOG2, 0), _INTERVALS - 1)
            divisions = self.divisions_by_interval[interval]
            if divisions > 1 and requested_bytes > MIN_BLOCK_BYTES * divisions:
                # roundup_power2_next_division; powers of two are their own step
                step = (1 << (requested_bytes.bit_length() - 1)) // divisions
                return -(-requested_bytes // step) * step
        return -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_bytes(self, rounded_bytes: int) -> int:
        """The bytes that a block of this size makes the allocator reserve. Rule: ``get_allocation_size``."""
        if rounded_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded_bytes < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-rounded_bytes // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES
