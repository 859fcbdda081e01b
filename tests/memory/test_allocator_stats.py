"""Statistics of the allocator, as ``torch.cuda.memory_stats`` gives them: derived by hand from the rules of c10."""
from analyzer.memory.allocator import AllocatorOptions, CachingAllocator, DeviceOutOfMemoryError

MIB = 1 << 20


def stat(current, peak, allocated, freed):
    return {"current": current, "peak": peak, "allocated": allocated, "freed": freed}


def test_blocks_segments_and_free_parts_are_counted():
    allocator = CachingAllocator(counts=True)
    small = allocator.allocate(100)         # 512 bytes of a segment of 2 MiB: the rest is a free part
    large = allocator.allocate(3 * MIB)     # of a segment of 20 MiB, whose rest of 17 MiB is one too
    second = allocator.allocate(4 * MIB)    # of that rest: it is one part still, of 13 MiB
    stats = allocator.stats.to_dict()
    assert stats["allocation"] == stats["active"] == {
        "all": stat(3, 3, 3, 0), "small_pool": stat(1, 1, 1, 0), "large_pool": stat(2, 2, 2, 0)}
    assert stats["segment"]["all"] == stat(2, 2, 2, 0) and stats["reserved_bytes"]["large_pool"]["current"] == 20 * MIB
    assert stats["inactive_split"]["all"] == stat(2, 2, 2, 0)
    # 2 MiB less 512 bytes; 17 MiB, of which 4 MiB were freed of that name
    assert stats["inactive_split_bytes"]["large_pool"] == stat(13 * MIB, 17 * MIB, 17 * MIB, 4 * MIB)
    assert stats["requested_bytes"]["small_pool"] == stat(100, 100, 100, 0)
    assert stats["allocated_bytes"]["all"]["current"] == allocator.allocated_bytes == 7 * MIB + 512

    allocator.free(large)                   # 3 MiB at the low end: a second free part of the large segment
    assert allocator.stats.to_dict()["inactive_split"]["large_pool"] == stat(2, 2, 2, 0)
    allocator.free(second)                  # it merges with both: the whole segment is free, and no part
    stats = allocator.stats.to_dict()
    assert stats["inactive_split"]["large_pool"] == stat(0, 2, 2, 2)
    assert stats["inactive_split_bytes"]["large_pool"]["current"] == 0
    allocator.empty_cache()
    allocator.free(small)
    stats = allocator.stats.to_dict()
    assert stats["segment"]["all"] == stat(1, 2, 2, 1) and stats["num_sync_all_streams"] == 1
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (2, 1)
    assert not allocator.stats.is_partial

    allocator.reset_peaks()
    allocator.stats.reset_accumulated()
    stats = allocator.stats.to_dict()
    assert stats["allocation"]["all"] == stat(0, 0, 0, 0) and stats["segment"]["all"] == stat(1, 1, 0, 0)
    allocator.free(allocator.allocate(10))
    assert allocator.stats.to_dict()["allocation"]["all"] == stat(0, 1, 1, 1)


def test_expandable_segments_have_no_free_parts_and_pages_are_no_segments():
    allocator = CachingAllocator(options=AllocatorOptions(expandable_segments=True), counts=True)
    allocator.free(allocator.allocate(5 * MIB))
    stats = allocator.stats.to_dict()
    assert stats["inactive_split"]["all"] == stats["segment"]["all"] == stat(0, 0, 0, 0)
    assert stats["reserved_bytes"]["all"] == stat(20 * MIB, 20 * MIB, 20 * MIB, 0) and stats["num_device_alloc"] == 1


def test_failures_retries_and_blocks_that_are_never_cut_are_counted():
    allocator = CachingAllocator(40 * MIB, AllocatorOptions(max_split_size_mb=20), counts=True)
    allocator.free(allocator.allocate(30 * MIB))
    try:
        allocator.allocate(50 * MIB)
    except DeviceOutOfMemoryError:
        pass
    stats = allocator.stats.to_dict()
    assert (stats["num_alloc_retries"], stats["num_ooms"], stats["max_split_size"]) == (1, 1, 20 * MIB)
    assert stats["oversize_allocations"] == stats["oversize_segments"] == stat(0, 1, 1, 1)


def test_a_fraction_that_is_set_later_is_a_limit():
    allocator = CachingAllocator(total_bytes=lambda: 100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.set_fraction(0.5)
    try:
        allocator.allocate(61 * MIB)
    except DeviceOutOfMemoryError as error:
        assert (error.capacity_bytes, error.short_bytes) == (50 * MIB, 12 * MIB)  # 62 MiB in whole steps of 2
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 50 * MIB and allocator.memory_fraction == 0.5
