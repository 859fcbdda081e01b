"""`MeshSpec`: a grid of devices, and what it costs there to change how a tensor lies. Solvers read it."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analyzer.errors import InputError, is_count
from analyzer.hardware.cluster_spec import ClusterSpec, cluster_of, find_cluster
from analyzer.hardware.device_spec import DeviceSpec
from analyzer.hardware.kernel_time.collective import collective_time

REPLICATE, PARTIAL = "Replicate()", "Partial()"


class MeshCollective(NamedTuple):
    """A collective among the devices of one dimension of a mesh; ``bytes`` are its whole buffer's."""

    kind: str
    axis: int
    bytes: int
    seconds: float


class Redistribution(NamedTuple):
    """The collectives that change how a tensor lies, and those that change its gradient back."""

    forward: tuple[MeshCollective, ...]
    backward: tuple[MeshCollective, ...]

    @property
    def seconds(self) -> float:
        """Of all of them, one after the other."""
        return math.fsum(collective.seconds for collective in (*self.forward, *self.backward))

    @property
    def comm_bytes(self) -> int:
        """Whole bytes of all of them."""
        return sum(collective.bytes for collective in (*self.forward, *self.backward))


@dataclass(frozen=True)
class MeshSpec:
    """Devices of ``cluster`` in a grid of ``sizes``, numbered as `torch.distributed.device_mesh.init_device_mesh` does:
    the last dimension counts fastest, so its devices are neighbours. Raises InputError for sizes below 1 and for links
    whose rates are unknown, when they are asked for.

    >>> mesh = MeshSpec.of((2, 8), "dgx_h100")
    >>> [mesh.ranks_per_host(axis) for axis in range(2)]  # the first dimension joins hosts, the second is one of them
    [1, 8]
    """

    sizes: tuple[int, ...]
    cluster: ClusterSpec

    @classmethod
    def of(cls, sizes: Sequence[int], cluster: str | ClusterSpec | DeviceSpec) -> MeshSpec:
        """As the class; ``cluster`` may be a name, or a device, whose usual hosts are then taken."""
        return cls(tuple(sizes), cluster_of(cluster) if isinstance(cluster, DeviceSpec) else find_cluster(cluster))

    def __post_init__(self) -> None:
        if not self.sizes or not all(is_count(size, 1) for size in self.sizes):
            raise InputError(f"MeshSpec(sizes={self.sizes!r}): each dimension must be a whole number of 1 or more")

    def ranks_per_host(self, axis: int) -> int:
        """How many devices of a dimension's group are in one host."""
        stride = math.prod(self.sizes[axis + 1:])
        return max(1, min(self.sizes[axis], -(-self.cluster.devices_per_host // stride)))

    def collective_seconds(self, kind: str, nbytes: int, axis: int) -> float:
        """Seconds of a collective among the devices of dimension ``axis``; ``nbytes`` are its whole buffer's."""
        if not nbytes or self.sizes[axis] == 1:
            return 0.0
        time = collective_time(kind, nbytes, self.sizes[axis], self.cluster, ranks_per_host=self.ranks_per_host(axis))
        if time is None:
            raise InputError(f"{kind} over dimension {axis} of {self.sizes}: a link of {self.cluster.name} that it "
                             f"takes is unknown; give a ClusterSpec with its rate")
        return time.seconds

    def parts(self, placements: Sequence[str]) -> int:
        """Among how many devices a tensor of this layout is divided."""
        return math.prod(size for size, placement in zip(self.sizes, placements) if sharded_dim(placement) is not None)

    def redistribute(self, nbytes: int, given: Sequence[str], wanted: Sequence[str]) -> Redistribution | None:
        """What it takes to turn one layout of a tensor of ``nbytes`` (whole) into another, dimension by dimension, and
        its gradient back; None where nothing turns a layout into it (a sum that is not finished).
        """
        forward: list[MeshCollective] = []
        backward: list[MeshCollective] = []
        for axis, (before, after) in enumerate(zip(given, wanted)):
            if before == after and before != PARTIAL:
                continue
            if after == PARTIAL:
                return None
            others = self.parts([*wanted[:axis], REPLICATE, *given[axis + 1:]])
            for found, kind in zip((forward, backward), _steps(before, after)):
                if kind is not None:
                    held = nbytes // others
                    found.append(MeshCollective(kind, axis, held, self.collective_seconds(kind, held, axis)))
        return Redistribution(tuple(forward), tuple(backward))


def sharded_dim(placement: str) -> int | None:
    """The dimension of a tensor that is divided over one of the mesh.

    >>> sharded_dim("Shard(2)"), sharded_dim("Replicate()")
    (2, None)
    """
    return int(placement.removeprefix("Shard(").rstrip(")")) if placement.startswith("Shard(") else None


def _steps(before: str, after: str) -> tuple[str | None, str | None]:
    """The collectives of a change and of its gradient; a sum's is whole (torch/distributed/tensor/_redistribute.py)."""
    if before == PARTIAL:
        return ("all_reduce", None) if sharded_dim(after) is None else ("reduce_scatter", "all_gather")
    if sharded_dim(before) is None:
        return None, "all_gather"
    return ("all_gather", None) if sharded_dim(after) is None else ("all_to_all", "all_to_all")
