"""A sequence of allocations that is replayed at once does what the same sequence does one by one."""
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.memory.allocator import AllocatorOptions, CachingAllocator
from analyzer.memory.allocator_segment import Opcode, Placements, hold

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.sampled_from([1, 512, 513, 4 * KIB, 300 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 21 * MIB, 64 * MIB])
STEP = st.one_of(st.tuples(st.just("alloc"), SIZES), st.tuples(st.just("free"), st.integers(0, 99)),
                 st.tuples(st.just("temporary"), SIZES),
                 st.tuples(st.just("held"), st.lists(SIZES, min_size=1, max_size=3).map(tuple)))
OPTIONS = st.sampled_from([AllocatorOptions(), AllocatorOptions(expandable_segments=True),
                           AllocatorOptions(max_split_size_mb=20), AllocatorOptions(roundup_power2_divisions=4)])


def compile_steps(steps, allocator):
    """The instructions of `CachingAllocator.replay` for steps of which a "free" names one of the live blocks."""
    instructions, live, slot = [], [], 0
    for kind, what in steps:
        if kind in ("alloc", "temporary"):
            instructions.append((Opcode.ALLOCATE, slot, allocator.rounded_bytes(what), what))
            if kind == "alloc":
                live.append(slot)
            else:
                instructions.append((Opcode.FREE, slot, None, None))
            slot += 1
        elif kind == "free" and live:
            instructions.append((Opcode.FREE, live.pop(what % len(live)), None, None))
        elif kind == "held":
            instructions.append(hold(what, tuple(map(allocator.rounded_bytes, what))))
    return instructions, slot


def run_one_by_one(instructions, allocator, top):
    """What `Placements` should say: addresses, sizes, and the highest use at a birth or while blocks are held."""
    blocks, given, best = {}, [], (top, -1, 0)
    for at, (opcode, slot, _, requested) in enumerate(instructions):
        if opcode is Opcode.FREE:
            allocator.free(blocks.pop(slot))
            continue
        has_grown = opcode is not Opcode.ALLOCATE
        taken = [allocator.allocate(nbytes) for nbytes in (requested if has_grown else [requested])]
        given += [(b.address, b.bytes) for b in taken]
        if allocator.allocated_bytes > best[0]:
            best = allocator.allocated_bytes, at, sum(b.bytes for b in taken) if has_grown else 0
        if has_grown:
            for block in taken:
                allocator.free(block)
        else:
            blocks[slot] = taken[0]
    return given, best, blocks


def books(allocator):
    return (allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes,
            allocator.peak_allocated_bytes, allocator.peak_requested_bytes, allocator.peak_reserved_bytes,
            allocator.snapshot())


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=60), st.lists(STEP, max_size=60), OPTIONS)
def test_replay_is_allocating_and_freeing(before, steps, options):
    one, other = CachingAllocator(options=options), CachingAllocator(options=options)
    for allocator in (one, other):  # what was there
        run_one_by_one(compile_steps(before, allocator)[0], allocator, 0)
    instructions, slots = compile_steps(steps, one)
    segments: list[tuple[int, str, int, int]] = []
    given_, best, left = run_one_by_one(instructions, one, 5 * MIB)
    placements, places = Placements(5 * MIB), [None] * slots
    other.observer = lambda *act: segments.append(act)
    other.replay(instructions, places, placements)
    assert segments == []  # it is all in the placements
    rounded = []
    for opcode, _, size, _ in instructions:
        if opcode is not Opcode.FREE:
            rounded += [size] if opcode is Opcode.ALLOCATE else [None] * len(size)
    assert [(a, placements.odd.get(i, rounded[i])) for i, a in enumerate(placements.addresses)] == given_
    assert (placements.top_bytes, placements.top_at, placements.top_workspace_bytes) == best
    assert books(one) == books(other)
    for slot, block in left.items():
        replayed = other.block_of(places[slot])
        assert (replayed.address, replayed.bytes, replayed.requested_bytes) == (block.address, block.bytes,
                                                                          block.requested_bytes)
        other.free(replayed)
    for block in left.values():
        one.free(block)
    assert books(one) == books(other)
