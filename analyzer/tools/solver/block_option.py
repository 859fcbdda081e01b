"""What each block may keep, run again or send to the host, and the best choice of all blocks together.

For each block there is a set of options that no other beats in bytes on the device and in seconds: of each result,
whether it is kept, computed again, or waits on the host. What waits costs nothing as long as its copy is done in the
time of its neighbour: the next block's forward pass on the way out, the next block's backward pass on the way back;
each direction has one copy engine, so what it copies more than that is waited for. So a block's option says all that
it adds to memory and time, whatever the other blocks' are, and a plan is a division into units (`unit`) of one block
each, for the solvers that there are: memory at each block, with what gathers and gradients hold there, stays within the
limit.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.collective import host_copy_time

from .block_choice import BlockChoice
from .block_step import BlockInfo, BlockStep
from .chain import least_limit, undominated
from .solver_registry import solve_units
from .unit import Unit, peak_bytes, total_cost

_RECOMPUTE, _KEEP, _OFFLOAD = range(3)
_EXACT = 2048          # labels of a block up to which none is given up but those that others beat
_HELD_STEPS, _SENT_STEPS = 512, 32  # of more, the cheapest in each such part of a block's bytes goes on
_MOST_OPTIONS = 48     # of a block, for all of the time for copies and for each of these parts of it: what is sent
_PARTS = (0.5, 0.25, 0.0)  # comes back while the next block runs, which may lack the room
_FEW_LABELS = 64       # of a block, which are all options


class CopyRate(NamedTuple):
    """Bytes a second of pinned memory, to the host and from it; 0: nothing may wait there."""

    out: float
    back: float

    @classmethod
    def of(cls, device: DeviceSpec) -> CopyRate:
        size = 2**30
        times = [host_copy_time(size, device, pinned=True, to_device=to_device) for to_device in (False, True)]
        return cls(*(0.0 if time is None else size / time.seconds for time in times))


def list_options(block: BlockInfo, rate: CopyRate, following: BlockInfo | None,
                 share: float = 1.0) -> list[BlockChoice]:
    """The options of a block that no other beats, by rising memory; nothing of the last one may wait on the host. With
    a ``share`` below 1 no more is sent than is copied in that part of the neighbour's time.
    """
    plain = BlockChoice(block.path, kept_bytes=block.saved_bytes)
    if not block.again_seconds:
        return [plain]
    window = 0.0
    if share and following is not None and min(rate) > 0:
        window = min(rate.out * following.fwd_seconds, rate.back * following.bwd_seconds)
    held, sent, cost, picks = _label(replace(block, path="", extra_bytes=0), window)
    exposed = np.zeros(len(held))
    if following is not None and window:
        exposed = (np.maximum(0.0, sent / rate.out - following.fwd_seconds)
                   + np.maximum(0.0, sent / rate.back - following.bwd_seconds))
    total = np.maximum(0.0, cost) + exposed
    caps = [share * window if share < 1 else np.inf, *(share * window * part for part in _PARTS)]
    if len(held) <= _FEW_LABELS:
        chosen = np.flatnonzero((held < block.saved_bytes) & (sent <= caps[0]))
    else:
        chosen = np.unique(np.concatenate([_find_frontier(held, total, sent <= cap, block.saved_bytes)
                                           for cap in caps]))
    order = chosen[np.lexsort((-sent[chosen], held[chosen]))]

    def describe(i: int) -> BlockChoice:
        keeps, offloads = (tuple(result.name for result, way in zip(block.results, picks[i][1:]) if way == taken)
                           for taken in (_KEEP, _OFFLOAD))
        there = picks[i][1:] != _RECOMPUTE
        for place in range(len(block.results) - 1, -1, -1):  # and what is computed for these alone
            there[place] |= block.results[place].reader >= 0 and there[block.results[place].reader]
        skips = tuple(result.name for result, way, left_out in zip(block.results, picks[i][1:], there)
                      if left_out and way == _RECOMPUTE)
        return BlockChoice(
            block.path, True, keeps, offloads, bool(picks[i][0] == _OFFLOAD), skips, kept_bytes=int(held[i]),
            offloaded_bytes=int(sent[i]), recompute_seconds=max(0.0, float(cost[i])),
            copy_seconds=float(exposed[i]), operators=block.operators)

    return [*map(describe, order), plain]


def _find_frontier(held: np.ndarray, total: np.ndarray, allowed: np.ndarray, below: int) -> np.ndarray:
    """Places of what is allowed and no other of it beats in bytes held, ``below`` so many, and in seconds."""
    order = np.flatnonzero(allowed & (held < below))
    order = order[undominated(total[order], held[order])][::-1]
    found: np.ndarray = order[::max(1, -(-len(order) // _MOST_OPTIONS))]  # from what holds least on
    return found


class _Labels(NamedTuple):
    """Ways to treat some of a block's results: bytes held and sent, seconds, and what becomes of the input and of each
    result, in columns.
    """

    held: np.ndarray
    sent: np.ndarray
    cost: np.ndarray
    picks: np.ndarray

    def beside(self, other: _Labels) -> _Labels:
        """Each way with each of other results."""
        rows, columns = (index.ravel() for index in np.indices((len(self.held), len(other.held))))
        return _Labels(*(a[rows] + b[columns] for a, b in zip(self, other)))

    def at(self, places: np.ndarray) -> _Labels:
        return _Labels(*(column[places] for column in self))


@functools.lru_cache(maxsize=32)
def _label(block: BlockInfo, window: float) -> _Labels:
    """The ways to treat the block's input and results; copies have the time for ``window`` bytes, with 0 nothing is
    sent. What is computed for one other result alone is left out where that one is kept or sent.
    """
    width, steps = 1 + len(block.results), (max(1, block.saved_bytes // _HELD_STEPS),
                                            max(1, int(window) // _SENT_STEPS))

    def treat(place: int, nbytes: int, can_wait: bool, seconds: float) -> _Labels:
        ways = [_KEEP, *([_OFFLOAD] if window and can_wait and nbytes else ())]
        picks = np.zeros((len(ways), width), dtype=np.int8)
        picks[:, place] = ways
        at_once = np.array([way == _KEEP for way in ways])
        return _Labels(nbytes * at_once, nbytes * ~at_once, np.full(len(ways), -seconds), picks)

    nothing = _Labels(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1), np.zeros((1, width), np.int8))
    below: dict[int, _Labels] = {}                  # of what is computed for each result alone
    spared = [result.seconds for result in block.results]
    whole = treat(0, block.input_bytes, block.input_can_wait, 0.0).beside(nothing._replace(
        cost=np.full(1, block.again_seconds)))
    for i, result in enumerate(block.results):      # in the order in which they are computed
        mine = treat(1 + i, result.bytes, result.can_wait, spared[i])
        mine = _Labels(*(np.concatenate(pair) for pair in zip(below.pop(i, nothing), mine)))
        if result.reader >= 0:
            spared[result.reader] += spared[i]
            joined = below[result.reader].beside(mine) if result.reader in below else mine
            below[result.reader] = joined.at(_keep_labels(*joined[:3], *steps))
        else:
            whole = whole.beside(mine)
            whole = whole.at(_keep_labels(*whole[:3], *steps))
    return whole


def _keep_labels(held: np.ndarray, sent: np.ndarray, cost: np.ndarray, held_step: int, sent_step: int) -> np.ndarray:
    """Places of the labels to go on from: those that none beats which holds, sends and costs no more."""
    order = np.arange(len(held))
    if len(held) > _EXACT:  # the cheapest of each cell
        order = np.lexsort((held, cost, sent // sent_step, held // held_step))
        cells = np.stack([held // held_step, sent // sent_step])[:, order]
        order = order[np.concatenate([[True], (cells[:, 1:] != cells[:, :-1]).any(0)])]
    if len(order) > _EXACT:
        return order
    order = order[np.lexsort((cost[order], sent[order], held[order]))]
    h, s, c = held[order], sent[order], cost[order]
    beats = (h[:, None] <= h) & (s[:, None] <= s) & (c[:, None] <= c)
    found: np.ndarray = order[~np.triu(beats, 1).any(0)]
    return found


def make_units(step: BlockStep, rate: CopyRate, share: float = 1.0) -> tuple[list[Unit], dict[Unit, BlockChoice]]:
    """A unit for each option of each block, and the loss as the last one; the option of each."""
    units: list[Unit] = []
    choice_of: dict[Unit, BlockChoice] = {}
    known: dict[tuple[object, ...], list[BlockChoice]] = {}
    for i, (block, following) in enumerate(zip(step.blocks, (*step.blocks[1:], None))):
        key = (replace(block, path="", extra_bytes=0),
               None if following is None else (following.fwd_seconds, following.bwd_seconds))
        options = known.get(key) or known.setdefault(key, list_options(block, rate, following, share))
        after = 0 if following is None else following.whole_bytes + following.extra_bytes
        for n, option in enumerate(options):
            # what it has on the host comes back while the next block runs backward
            work = max(block.whole_bytes + block.extra_bytes,
                       option.kept_bytes + option.offloaded_bytes + after if option.offloaded_bytes else 0)
            seconds = option.recompute_seconds + option.copy_seconds + step.checkpoint_seconds * option.runs_again
            unit = Unit(i, i, option.runs_again, seconds, option.kept_bytes, work, (n,))
            units.append(unit)
            choice_of[unit] = replace(option, path=block.path)
    units.append(Unit(len(step.blocks), len(step.blocks), False, 0.0, 0, step.extra_bytes))
    return units, choice_of


def account(step: BlockStep, choices: Sequence[BlockChoice]) -> int:
    """The peak of a step with these choices, by what was recorded without a plan."""
    units = [Unit(i, i, True, 0.0, choice.kept_bytes, block.whole_bytes + block.extra_bytes)
             for i, (block, choice) in enumerate(zip(step.blocks, choices))]
    return peak_bytes([*units, Unit(len(units), len(units), False, 0.0, 0, step.extra_bytes)])


def least_bytes(step: BlockStep, rate: CopyRate) -> int:
    """The smallest limit under which there is a choice."""
    return least_limit(make_units(step, rate)[0])


def choose(step: BlockStep, rate: CopyRate, limit_bytes: int, method: str = "auto",
           host_bytes: int | None = None) -> list[BlockChoice] | None:
    """The choice of each block by which a step within ``limit_bytes`` takes least, with no more than ``host_bytes`` on
    the host; None where none is within the limit.
    """
    best: tuple[float, list[BlockChoice]] | None = None
    shares = [1.0]
    if host_bytes is not None:
        windows = sum(min(rate.out * block.fwd_seconds, rate.back * block.bwd_seconds) for block in step.blocks[1:])
        shares += [part * min(1.0, host_bytes / max(windows, 1.0)) for part in (1.0, 0.0)]
    for share in shares:
        units, choice_of = make_units(step, rate, share)
        division = solve_units(units, limit_bytes, method)
        if division is None or best is not None and total_cost(division.units) >= best[0]:
            continue
        chosen = [choice_of[unit] for unit in _sort_alike(division.units, units, limit_bytes)[:-1]]
        if host_bytes is None or sum(choice.offloaded_bytes for choice in chosen) <= host_bytes:
            best = total_cost(division.units), chosen
    return None if best is None else best[1]


def _sort_alike(chosen: list[Unit], units: Sequence[Unit], limit_bytes: int) -> list[Unit]:
    """Equal choices next to each other among blocks that have the same options, where memory allows that."""
    of_block: dict[int, dict[tuple[object, ...], Unit]] = {}
    for u in units:
        of_block.setdefault(u.first, {})[u.keeps, u.cost, u.held_bytes] = u
    result: list[Unit] = []
    for _, run in groupby(chosen, key=lambda u: tuple(sorted(of_block[u.first]))):
        members = list(run)
        order = sorted(members, key=lambda u: -u.held_bytes)
        result += [of_block[place.first][u.keeps, u.cost, u.held_bytes] for place, u in zip(members, order)]
    is_as_good = peak_bytes(result) <= limit_bytes and total_cost(result) <= total_cost(chosen) * (1 + 1e-9)
    return result if is_as_good else chosen
