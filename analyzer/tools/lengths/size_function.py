"""Exact functions of the sizes of inputs: polynomials with rational factors, of the sizes or of these rounded up."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

#: multiples to which kernels and convolutions round sizes: each is tried, the finest first
ROUNDINGS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MOST_TERMS = 3
_SPARE = 2  #: further points that a function must meet, beside those that its factors follow from
_MOST_DERIVED = 4
_DENOMINATOR = 1 << 14  # of factors: a convolution's stride for each of two dimensions, and bytes of one bit

Function = Callable[[Sequence[int]], Numbers]


class Basis:
    """Products of sizes: of the first, which is of rows, to the first power at most, of each other one and the same
    rounded up to the second, both together. Sizes that are the same at all ``points`` are in the factors.
    """

    def __init__(self, points: Numbers) -> None:
        varies = [bool((column != column[0]).any()) for column in points.T]
        plain: list[list[tuple[int, int]]] = [[(0, 0), (1, 0)] if varies[0] else [(0, 0)]]
        mixed = list(plain)
        for one in varies[1:]:
            plain.append([(power, 0) for power in range(3)] if one else [(0, 0)])
            mixed.append([(i, j) for i in range(3) for j in range(3 - i)] if one else [(0, 0)])
        self.exponents: list[list[tuple[tuple[int, int], ...]]] = []  #: of each of `ROUNDINGS`
        for rounding in ROUNDINGS:
            found = list(product(*(plain if rounding == 1 else mixed)))
            self.exponents.append(sorted(found, key=lambda each: (sum(i + j for i, j in each), each)))

    def evaluate(self, point: Sequence[int]) -> list[Numbers]:
        """The products at a point, for each of `ROUNDINGS`."""
        found = []
        for rounding, exponents in zip(ROUNDINGS, self.exponents):
            pairs = [(size, -(-size // rounding) * rounding) for size in point]
            found.append(np.array([math.prod(size**i * up**j for (size, up), (i, j) in zip(pairs, each))
                                   for each in exponents], np.int64))
        return found


def fit_functions(points: Numbers, rows: Numbers) -> tuple[Function, npt.NDArray[np.bool_]]:
    """A function of a point to the values of all rows there, and which rows it is exact for: each has a polynomial of
    few terms that gives its value at every point, one more than follow from its factors. ``points`` is an array
    (points, sizes), ``rows`` one (rows, points). Of other rows the function gives the value at the nearest point that
    is no smaller in any size, else the largest of all.

    >>> points = np.array([[2, 3], [2, 5], [2, 10], [2, 12]])
    >>> function, is_exact = fit_functions(points, np.array([[12, 40, 160, 228]]) * 0 + points[:, 1]**2 * 4 + 8)
    >>> function((2, 100)), is_exact
    (array([40008]), array([ True]))
    """
    different, inverse = np.unique(rows, axis=0, return_inverse=True)
    basis = Basis(points)
    values = [np.stack(tables) for tables in zip(*(basis.evaluate(point) for point in points.tolist()))]
    starts = np.cumsum([0, *(table.shape[1] for table in values)]).tolist()
    factors = np.zeros((len(different), starts[-1]), np.int64)
    divisors = np.ones(len(different), np.int64)
    is_exact = (different == different[:, :1]).all(axis=1)
    factors[is_exact, 0] = different[is_exact, 0]  # the first product is 1
    for terms in range(1, _MOST_TERMS + 1):
        for start, table in zip(starts, values):
            for chosen in combinations(range(table.shape[1]), terms):
                if is_exact.all() or terms > 1 and len(points) < terms + _SPARE:
                    break
                _try_terms(table[:, chosen], different, is_exact, factors, divisors, [start + one for one in chosen])
    used = np.nonzero(factors.any(axis=0))[0]
    factors = factors[:, used]

    def evaluate(point: Sequence[int]) -> Numbers:
        found = factors @ np.concatenate(basis.evaluate(point))[used] // divisors
        if not is_exact.all():
            found[~is_exact] = _at_nearest(points, different[~is_exact], point)
        return np.asarray(found[inverse.reshape(-1)])

    return evaluate, is_exact[inverse.reshape(-1)]


def fit_with_derived(points: Numbers, rows: Numbers, derived: Numbers) -> tuple[Function, npt.NDArray[np.bool_]]:
    """As `fit_functions`; rows that have no function of the sizes may have one of a size that follows from these, as
    the frames of a spectrogram and the patches of an image do. ``derived`` is an array (such sizes, points).
    """
    function, is_exact = fit_functions(points, rows)
    functions: list[tuple[npt.NDArray[np.bool_], Function]] = []
    for values in np.unique(derived, axis=0):
        if is_exact.all() or len(functions) == _MOST_DERIVED:
            break
        of_points, follows = fit_functions(points, values[None])
        if not follows.all():
            continue
        left = ~is_exact
        further, met = fit_functions(np.stack([points[:, 0], values], axis=1), rows[left])
        if met.any():
            solved = left.copy()
            solved[left] = met
            functions.append((solved, _compose(of_points, further, met)))
            is_exact |= solved

    def evaluate(point: Sequence[int]) -> Numbers:
        found = function(point)
        for solved, further in functions:
            found[solved] = further(point)
        return found

    return evaluate, is_exact


def _compose(inner: Function, outer: Function, chosen: npt.NDArray[np.bool_]) -> Function:
    return lambda point: outer((point[0], int(inner(point)[0])))[chosen]


def _try_terms(table: Numbers, rows: Numbers, is_exact: npt.NDArray[np.bool_], factors: Numbers, divisors: Numbers,
               columns: Sequence[int]) -> None:
    """Give these terms to the rows that they meet at all points."""
    left = np.nonzero(~is_exact)[0]
    if not len(left) or np.linalg.matrix_rank(table.astype(float)) < table.shape[1]:
        return
    scale = np.abs(table).max(axis=0).astype(float)
    solved, *_ = np.linalg.lstsq(table / scale, rows[left].T.astype(float), rcond=None)
    misses = np.abs(table / scale @ solved - rows[left].T).max(axis=0)
    near = misses <= 1e-6 * np.maximum(1.0, np.abs(rows[left]).max(axis=1))
    for row, solution in zip(left[near].tolist(), (solved[:, near] / scale[:, None]).T.tolist()):
        exact = [Fraction(factor).limit_denominator(_DENOMINATOR) for factor in solution]
        divisor = math.lcm(*(factor.denominator for factor in exact))
        numerators = [int(factor * divisor) for factor in exact]
        given = [sum(n * v for n, v in zip(numerators, values)) for values in table.tolist()]
        if given == [divisor * value for value in rows[row].tolist()]:
            is_exact[row], divisors[row] = True, divisor
            factors[row, columns] = numerators


def _at_nearest(points: Numbers, rows: Numbers, point: Sequence[int]) -> Numbers:
    above = np.nonzero((points >= np.array(point)).all(axis=1))[0]
    if not len(above):
        return np.asarray(rows.max(axis=1))
    return np.asarray(rows[:, above[np.argmin(points[above].prod(axis=1))]])
