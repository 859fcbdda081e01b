"""`WorldSpec`: how many ranks there are, which of them runs, and on what machines."""
from __future__ import annotations

from dataclasses import dataclass

from analyzer.errors import InputError, is_count
from analyzer.hardware.cluster_catalogue import find_cluster
from analyzer.hardware.cluster_spec import ClusterSpec


@dataclass(frozen=True)
class WorldSpec:
    """``size`` ranks, of which ``rank`` runs, ``devices_per_host`` on each host of ``cluster`` (None: the usual one of
    the device that is profiled). Raises InputError for values that cannot be, UnknownDeviceError for an unknown
    cluster's name.

    >>> WorldSpec(64, rank=12).host, WorldSpec(64, rank=12).local_rank, WorldSpec(4).local_size
    (1, 4, 4)
    """

    size: int
    rank: int = 0
    devices_per_host: int = 8
    cluster: ClusterSpec | None = None

    @classmethod
    def of(cls, size: int, rank: int = 0, devices_per_host: int | None = None,
           cluster: str | ClusterSpec | None = None) -> WorldSpec:
        """As the class; ``cluster`` may be a name, and hosts are the cluster's where they are not given.

        >>> WorldSpec.of(32, cluster="dgx_h100").devices_per_host
        8
        """
        found = None if cluster is None else find_cluster(cluster)
        if devices_per_host is None:
            devices_per_host = 8 if found is None else found.devices_per_host
        return cls(size, rank, devices_per_host, found)

    def __post_init__(self) -> None:
        if not is_count(self.size, 1):
            raise InputError(f"world(size={self.size!r}): must be a whole number of ranks, 1 or more")
        if not is_count(self.rank, 0) or self.rank >= self.size:
            raise InputError(f"world(size={self.size}, rank={self.rank!r}): the ranks are 0 to {self.size - 1}")
        if not is_count(self.devices_per_host, 1):
            raise InputError(f"world(devices_per_host={self.devices_per_host!r}): must be a whole number, 1 or more")

    @property
    def host(self) -> int:
        """The number of the host that the rank runs on."""
        return self.rank // self.devices_per_host

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.size // self.devices_per_host)

    @property
    def local_rank(self) -> int:
        """The number of the rank on its host, and of its device."""
        return self.rank % self.devices_per_host

    @property
    def local_size(self) -> int:
        """How many ranks the host of the rank has."""
        return min(self.devices_per_host, self.size - self.host * self.devices_per_host)

    def environment(self) -> dict[str, str]:
        """What ``torchrun`` tells a process of its place. Source: ``_start_workers`` in
        torch/distributed/elastic/agent/server/local_elastic_agent.py.
        """
        return {"RANK": str(self.rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(self.local_rank),
                "LOCAL_WORLD_SIZE": str(self.local_size), "GROUP_RANK": str(self.host),
                "GROUP_WORLD_SIZE": str(self.hosts), "ROLE_RANK": str(self.rank), "ROLE_WORLD_SIZE": str(self.size),
                "ROLE_NAME": "default", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
                "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
