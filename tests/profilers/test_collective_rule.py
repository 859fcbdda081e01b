"""Collectives take the time of their kind, bytes and ranks on the device's cluster."""
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from analyzer import profile
from analyzer.hardware import cluster_of, find_cluster, find_device
from analyzer.hardware.kernel_time.collective import collective_time
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.kernel_time import communication_time
from analyzer.record.process_group import ProcessGroupSpec, WorldFacts
from tests.call import Call


def gathered(m, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(4 * len(x), x.shape[1], device=x.device)
    dist.all_gather_into_tensor(out, x)
    return out


@pytest.mark.parametrize(("function", "kind", "nbytes"), [
    (lambda m, x: collectives.all_reduce(x, "sum", dist.group.WORLD), "all_reduce", 1024 * 1024 * 4),
    (gathered, "all_gather", 4 * 1024 * 1024 * 4)])
@pytest.mark.parametrize("device", ["h100", "a100"])
def test_its_seconds_are_those_of_the_model(group, function: Any, kind: str, nbytes: int, device: str) -> None:
    p = profile(Call(function), args=(torch.empty(1024, 1024),), mode="infer", device=device)
    expected = collective_time(kind, nbytes, 4, cluster_of(find_device(device)), dtype="float32")
    assert expected is not None
    phase = p.phases["forward"]
    assert phase.communication_seconds + phase.latency_seconds == pytest.approx(expected.seconds, rel=1e-6)


def test_a_barrier_takes_time(group) -> None:
    waiting, alone = (profile(model, args=(torch.empty(8, 8),), mode="infer", device="h100").kernel_seconds
                      for model in (Call(lambda m, x: dist.barrier() or x + 1), torch.nn.Identity()))
    assert alone == 0 and waiting > 2e-6


X = TensorSpec.of((1024, 1024), (1024, 1), torch.float32, "cuda:0")
H100, P4D = find_device("h100"), find_cluster("aws_p4d")


def call(name: str, *args: object) -> Signature:
    return Signature(getattr(torch.ops.c10d, name).default, args, {}, (X,), ())


@pytest.mark.parametrize(("ranks", "rank", "per_host"), [
    ((0, 1, 2, 3), 1, 4), ((0, 8), 0, 1), (tuple(range(0, 64, 8)), 3, 1), (tuple(range(0, 16, 2)), 0, 4),
    ((6, 7, 8), 0, 2)])  # two hosts, one of which holds two
def test_a_group_takes_the_links_between_its_ranks(ranks: tuple[int, ...], rank: int, per_host: int) -> None:
    group = ProcessGroupSpec("1", "mesh_dp", len(ranks), ranks, rank)
    expected = collective_time("all_reduce", X.nbytes, len(ranks), cluster_of(H100), ranks_per_host=per_host,
                               dtype="float32")
    assert expected is not None
    assert communication_time(call("allreduce_", [X]), H100, group) == expected


def test_the_worlds_own_hosts_and_cluster_count() -> None:
    group = ProcessGroupSpec("1", "mesh_tp", 2, (2, 3), 0)
    for world, per_host in ((WorldFacts(8, 2, cluster=P4D), 2),
                            (WorldFacts(8, 2, devices_per_host=1, cluster=P4D), 1)):
        expected = collective_time("all_reduce", X.nbytes, 2, P4D, ranks_per_host=per_host, dtype="float32")
        assert expected is not None
        assert communication_time(call("allreduce_", [X]), H100, group, world) == expected


def test_a_message_takes_the_links_between_two_ranks() -> None:
    group = ProcessGroupSpec("1", "mesh_pp", 4, (0, 4, 8, 12), 1)
    near, far = (collective_time("send", X.nbytes, 2, cluster_of(H100), ranks_per_host=n, dtype="float32")
                 for n in (2, 1))
    assert near is not None and far is not None and near.seconds < far.seconds
    for name, peer, expected in (("send", 0, near), ("send", 2, far), ("recv_", 0, near), ("recv_", 3, far)):
        assert communication_time(call(name, [X], None, peer, 0), H100, group) == expected
