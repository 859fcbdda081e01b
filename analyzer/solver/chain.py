"""Dynamic programming over the division of a program into units.

The state is the place in the program and the bytes that the units before it hold, as in the dynamic programs of
Beaumont, Herrmann, Pallez (Aupy) and Shilova, "Optimal memory-aware backpropagation of deep join networks" (2020) and
"Optimal checkpointing for heterogeneous chains" (the tool rotor, 2019; persistent schedules: what is kept stays until
its backward). Here a stage that is kept or not is a unit that runs plainly, under a checkpoint, or under one that keeps
some products. Where theirs runs memory in equal steps, bytes are exact here; of more than `most_states` states at a
place, those that hold least and those that cost least in each of equal steps of memory go on. With fewer the plan is
the best.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .unit import Unit

# in as many equal steps of memory as rotor has by default (its mem_slots), the least that is held and the least that it
# costs
MOST_STATES = 2 * 500


def solve_chain(units: Sequence[Unit], limit_bytes: int, most_states: int = MOST_STATES) -> list[Unit] | None:
    """The cheapest division whose memory stays within ``limit_bytes``; None where there is none.

    Units come sorted into those that begin at each place; the plan begins at atom 0 and ends with the last unit.
    """
    by_first: dict[int, list[int]] = {}
    for i, u in enumerate(units):
        by_first.setdefault(u.first, []).append(i)
    if not units:
        return None
    goal = max(u.last for u in units) + 1
    arrived: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]] = {}
    fixed: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
    arrived[0] = [(np.zeros(1, dtype=np.int64), np.zeros(1), np.full(1, -1), np.full(1, -1))]
    for place in sorted({*by_first, goal}):
        if place not in arrived:
            continue
        held, cost, via, state = (np.concatenate(parts) for parts in zip(*arrived.pop(place)))
        keep = _best_states(held, cost, limit_bytes, most_states)
        fixed[place] = held, cost, via, state = held[keep], cost[keep], via[keep], state[keep]
        if place == goal:
            break
        for i in by_first[place]:
            u = units[i]
            fits = int(np.searchsorted(held, limit_bytes - u.work_bytes, side="right"))
            if fits:
                arrived.setdefault(u.last + 1, []).append(
                    (held[:fits] + u.held_bytes, cost[:fits] + u.cost, np.full(fits, i), np.arange(fits)))
    if goal not in fixed:
        return None
    return trace_back(units, fixed, goal)


def _best_states(held: np.ndarray, cost: np.ndarray, limit_bytes: int, most_states: int) -> np.ndarray:
    """The states to go on from; of too many, those that hold least and those that cost least in each step."""
    keep = undominated(held, cost)
    if len(keep) > most_states:
        step = held[keep] * (most_states // 2) // max(1, limit_bytes)
        changes = step[1:] != step[:-1]
        keep = keep[np.concatenate([[True], changes]) | np.concatenate([changes, [True]])]
    return keep


def undominated(held: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Indices of the states that no other beats in both, by rising memory."""
    order = np.lexsort((cost, held))
    best = np.minimum.accumulate(cost[order])
    keep: np.ndarray = order[np.concatenate([[True], cost[order][1:] < best[:-1]])[:len(order)]]
    return keep


def trace_back(units: Sequence[Unit], fixed: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
               goal: int) -> list[Unit]:
    """The units of the cheapest way to ``goal``; ``fixed``: each place's states (held, cost, last unit, one before)."""
    place = goal
    _, cost, _, _ = fixed[place]
    at = int(np.argmin(cost))
    found = []
    while place:
        _, _, via, state = fixed[place]
        u = units[int(via[at])]
        found.append(u)
        place, at = u.first, int(state[at])
    return found[::-1]


def least_limit(units: Sequence[Unit]) -> int:
    """The smallest limit under which there is a plan, to the byte, by the units' own account."""
    low, high = 0, sum(u.held_bytes for u in units) + max(u.work_bytes for u in units)
    by_first: dict[int, list[Unit]] = {}
    for u in units:
        by_first.setdefault(u.first, []).append(u)
    goal = max(u.last for u in units) + 1

    def is_enough(limit: int) -> bool:
        least = {0: 0}
        for place in sorted(by_first):
            if place in least:
                for u in by_first[place]:
                    if least[place] + u.work_bytes <= limit:
                        held = least[place] + u.held_bytes
                        if held < least.get(u.last + 1, held + 1):
                            least[u.last + 1] = held
        return goal in least

    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
