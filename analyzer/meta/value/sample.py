"""Samples: contents as they may be of what a router computes, so that what its choices decide can be counted. They
begin where classes are chosen by unknown scores, and are followed as known contents are, but are never taken for these.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes

from .barred import FAR_BELOW, barred_choices
from .contents import covers_storage, defer_call, storage_numel, worth_following
from .known_value import MOST_CLASSES, Deferred, DeferredCall, Known, Result, Written, Zeros, window_of
from .nonzero_bound import NonzeroBound

Tensor = torch.Tensor
_GOLDEN = 0.6180339887498949  #: multiples of it, without their whole part, are spread evenly
#: operators that choose by scores: where the dimension stands among the arguments, and what it is without one
STARTS: dict[str, tuple[int, int | None]] = {
    "topk": (2, -1), "kthvalue": (2, -1), "argmax": (1, None), "max": (1, None), "amax": (1, None), "sort": (1, -1),
    "multinomial": (3, -1)}
_CHOICE = torch.ops.aten.topk.default
# what these give for scores depends on their order alone, where it is no floating number
_BY_ORDER = frozenset({"topk", "kthvalue", "argmax", "argmin", "max", "min", "sort", "argsort", "multinomial",
                       "logical_not", "logical_and", "logical_or", "any", "all", "nonzero", "count_nonzero"})
_COUNTING = frozenset({"sum", "cumsum", "count_nonzero", "histc", "any", "all", "scatter_add", "scatter_add_",
                       "index_add", "index_add_"})
_COMPARING = frozenset({"gt", "ge", "lt", "le", "eq", "ne"})
_PICKING = frozenset({"gather"})  #: operators whose argument may be larger than what they give
#: operators that write some places of a tensor, and leave what is in the others
_KEEPING = frozenset({"masked_fill_", "index_fill_", "index_put_", "scatter_", "copy_", "fill_"})
_NEAR_ZERO = 1e-6
_DEEPEST = 64  #: calls behind a sample: a buffer to which each step adds its counts would keep those of all steps
_NONE_NONZERO = NonzeroBound(0)


class Sample(NamedTuple):
    """Contents that may be, of which floating ones that ``are_scores`` mean nothing but their order and their sign;
    ``depth`` calls lie behind them. Numbers that are ``counts`` are expected so and may be read one by one, where each
    single choice may be another.
    """

    contents: Known | None
    are_scores: bool
    depth: int = 0
    counts: bool = False


UNSAMPLED = Sample(None, are_scores=True)
"""Of numbers that are not known, and that no scores are to be taken for: those that a tensor was filled with."""


class Scores(Known):
    """Numbers above zero in rows of some width, of which the k largest fall evenly on the columns, for every k; those
    of columns that are barred lie below zero.
    """

    __slots__ = ("numel", "width", "barred", "dtype")

    def __init__(self, numel: int, width: int, dtype: torch.dtype, barred: frozenset[int] = frozenset()) -> None:
        super().__init__(assumed=True)
        self.numel, self.width, self.barred, self.dtype = numel, width, barred, dtype

    def _compute(self) -> Tensor:
        left = torch.tensor([column for column in range(self.width) if column not in self.barred])
        count = max(2, len(left))
        row = torch.arange(self.numel // self.width)
        turn, rest = torch.zeros_like(row), row
        while bool(rest.any()):  # the sum of the digits: rows that others choose among get each turn as often, too
            turn, rest = turn + rest % count, rest // count
        order = (turn[:, None] - torch.arange(len(left))) % count
        found = torch.full((len(row), self.width), -1.0, dtype=torch.float64)
        found[:, left] = (order + (row.double() * _GOLDEN % 1)[:, None]) * 4 / count
        return found.flatten().to(self.dtype)


class SampledCall:
    """A call on samples, and what its arguments held before it wrote to them."""

    __slots__ = ("deferred", "before", "are_scores", "depth", "counts")

    def __init__(self, deferred: DeferredCall, before: list[Any], are_scores: bool, depth: int, counts: bool) -> None:
        self.deferred, self.before, self.are_scores = deferred, before, are_scores
        self.depth, self.counts = depth, counts

    def tell(self, call: Any) -> None:
        """Give what the call has made or written its sample."""
        single = len(call.outputs) == 1 and not call.info.returns_list
        for at, (out, storage) in enumerate(zip(call.outputs, call.born)):
            if storage is not None and isinstance(out, Tensor) and storage.exact is None and worth_following(
                    numel := storage_numel(storage, out.dtype)):
                index = 1 if call.info.name == "multinomial" else None if single else at
                self._give(storage, out, Result(self.deferred, index, window_of(out), numel, out.dtype))
        for position, target, before in self.before:
            storage = target.untyped_storage()
            overwritten = call.info.overwrites and covers_storage(target, storage)
            self._give(storage, target, Written(None if overwritten else before, self.deferred, position,
                                                window_of(target), storage_numel(storage, target.dtype), target.dtype))

    def _give(self, storage: Any, out: Tensor, contents: Known) -> None:
        storage.sample = Sample(contents, self.are_scores and out.dtype.is_floating_point, self.depth, self.counts)


def sample_call(call: Any) -> SampledCall | None:
    """A call as it is on samples; None where none is given, or where it cannot be followed."""
    info = call.info
    dim_place = STARTS.get(info.name)
    is_sampled = any([s.sample is not None for s in call.storages])
    if dim_place is None and not is_sampled:
        return None
    if info.is_random and dim_place is None or info.undefined or not info.runs_on_host or info.is_foreach or (
            info.op.namespace != "aten" or torch._C._current_autograd_node() is not None):
        return None
    if dim_place is not None and not is_sampled and not _start(call, *dim_place):
        return None
    return _follow(call)


def _start(call: Any, place: int, usual: int | None) -> bool:
    """Take scores by which a class is chosen in the last dimension to be as `Scores`; whether they are."""
    x = call.args[0]
    if call.info.name == "sort" and len(call.args) > 1 and isinstance(call.args[1], bool):
        place = 2
    dim = call.args[place] if len(call.args) > place else call.kwargs.get("dim", usual)
    if call.info.name == "multinomial":
        dim = -1
    if isinstance(dim, (list, tuple)):
        dim = dim[0] if len(dim) == 1 else None
    if not isinstance(dim, int) or not x.dim() or dim % x.dim() != x.dim() - 1 or not x.is_floating_point():
        return False
    storage = x.untyped_storage()
    return isinstance(storage, MetaStorage) and storage.exact is None and _score(x, storage, barred_choices(x, dim))


def _score(x: Tensor, storage: MetaStorage, barred: frozenset[int] = frozenset()) -> bool:
    """Take what a tensor holds to be `Scores`, where its rows are as long as there are classes; whether it is. Fewer
    rows than classes, as of the next token of a text, do not fall evenly on these: nothing is told of what they choose.
    """
    are_rows = x.dim() > 0 and 0 < x.shape[-1] <= min(MOST_CLASSES, x.numel() // x.shape[-1]) and (
        x.is_contiguous() and covers_storage(x, storage))
    if not are_rows or not worth_following(x.numel()):
        return False
    storage.sample = Sample(Scores(x.numel(), x.shape[-1], x.dtype, barred), are_scores=True)
    return True


def _follow(call: Any) -> SampledCall | None:
    info = call.info
    depth = 1 + max(s.sample.depth for s in call.storages if s.sample is not None)
    if depth > _DEEPEST:
        return None
    largest = max(t.numel() for t in call.tensors if _sample(t) is not None)

    def contents_of(tensor: Tensor, storage: MetaStorage) -> Known | None:
        if storage.sample is None and storage.exact is not None:
            return storage.exact
        if storage.nonzero_bound == _NONE_NONZERO:
            numel = storage_numel(storage, tensor.dtype)
            return Zeros(numel, tensor.dtype) if worth_following(numel) else None
        if storage.sample is None and tensor.is_floating_point() and (
                info.name in _PICKING or tensor.numel() <= largest):
            _score(tensor, storage)
        sample: Sample | None = storage.sample
        return None if sample is None else sample.contents

    before = []
    for position, target in call.written() if info.mutated else ():
        storage = target.untyped_storage() if target.layout is torch.strided else None
        contents = contents_of(target, storage) if isinstance(storage, MetaStorage) else None
        if position is None or not isinstance(storage, MetaStorage) or contents is None or not worth_following(
                storage_numel(storage, target.dtype)):
            return None
        if isinstance(contents, Scores) and info.name not in _KEEPING:
            return None
        before.append((position, target, contents))
    if info.name == "multinomial":
        deferred, unknown = defer_call(_CHOICE, call.args[:2], {}, contents_of=contents_of)
    else:
        deferred, unknown = defer_call(info.op, call.args, call.kwargs, contents_of=contents_of)
    are_scores = any([s.sample is not None and s.sample.are_scores for s in call.storages])
    if unknown or are_scores and not _is_by_order(call):
        return None
    counts = info.name in _COUNTING or any([s.sample is not None and s.sample.counts for s in call.storages])
    return SampledCall(deferred, before, are_scores, depth, counts)


def _sample(tensor: Tensor) -> Sample | None:
    storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
    return storage.sample if isinstance(storage, MetaStorage) else None


def is_told_by_sample(storage: Any) -> bool:
    """Whether classes are none that were chosen, but what was computed of these, as a sample tells."""
    return getattr(storage, "sample", None) is not None and storage.drawn_from is None


def _is_by_order(call: Any) -> bool:
    """Whether what a call on scores gives follows from their order and sign, where it is no score itself."""
    name = call.info.name.removesuffix("_")
    if name in _COMPARING:
        return all(_is_no_bound(value) for value in call.args[:2])
    if name in _BY_ORDER:
        return True
    written = [target for _, target in call.written()] if call.info.mutated else []
    return all(out.dtype.is_floating_point or name == "_to_copy" and out.dtype is torch.bool
               for out in (*call.outputs, *written) if isinstance(out, Tensor))


def _is_no_bound(value: Any) -> bool:
    """Whether scores may be compared with it: others, zero, or what is far below or above all."""
    if isinstance(value, Tensor):
        return _sample(value) is not None
    return isinstance(value, (int, float)) and (abs(value) <= _NEAR_ZERO or abs(value) >= -FAR_BELOW)


def read_count(tensor: Tensor) -> Tensor | None:
    """A number as it may be, where it counts elements."""
    sample = _sample(tensor)
    return read_sample(tensor) if sample is not None and sample.counts else None


def read_sample(tensor: Tensor, by_sign: bool = False) -> Tensor | None:
    """The contents that a tensor may have, on CPU and not to be written; scores only where their sign is asked for."""
    sample = _sample(tensor)
    if sample is None or sample.contents is None or sample.are_scores and not by_sign:
        return None
    with without_modes():
        flat = sample.contents.work_out()
        return flat.as_strided(*window_of(tensor)) if flat.dtype == tensor.dtype else None


def count_sample(index: Tensor, bins: int) -> Sample | None:
    """How often each class below ``bins`` is among those of a sample."""
    found = read_sample(index)
    if found is None:
        return None
    with without_modes():
        counts = torch.bincount(found.flatten(), minlength=bins)[:bins]
    return Sample(Deferred(counts, assumed=True), are_scores=False, counts=True)
