"""A sequence of allocations that is played at once does what the same sequence does one by one."""
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.memory.allocator import AllocatorOptions, CachingAllocator
from analyzer.memory.allocator_play import Held, Takings

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.sampled_from([1, 512, 513, 4 * KIB, 300 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 21 * MIB, 64 * MIB])
STEP = st.one_of(st.tuples(st.just("alloc"), SIZES), st.tuples(st.just("free"), st.integers(0, 99)),
                 st.tuples(st.just("temporary"), SIZES),
                 st.tuples(st.just("held"),
                           st.lists(SIZES, min_size=1, max_size=3).map(tuple)))
OPTIONS = st.sampled_from([
    AllocatorOptions(),
    AllocatorOptions(expandable_segments=True),
    AllocatorOptions(max_split_size_mb=20),
    AllocatorOptions(roundup_power2_divisions=4)
])


def compile_steps(steps, allocator):
    """The acts of `CachingAllocator.play` for steps of which a "free" names one of the live blocks."""
    acts, live, slot = [], [], 0
    for kind, what in steps:
        if kind == "alloc":
            acts.append((slot, allocator.rounded_bytes(what), what))
            live.append(slot)
            slot += 1
        elif kind == "free" and live:
            acts.append(live.pop(what % len(live)))
        elif kind == "temporary":
            acts.append((allocator.rounded_bytes(what), what))
        elif kind == "held":
            acts.append(Held.of(what, tuple(map(allocator.rounded_bytes, what))))
    return acts, slot


def run_one_by_one(acts, allocator, top):
    """What `Takings` should say: addresses, sizes, and the highest use at a birth or while blocks are held."""
    blocks, given, best = {}, [], (top, -1, 0)
    for at, act in enumerate(acts):
        if isinstance(act, int):
            allocator.free(blocks.pop(act))
            continue
        sizes = (act[2],) if len(act) == 3 else (act[1],) if len(act) == 2 else act.blocks
        taken = [allocator.allocate(nbytes) for nbytes in sizes]
        given += [(b.address, b.bytes) for b in taken]
        if allocator.allocated_bytes > best[0]:
            best = allocator.allocated_bytes, at, sum(b.bytes for b in taken) if len(act) == 4 else 0
        if len(act) == 3:
            blocks[act[0]] = taken[0]
        else:
            for block in taken:
                allocator.free(block)
    return given, best, blocks


def books(allocator):
    return (allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes,
            allocator.peak_allocated_bytes, allocator.peak_requested_bytes, allocator.peak_reserved_bytes,
            allocator.snapshot())


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=60), st.lists(STEP, max_size=60), OPTIONS)
def test_playing_is_allocating_and_freeing(before, steps, options):
    one, other = CachingAllocator(options=options), CachingAllocator(options=options)
    for allocator in (one, other):  # what was there
        run_one_by_one(compile_steps(before, allocator)[0], allocator, 0)
    acts, slots = compile_steps(steps, one)
    segments: list[tuple[int, str, int, int]] = []
    given_, best, left = run_one_by_one(acts, one, 5 * MIB)
    takings, places = Takings(5 * MIB), [None] * slots
    other.observer = lambda *act: segments.append(act)
    other.play(acts, places, takings, lambda *_: None)
    assert segments == []  # the takings tell it all
    rounded = [size for act in acts if not isinstance(act, int)
               for size in ((act[1],) if len(act) == 3 else (act[0],) if len(act) == 2 else (None,) * len(act.blocks))]
    assert [(a, takings.odd.get(i, rounded[i])) for i, a in enumerate(takings.addresses)] == given_
    assert (takings.top_bytes, takings.top_at, takings.top_workspace_bytes if takings.top_at >= 0 else 0) == best
    assert books(one) == books(other)
    for slot, block in left.items():
        played = other.block_of(places[slot])
        assert (played.address, played.bytes, played.requested_bytes) == (block.address, block.bytes,
                                                                          block.requested_bytes)
        other.free(played)
    for block in left.values():
        one.free(block)
    assert books(one) == books(other)
