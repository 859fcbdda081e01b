"""V-Half and V-Min: schedules of two stages a rank that hold a half and a third of what 1F1B holds.

Source: Qi et al., Pipeline Parallelism with Controllable Memory (NeurIPS 2024, arXiv 2405.15362), and its authors'
implementation (sail-sg/zero-bubble-pipeline-parallelism, scheduler/zbv_greedy.py). Stages go down the ranks and up
again. Each rank repeats a *building block*, one micro-batch's four passes at fixed slots, every six slots: there is one
for each pass, and one for the weights' gradients of each stage. How long a block holds activations decides the peak.
Then passes of the warm-up and cool-down are moved to earlier free slots, as far as the peak allows.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

_REPEAT = 6
FORWARD, FORWARD_UP, BACKWARD, BACKWARD_UP, WEIGHT = range(5)  # of the second stage: FORWARD_UP, BACKWARD

#: Of a rank: for each kind of pass the slots of all micro-batches. The weights' gradients are in the order of the
#: backward passes that they belong to.
Slots = list[list[int]]


def _half(rank: int, ranks: int) -> tuple[int, ...]:
    """The building block of V-Half: slots of the four passes."""
    shift = 0 if ranks % 2 else 3  # so that no two passes of a rank come at once
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + shift + 2 * rank - 1, 6 * ranks + shift - rank - 2


def _third(rank: int, ranks: int) -> tuple[int, ...]:
    """The building block of V-Min."""
    shift = 0 if ranks % 3 else 2
    return rank, 2 * ranks - rank - 1, 2 * ranks + shift + rank, 4 * ranks + shift - rank - 1


BLOCKS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"VHalf": _half, "VMin": _third}


def list_v_schedule(name: str, ranks: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """Of each rank what it computes, in its order: kind, stage, micro-batch. ``name`` is one of `BLOCKS`. Of p ranks
    none holds more activations of stages than 2 ((p + 2) // 2) under V-Half and 2 ((p + 4) // 3) under V-Min, where
    1F1B holds 2p: huggingface.co/spaces/sail/pipeline-parallelism-with-controllable-memory, by the authors.

    >>> [f"{stage}{kind}{i}" for kind, stage, i in list_v_schedule("VHalf", ranks=2, micro_batches=1)[0]]
    ['0forward0', '3forward0', '3backward_input0', '3backward_weight0', '0backward_input0', '0backward_weight0']
    """
    all_slots = [[[start + _REPEAT * i for i in range(micro_batches)] for start in BLOCKS[name](rank, ranks)]
                 for rank in range(ranks)]
    all_slots = _squeeze(_pull([_add_weights(slots) for slots in all_slots], moves_first=True))
    all_slots = _pull([slots[:WEIGHT] for slots in all_slots], moves_first=False)
    return [list(_act(rank, ranks, _add_weights(slots[:WEIGHT]))) for rank, slots in enumerate(all_slots)]


def _passes(slots: Slots) -> list[tuple[int, int, int]]:
    """Slot, kind and number of each pass, in the order of slots."""
    return sorted((slot, kind, i) for kind, own in enumerate(slots) for i, slot in enumerate(own))


def _add_weights(slots: Slots) -> Slots:
    """The weights' gradients take the first slots that are free."""
    taken, waiting, found = {slot: kind for slot, kind, _ in _passes(slots)}, 0, []
    for slot in range(max(taken) + 1):
        if slot in taken:
            waiting += taken[slot] >= BACKWARD
        elif waiting:
            waiting -= 1
            found.append(slot)
    return [*slots, [*found, *range(max(taken) + 1, max(taken) + 1 + waiting)]]


def _peak(slots: Slots) -> int:
    """The most activations of a stage that a rank holds: from a forward pass until the weights' gradients are there."""
    whole = slots if len(slots) > WEIGHT else _add_weights(slots)
    held = most = 0
    for _, kind, _ in _passes(whole):
        held += (kind < BACKWARD) - (kind == WEIGHT)
        most = max(most, held)
    return most


def _needs(all_slots: Sequence[Slots], rank: int, kind: int, number: int) -> Iterator[tuple[int, int, int]]:
    """Rank, kind and number of the passes that one waits for."""
    if kind == WEIGHT:
        backward = [(kind, i) for _, kind, i in _passes(all_slots[rank][:WEIGHT]) if kind >= BACKWARD]
        yield rank, *backward[number]
        return
    other = rank + (-1 if kind in (FORWARD, BACKWARD) else 1)
    if 0 <= other < len(all_slots):
        yield other, kind, number
    if kind:
        yield rank, kind - 1, number
    if number:
        yield rank, kind, number - 1


def _pull(all_slots: list[Slots], moves_first: bool) -> list[Slots]:
    """Each pass of the warm-up (if asked) and of the cool-down at the first free slot at which what it needs is there,
    and the rank holds no more than the fullest one does.
    """
    most = max(map(_peak, all_slots))
    taken = [{slot for slot, _, _ in _passes(slots)} for slots in all_slots]
    first, last = all_slots[0][BACKWARD_UP][0], all_slots[0][FORWARD][-1]  # the steady part is between these
    for slot, rank, kind, number in sorted((slot, rank, kind, number) for rank, slots in enumerate(all_slots)
                                           for slot, kind, number in _passes(slots)):
        if first <= slot <= last or (slot < first and not moves_first):
            continue
        own = all_slots[rank][kind]
        needed = [all_slots[r][k][i] for r, k, i in _needs(all_slots, rank, kind, number)]
        for earlier in range(max(needed, default=-1) + 1, slot):
            if earlier in taken[rank]:
                continue
            own[number] = earlier
            if _peak(all_slots[rank]) <= most:
                taken[rank] = taken[rank] - {slot} | {earlier}
                break
            own[number] = slot
    return all_slots


def _squeeze(all_slots: list[Slots]) -> list[Slots]:
    """Without slots in which a rank waits for nothing: each pass as early as its order allows."""
    free = [0] * len(all_slots)
    found = [[list(own) for own in slots] for slots in all_slots]
    for _, rank, kind, number in sorted((slot, rank, kind, number) for rank, slots in enumerate(all_slots)
                                        for slot, kind, number in _passes(slots)):
        needed = (found[r][k][i] + 1 for r, k, i in _needs(all_slots, rank, kind, number))
        found[rank][kind][number] = max(free[rank], *needed, 0)
        free[rank] = found[rank][kind][number] + 1
    return found


def _act(rank: int, ranks: int, slots: Slots) -> Iterator[tuple[str, int, int]]:
    stages = (rank, 2 * ranks - 1 - rank, 2 * ranks - 1 - rank, rank)
    waiting: list[tuple[str, int, int]] = []
    for _, kind, number in _passes(slots):
        if kind == WEIGHT:
            yield waiting.pop(0)
            continue
        yield "forward" if kind < BACKWARD else "backward_input", stages[kind], number
        if kind >= BACKWARD:
            waiting.append(("backward_weight", stages[kind], number))
