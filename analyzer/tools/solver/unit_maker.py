"""The units that plans of a program are made of: at which places they may begin and end, and what each costs."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from .problem import Problem
from .unit import Unit

_MOST_STARTS = 400      # boundaries: units grow with their square
_NEAR = 12              # a unit that spans no more boundaries than this may begin and end at any
# and one that spans no more than this may begin anywhere: query, key and value of one norm, with a boundary after each
# and between
_NEARER = 6
_MOST_PLACES = 2000     # in a program, for that
# longer units begin and end where little passes, at as many places as keeps their number below this
_MOST_FAR_UNITS = 8000
_LONG_STRETCH, _STRIDE = 32, 8  # atoms without a product that have a boundary in every stride of so many
_FEW_UNITS = 2          # up to the next product, that may each count a value that all of them read
_MOST_SHARES = 8        # between keeping no product of a region and keeping all


def choose_boundaries(problem: Problem) -> np.ndarray:
    """The atoms after which a unit may end, the last atom before the loss among them.

    After a product: what it makes is dear to run again, and as the last of a region it need not be. And between two
    products at the first of the places where fewest bytes pass: block ends; what lies between is cheap to run again. A
    long stretch without products, as a scan or a chain of gates, has such a place in every few atoms.
    """
    count = len(problem)
    passing = passing_bytes(problem)
    chosen = np.zeros(count, dtype=bool)
    before = -1
    for i in range(count):
        if any(c.is_product for c in problem.calls[i]) or problem.pinned[i] or i == count - 1:
            chosen[i] = True
            if problem.pinned[i] and i:
                chosen[i - 1] = True
            if i - before > _LONG_STRETCH:
                for first in range(before + 1, i, _STRIDE):
                    chosen[first + passing[first:min(first + _STRIDE, i)].argmin()] = True
            rising = [k for k in range(before + 1, i) if passing[k] < passing[k + 1]]
            if rising:
                chosen[min(rising, key=passing.__getitem__)] = True
            before = i
    while chosen.sum() > _MOST_STARTS:  # give up those where most passes
        candidates = np.flatnonzero(chosen[:-1])
        worst = candidates[np.argsort(passing[candidates])[_MOST_STARTS // 2:]]
        chosen[worst[::2]] = False
    return np.flatnonzero(chosen)


def passing_bytes(problem: Problem) -> np.ndarray:
    """Bytes of the values that are made up to each atom and needed after it, forward or backward."""
    change = np.zeros(len(problem) + 2, dtype=np.int64)
    last = np.maximum(problem.last_saver, problem.last_reader)
    passes = last > problem.maker
    np.add.at(change, problem.maker[passes], problem.nbytes[passes])
    np.subtract.at(change, last[passes], problem.nbytes[passes])
    return np.cumsum(change)[:len(problem) + 1]


def product_atoms(problem: Problem) -> np.ndarray:
    count = len(problem)
    return np.array([*(i for i in range(count) if any(c.is_product for c in problem.calls[i])), count])


def _held_for_many(problem: Problem, boundaries: np.ndarray) -> Problem:
    """Values that many units read, as each step of a scan does, are saved for all of these: held once."""
    products = product_atoms(problem)
    first, last = problem.first_saver.copy(), problem.last_saver.copy()
    for v in np.flatnonzero(~problem.saved & (problem.maker < len(problem))):
        near = products[np.searchsorted(products, problem.maker[v], "right")]
        users = [u for u in problem.users[v] if u <= near]
        if len(set(np.searchsorted(boundaries, users))) > _FEW_UNITS:
            first[v], last[v] = users[0], users[-1]
    return replace(problem, first_saver=first, last_saver=last)


class UnitMaker:
    """Makes units from atoms ``first`` to ``last``."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        count = len(problem)
        self.start = np.searchsorted(problem.maker, np.arange(count + 2))  # first value of each atom
        self.last_use = np.maximum(problem.last_saver, problem.last_reader)
        self.pinned_before = np.concatenate([[0], np.cumsum(problem.pinned)])
        # values that nothing saves, by the atoms that compute with them: the first region that does so holds it as its
        # argument, or the next where the first, up to the next product after the value is made, may lie in one unit
        # with its maker
        products = product_atoms(problem)
        self.arguments: list[list[int]] = [[] for _ in range(count + 1)]
        for v in np.flatnonzero(~problem.saved & (problem.maker < count)):
            near = int(products[np.searchsorted(products, problem.maker[v])])
            users = problem.users[v]
            for atom in users[:sum(u <= near for u in users) + 1]:
                self.arguments[atom].append(int(v))
        # and what a list of many is joined from, as the states of a scan: no unit holds it for that but the join's own
        reads = Counter(atom for users in problem.users for atom in users)
        for v in np.flatnonzero(problem.saved):
            *others, join = problem.users[v] or (-1,)
            if reads[join] > _NEAR and problem.last_saver[v] >= max(others, default=-1):
                self.last_use[v] = problem.last_saver[v]
                self.arguments[join].append(int(v))
        unsaved = np.flatnonzero(~problem.saved & (problem.last_reader > problem.maker))
        self.unsaved_maker, self.unsaved_reader, self.unsaved_bytes = (
            problem.maker[unsaved], problem.last_reader[unsaved], problem.nbytes[unsaved])

    def passing_unsaved(self, first: int) -> int:
        """Bytes that pass into atom ``first`` and are freed before backward."""
        return int(self.unsaved_bytes[(self.unsaved_maker < first) & (self.unsaved_reader >= first)].sum())

    def plain(self, first: int, last: int) -> Unit:
        saved = self.problem.saved[self._values(first, last)]
        held = int(self.problem.nbytes[self._values(first, last)][saved].sum())
        work = max(self._backward_peak(first, last, saved),
                   self.passing_unsaved(first) + self._forward_peak(first, last, saved))
        return Unit(first, last, False, 0.0, held, work)

    def _values(self, first: int, last: int) -> slice:
        return slice(self.start[first], self.start[last + 1])

    def _backward_peak(self, first: int, last: int, saved: np.ndarray) -> int:
        """Highest point of backward over these atoms: what is still saved, and what an atom runs with."""
        p, here = self.problem, self._values(first, last)
        size = last - first + 1
        ends = np.minimum(p.first_saver[here] - first, size)
        alive = np.cumsum(np.bincount(ends, weights=np.where(saved, p.nbytes[here], 0), minlength=size + 1))[:size]
        return int((alive + p.backward_bytes[first:last + 1]).max())

    def _forward_peak(self, first: int, last: int, kept: np.ndarray) -> int:
        """Highest point of forward over these atoms: earlier values that are ``kept`` or still to be read."""
        p, here = self.problem, self._values(first, last)
        size = last - first + 2
        begin = np.minimum(p.maker[here] - first + 1, size - 1)
        until = np.where(kept, size - 1, np.clip(np.minimum(p.last_reader[here], last) - first + 1, begin, size - 1))
        begun, ended = (np.bincount(at, weights=p.nbytes[here], minlength=size) for at in (begin, until))
        return int((np.cumsum(begun - ended)[:size - 1] + p.forward_bytes[first:last + 1]).max())

    def regions(self, first: int, last: int) -> list[Unit]:
        """Checkpoints of these atoms: keeping no product, all, and shares between, the dearest per byte first."""
        p = self.problem
        if self.pinned_before[last + 1] > self.pinned_before[first] or any(
                a < first <= b < last or first < a <= last < b for a, b in p.fences):
            return []
        calls = [c for atom in p.calls[first:last + 1] for c in atom]
        stop = next((i for i in range(len(calls) - 1, -1, -1) if calls[i].saves), None)
        if stop is None:
            return []
        executed = calls[:stop + calls[stop].saves_own]
        here = self._values(first, last)
        recomputed = p.saved[here] & (p.first_saver[here] <= last)
        crossing = p.saved[here] & (self.last_use[here] > last)
        arguments = {v for atom in range(first, last + 1) for v in self.arguments[atom] if p.maker[v] < first}
        argument_bytes = int(sum(p.nbytes[v] for v in arguments))
        held = int(p.nbytes[here][crossing].sum()) + argument_bytes
        again = max(self._backward_peak(first, last, recomputed),
                    int(p.incoming_bytes[last]) + self._forward_peak(first, last, recomputed))
        work = max(argument_bytes + again,
                   self.passing_unsaved(first) + self._forward_peak(first, last, np.zeros_like(recomputed)))
        writing: dict[int, float] = {}  # of what writes to each value in place
        for c in executed:
            if c.written_value >= 0:
                writing[c.written_value] = writing.get(c.written_value, 0.0) + c.cost
        cost = sum(c.cost for c in executed)
        ordinals = [i for i, c in enumerate(calls) if c.is_product]
        options, skips = [], []
        for ordinal, i in enumerate(ordinals):
            call = calls[i]
            if call.keep_bytes < 0 or i >= len(executed):
                continue
            own_cost = call.cost + writing.get(call.keep_value, 0.0)
            if call.first_use > last and not recomputed[call.keep_value - here.start]:
                skips.append(ordinal)
                cost -= own_cost
                continue
            is_held = bool(crossing[call.keep_value - here.start])
            extra = call.keep_bytes - (int(p.nbytes[call.keep_value]) if is_held else 0)
            options.append(
                (own_cost, extra, ordinal, 0 if recomputed[call.keep_value - here.start] else call.keep_bytes))
        units = [Unit(first, last, True, cost, held, work, skips=tuple(skips))]
        options.sort(key=lambda o: -o[0] / max(o[1], 1))
        for n in sorted({round(len(options) * share / (_MOST_SHARES - 1)) for share in range(1, _MOST_SHARES)}):
            taken = options[:n]
            if taken:
                units.append(Unit(first, last, True, cost - sum(o[0] for o in taken), held + sum(o[1] for o in taken),
                                  work + sum(o[3] for o in taken), tuple(sorted(o[2] for o in taken)), tuple(skips)))
        return units


def make_units(problem: Problem, limit_bytes: int) -> list[Unit]:
    """All units that a plan within ``limit_bytes`` may use, the loss last."""
    count = len(problem)
    boundaries = choose_boundaries(problem)
    make = UnitMaker(_held_for_many(problem, boundaries))
    pairs, ends = _pair(boundaries, passing_bytes(problem)), boundaries
    if count <= _MOST_PLACES:  # what is cheap to keep, as a norm's deviations, need not be run again with the rest
        ends = np.arange(count)
        following = np.searchsorted(boundaries, ends)
        pairs = sorted({*pairs, *((a, int(b)) for a, i in enumerate(following) for b in boundaries[i:i + _NEARER])})
    starts = np.concatenate([[0], ends[:-1] + 1])
    units = [make.plain(int(a), int(b)) for a, b in zip(starts, ends)]
    plain_held = np.concatenate([[0], np.cumsum([u.held_bytes for u in units])])
    for a, b in pairs:
        as_plain = int(plain_held[np.searchsorted(ends, b) + 1] - plain_held[np.searchsorted(starts, a)])
        units.extend(u for u in make.regions(a, b) if u.held_bytes < as_plain)  # others spare nothing
    units.append(make.plain(count, count))
    # without its last unit a program would be a shorter one
    return [u for u in units if not u.is_region or u.work_bytes <= limit_bytes]


def _pair(ends: np.ndarray, passing: np.ndarray) -> list[tuple[int, int]]:
    starts = np.concatenate([[0], ends[:-1] + 1])
    count = len(ends)
    pairs = {(i, j) for i in range(count) for j in range(i, min(count, i + _NEAR))}
    into = np.concatenate([[0], passing[ends[:-1]]])  # what passes into the interval that begins there
    lows = [i for i in range(count) if (i == 0 or into[i] <= into[i - 1]) and (i == count - 1 or into[i] < into[i + 1])]
    while len(lows) * len(lows) // 2 > _MOST_FAR_UNITS:
        lows = [0, *lows[1::2]]
    marks = [*lows, count]
    pairs |= {(i, j - 1) for x, i in enumerate(marks) for j in marks[x + 1:]}
    return sorted((int(starts[i]), int(ends[j])) for i, j in pairs)
