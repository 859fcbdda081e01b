"""What is expected of contents that are not known. Means of masks, so that routing and ``nonzero`` get balanced sizes:
an element of a one-hot row over n classes is 1 with probability 1/n when classes are equally likely, sums of such masks
count, comparisons of counts decide.
"""
from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.state import MetaState

from .barred import barred_choices
from .contents import look_at, read_known
from .known_value import MOST_CLASSES, Deferred, Known, Positions, filled_with
from .sample import is_told_by_sample

Rule = Callable[[Any, list[MetaStorage], "float | None"], "float | None"]
_KEEPING = {"_to_copy", "clone", "contiguous", "index", "cat", "_reshape_copy", "flip", "gather", "index_select",
            "sort", "repeat", "roll"}


def expected_counts(total: int, bins: int, only: int | None = None, skew: float = 0.0) -> list[int]:
    """How many of ``total`` elements each of ``bins`` classes gets, equally likely or by Zipf's law of the exponent
    ``skew``, the last most where that is below 0; with ``only``, that class gets all.

    >>> expected_counts(10, 4), expected_counts(10, 4, only=2), expected_counts(100, 4, skew=1.0)
    ([2, 3, 2, 3], [0, 0, 10, 0], [48, 24, 16, 12])
    >>> expected_counts(100, 4, skew=-1.0)
    [12, 16, 24, 48]
    """
    if only is not None:
        return [total if i == only % bins else 0 for i in range(bins)]
    if not skew:
        return [total * (i + 1) // bins - total * i // bins for i in range(bins)]
    ends = list(itertools.accumulate((1 / (i + 1) ** abs(skew) for i in range(bins)), initial=0.0))
    found = [round(total * high / ends[-1]) - round(total * low / ends[-1]) for low, high in itertools.pairwise(ends)]
    return found if skew > 0 else found[::-1]


class Marks(float):
    """The share of ones in a bin of marks. Of as many ``bins`` as there are those ``left_out`` stand for dropped,
    padded or forbidden classes: no choice falls on them.
    """

    bins: int
    left_out: frozenset[int]

    @property
    def classes(self) -> int:
        """In how many bins marks are."""
        return self.bins - len(self.left_out)

    def times(self, count: float) -> Marks:
        found = Marks(self * count)
        found.bins, found.left_out = self.bins, self.left_out
        return found

    def within(self, marks: torch.Tensor) -> float:
        """The share in ``marks``, of which each element may be of one bin: bins lie beside one another in memory."""
        along = [size for size, stride in zip(marks.shape, marks.stride()) if size > 1 and stride % self.bins]
        first, count = int(marks.storage_offset()) % self.bins, along[0] if along else 1
        if len(along) > 1 or first + count > self.bins:
            first, count = 0, self.bins
        marked = sum(number not in self.left_out for number in range(first, first + count))
        return self * (marked / count)


class ShareOfClasses(float):
    """The share of choices that fall on some ``classes`` of those that ``drawn`` are."""

    drawn: Positions
    classes: frozenset[int]

    @classmethod
    def of(cls, drawn: Positions, holds: Callable[[int], bool]) -> ShareOfClasses:
        left = [number for number in range(drawn.count) if number not in drawn.barred]
        classes = frozenset(filter(holds, left))
        found = cls(len(classes) / max(1, len(left)))
        found.drawn, found.classes = drawn, classes
        return found


def share_of_marks(index: Any, bins: int) -> float | None:
    """The expected mean in each bin, of ``bins``, that a class of unknown ``index`` (a storage) can be."""
    if is_told_by_sample(index):
        return None
    drawn = getattr(index, "drawn_from", None)
    left_out = drawn.left_out_of(bins) if isinstance(drawn, Positions) and drawn.count <= bins else frozenset()
    if not left_out:
        return 1 / bins
    found = Marks(1 / max(1, bins - len(left_out)))
    found.bins, found.left_out = bins, left_out
    return found


def bins_left_out(index: torch.Tensor, bins: int) -> frozenset[int]:
    """The bins, of ``bins``, that an unknown index cannot be."""
    share = share_of_marks(index.untyped_storage(), bins)
    return share.left_out if isinstance(share, Marks) else frozenset()


def count_classes(state: MetaState, name: str, counts: torch.Tensor, total: int,
                  left_out: frozenset[int] = frozenset()) -> None:
    """Take ``total`` unknown elements that an operator counts to fall into bins as is expected, but for those
    ``left_out``, where that is the policy.
    """
    if not state.expects_contents or state.options.unknown_size != "balanced" and not state.repeats:
        return
    bins, skew = counts.numel() - len(left_out), state.options.skew
    how = "evenly" if not skew else f"by Zipf's law of exponent {abs(skew):g}{', the last most,' if skew < 0 else ''}"
    state.assume(f"{name}: unknown elements are assumed to fall {how} into {bins} bins (balanced) {state.where()}")
    fallen = iter(expected_counts(total, bins, state.placeholder if state.repeats else None, skew))
    expected = [0 if number in left_out else next(fallen) for number in range(counts.numel())]
    with without_modes():
        counts.untyped_storage().known = Deferred(  # type: ignore[attr-defined]
            torch.tensor(expected, dtype=counts.dtype))


def count_marked(state: MetaState, name: str, args: Any, out: torch.Tensor, density: float | None) -> None:
    """Take counts to be even that are sums of marks, whose mean is ``density``, or ones that are added up by class."""
    if out.dtype.is_floating_point or out.numel() < 2:
        return
    if name == "sum" and density is not None and density < 1:
        left_out = density.left_out if isinstance(density, Marks) and out.numel() == density.bins else frozenset()
        count_classes(state, "sum of marks", out, round(density * args[0].numel() * (
            1 - len(left_out) / out.numel())), left_out)
    elif name in _ADDING and out.dim() == 1 and isinstance(args[3], torch.Tensor) and not is_told_by_sample(
            args[2].untyped_storage()):
        storage = args[3].untyped_storage()
        ones = storage.exact if isinstance(storage, MetaStorage) else None
        with without_modes():
            all_ones = ones is not None and bool((ones.flat() == 1).all())
        if all_ones:
            count_classes(state, name, out, args[2].numel(), bins_left_out(args[2], out.numel()))


def drawn_contents(name: str, args: Any, storages: list[MetaStorage]) -> Known | None:
    """Known integers that hold every element of the first output: picked by unknown indices, or copies of that, and
    choices of classes beside numbers that are none.
    """
    if not storages or name == "cat" and len({id(origin_of(s)) for s in storages}) > 1:
        return None
    if name in _KEEPING:
        return origin_of(storages[0])
    if name in _CUTTING:
        return _within(args[0], *_CUTTING[name](*args[1:]))
    if name == "masked_fill":
        return _beside_dropped(args[0], args[2] if len(args) > 2 else None)
    if name == "where" and len(args) == 3:
        return _beside_dropped(args[1], args[2]) or _beside_dropped(args[2], args[1])
    return None


def after_write(name: str, args: Any, storages: list[MetaStorage]) -> tuple[Known | None, float | None]:
    """What is expected of the first argument of an operator that writes to it: that which it holds is among known
    contents, and its mean.
    """
    name = name.removesuffix("_")
    if name in _PUTTING:
        drawn = _beside_dropped(args[0], args[_PUTTING[name]])
    else:
        drawn = drawn_contents(name, args, storages) if name in _CUTTING or name == "copy" else None
    return drawn, expected_density(name, args, storages)


_PUTTING = {"masked_fill": 2, "index_put": 2, "index_fill": 3, "fill": 1}
_CUTTING: dict[str, Callable[..., tuple[Any, Any]]] = {
    "clamp": lambda low=None, high=None: (low, high), "clamp_min": lambda low: (low, None),
    "clamp_max": lambda high: (None, high)}


def _positions_in(given: Any) -> Positions | None:
    storage: Any = given.untyped_storage() if isinstance(given, torch.Tensor) else None
    origin = origin_of(storage) if isinstance(storage, MetaStorage) else None
    return origin if isinstance(origin, Positions) else None


def _within(index: Any, low: Any, high: Any) -> Known | None:
    """Choices that lie between bounds, which change none of them."""
    origin = _positions_in(index)
    is_whole = origin is not None and (low is None or isinstance(low, (int, float)) and low <= 0) and (
        high is None or isinstance(high, (int, float)) and high >= origin.count - 1)
    return origin if is_whole else None


def _beside_dropped(index: Any, value: Any) -> Known | None:
    """Choices of which those in a mask are put behind all classes, where a capacity leaves them out: none is taken to
    be.
    """
    origin = _positions_in(index)
    if origin is None:
        return None
    if isinstance(value, torch.Tensor):
        storage: Any = value.untyped_storage()
        known = storage.exact if isinstance(storage, MetaStorage) and value.numel() else None
        if known is None:
            return None
        with without_modes():
            found = known.flat()
            is_behind = all(origin.is_out(number) for number in found.unique().tolist())
    else:
        is_behind = isinstance(value, int) and origin.is_out(value)
    return origin if is_behind else None


_ADDING = frozenset({"scatter_add", "scatter_add_", "index_add", "index_add_"})
CHOOSING = {"topk": 1, "argmax": 0, "max": 1, "sort": 1, "multinomial": 0}
"""Operators that choose classes, as routers do, and the output that says which; whole rows that are sorted are cut."""


_positions = functools.lru_cache(maxsize=1024)(Positions)  # one for each count: compared by identity


def chosen_among(name: str, args: Any, kwargs: Any) -> Known:
    x, place = args[0], 2 if name == "topk" else 1
    usual = None if name == "argmax" else -1
    dim = usual if name == "multinomial" else args[place] if len(args) > place else kwargs.get("dim", usual)
    if isinstance(dim, bool):  # sort(stable, dim, descending)
        dim = args[2] if len(args) > 2 else kwargs.get("dim", usual)
    return _positions(x.numel() if dim is None else x.shape[dim] if x.dim() else 1,
                      frozenset() if name == "sort" else barred_choices(x, dim))


def origin_of(storage: MetaStorage) -> Known | None:
    """Known contents that those of ``storage`` are, or are among."""
    return storage.exact or storage.drawn_from


def distinct_count(contents: Known) -> int:
    if isinstance(contents, Positions):
        return contents.count - len(contents.barred)
    with without_modes():
        return int(contents.flat().unique().numel())


def expected_density(name: str, args: Any, storages: list[MetaStorage]) -> float | None:
    """The expected mean of the first output's elements, or None where it is not followed."""
    if not storages or name not in _RULES:
        return None
    rule: Rule = _RULES[name]
    return rule(args, storages, storages[0].density)


def _equal(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
    """Of n unknown classes, one in n equals another, a given one or (as in ``one_hot``) that of an enumeration."""
    drawn = storages[0].drawn_from
    if drawn is not None and (drawn is storages[1].drawn_from if len(storages) == 2 else isinstance(
            args[1], (int, float))):
        if isinstance(drawn, Positions) and len(storages) == 1:
            return _share_of_one(drawn, args[1])
        return 1 / max(1, distinct_count(drawn))
    if len(storages) == 2 and (storages[0].known is None) != (storages[1].known is None):
        index, known = (storages[0], args[1]) if storages[0].known is None else (storages[1], args[0])
        if known.numel() == 1:
            return _equal_number(index, known)
        return share_of_marks(index, known.numel()) if _counts_up(known) else None
    if first is not None and len(storages) == 1 and isinstance(args[1], (int, float)) and args[0].numel() == 1:
        return float(first == args[1])  # one expected count
    return None


def _counts_up(known: torch.Tensor) -> bool:
    """Whether known numbers are those of all bins, each once."""
    found = look_at(known)
    with without_modes():
        return found is not None and bool((found.flatten() == torch.arange(found.numel())).all())


def _equal_number(index: MetaStorage, known: torch.Tensor) -> float | None:
    """The same of a class that stands in a tensor."""
    drawn, number = index.drawn_from, read_known(known)
    if drawn is None or number is None:
        return None
    return _share_of_one(drawn, number.item()) if isinstance(drawn, Positions) else 1 / max(1, distinct_count(drawn))


def _share_of_one(drawn: Positions, number: float) -> float:
    if drawn.count <= MOST_CLASSES:
        return ShareOfClasses.of(drawn, lambda one: one == number)
    return 0.0 if drawn.is_out(number) else 1 / max(1, distinct_count(drawn))


def _compared(compare: Callable[[Any, Any], bool], otherwise: Rule) -> Rule:
    """Of choices that are compared with a number, those of classes of which that is true."""
    def rule(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
        drawn, number = storages[0].drawn_from, args[1]
        if len(storages) == 1 and isinstance(drawn, Positions) and isinstance(number, (int, float)) and (
                drawn.count <= MOST_CLASSES):
            return ShareOfClasses.of(drawn, lambda one: compare(one, number))
        return otherwise(args, storages, first)
    return rule


def _combined(holds: Callable[[bool, bool], bool]) -> Rule:
    """Of two masks of the same choices, or of one and nothing else."""
    def rule(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
        masks = [storage.density for storage in storages]
        one, other = masks[0], masks[-1]
        if not isinstance(one, ShareOfClasses) or not isinstance(other, ShareOfClasses) or (
                one.drawn is not other.drawn or len(masks) != len([a for a in args if isinstance(a, torch.Tensor)])):
            return None
        return ShareOfClasses.of(one.drawn, lambda n: holds(n in one.classes, n in other.classes))
    return rule


def _sum(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
    if first is None:
        return None
    sizes = [args[0].shape[d] for d in (args[1] if len(args) > 1 and args[1] else range(args[0].dim()))]
    if isinstance(first, Marks) and first.bins in sizes:
        sizes[sizes.index(first.bins)] = first.classes
    return first * float(math.prod(sizes))


def _scatter(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
    value = args[3] if len(args) > 3 else None
    is_one = isinstance(value, (int, float)) and value == 1
    if (is_one or isinstance(value, torch.Tensor) and _is_zero(args[0])) and args[0].numel():
        share = share_of_marks(args[2].untyped_storage(), bins := args[0].shape[args[1]] if args[0].dim() else 1)
        if share is None:
            return None
        mean = min(1.0, int(args[2].numel()) / int(args[0].numel()))
        return share.times(min(share.classes, mean * bins)) if isinstance(share, Marks) else mean
    return None


def _is_zero(x: torch.Tensor) -> bool:
    known = x.untyped_storage().known  # type: ignore[attr-defined]
    return known is not None and filled_with(known) == 0


def _greater(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
    if first is None or not isinstance(args[1], (int, float)):
        return None
    if 0 < first < 1 and args[0].numel() > 1 and 0 <= args[1] < 1:
        return first  # of marks, the ones
    return 1.0 if first > args[1] else 0.0


def _max(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
    """Of marks, whether there is one; of counts, which are taken to be even, one of them."""
    if first is None or not 0 < first < 1 or len(args) < 2 or isinstance(args[1], torch.Tensor):
        return first
    return _any(args, storages, first)


def _not_equal(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
    return None if first is None or isinstance(args[1], torch.Tensor) or args[1] != 0 else min(1.0, first)


def _clamped(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
    low = args[1] if len(args) > 1 else None
    if first is None or isinstance(low, torch.Tensor):
        return None
    return first if low is None else max(first, float(low))


def _any(args: Any, storages: list[MetaStorage], first: float | None) -> float | None:
    """Some element of all is marked where any can be; of a row as many rows have one as there are marks: the choices of
    a token differ.
    """
    if first is None or len(args) < 2 or args[1] is None:
        return None if first is None else float(first > 0)
    dims = [args[1]] if isinstance(args[1], int) else args[1]
    count = math.prod([args[0].shape[d] for d in dims])
    return float(first > 0) if count == args[0].numel() else min(1.0, first * count)


_RULES: dict[str, Rule] = {
    "eq": _equal, "sum": _sum, "scatter": _scatter, "scatter_": _scatter, "clamp": _clamped, "clamp_min": _clamped,
    "gt": _compared(operator.gt, _greater), "ge": _compared(operator.ge, _greater),
    "lt": _compared(operator.lt, lambda *_: None), "le": _compared(operator.le, lambda *_: None),
    "ne": _compared(operator.ne, _not_equal),
    **dict.fromkeys(("bitwise_and", "logical_and", "__and__"), _combined(operator.and_)),
    **dict.fromkeys(("bitwise_or", "logical_or", "__or__"), _combined(operator.or_)),
    **dict.fromkeys(("bitwise_not", "logical_not"), _combined(lambda one, _: not one)),
    "any": _any, "max": _max, "amax": _max,
    # floating data made whole counts something, as predicted durations do: 1 is expected where nothing else is
    **dict.fromkeys(("ceil", "round", "floor"), lambda args, storages, first: 1.0 if first is None else first),
    **dict.fromkeys((*_KEEPING, "select", "squeeze", "masked_fill"),
                    lambda args, storages, first: first)}
ESTIMATED = frozenset({*_RULES, *_ADDING, *_CUTTING, *CHOOSING, "histc", "where"})
"""Operators of whose unknown results something is expected."""
