"""Contents of small tensors that follow from their factory, as expressions that are computed when asked for. They are
immutable: an in-place operator gives the storage a new one. A view's value is a window on the storage's.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from analyzer.meta.intercept.mode_stack import without_modes

# Larger contents are forgotten. Masks and position tables of long contexts stay within the first; schedules, scalars,
# boxes within the second, the most that is read of a floating tensor with data: weights and images decide nothing.
LARGEST_INTEGER = 1 << 20
LARGEST_FLOATING = 1 << 12
MOST_CLASSES = 1024  #: that are looked at one by one: experts, not the words of a vocabulary

Window = tuple[tuple[int, ...], tuple[int, ...], int]


def small_enough(numel: int, dtype: torch.dtype) -> bool:
    return numel <= (LARGEST_FLOATING if dtype.is_floating_point or dtype.is_complex else LARGEST_INTEGER)


class _Reads(threading.local):
    """How often this thread asked for contents: what ran in between without asking did not depend on them."""

    count = 0
    varying = 0            #: how often for those that another call may find otherwise
    hides_varying = False  #: whether those are unknown


reads = _Reads()


class Known:
    """The contents of one storage, as a flat tensor on CPU, computed at the first call of `flat`."""

    __slots__ = ("_flat", "_number", "assumed", "varies")

    def __init__(self, assumed: bool = False, varies: bool = False) -> None:
        self._flat: torch.Tensor | None = None
        self._number: int | float | bool | complex | None = None
        self.assumed = assumed  #: whether something unknown was taken as zero: good for an answer, but not exact
        self.varies = varies    #: whether another call may find them otherwise: they follow from an input of a trace

    def _parents(self) -> Sequence[Known]:
        return ()

    def _compute(self) -> torch.Tensor:
        raise NotImplementedError

    def _let_go(self) -> None:
        """Hold nothing that the contents were computed from."""

    def flat(self) -> torch.Tensor:
        if self._flat is not None:
            return self.work_out()
        with without_modes():
            return self.work_out()

    def work_out(self, is_final: bool = True) -> torch.Tensor:
        """As `flat`, where no mode is on; ``is_final``: `forget` will not be called."""
        reads.count += 1
        if self._flat is None:
            # a loop, because chains of in-place updates can be deeper than Python's stack
            pending: list[Known] = [self]
            while pending:
                top = pending[-1]
                if top._flat is not None:  # something else read it, too
                    pending.pop()
                elif missing := [p for p in top._parents() if p._flat is None]:
                    pending.extend(missing)
                else:
                    top._flat = top._compute()
                    if is_final:
                        top._let_go()
        assert self._flat is not None
        return self._flat

    def peek(self) -> torch.Tensor:
        """As `work_out`, and what was not read before was not read by this either."""
        if self._flat is not None:
            return self._flat
        new: dict[int, Known] = {}
        pending: list[Known] = [self]
        while pending:
            top = pending.pop()
            if top._flat is None and id(top) not in new:  # what was written reads what was there, too
                new[id(top)] = top
                pending += top._parents()
        is_watched = any(isinstance(known, Watched) for known in new.values())
        before = reads.count
        flat = self.work_out(is_final=not is_watched)
        reads.count = before
        if is_watched:
            for known in new.values():
                known.forget()
        return flat

    def forget(self) -> None:
        """Be as before the first call of `flat`."""
        self._flat = self._number = None

    def number(self, dtype: torch.dtype) -> int | float | bool | complex | None:
        reads.count += 1
        if self._number is None:
            with without_modes():
                flat = self.work_out()
                if flat.dtype != dtype or flat.numel() != 1:
                    return None
                self._number = flat.item()
        return self._number


class Deferred(Known):
    """The contents of a real tensor, read when needed and never written."""

    __slots__ = ("source",)

    def __init__(self, source: torch.Tensor, assumed: bool = False) -> None:
        super().__init__(assumed)
        self.source = source

    def _compute(self) -> torch.Tensor:
        whole = self.source.untyped_storage()
        count = whole.nbytes() // self.source.itemsize
        window = torch.empty(0, dtype=self.source.dtype, device=self.source.device).set_(whole, 0, (count,), (1,))
        return window.detach().to("cpu", copy=True)


class Watched(Known):
    """The contents that another tells, and whether they were asked for here."""

    __slots__ = ("source",)

    def __init__(self, source: Known, varies: bool = False) -> None:
        super().__init__(source.assumed, varies or source.varies)
        self.source = source

    def _parents(self) -> Sequence[Known]:
        return (self.source,)

    def _compute(self) -> torch.Tensor:
        return self.source.flat()

    @property
    def was_read(self) -> bool:
        return self._flat is not None


class Zeros(Known):
    """What unknown contents are taken as where they meet known ones."""

    __slots__ = ("numel", "dtype")

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__(assumed=True)
        self.numel, self.dtype = numel, dtype

    def _compute(self) -> torch.Tensor:
        return torch.zeros(self.numel, dtype=self.dtype)


@dataclass(slots=True, eq=False)
class ReadArgument:
    """A tensor argument of a deferred call: a window on known contents."""

    known: Known
    window: Window


_HISTOGRAM = torch.ops.aten.histc.default


@dataclass(slots=True, eq=False)
class DeferredCall:
    """A deferred operator call; its results are computed once."""

    op: Any
    args: Any
    kwargs: Any
    reads: list[ReadArgument]
    seed: int | None = None
    results: Any = None

    def run(self, args: Any = None) -> Any:
        args, kwargs = _substitute(self.args if args is None else args), _substitute(self.kwargs)
        if self.op is _HISTOGRAM and not args[0].is_floating_point():  # which CUDA alone counts: SummaryOps.cu
            return self.op(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        if self.seed is None:
            return self.op(*args, **kwargs)
        # random scalars have a seed of their own; the user's generator stays as it is
        generator = torch.default_generator
        before = generator.get_state()
        try:
            generator.manual_seed(self.seed)
            return self.op(*args, **kwargs)
        finally:
            generator.set_state(before)


class Result(Known):
    """The contents of a new storage that a call returned as output ``index``."""

    __slots__ = ("call", "index", "window", "numel", "dtype")

    def __init__(self, call: DeferredCall, index: int | None, window: Window, numel: int, dtype: torch.dtype) -> None:
        super().__init__(any([r.known.assumed for r in call.reads]), any([r.known.varies for r in call.reads]))
        self.call, self.index, self.window, self.numel, self.dtype = call, index, window, numel, dtype

    def _parents(self) -> Sequence[Known]:
        return [r.known for r in self.call.reads] if self.call.results is None else ()

    def forget(self) -> None:
        super().forget()
        self.call.results = None

    def _compute(self) -> torch.Tensor:
        if self.call.results is None:
            self.call.results = self.call.run()
        value: torch.Tensor = self.call.results if self.index is None else self.call.results[self.index]
        if self.numel == 1 and value.numel() == 1 and value.dtype == self.dtype:
            return value.reshape(1)  # a scalar fills its storage
        flat = torch.zeros(self.numel, dtype=self.dtype)
        flat.as_strided(*self.window).copy_(value)
        return flat


class Written(Known):
    """The contents after a call wrote, in place, to a window of known contents."""

    __slots__ = ("before", "call", "position", "window", "numel", "dtype")
    call: DeferredCall | None

    def __init__(self, before: Known | None, call: DeferredCall, position: Any, window: Window, numel: int,
                 dtype: torch.dtype) -> None:
        parents = [*([] if before is None else [before]), *(r.known for r in call.reads)]
        super().__init__(any([known.assumed for known in parents]), any([known.varies for known in parents]))
        self.before, self.call, self.position = before, call, position
        self.window, self.numel, self.dtype = window, numel, dtype

    def _parents(self) -> Sequence[Known]:
        assert self.call is not None
        reads = [r.known for r in self.call.reads]
        return reads if self.before is None else [self.before, *reads]

    def _let_go(self) -> None:
        self.before = self.call = None  # a buffer that is written again and again would hold all that was in it

    def _compute(self) -> torch.Tensor:
        assert self.call is not None
        flat = torch.zeros(self.numel, dtype=self.dtype) if self.before is None else self.before.flat().clone()
        target = flat.as_strided(*self.window)
        self.call.run(_replace(self.call.args, self.position, target))
        return flat


class Positions(Known):
    """The numbers below ``count`` but for those ``barred``."""

    __slots__ = ("count", "barred")

    def __init__(self, count: int, barred: frozenset[int]) -> None:
        super().__init__()
        self.count, self.barred = count, barred

    def _compute(self) -> torch.Tensor:
        return torch.tensor([number for number in range(self.count) if number not in self.barred])

    def is_out(self, number: float) -> bool:
        return not 0 <= number < self.count or number in self.barred

    def left_out_of(self, bins: int) -> frozenset[int]:
        """The numbers below ``bins`` that are none of these."""
        return self.barred.union(range(self.count, bins))


def _substitute(tree: Any) -> Any:
    if isinstance(tree, ReadArgument):
        return tree.known.flat().as_strided(*tree.window)
    if isinstance(tree, (list, tuple)):
        return [_substitute(x) if isinstance(x, _SUBSTITUTED) else x for x in tree]
    if isinstance(tree, dict):
        return {k: _CPU if k == "device" else _substitute(v) for k, v in tree.items() if k != "pin_memory"}
    return _CPU if isinstance(tree, torch.device) else tree


_CPU = torch.device("cpu")
_SUBSTITUTED = (ReadArgument, list, tuple, dict, torch.device)


def _replace(args: Any, position: tuple[int, ...], value: Any) -> Any:
    copy = list(args)
    copy[position[0]] = value if len(position) == 1 else _replace(args[position[0]], position[1:], value)
    return copy


def window_of(tensor: torch.Tensor) -> Window:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def filled_with(known: Known) -> int | float | bool | complex | None:
    """The number that contents are full of, where they were made so."""
    is_full = isinstance(known, Result) and known.call.op is torch.ops.aten.full.default
    return known.call.args[1] if is_full else None  # type: ignore[attr-defined]
