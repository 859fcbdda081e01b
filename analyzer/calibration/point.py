"""What is timed: one kernel, copy or host call of given sizes."""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("memory_bound", "matmul", "attention", "convolution", "host_copy", "host")


@dataclass(frozen=True)
class Point:
    """One measurement to make: the ``family`` of kernels and its ``sizes``, plain data.

    >>> Point("matmul", {"m": 8, "dtype": "float32"}).key
    'matmul {"dtype": "float32", "m": 8}'
    """

    family: str
    sizes: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def key(self) -> str:
        """The point as text, by which results are kept."""
        return f"{self.family} {json.dumps(dict(self.sizes), sort_keys=True)}"

    @classmethod
    def of_key(cls, key: str) -> Point:
        """The point that has this key. Raises ValueError for other text."""
        family, _, sizes = key.partition(" ")
        return cls(family, json.loads(sizes))


#: What the host is timed at, see `host_bench`: the fields of `HostSpec` that are measured directly.
HOST_CALLS = ("forward", "gradient", "backward", "update", "module", "list_tensor")
#: The same on a device that queues kernels.
DEVICE_CALLS = ("call", "floor", "synchronize")


def list_points(kind: str, *, quick: bool = False) -> list[Point]:
    """What is measured on a device of ``kind``, ``"cuda"`` or ``"cpu"``; ``quick`` leaves most sizes out."""
    points = [*_list_streams(kind, quick), *_list_products(kind, quick)]
    if kind == "cuda":
        points += [*_list_attention(quick), *_list_convolutions(quick), *_list_copies(quick)]
        points += [Point("host", {"call": call}) for call in DEVICE_CALLS]
    return points + [Point("host", {"call": call}) for call in HOST_CALLS]


def _list_streams(kind: str, quick: bool) -> Iterator[Point]:
    exponents = (16, 20, 24, 27) if quick else range(12, 31 if kind == "cuda" else 29)
    for exponent in exponents:
        yield Point("memory_bound", {"nbytes": 2**exponent})


def _list_products(kind: str, quick: bool) -> Iterator[Point]:
    formats = ("float32", "tf32", "bfloat16", "float16") if kind == "cuda" else ("float32", "bfloat16")
    largest = 8192 if kind == "cuda" else 2048
    squares = [n for n in (256, 512, 1024, 2048, 4096, 8192) if n <= largest]
    shapes = [(n, n, n) for n in (squares[::2] if quick else squares)]
    if not quick:
        wide = 4096 if kind == "cuda" else 1024
        shapes += [(m, wide, wide) for m in (1, 16, 64, 256)]
        shapes += [(wide, 4 * wide, wide), (wide, wide, 4 * wide), (wide, 64, wide), (64, 64, 4 * wide)]
        shapes += [(8 * m + 40, 1000, 777) for m in (8, 64, 500)]  # nothing divides them
    for dtype in formats:
        for m, n, k in shapes:
            yield Point("matmul", {"m": m, "n": n, "k": k, "dtype": dtype})


def _list_attention(quick: bool) -> Iterator[Point]:
    shapes = [(1, 16, 1024), (8, 16, 2048), (1, 32, 8192)] if quick else [
        (batch, heads, length) for batch, heads in ((1, 16), (8, 16), (32, 12)) for length in (128, 512, 2048, 4096)
        if batch * length <= 65536]
    for kernel in ("flash", "cudnn", "efficient"):
        for batch, heads, length in shapes:
            for causal in (False, True):
                yield Point("attention", {"kernel": kernel, "batch": batch, "heads": heads, "q_len": length,
                                          "kv_len": length, "head_dim": 64 if heads < 16 else 128, "causal": causal})
    for batch in (1, 32) if quick else (1, 8, 32, 128):
        for length in (1024, ) if quick else (512, 2048, 8192):
            yield Point("attention", {"kernel": "flash", "batch": batch, "heads": 32, "q_len": 1, "kv_len": length,
                                      "head_dim": 128, "causal": False})


def _list_convolutions(quick: bool) -> Iterator[Point]:
    shapes = [(64, 64, 56, 3), (256, 256, 14, 3)] if quick else [
        (64, 64, 56, 3), (64, 256, 56, 1), (128, 128, 28, 3), (256, 1024, 14, 1), (256, 256, 14, 3), (512, 512, 7, 3)]
    for dtype in ("float32", "tf32", "bfloat16"):
        for channels, outputs, size, kernel in shapes:
            for batch in (32, ) if quick else (8, 64):
                yield Point("convolution", {"batch": batch, "in_channels": channels, "out_channels": outputs,
                                            "size": size, "kernel_size": kernel, "dtype": dtype})


def _list_copies(quick: bool) -> Iterator[Point]:
    for exponent in (26, ) if quick else (16, 20, 24, 28):
        for pinned in (True, False):
            for way in ("to_device", "from_device"):
                yield Point("host_copy", {"nbytes": 2**exponent, "way": way, "pinned": pinned})
