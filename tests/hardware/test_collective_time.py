"""Time of collectives: order of size from the links, what must grow with what, and what is refused."""
import dataclasses
import math

import pytest

from analyzer.errors import InputError
from analyzer.hardware import ClusterSpec, DeviceSpec, LinkSpec, cluster_of, find_cluster, find_device
from analyzer.hardware.kernel_time import NO_TIME
from analyzer.hardware.kernel_time.collective import COLLECTIVE_KINDS, collective_time, find_path, host_copy_time

GIB = 2**30
H100, A100, PAIRS = find_cluster("dgx_h100"), find_cluster("dgx_a100"), find_cluster("a100_pcie_pairs")
NVL72 = find_cluster("gb200_nvl72")


def seconds(kind: str, nbytes: int, ranks: int, cluster: ClusterSpec, **options: object) -> float:
    time = collective_time(kind, nbytes, ranks, cluster, **options)  # type: ignore[arg-type]
    assert time is not None
    return time.seconds


@pytest.mark.parametrize(("cluster", "ranks", "per_host", "medium", "bandwidth", "domains"), [
    (H100, 8, 8, "nvlink", 450e9, 1),
    (PAIRS, 2, 2, "nvlink", 300e9, 1),                     # the two cards of a bridge
    (PAIRS, 4, 4, "pcie", 32e9, 1),                        # two pairs cross the bus
    (H100, 16, 8, "infiniband", 8 * 50e9, 2),              # eight rings, each through its own card
    (H100, 16, 1, "infiniband", 50e9, 16),                 # one rank of each host: one card
    (NVL72, 72, 4, "nvlink", 900e9, 1),                    # the rack is one domain
    (NVL72, 144, 4, "infiniband", 72 * 50e9, 2),
    (NVL72, 36, 1, "infiniband", 18 * 50e9, 2),            # one rank of each tray, 18 trays in a rack
    (find_cluster("mi300x_platform"), 2, 2, "nvlink", 64e9, 1),   # one of seven links
    (find_cluster("mi300x_platform"), 8, 8, "nvlink", 448e9, 1),
    (find_cluster("dgx1_v100"), 4, 4, "nvlink", 100e9, 1),        # four rings of 25 GB/s
    (find_cluster("l40s_host_memory"), 4, 4, "host", 32e9, 1),
    (find_cluster("l40s_host_memory"), 8, 8, "sockets", 32e9, 1)])
def test_the_slowest_link_of_a_group(cluster: ClusterSpec, ranks: int, per_host: int, medium: str, bandwidth: float,
                                     domains: int) -> None:
    path = find_path(cluster, ranks, per_host)
    assert path is not None
    assert (path.medium, path.bandwidth, path.domains) == (medium, pytest.approx(bandwidth), domains)


# Bus bandwidth of large buffers as published: NVIDIA nccl-tests on DGX and tables of stas00/ml-engineering, GB/s.
@pytest.mark.parametrize(("name", "kind", "ranks", "factor", "published"), [
    ("dgx_a100", "all_reduce", 8, 1.75, 230), ("dgx_h100", "all_reduce", 8, 1.75, 475),
    ("dgx_h100", "all_gather", 8, 0.875, 360), ("dgx_h200", "reduce_scatter", 8, 0.875, 363),
    ("aws_p5en", "all_reduce", 32, 2 * 31 / 32, 365), ("mi300x_platform", "all_reduce", 8, 1.75, 313)])
def test_large_buffers_reach_the_published_bandwidth(name: str, kind: str, ranks: int, factor: float,
                                                     published: float) -> None:
    nbytes = 8 * GIB
    rate = factor * nbytes / seconds(kind, nbytes, ranks, find_cluster(name)) / 1e9
    assert rate == pytest.approx(published, rel=0.12)


def test_switches_that_add_up_beat_the_ring_but_not_on_bytes() -> None:
    half = seconds("all_reduce", GIB, 8, H100)
    assert half < 0.85 * seconds("all_reduce", GIB, 8, H100, dtype="int8")
    assert seconds("all_reduce", GIB, 4, H100) == seconds("all_reduce", GIB, 4, H100, dtype="torch.int8")
    assert H100.link is not None
    ring = dataclasses.replace(H100, link=dataclasses.replace(H100.link, reduces_in_switch=False))
    assert seconds("all_reduce", GIB, 8, ring) == seconds("all_reduce", GIB, 8, H100, dtype="int8")


@pytest.mark.parametrize("cluster", [H100, A100, PAIRS, NVL72, find_cluster("l40s_host_memory")], ids=repr)
@pytest.mark.parametrize("kind", [kind for kind in COLLECTIVE_KINDS if kind != "barrier"])
def test_more_bytes_never_take_less(kind: str, cluster: ClusterSpec) -> None:
    times = [seconds(kind, 2**power, 4, cluster) for power in range(1, 36)]
    assert times == sorted(times)
    assert times[-1] / times[-2] == pytest.approx(2, rel=0.1)  # the rate is all there is


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
@pytest.mark.parametrize("nbytes", [1024, GIB])
def test_a_second_host_never_makes_it_faster(kind: str, nbytes: int) -> None:
    inside = seconds(kind, nbytes, 8, H100)
    assert inside < seconds(kind, nbytes, 8, H100, ranks_per_host=4) <= (
        seconds(kind, nbytes, 8, H100, ranks_per_host=1))


def test_what_bounds_it_and_what_is_free() -> None:
    small, large = collective_time("all_gather", 1024, 8, H100), collective_time("all_gather", GIB, 8, H100)
    assert small is not None and large is not None
    assert (small.bound, large.bound, small.kernels) == ("latency", "communication", 1)
    assert collective_time("all_reduce", GIB, 1, H100) == NO_TIME
    assert collective_time("all_reduce", 0, 8, H100) == NO_TIME
    assert 5e-6 < seconds("barrier", 0, 8, H100) < 30e-6


def test_an_unknown_link_is_an_unknown_time() -> None:
    alone = ClusterSpec("alone", find_device("l4"), 1)
    assert collective_time("all_reduce", GIB, 2, alone) is None
    assert collective_time("send", GIB, 2, ClusterSpec("two", find_device("l4"), 2)) is None
    assert collective_time("send", GIB, 8, PAIRS) is None  # two hosts, and no fabric told


def test_a_latency_of_the_link_counts() -> None:
    slow = dataclasses.replace(H100, fabric=LinkSpec("ethernet", 50e9, latency_seconds=1e-3))
    assert seconds("all_gather", 8, 16, slow) > 1e-3 > seconds("all_gather", 8, 16, H100)


@pytest.mark.parametrize(("arguments", "message"), [
    (("all_sum", 8, 2, H100), "collective_time('all_sum'): unknown collective; the kinds are all_reduce"),
    (("send", -1, 2, H100), "collective_time(nbytes=-1): a size is not negative"),
    (("send", 8, 0, H100), "collective_time(ranks=0): must be an int of 1 or more"),
    (("send", 8, 2, "dgx_h100"), "find_cluster('dgx_h100') gives one by name")])
def test_bad_input(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        collective_time(*arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_more_ranks_of_a_host_than_it_has_are_refused() -> None:
    with pytest.raises(InputError, match="hosts of 'dgx_h100' have 1 to 8 ranks"):
        collective_time("send", 8, 16, H100, ranks_per_host=9)


def test_copies_between_host_and_device() -> None:
    h200 = find_device("h200")
    pinned = host_copy_time(GIB, h200, pinned=True, to_device=True)
    pageable = host_copy_time(GIB, h200, pinned=False, to_device=True)
    back = host_copy_time(GIB, h200, pinned=False, to_device=False)
    assert pinned is not None and pageable is not None and back is not None
    assert GIB / pinned.seconds == pytest.approx(55.4e9, rel=0.01)  # nvbandwidth on an H200
    assert 2 * pinned.seconds < pageable.seconds < back.seconds
    small = host_copy_time(8, h200, pinned=True, to_device=False)
    assert small is not None and small.bound == "latency"
    assert host_copy_time(0, h200, pinned=True, to_device=True) == NO_TIME
    assert host_copy_time(8, DeviceSpec("x"), pinned=True, to_device=True) is None
    grace = find_device("gb200")
    assert host_copy_time(GIB, grace, pinned=False, to_device=True) == host_copy_time(
        GIB, grace, pinned=True, to_device=True)
    with pytest.raises(InputError, match="nbytes=-1"):
        host_copy_time(-1, h200, pinned=True, to_device=True)
    assert math.isclose(small.seconds, 2.5e-6, rel_tol=0.01)


def test_the_constants_are_those_of_the_model() -> None:
    """Measured collectives through the constants' file: near where they were fitted, as the file's provenance says."""
    from analyzer.hardware.kernel_time.collective import estimate_collective
    from analyzer.hardware.kernel_time.estimate import find_constants
    from benchmarks.calibration.collective import read_cases

    errors = sorted(abs(estimate_collective(case.kind, case.nbytes, case.ranks, case.path,
                                            find_constants("collective", find_device(case.device)),
                                            case.dtype).seconds / case.seconds - 1) for case in read_cases()[::5])
    assert errors[len(errors) // 2] < 0.07
    assert errors[9 * len(errors) // 10] < 0.25


@pytest.mark.parametrize(("cluster", "ranks", "slower"), [
    (find_cluster("a40_pairs"), 4, "sockets"), (cluster_of("l40s"), 4, "host"), (cluster_of("l40s"), 8, "sockets"),
    (cluster_of("l40s"), 2, None), (find_cluster("a100_pcie_pairs"), 4, None),
    (find_cluster("l40s_host_memory"), 4, None)])
def test_cards_that_nobody_said_reach_each_other_may_go_through_the_host(cluster: ClusterSpec, ranks: int,
                                                                         slower: str | None) -> None:
    """Downwards the range is that of a machine whose cards do; upwards it holds one whose cards do not."""
    time = collective_time("all_reduce", 2**28, ranks, cluster)
    assert time is not None and (time.below is not None) == (slower is not None)
    if slower is not None:
        assert cluster.host_link is not None
        told = dataclasses.replace(cluster.host_link, sources={"has_peer_access": "this test"})
        other = collective_time("all_reduce", 2**28, ranks, dataclasses.replace(cluster, host_link=told))
        without = dataclasses.replace(told, has_peer_access=False)
        slow = collective_time("all_reduce", 2**28, ranks, dataclasses.replace(cluster, host_link=without))
        assert other is not None and slow is not None
        assert (time.seconds, time.low) == (other.seconds, other.low) and other.high < slow.seconds
        assert time.high == pytest.approx(slow.high)
