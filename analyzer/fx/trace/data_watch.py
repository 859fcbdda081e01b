"""What a forward changes of arrays, buffers and generators that it reaches, and which iterators it advances."""
from __future__ import annotations

import gc
import hashlib
import io
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple

import torch

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import InterruptsHeld
from analyzer.meta.state import MetaState
from analyzer.state.value import PLAIN, is_equal, refill_of

_COPIED_BYTES = 1 << 20  #: of arrays that are put back; of larger ones a digest is kept
_SUSPENDED = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}


class _Followed(NamedTuple):
    value: Any
    read: Callable[[], Any]
    put_back: Callable[[Any], object] | None  #: given what was read; None where it cannot be
    told: str  #: what it means that ``read`` gives something else
    before: Any  #: what was read; None where it cannot be


class DataWatch:
    """The state of values of which a record of containers has no contents; what a block changes of it is told, and put
    back at its end, but for positions of iterators.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values
        self._watched: list[_Followed] = []

    def __enter__(self) -> DataWatch:
        with without_modes(), torch._C.DisableTorchFunction():
            self._watched += map(_watch, self._values)
        return self

    def __exit__(self, *exc: object) -> None:
        with InterruptsHeld(), without_modes(), torch._C.DisableTorchFunction():
            for _, read, put_back, _, before in self._watched:
                if put_back is not None and not is_equal(read(), before):
                    put_back(before)
            self._watched.clear()

    def tell(self, state: MetaState) -> None:
        """Note what forward changed, and what it may have."""
        for value, read, _, told, before in self._watched:
            with without_modes(), torch._C.DisableTorchFunction():
                now = read()
            if before is None or now is None:
                state.assume(f"forward reaches {_name(value)} whose position cannot be read: if it advances it, the "
                             "graph does not, and has what it gave in the trace as constants")
            elif not is_equal(now, before):
                state.assume(told)


def _watch(value: Any) -> _Followed:
    told = f"forward changes {_name(value)} that it reaches: the graph does not"
    drawn = (f"forward draws from {_name(value)} that it reaches: what it drew is a constant of the graph, which draws "
             "nothing from it")
    advanced = (f"forward advances {_name(value)} that it reaches: the graph does not, and has what it gave in the "
                "trace as constants")
    kind = type(value)
    read: Callable[..., Any]
    put_back: Callable[..., object] | None = None
    if isinstance(value, random.Random):
        read, put_back, told = value.getstate, value.setstate, drawn
    elif hasattr(kind, "get_state"):  # of numpy's older generators
        read, put_back, told = value.get_state, value.set_state, drawn
    elif hasattr(kind, "bit_generator"):  # and of its newer ones
        bits = value.bit_generator
        read, put_back, told = partial(getattr, bits, "state"), partial(setattr, bits, "state"), drawn
    elif isinstance(value, io.IOBase):
        read = partial(_read_file, value)
    elif isinstance(value, Iterator):
        read, told = partial(read_position, value), advanced
    else:
        read = partial(_read_bytes, value)
        if kind is bytearray:
            put_back = partial(value.__setitem__, slice(None))
        elif hasattr(kind, "tobytes") and not isinstance(value, memoryview):
            put_back = refill_of(value)
        if memoryview(value).nbytes > _COPIED_BYTES:
            put_back = None
    return _Followed(value, read, put_back, told, read())


def _name(value: Any) -> str:
    kind = type(value)
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return f"an iterator ({kind.__module__}.{kind.__qualname__})".replace("builtins.", "")
    return f"{'an' if kind.__name__[0].lower() in 'aeiou' else 'a'} {kind.__name__}"


def _read_file(value: io.IOBase) -> Any:
    with suppress(OSError, ValueError):  # closed, or a pipe
        return value.tell()
    return "closed"


def _read_bytes(value: Any) -> bytes:
    """The contents of what exports a buffer, or a digest of them."""
    with suppress(TypeError, ValueError, BufferError):
        view = memoryview(value)
        if view.nbytes > _COPIED_BYTES and view.c_contiguous:
            return hashlib.blake2b(view.cast("B")).digest()
    contents = value.tobytes() if hasattr(value, "tobytes") else memoryview(value).tobytes()
    return hashlib.blake2b(contents).digest() if len(contents) > _COPIED_BYTES else contents


# Positions of iterators. Python tells those of its own by ``__reduce__`` (those of itertools before Python 3.14).

def read_position(iterator: Any) -> Any:
    """What differs once an iterator has given something; None where that cannot be read.

    >>> import itertools
    >>> numbers = itertools.count(3)
    >>> before = read_position(numbers)
    >>> before == read_position(numbers), next(numbers), before == read_position(numbers)
    (True, 3, False)
    """
    kind = type(iterator)
    if kind in _SUSPENDED:
        frame = getattr(iterator, _SUSPENDED[kind])
        if frame is None:
            return "ended"
        held = [x for x in gc.get_referents(iterator) if not isinstance(x, (FrameType, CodeType, dict))]
        return frame.f_lasti, tuple(map(_describe, held))
    if isinstance(attributes := getattr(iterator, "__dict__", None), dict):  # written in Python
        return tuple((name, _describe(value)) for name, value in attributes.items())
    if kind.__module__ == "itertools" and kind.__name__ in ("count", "repeat"):
        return repr(iterator)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _describe(iterator.__reduce__())
    except Exception:  # whatever a class of an extension raises
        return None


def _describe(value: Any) -> Any:
    kind = type(value)
    if kind in PLAIN or kind is range:
        return kind.__name__, value
    if kind is tuple:
        return tuple(map(_describe, value))
    if kind is list:  # what is left, which ``__reduce__`` lists anew
        return tuple(item if type(item) in PLAIN else id(item) for item in value)
    return read_position(value) if isinstance(value, Iterator) else id(value)
