"""Columns of scores on which no choice falls: experts that are padded or forbidden by a number far below all others."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes

from .known_value import Known

Tensor = torch.Tensor
Part = Callable[[], "set[int]"]

#: what masks add at least: -10000 in early models of transformers, the least number of a dtype in later ones
#: (``get_extended_attention_mask`` in transformers/modeling_utils.py)
FAR_BELOW = -1e4
_MOST_KNOWN = 1 << 14  #: elements of masks that are looked at


class Bars:
    """The columns, of ``width``, that nothing is chosen from; which these are is found out when it is asked for."""

    __slots__ = ("width", "_parts")

    def __init__(self, width: int, parts: tuple[Part, ...]) -> None:
        self.width, self._parts = width, parts

    def find(self) -> frozenset[int]:
        with without_modes():
            return frozenset[int]().union(*(part() for part in self._parts))

    def beside(self, offset: int, width: int) -> Part:
        """Them as columns of another tensor, of which this one is a part."""
        return lambda: {column + offset for column in self.find() if 0 <= column + offset < width}


def barred_choices(x: Tensor, dim: int | None) -> frozenset[int]:
    """The columns of ``x`` that no choice along ``dim`` falls on."""
    bars = _bars_of(x)
    if bars is None or dim is None or not x.dim() or dim % x.dim() != x.dim() - 1:
        return frozenset()
    found = bars.find()
    return found if len(found) < bars.width else frozenset()  # where all are, one of them is chosen


def follow_bars(name: str, args: Any, kwargs: Any, storages: list[MetaStorage], result: Any) -> None:
    """Note what an operator of `FOLLOWED`, before its contents are followed, bars in what it has made or written."""
    if name not in _SOURCES and not any([s.barred is not None or s.known is not None for s in storages]):
        return
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    is_written = name.endswith("_")
    if is_written and isinstance(args[0], Tensor) and args[0].layout is torch.strided:
        target = args[0].untyped_storage()
        if isinstance(target, MetaStorage):
            target.barred = _write(name.removesuffix("_"), args, kwargs, target)
    elif isinstance(result, Tensor) and result.layout is torch.strided and result.is_floating_point() and (
            result.dim()) and isinstance(storage := result.untyped_storage(), MetaStorage):
        width = result.shape[-1]
        parts = tuple(_RULES[name](width, *args, **kwargs))
        storage.barred = Bars(width, parts) if parts else None


def _bars_of(x: Any) -> Bars | None:
    storage = x.untyped_storage() if isinstance(x, Tensor) and x.layout is torch.strided else None
    bars: Bars | None = storage.barred if isinstance(storage, MetaStorage) else None
    is_whole = bars is not None and x.dim() and x.shape[-1] == bars.width and x.storage_offset() % bars.width == 0 and (
        x.stride(-1) == 1 or bars.width == 1)
    return bars if is_whole else None


def _kept(width: int, *tensors: Any) -> Iterator[Part]:
    for x in tensors:
        bars = _bars_of(x)
        if bars is not None and bars.width == width:
            yield bars.beside(0, width)


def _known(x: Any) -> Known | None:
    """The contents of a tensor that is all of its storage."""
    storage = x.untyped_storage() if isinstance(x, Tensor) and x.layout is torch.strided else None
    if not isinstance(storage, MetaStorage) or storage.known is None or not 0 < x.numel() <= _MOST_KNOWN:
        return None
    return _exact(storage) if x.numel() * x.itemsize == storage.nbytes() and x.is_contiguous() else None


def _exact(storage: MetaStorage) -> Known | None:
    """Its contents where nothing in them was taken for granted, and no other call may have others."""
    known = storage.known
    return None if known is None or known.assumed or known.varies else known


def _far_below(contents: Tensor) -> Tensor:
    return contents.float() <= FAR_BELOW  # the CPU compares no numbers of eight bits


def _is_below(value: Any) -> bool:
    """Whether a number, or every element of a tensor, is far below all scores."""
    if isinstance(value, (int, float)):
        return value <= FAR_BELOW
    if (bars := _bars_of(value)) is not None and len(bars.find()) == bars.width:
        return True
    known = _known(value)
    if known is None or not value.is_floating_point():
        return False
    with without_modes():
        return bool(_far_below(known.peek()).all())  # no one learns that it was read


def _marked(width: int, mask: Any, are_marked: bool = True) -> Iterator[Part]:
    """The columns that a known mask has, or has not, in all of its rows."""
    known = _known_rows(mask, width)
    if known is not None and mask.dtype is torch.bool:
        yield lambda: set((known() == are_marked).all(0).nonzero().flatten().tolist())


def _known_rows(x: Any, width: int) -> Callable[[], Tensor] | None:
    """What gives the known rows of a tensor, each of them once where a dimension repeats them."""
    storage = x.untyped_storage() if isinstance(x, Tensor) and x.layout is torch.strided else None
    if not isinstance(storage, MetaStorage) or not x.dim() or x.shape[-1] != width or not width:
        return None
    size = [1 if stride == 0 else size for size, stride in zip(x.shape[:-1], x.stride())]
    known = _exact(storage) if width * math.prod(size) <= _MOST_KNOWN else None
    if known is None or storage.nbytes() > _MOST_KNOWN * x.itemsize:
        return None
    window = (*size, width), x.stride(), int(x.storage_offset())
    return lambda: known.flat().as_strided(*window).reshape(-1, width)


def _cat(width: int, tensors: Any, dim: int = 0) -> Iterator[Part]:
    if dim % tensors[0].dim() != tensors[0].dim() - 1:
        return
    offset = 0
    for x in tensors:
        if not x.dim():
            continue
        size = x.shape[-1]
        if _is_below(x):
            yield lambda columns=range(offset, offset + size): set(columns)  # type: ignore[misc]
        elif (bars := _bars_of(x)) is not None:
            yield bars.beside(offset, width)
        offset += size


def _pad(width: int, x: Tensor, pad: Any, value: Any = 0) -> Iterator[Part]:
    before, after = pad[:2]
    if (bars := _bars_of(x)) is not None:
        yield bars.beside(before, width)
    if _is_below(value) and not any(pad[2:]):
        yield lambda: {*range(max(0, before)), *range(width - max(0, after), width)}


def _masked_fill(width: int, x: Tensor, mask: Tensor, value: Any) -> Iterator[Part]:
    yield from _kept(width, x)
    if _is_below(value):
        yield from _marked(width, mask)


def _where(width: int, condition: Tensor, x: Any, other: Any) -> Iterator[Part]:
    for value, beside, are_marked in ((x, other, True), (other, x, False)):
        if _is_below(value):
            yield from _marked(width, condition, are_marked)
            yield from _kept(width, beside)
            return


def _add(width: int, x: Any, other: Any, *rest: Any, alpha: float = 1) -> Iterator[Part]:
    yield from _kept(width, x, *((other,) if alpha > 0 else ()))
    yield from _below(width, x)
    yield from _below(width, other, alpha)


def _sub(width: int, x: Any, other: Any, *rest: Any, alpha: float = 1) -> Iterator[Part]:
    yield from _add(width, x, other, alpha=-alpha)


def _below(width: int, x: Any, factor: float = 1) -> Iterator[Part]:
    """The columns in which all known numbers times a factor are far below all scores."""
    known = _known_rows(x, width)
    if known is not None and x.is_floating_point():
        yield lambda: set(_far_below(known().float() * factor).all(0).nonzero().flatten().tolist())


def _index_fill(width: int, x: Tensor, dim: int, index: Tensor, value: Any) -> Iterator[Part]:
    yield from _kept(width, x)
    known = _known(index)
    if known is not None and dim % x.dim() == x.dim() - 1 and _is_below(value):
        yield lambda: {int(column) % width for column in known.flat().tolist()}


def _scale(width: int, x: Any, other: Any, *_: Any, **__: Any) -> Iterator[Part]:
    if not isinstance(other, (int, float)) or other > 0:
        yield from _kept(width, x, other)


def _first(width: int, x: Any, *_: Any, **__: Any) -> Iterator[Part]:
    yield from _kept(width, x)


def _write(name: str, args: Any, kwargs: Any, target: MetaStorage) -> Bars | None:
    """What is barred in a storage after an operator in place, which may write to a part of its columns."""
    x, before = args[0], target.barred
    if name in ("fill", "copy"):
        width, columns = _columns_of(x, target)
        if columns is None or width < 2:
            return None
        kept = _known_below(target, x.itemsize, width) if before is None or before.width != width else before
        if _is_below(args[1]):
            return Bars(width, (*(() if kept is None else (kept.find,)), lambda: set(columns)))
        return None if kept is None else Bars(width, (lambda: set(kept.find().difference(columns)),))
    if not x.dim():
        return None
    width = x.shape[-1]
    if name == "index_put":
        parts: tuple[Part, ...] = (*_kept(width, x), *_put(width, *args[1:]))
    else:
        parts = tuple(_RULES[name](width, *args, **kwargs))
    return Bars(width, parts) if parts else None


def _put(width: int, indices: Any, value: Any, *_: Any) -> Iterator[Part]:
    *others, last = indices
    known = _known(last)
    if known is None or any(one is not None for one in others) or not _is_below(value) or last.dim() != 1:
        return
    if last.dtype is torch.bool:
        yield from _marked(width, last)
    else:
        yield lambda: {int(column) % width for column in known.flat().tolist()}


def _known_below(storage: MetaStorage, itemsize: int, width: int) -> Bars | None:
    """All columns, where all of the known contents are far below."""
    known = _exact(storage)
    if known is None or storage.nbytes() // itemsize > _MOST_KNOWN:
        return None
    with without_modes():
        found = known.peek()
        is_below = found.is_floating_point() and found.itemsize == itemsize and bool(_far_below(found).all())
    return Bars(width, (lambda: set(range(width)),)) if is_below else None


def _fill(width: int, x: Tensor, *args: Any, **kwargs: Any) -> Iterator[Part]:
    if _is_below(args[-1] if args else kwargs.get("fill_value")):
        yield lambda: set(range(width))


def _columns_of(view: Tensor, storage: MetaStorage) -> tuple[int, range | None]:
    """The width of the rows of a storage, and the columns that a view of all of them has; None of some of them."""
    count, rest = storage.nbytes() // view.itemsize, 1
    sizes = [(size, stride) for size, stride in zip(view.shape, view.stride()) if size != 1]
    columns = 1
    if sizes and sizes[-1][1] == 1:
        columns = sizes.pop()[0]
    width = sizes[-1][1] if sizes else count
    for size, stride in reversed(sizes):
        if stride != width * rest:
            return width, None
        rest *= size
    first = view.storage_offset()
    return width, range(first, first + columns) if rest * width == count and first + columns <= width else None


_RULES: dict[str, Callable[..., Iterator[Part]]] = {
    "cat": _cat, "constant_pad_nd": _pad, "masked_fill": _masked_fill, "where": _where, "add": _add, "sub": _sub,
    "minimum": _add, "index_fill": _index_fill, "mul": _scale, "div": _scale, "new_full": _fill, "full_like": _fill,
    **dict.fromkeys(("_softmax", "_log_softmax", "sigmoid", "exp", "clone", "_to_copy"), _first)}
_SOURCES = frozenset({"constant_pad_nd", "fill_", "new_full", "full_like"})
FOLLOWED = frozenset({*_RULES, "fill_", "copy_", "index_put_", *(f"{name}_" for name in (
    "masked_fill", "add", "sub", "index_fill", "mul", "div"))})
"""Operators of which `follow_bars` knows what they bar, or keep barred."""
