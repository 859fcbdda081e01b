"""The simulated CUDA caching allocator: hand-derived cases of every rule, and books that always balance."""
import itertools
import pickle
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.errors import AnalyzerError, InputError
from analyzer.memory.allocator import AllocatorOptions, Block, CachingAllocator, DeviceOutOfMemoryError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
EXPANDABLE = AllocatorOptions(expandable_segments=True)


def states(allocator: CachingAllocator) -> list[list[tuple[str, int]]]:
    """Per segment, (state, MiB) of each block."""
    return [[(b["state"], b["size"] // MIB) for b in s["blocks"]] for s in allocator.snapshot()]


@pytest.mark.parametrize(("nbytes", "allocated", "reserved"), [
    (1, 512, 2 * MIB),
    (513, 1024, 2 * MIB),
    (MIB, MIB, 2 * MIB),  # the largest small request
    (MIB + 1, MIB + 512, 20 * MIB),  # the smallest large one
    (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),  # the last that shares a 20 MiB segment
    (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounds to 10 MiB: a segment of its own
    (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # the remainder, 2 MiB - 512, is split off
    (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # remainder 1 MiB + 512: split off
    (11 * MIB, 12 * MIB, 12 * MIB),  # remainder 1 MiB, not more: the block keeps it
    (3 * GIB + 1, 3 * GIB + 512, 3 * GIB + 2 * MIB)])
def test_first_allocation(nbytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(nbytes)
    assert (block.requested_bytes, block.bytes, block.stream) == (nbytes, allocated, 0)
    assert (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes) == (nbytes, allocated,
                                                                                                reserved)


@pytest.mark.parametrize(("nbytes", "allocated", "reserved"), [
    (1, 512, 2 * MIB),
    (MIB + 1, MIB + 512, 20 * MIB),
    (20 * MIB - 512, 20 * MIB - 512, 20 * MIB),  # a remainder of 512 bytes is split off
    (30 * MIB, 30 * MIB, 40 * MIB)])  # pages of 20 MiB
def test_first_allocation_in_expandable_segment(nbytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(options=EXPANDABLE)
    assert allocator.allocate(nbytes).bytes == allocated
    assert allocator.reserved_bytes == reserved


@pytest.mark.parametrize(("settings_string", "nbytes", "rounded"), [
    ("roundup_power2_divisions:4", 1, 512),
    ("roundup_power2_divisions:4", 1200, 1536),  # not above 4 * 512: to 512 as ever
    ("roundup_power2_divisions:4", 2100, 2560),  # 2048, 2560, 3072, 3584
    ("roundup_power2_divisions:4", 5 * MIB + 1, 6 * MIB),
    ("roundup_power2_divisions:1", 5 * MIB + 1, 5 * MIB + 512),
    # below the first: as the first
    ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 100 * MIB + 1, 100 * MIB + 512),
    ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 512 * MIB + 1, 768 * MIB),
    ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 2 * GIB + 1, 2 * GIB + 256 * MIB),
    ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 200 * GIB + 1, 208 * GIB),  # above the table: as its end
    ("roundup_power2_divisions:[128:8,512:1,2048:8]", 300 * MIB + 1, 300 * MIB + 512)])  # left out: not rounded
def test_roundup_power2_divisions(settings_string: str, nbytes: int, rounded: int) -> None:
    options = AllocatorOptions.from_string(settings_string)
    assert options.rounded_bytes(nbytes) == rounded
    if nbytes < GIB:
        assert CachingAllocator(options=options).allocate(nbytes).bytes in (rounded, options.segment_bytes(rounded))


def test_large_segment_size() -> None:
    allocator = CachingAllocator(options=AllocatorOptions(large_segment_size_mb=32))
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 32 * MIB
    allocator.allocate(1)  # small segments keep their 2 MiB
    assert allocator.reserved_bytes == 34 * MIB


@pytest.mark.parametrize(("request_mib", "taken_mib", "index"), [
    (12, 12, 1),
    (13, 14, 2),  # remainder 1 MiB: kept
    (15, 15, 0),  # remainder 15 MiB: split off
    (31, None, None)])  # none fits
def test_best_fit(request_mib: int, taken_mib: int | None, index: int | None) -> None:
    allocator = CachingAllocator()
    cached = [allocator.allocate(n * MIB) for n in (30, 12, 14)]
    for block in cached:
        allocator.free(block)
    block = allocator.allocate(request_mib * MIB)
    if index is None:
        assert allocator.reserved_bytes == (56 + 32) * MIB
    else:
        assert (block.address, block.bytes) == (cached[index].address, (taken_mib or 0) * MIB)
        assert allocator.reserved_bytes == 56 * MIB


def test_equal_sizes_are_taken_by_address() -> None:
    allocator = CachingAllocator()
    cached = [allocator.allocate(24 * MIB) for _ in range(4)]
    for index in (2, 0, 3, 1):
        allocator.free(cached[index])
    # each segment lies below the one before, and the lowest address comes first
    assert [allocator.allocate(24 * MIB).address for _ in range(4)] == [b.address for b in reversed(cached)]


def test_segments_go_downwards_in_ranges_of_32_mib() -> None:
    top = 1 << 40
    allocator = CachingAllocator(top_address=top)
    places = [(top - allocator.allocate(n * MIB).address) // MIB for n in (20, 512, 40, 1, 12, 10, 12)]
    # a range each for 20, 512 and 40 MiB; 2 MiB (of the small pool), 12 and 10 fill the lowest gap, the 24 MiB behind
    # 40; the last finds the 12 MiB behind the first
    assert places == [32, 32 + 512, 32 + 512 + 64, 32 + 512 + 24, 32 + 512 + 22, 32 + 512 + 10, 12]


def test_pools_do_not_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(MIB)  # 20 MiB lie free, but in the large pool
    assert allocator.reserved_bytes == 22 * MIB
    assert [s["segment_type"] for s in allocator.snapshot()] == ["large", "small"]


@pytest.mark.parametrize("options", [AllocatorOptions(), EXPANDABLE], ids=["native", "expandable"])
def test_streams_do_not_share(options: AllocatorOptions) -> None:
    allocator = CachingAllocator(options=options)
    first = allocator.allocate(20 * MIB, stream=1)
    allocator.free(first)
    assert allocator.allocate(20 * MIB, stream=2).address != first.address
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.allocate(20 * MIB, stream=1).address == first.address
    assert allocator.reserved_bytes == 40 * MIB
    assert [s["stream"] for s in allocator.snapshot()] == [2, 1]


@pytest.mark.parametrize("options", [AllocatorOptions(), EXPANDABLE], ids=["native", "expandable"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_neighbours_merge_in_any_order(order: tuple[int, ...], options: AllocatorOptions) -> None:
    allocator = CachingAllocator(options=options)
    blocks = [allocator.allocate(512 * KIB) for _ in range(4)]
    live = [True] * 4
    for index in order:
        allocator.free(blocks[index])
        live[index] = False
        # live blocks stay apart, each run of free ones is one
        expected = [size for is_live, run in itertools.groupby(live) for size in (
                        [1] * len(list(run)) if is_live else [len(list(run))])]
        assert [b["size"] // (512 * KIB) for b in allocator.snapshot()[0]["blocks"]] == expected
    assert states(allocator) == [[("inactive", 2)]]


def test_empty_cache_keeps_segments_in_use() -> None:
    allocator = CachingAllocator()
    idle, kept, split = allocator.allocate(30 * MIB), allocator.allocate(12 * MIB), allocator.allocate(2 * MIB)
    allocator.free(idle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 32 * MIB
    allocator.free(kept)
    allocator.free(split)
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.peak_reserved_bytes) == (0, 32 * MIB,
                                                                                                    62 * MIB)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.snapshot()) == (0, [])
    # no stale address comes back
    assert allocator.allocate(30 * MIB).address not in {b.address for b in (idle, kept, split)}


def test_empty_blocks_hold_nothing() -> None:
    allocator = CachingAllocator()
    empty = [allocator.allocate(0) for _ in range(3)]
    full = allocator.allocate(1)
    assert [(b.bytes, b.requested_bytes) for b in empty] == [(0, 0)] * 3
    assert len({b.address for b in [*empty, full]}) == 4
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512, 2 * MIB)
    for block in empty:
        allocator.free(block)
    assert allocator.allocated_bytes == 512
    with pytest.raises(InputError, match="freed a second time"):
        allocator.free(empty[0])
    with pytest.raises(InputError, match="nbytes=-1: must not be negative"):
        allocator.allocate(-1)


def test_full_device_gives_back_the_cache_and_retries() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    idle, _ = allocator.allocate(12 * MIB), allocator.allocate(2 * MIB)
    allocator.free(idle)
    allocator.allocate(19 * MIB)  # takes 20 MiB: 32 + 20 > 40, but without the idle 12 it is just 40
    assert (allocator.reserved_bytes, allocator.alloc_retry_count) == (40 * MIB, 1)


def test_out_of_memory() -> None:
    allocator = CachingAllocator(capacity_bytes=30 * MIB)
    live = allocator.allocate(12 * MIB)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        allocator.allocate(19 * MIB)  # takes 20 MiB
    error = caught.value
    assert isinstance(error, AnalyzerError) and isinstance(error, MemoryError)
    assert (error.requested_bytes, error.short_bytes) == (19 * MIB, 2 * MIB)
    assert (error.allocated_bytes, error.reserved_bytes, error.capacity_bytes) == (12 * MIB, 12 * MIB, 30 * MIB)
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 19,922,944 bytes, 2,097,152 bytes short; of 31,457,280 bytes 12,582,912 "
        "are allocated "
        "and 0 reserved but unused. Try a smaller batch, activation checkpointing or a device with more memory")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.short_bytes) == (str(error), error.short_bytes)
    # nothing is lost
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (12 * MIB, 12 * MIB)
    allocator.allocate(18 * MIB)
    allocator.free(live)


def test_out_of_memory_by_fragmentation() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    blocks = [allocator.allocate(n * MIB) for n in (9, 9, 9, 9)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    with pytest.raises(DeviceOutOfMemoryError,
                       match="10,485,760 bytes short.*Fragmentation is the cause; expandable_segments:True"):
        allocator.allocate(10 * MIB)  # 22 MiB are free, in pieces of 9 and 2 and 9 and 2


def test_memory_fraction() -> None:
    options = AllocatorOptions(per_process_memory_fraction=0.5)
    allocator = CachingAllocator(80 * MIB, options)
    allocator.allocate(40 * MIB)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        allocator.allocate(1)
    assert (caught.value.short_bytes, caught.value.capacity_bytes) == (2 * MIB, 40 * MIB)
    with pytest.raises(InputError,
                       match="per_process_memory_fraction=0.5: a share of no known size; give capacity_bytes"):
        CachingAllocator(options=options)


@pytest.mark.parametrize(("throws", "reserved_mib"), [(False, 0), (True, 30)])
def test_throw_on_cudamalloc_oom_keeps_the_cache(throws: bool, reserved_mib: int) -> None:
    allocator = CachingAllocator(80 * MIB,
                                 AllocatorOptions(per_process_memory_fraction=0.5, throw_on_cudamalloc_oom=throws))
    allocator.free(allocator.allocate(30 * MIB))
    with pytest.raises(DeviceOutOfMemoryError):
        allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == reserved_mib * MIB


@pytest.mark.parametrize(("cached_mib", "request_mib", "taken_mib"), [
    (40, 20, None),  # unsplittable blocks serve no request below the limit
    (40, 30, 40),  # at or above it they do, whole
    (44, 25, 44),  # 44 < 25 + 20
    (44, 24, None),  # 44 is not below 24 + 20
    (22, 12, 12)])  # below the limit all is as ever
def test_max_split_size(cached_mib: int, request_mib: int, taken_mib: int | None) -> None:
    allocator = CachingAllocator(options=AllocatorOptions(max_split_size_mb=24))
    cached = allocator.allocate(cached_mib * MIB)
    allocator.free(cached)
    block = allocator.allocate(request_mib * MIB)
    if taken_mib is None:
        assert block.address != cached.address
        assert allocator.reserved_bytes == (cached_mib + request_mib) * MIB
    else:
        assert (block.address, block.bytes, allocator.reserved_bytes) == (cached.address, taken_mib * MIB,
                                                                          cached_mib * MIB)


def test_max_non_split_rounding() -> None:
    allocator = CachingAllocator(options=AllocatorOptions(max_split_size_mb=24, max_non_split_rounding_mb=21))
    allocator.free(allocator.allocate(44 * MIB))
    assert allocator.allocate(24 * MIB).bytes == 44 * MIB  # 44 < 24 + 21


@pytest.mark.parametrize(("capacity_mib", "idle_mib", "request_mib", "reserved_mib"), [
    (80, (60, 10), 28, 38),  # the 60 MiB are too large to serve 28, but make room for them
    (170, (60, 90, 10), 28, 128),  # of two such the smaller one
    (100, (40, 30, 10), 50, 60),  # the two unsplittable ones together
    (100, (30, 60, 10), 26, 100)])  # the best fit is taken at once: nothing is released
def test_oversize_blocks_go_before_the_rest(capacity_mib: int, idle_mib: tuple[int, ...], request_mib: int,
                                            reserved_mib: int) -> None:
    allocator = CachingAllocator(capacity_mib * MIB, AllocatorOptions(max_split_size_mb=24))
    for block in [allocator.allocate(n * MIB) for n in idle_mib]:
        allocator.free(block)
    allocator.allocate(request_mib * MIB)
    assert (allocator.reserved_bytes, allocator.alloc_retry_count) == (reserved_mib * MIB, 0)


@pytest.mark.parametrize(("threshold", "fraction", "reserved_mib"), [
    # 40 and 50 MiB lie idle, the 40 for longer; with 60 MiB in use 150 are reserved when 70 more are asked for.
    (0.20, 0.9, 220),  # 150 of at most 0.2 * 900: nothing to do
    (0.13, 0.9, 180),  # 33 MiB too many: the older one is enough
    (0.10, 0.9, 130),  # 60 MiB too many: both
    (0.10, 1.0, 220)])  # without a memory fraction PyTorch collects nothing
def test_garbage_collection(threshold: float, fraction: float, reserved_mib: int) -> None:
    options = AllocatorOptions(garbage_collection_threshold=threshold, per_process_memory_fraction=fraction)
    allocator = CachingAllocator(1000 * MIB, options)
    first, second = allocator.allocate(40 * MIB), allocator.allocate(50 * MIB)
    allocator.free(first)
    allocator.allocate(60 * MIB)
    allocator.free(second)
    assert allocator.reserved_bytes == 150 * MIB
    allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == reserved_mib * MIB


def test_expandable_segment_grows_by_what_its_end_lacks() -> None:
    allocator = CachingAllocator(options=EXPANDABLE)
    first = allocator.allocate(30 * MIB)  # two pages of 20 MiB
    second = allocator.allocate(25 * MIB)  # 10 MiB are left: one more page
    assert (second.address - first.address, allocator.reserved_bytes) == (30 * MIB, 60 * MIB)
    assert states(allocator) == [[("active_allocated", 30), ("active_allocated", 25), ("inactive", 5)]]
    assert allocator.snapshot()[0]["is_expandable"]


def test_expandable_pages_are_given_back_and_filled_first() -> None:
    allocator = CachingAllocator(options=EXPANDABLE)
    first = allocator.allocate(30 * MIB)
    allocator.allocate(15 * MIB)
    allocator.free(first)
    # pages [0, 20), [20, 40), [40, 60); live: [30, 45). Only the first page is free as a whole.
    assert allocator.fragmented_bytes == (10 + 15) * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB
    assert states(allocator) == [[("inactive", 10), ("active_allocated", 15), ("inactive", 15)]]
    again = allocator.allocate(25 * MIB)  # the page that is missing and 5 MiB of the next
    assert (again.address, allocator.reserved_bytes) == (first.address, 60 * MIB)


def test_expandable_best_fit_spares_the_end() -> None:
    allocator = CachingAllocator(options=EXPANDABLE)
    first = allocator.allocate(15 * MIB)
    allocator.allocate(15 * MIB)
    allocator.free(first)  # free: 15 MiB at the start, 10 MiB at the end, which could grow
    assert allocator.allocate(5 * MIB).address == first.address


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_expandable_range_goes_when_its_last_page_does(order: tuple[int, int]) -> None:
    allocator = CachingAllocator(options=EXPANDABLE)
    blocks = [allocator.allocate(20 * MIB) for _ in range(2)]
    for index in order:
        allocator.free(blocks[index])
        allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.allocate(20 * MIB).address not in {b.address for b in blocks}


def test_expandable_out_of_memory() -> None:
    allocator = CachingAllocator(50 * MIB, EXPANDABLE)
    block = allocator.allocate(30 * MIB)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        allocator.allocate(15 * MIB)  # 10 MiB are left of the second page; the third does not fit
    assert caught.value.short_bytes == 10 * MIB
    with pytest.raises(DeviceOutOfMemoryError):
        allocator.allocate(500 * MIB)  # beyond the address range
    allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.snapshot()) == (0, [])


def test_expandable_without_capacity_has_no_bound() -> None:
    allocator, nbytes = CachingAllocator(options=EXPANDABLE), 100 << 40
    assert [allocator.allocate(nbytes).bytes for _ in range(2)] == [nbytes] * 2
    assert allocator.reserved_bytes == 2 * -(-nbytes // (20 * MIB)) * 20 * MIB


def test_snapshot_has_pytorchs_form() -> None:
    allocator = CachingAllocator(top_address=0x1000 + 32 * MIB)
    allocator.allocate(1000, stream=3)
    assert allocator.snapshot(device=2) == [{"device": 2, "address": 0x1000, "total_size": 2 * MIB,
                                             "allocated_size": 1024, "active_size": 1024, "requested_size": 1000,
                                             "stream": 3, "segment_type": "small", "segment_pool_id": (0, 0),
                                             "is_expandable": False, "frames": [],
                                             "blocks": [{"address": 0x1000, "size": 1024, "requested_size": 1000,
                                                         "state": "active_allocated", "frames": []}, {
        "address": 0x1400, "size": 2 * MIB - 1024, "requested_size": 0, "state": "inactive", "frames": []}]}]


def test_snapshot_is_read_by_pytorchs_own_viewer() -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    allocator = CachingAllocator()
    allocator.allocate(30 * MIB)
    allocator.free(allocator.allocate(2 * MIB))
    summary = viewer.segsum({"segments": allocator.snapshot(), "device_traces": []})  # it checks the sums
    assert "segments: 2" in summary and "total_reserved: 50.0MiB" in summary and "total_allocated: 30.0MiB" in summary


def test_double_free() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(1000)
    allocator.free(block)
    again = allocator.allocate(1000)
    assert again.address == block.address
    with pytest.raises(InputError, match=r"Block\(0x6[0-9a-f]+, requested_bytes=1000, .* is freed a second time"):
        allocator.free(block)
    assert allocator.allocated_bytes == 1024  # the new owner of the address still has it
    assert (block.requested_bytes, block.bytes) == (1000, 1024)


@pytest.mark.parametrize("nbytes", [0, 1])
def test_block_of_another_allocator(nbytes: int) -> None:
    mine, other = CachingAllocator(), CachingAllocator()
    block = other.allocate(nbytes)
    with pytest.raises(InputError, match="came from another allocator"):
        mine.free(block)
    other.free(block)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"capacity_bytes": 0}, "capacity_bytes=0: must be positive, or None for no limit"),
    ({"top_address": 100}, "top_address=100: must be a positive multiple of 512")])
def test_bad_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as caught:
        CachingAllocator(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(("text", "options"), [
    ("", AllocatorOptions()),
    ("expandable_segments:True,max_split_size_mb:128",
     AllocatorOptions(expandable_segments=True, max_split_size_mb=128)),
    (" max_split_size_mb : 128 ,", AllocatorOptions(max_split_size_mb=128)),
    ("roundup_power2_divisions:8", AllocatorOptions(roundup_power2_divisions=8)),
    ("roundup_power2_divisions:[256:1,>:8],garbage_collection_threshold:0.6",
     AllocatorOptions(roundup_power2_divisions={256: 1, ">": 8}, garbage_collection_threshold=0.6)),
    ("max_split_size_mb:12,large_segment_size_mb:12,max_non_split_rounding_mb:16",  # in any order
     AllocatorOptions(max_split_size_mb=12, large_segment_size_mb=12, max_non_split_rounding_mb=16)),
    ("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True",
     AllocatorOptions(per_process_memory_fraction=0.5, throw_on_cudamalloc_oom=True)),
    ("backend:native,pinned_num_register_threads:8,release_lock_on_cudamalloc:True", AllocatorOptions())])
def test_options_from_string(text: str, options: AllocatorOptions) -> None:
    assert AllocatorOptions.from_string(text) == options
    assert hash(AllocatorOptions.from_string(text)) == hash(options)
    assert AllocatorOptions.from_string(text).text == text
    assert AllocatorOptions.from_string(options.text) == options


REFUSED = [("max_split_size_mb:19", "max_split_size_mb=19: must be None or at least large_segment_size_mb, 20"),
           ("max_non_split_rounding_mb:3",
            "max_non_split_rounding_mb=3: must be None or at least large_segment_size_mb, 20"),
           ("large_segment_size_mb:10", "large_segment_size_mb=10: must be above 10"),
           ("garbage_collection_threshold:1.0",
            "garbage_collection_threshold=1.0: must lie between 0 and 1; 0 switches it off"),
           ("roundup_power2_divisions:3", "roundup_power2_divisions=3: must be a power of two"),
           ("roundup_power2_divisions:0", "roundup_power2_divisions=0: must be a power of two"),
           ("roundup_power2_divisions:[256:3]",
            "roundup_power2_divisions={256: 3}: the divisions 3 must be 0 or a power of two"),
           ("roundup_power2_divisions:[3:2]",
            "roundup_power2_divisions={3: 2}: the boundary 3 must be '>' or a power of two, in MiB"),
           ("expandable_segments:true", "expandable_segments:true: must be True or False"),
           ("max_split_size_mb", "'max_split_size_mb' is not of the form key:value"),
           ("max_split_size_mb:many", "max_split_size_mb:many: invalid literal for int() with base 10: 'many'"),
           ("roundup_power2_divisions:[256:1", "roundup_power2_divisions:[256:1: lacks its closing bracket ']'")]


@pytest.mark.parametrize(("text", "message"), [
    *REFUSED, ("per_process_memory_fraction:1.5", "per_process_memory_fraction=1.5: must lie between 0 and 1"),
    ("roundup_power2_divisions:[256]", "has the entry '256', which is not MIB:DIVISIONS or >:DIVISIONS"),
    ("backend:cudaMallocAsync",
     "only backend:native is simulated; with cudaMallocAsync the CUDA driver pools the memory"),
    ("max_split:128", "unknown key 'max_split'; use one of expandable_segments, garbage_collection_threshold, ")])
def test_refused_settings(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        AllocatorOptions.from_string(text)
    assert str(caught.value).startswith(f"allocator settings {text!r}: ")
    assert message in str(caught.value)


def test_pytorch_refuses_and_accepts_the_same_settings() -> None:
    torch = pytest.importorskip("torch")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        pytest.skip("large_segment_size_mb came with PyTorch 2.11")
    parse = torch._C._accelerator_setAllocatorSettings
    try:
        for text, _ in REFUSED:
            with pytest.raises((ValueError, RuntimeError)):
                parse(text)
        for text in ("max_split_size_mb:20,", "max_split_size_mb:12,large_segment_size_mb:12",
                     "roundup_power2_divisions:[256:0,>:8]"):
            parse(text)
            AllocatorOptions.from_string(text)
    finally:
        parse("")


SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, MIB), st.integers(1, 40 * MIB),
                  st.sampled_from([512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 11 * MIB, 20 * MIB,
                                   24 * MIB, 45 * MIB]))
STEP = st.one_of(st.tuples(st.just("allocate"), SIZES, st.sampled_from([0, 0, 0, 1])),
                 st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
                 st.tuples(st.sampled_from(["empty_cache", "allocate"]), st.just(0), st.just(0)))
# long ones too, which lists() alone seldom makes
STEPS = st.lists(STEP, min_size=30, max_size=100) | st.lists(STEP, max_size=30)
OPTIONS = st.builds(AllocatorOptions, expandable_segments=st.booleans(),
                    max_split_size_mb=st.sampled_from([None, None, 24, 25, 40]),
                    roundup_power2_divisions=st.sampled_from([None, None, 1, 4, {8: 2, 16: 8, ">": 1}]),
                    garbage_collection_threshold=st.sampled_from([0.0, 0.3, 0.8]),
                    large_segment_size_mb=st.sampled_from([20, 20, 12, 24]),
                    per_process_memory_fraction=st.sampled_from([1.0, 0.75]))


def check_books(allocator: CachingAllocator, live: list[Block]) -> None:
    snapshot = allocator.snapshot()
    end_of_last = 0
    for segment in snapshot:
        assert segment["address"] >= end_of_last  # segments lie apart
        end_of_last = segment["address"]
        was_free = False
        for block in segment["blocks"]:
            assert block["address"] == end_of_last and block["size"] > 0  # blocks tile their segment, so none overlap
            end_of_last += block["size"]
            is_free = block["state"] == "inactive"
            assert not (was_free and is_free)  # free neighbours are merged
            was_free = is_free
        assert segment["total_size"] == end_of_last - segment["address"]
    held = sorted((b.address, b.bytes, b.requested_bytes) for b in live if b.bytes)
    assert held == sorted((b["address"], b["size"], b["requested_size"]) for s in snapshot for b in s["blocks"]
                          if b["state"] == "active_allocated")
    assert all(b.bytes >= b.requested_bytes and b.bytes % 512 == 0 and b.address % 512 == 0 for b in live)
    assert len({b.address for b in live}) == len(live)
    assert allocator.reserved_bytes == sum(s["total_size"] for s in snapshot)
    assert allocator.allocated_bytes == sum(s["allocated_size"] for s in snapshot) == sum(b.bytes for b in live)
    assert allocator.requested_bytes == sum(b.requested_bytes for b in live)
    assert allocator.peak_allocated_bytes >= allocator.allocated_bytes
    assert allocator.peak_requested_bytes >= allocator.requested_bytes
    assert allocator.peak_reserved_bytes >= allocator.reserved_bytes
    assert allocator.capacity_bytes is None or allocator.peak_reserved_bytes <= allocator.capacity_bytes
    assert 0 <= allocator.fragmented_bytes <= allocator.reserved_bytes - allocator.allocated_bytes


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, options=OPTIONS, capacity_mib=st.sampled_from([64, 150, 1000]))
def test_books_balance(steps: list[tuple[str, int, int]], options: AllocatorOptions, capacity_mib: int) -> None:
    allocator = CachingAllocator(capacity_mib * MIB, options)
    live: list[Block] = []
    addresses = set()
    peak_bytes = 0
    for action, value, stream in steps:
        if action == "allocate":
            try:
                live.append(allocator.allocate(value, stream))
                addresses.add(live[-1].address)
            except DeviceOutOfMemoryError as error:
                assert error.short_bytes > 0 and error.reserved_bytes == allocator.reserved_bytes
        elif action == "free" and live:
            allocator.free(live.pop(value % len(live)))
        elif action == "empty_cache":
            fragmented_bytes = allocator.fragmented_bytes
            allocator.empty_cache()
            assert allocator.reserved_bytes == allocator.allocated_bytes + fragmented_bytes
        peak_bytes = max(peak_bytes, allocator.allocated_bytes)
        check_books(allocator, live)
    assert allocator.peak_allocated_bytes == peak_bytes
    for block in live:
        allocator.free(block)
    check_books(allocator, [])
    assert all(len(s["blocks"]) == 1 for s in allocator.snapshot())
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.snapshot()) == (0, [])
    assert allocator.allocate(1).address not in addresses  # ranges that were given back are gone


@pytest.mark.parametrize("options", [AllocatorOptions(), EXPANDABLE])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["allocator_first", "blocks_first"])
def test_a_deep_copy_is_apart_however_many_blocks_there_are(options, order):
    allocator = CachingAllocator(options=options)
    blocks = [allocator.allocate(512) for _ in range(5000)] + [allocator.allocate(0)]
    for block in blocks[:5000:2]:
        allocator.free(block)
    pair = deepcopy(tuple((allocator, blocks)[i] for i in order))
    other, theirs = (pair[i] for i in order)
    assert other.snapshot() == allocator.snapshot()
    assert [other.allocate(n).address for n in (512, 1024, 8 * MIB)] == [
        allocator.allocate(n).address for n in (512, 1024, 8 * MIB)]
    for block in theirs[1::2] + theirs[-1:]:
        other.free(block)
    used = 512 + 1024 + 8 * MIB
    assert (other.allocated_bytes, allocator.allocated_bytes) == (used, used + 2500 * 512)


@pytest.mark.parametrize("capacity_bytes", [None, 64 * MIB])
def test_a_copy_takes_segments_where_the_allocator_would(capacity_bytes):
    """A segment of 2 MiB goes into the gap behind that of 20 MiB, and one that exceeds the limit is refused alike."""
    allocator = CachingAllocator(capacity_bytes=capacity_bytes)
    allocator.allocate(20 * MIB)
    copied, _ = allocator.copy(is_limited=True)
    assert [a.allocate(512).address for a in (copied, allocator)] == [allocator.snapshot()[-1]["address"]] * 2
    if capacity_bytes is not None:
        for limited in (allocator, copied):
            with pytest.raises(DeviceOutOfMemoryError):
                limited.allocate(60 * MIB)
