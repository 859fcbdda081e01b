"""The time of one call's kernels: by the rule of its operator, by its traffic, or among the ranks of a group."""
from __future__ import annotations

from collections.abc import Hashable, Sequence

from analyzer.hardware import ClusterSpec, DeviceSpec, cluster_of, find_peak
from analyzer.hardware.kernel_time.collective import CHANNELS, collective_time, find_path
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime
from analyzer.hardware.kernel_time.pointwise import stream_time
from analyzer.meta.fused_kernel import FusedKernel
from analyzer.meta.spec import Signature
from analyzer.record.call_table import OpCall
from analyzer.record.device_log import find_copied, find_place
from analyzer.record.log import Log
from analyzer.record.process_group import ProcessGroupSpec, WorldFacts, communicates, find_group

from .collective import POINT_TO_POINT, SILENT, kind_of, message_of
from .flop_registry import count_call
from .operator.fused import fused_time
from .operator.registration import TimeRule, foreach_single, is_inexact, register_time_impl, uses_tf32
from .schedule import COMMUNICATION, COMPUTE, DEALT, FROM_HOST, TO_DEVICE, TO_HOST
from .traffic import NOTHING, plan_of


def find_rule(op: Hashable) -> TimeRule | None:
    if isinstance(op, FusedKernel):
        return lambda signature, device: fused_time(signature, device, lambda part: signature_time(part, device))
    found, single = register_time_impl.find_variant(op), foreach_single(op)
    return found if found is not None or single is None else register_time_impl.find(f"aten::{single}")


#: How far off the time of an operator may be of which only the traffic is known: as much as it is too low if each
#: byte is moved twice.
SPREAD = 1.0
#: Part of the peak rate that products reach, for those without a rule of their own: the median of the 19,913 bf16
#: products of 1e10 FLOPs or more in ``benchmarks/truth/kernels/gemm.csv.gz`` (without vllm's) is 0.595. A measured
#: device tells its own.
PRODUCT_FRACTION = 0.6


def default_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """One kernel that moves what the operator reads and writes, or does its arithmetic where that takes longer."""
    total = plan_of(signature).total
    count = count_call(signature)
    flops = 0 if count is None else count.flops
    if total == NOTHING and not flops:
        return NO_TIME
    time = stream_time(total.read_bytes + total.written_bytes, device)
    if time is None:
        return None
    dtype = next((spec.dtype for spec in (*signature.outputs, *signature.inputs) if is_inexact(spec)), None)
    peak = find_peak(dtype, device, count.macs > 0) if count and flops and dtype is not None else None
    if peak is not None:
        own = device.calibration.get("default", {})
        arithmetic = flops / (peak * own.get("product_fraction", PRODUCT_FRACTION))
        if arithmetic > time.seconds:
            return KernelTime(arithmetic, SPREAD, "arithmetic")
    return KernelTime(time.seconds, SPREAD, time.bound)


MEMO_KEY = "kernel_time"


def signature_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The time of any call of a signature that is no view; None where it is not known."""
    if communicates(signature):
        return communication_time(signature, device)  # which the group decides that has a name now: nothing is kept
    state = register_time_impl.version, uses_tf32("matmul"), uses_tf32("conv"), uses_tf32("rnn")
    memo = signature.memo.get(MEMO_KEY)
    if memo is not None and memo[0] is device and memo[1] == state:
        return memo[2]  # type: ignore[no-any-return]
    rule = None if signature.is_sparse else find_rule(signature.op)
    time: KernelTime | None = NO_TIME  # of what is on the host beside the device: counters of optimizer steps
    specs = (*signature.inputs, *signature.outputs)
    if device.kind == "cpu" or not specs or any(spec.device != "cpu" for spec in specs):
        time = None if rule is None else rule(signature, device)
        if rule is None or time is None and device.kind != "cuda":  # most rules know the kernels of CUDA alone
            time = default_time(signature, device)
    signature.memo[MEMO_KEY] = device, state, time
    return time


def is_view(call: OpCall) -> bool:
    """Whether a call makes another tensor over a storage that it was given, and runs no kernel."""
    return bool(call.outputs) and plan_of(call.signature).may_be_view and set(call.outputs) <= set(call.inputs)


def kernel_time(call: OpCall, device: DeviceSpec, log: Log | None = None) -> KernelTime | None:
    """The time of a call's kernels; none for a view, None where unknown. Its ``log`` knows its process group."""
    signature = call.signature
    if communicates(signature):
        return communication_time(signature, device) if log is None else communication_time(
            signature, device, log.group_of(signature), log.world)
    return NO_TIME if is_view(call) else signature_time(signature, device)


def find_kind(signature: Signature) -> str:
    """What the kernels of a call do: they compute, communicate, or copy from or to the host or another device."""
    if communicates(signature):
        return COMMUNICATION
    ends = find_copied(signature)
    if ends is None:
        return COMPUTE
    return TO_HOST if ends[1] == "cpu" else FROM_HOST if ends[0] == "cpu" else TO_DEVICE


def find_turn(signature: Signature, kind: str, kernel: KernelTime, device: DeviceSpec, log: Log) -> Hashable:
    """What the kernels of a call take turns for; None where they run beside all others. A kernel of enough blocks holds
    every multiprocessor, and the blocks of a second one are placed when there is room: two kernels that are bound by
    arithmetic or memory take as long beside each other as one after the other (Amert et al., "GPU Scheduling on the
    NVIDIA TX2: Hidden Details Revealed", RTSS 2017, rules X1 and R1 to R3). Those too small to fill the device leave
    room. Collectives take turns for the links that bound them, and leave the multiprocessors that they do not hold to
    the others. Copies from and to the host have an engine for each direction (CUDA C++ Programming Guide, "Concurrent
    Data Transfers"). Each of several devices has turns of its own.
    """
    turn = _find_own_turn(signature, kind, kernel, device, log)
    return (turn, find_place(signature)) if turn is not None and log.others else turn


def _find_own_turn(signature: Signature, kind: str, kernel: KernelTime, device: DeviceSpec, log: Log) -> Hashable:
    if kernel.bound == "latency" or not kernel.kernels:
        return None
    return kind if kind != COMMUNICATION else find_medium(signature, device, log.group_of(signature), log.world)


_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"))


def find_share(signature: Signature, kind: str, turn: Hashable, device: DeviceSpec) -> float:
    """The share of the multiprocessors that the kernels of a call hold: those of a collective that is bound by links
    what their channels take, one each, others that take turns all of them, and what takes none leaves room. Products on
    Hopper are dealt out: cuBLAS and CUTLASS start a block on each multiprocessor, which has its tiles beforehand
    (github.com/pytorch/pytorch/pull/144974; CUTLASS, ``sm90_tile_scheduler.hpp``).
    """
    if turn is None or kind in (TO_HOST, FROM_HOST, TO_DEVICE) or device.multiprocessors is None:
        return 0.0
    if kind == COMMUNICATION:  # of small devices at most half, which is in no source
        return min(0.5, CHANNELS.get(str(turn), 0) / device.multiprocessors)
    is_product = signature.op.__name__.partition(".")[0] in _PRODUCTS
    return DEALT if is_product and (device.compute_capability or (0, 0))[0] == 9 and device.vendor == "NVIDIA" else 1.0


def communication_time(signature: Signature, device: DeviceSpec, group: ProcessGroupSpec | None = None,
                       world: WorldFacts | None = None) -> KernelTime | None:
    """Time of a collective among the ranks of ``group``, by default the one that it names now, on the hosts of
    ``world``; of nothing for what only waits for one or wraps its result. None where the group, or a link that it
    needs, is unknown, or the operator is. Groups beside each other (the other ranks of a host in groups of their own)
    are taken not to slow each other down: each device has its own links and its own share of the network
    (`ClusterSpec.fabric`). A receive takes the time of its send; that the sender comes later is no time of its own.
    """
    name = signature.op._schema.name
    if name in SILENT:
        return NO_TIME
    group = group or find_group(signature)
    message = message_of(signature, group)
    if message is None or message.kind is None or message.bytes is None or group is None or device.kind == "cpu":
        return None
    if name.startswith("symm_mem::fused"):  # products too
        return None
    dtype = next((str(spec.dtype).removeprefix("torch.") for spec in signature.inputs), "float16")
    cluster, devices_per_host = _find_hosts(device, world)
    kind, ranks, size = message.kind, group.ranks, group.size
    if kind in POINT_TO_POINT:  # a batch goes both ways at once
        kind, size = "send", min(2, group.size)
        own = None if ranks is None or group.rank is None else ranks[group.rank]
        ranks = None if own is None or message.peer is None else (own, message.peer)
    return collective_time(kind, message.bytes, size, cluster, dtype=dtype,
                           ranks_per_host=share_of_host(ranks, size, devices_per_host, cluster))


def find_medium(signature: Signature, device: DeviceSpec, group: ProcessGroupSpec | None = None,
                world: WorldFacts | None = None) -> str | None:
    """The links that bound a collective, as `Path.medium`; None where unknown, and of messages between two ranks."""
    group = group or find_group(signature)
    if group is None or kind_of(signature) in POINT_TO_POINT:
        return None
    cluster, devices_per_host = _find_hosts(device, world)
    share = share_of_host(group.ranks, group.size, devices_per_host, cluster)
    path = find_path(cluster, group.size, share or min(group.size, cluster.devices_per_host))
    return None if path is None else path.medium


def _find_hosts(device: DeviceSpec, world: WorldFacts | None) -> tuple[ClusterSpec, int]:
    cluster = cluster_of(device) if world is None or world.cluster is None else world.cluster
    return cluster, cluster.devices_per_host if world is None else world.devices_per_host or cluster.devices_per_host


def share_of_host(ranks: Sequence[int] | None, size: int, devices_per_host: int, cluster: ClusterSpec) -> int | None:
    """How many ranks of a group one host holds, where ranks are given to hosts in order, as torchrun does; where hosts
    hold different numbers, the mean, rounded up. None (as many as fit) where the ranks are unknown.

    >>> from analyzer.hardware import find_cluster
    >>> dgx = find_cluster("dgx_h100")
    >>> [share_of_host(ranks, len(ranks), 8, dgx) for ranks in (range(16), range(0, 64, 8), (0, 2, 8, 10), range(4))]
    [8, 1, 2, 4]
    """
    if ranks is None:
        return None
    hosts = len({rank // devices_per_host for rank in ranks})
    return min(-(-size // hosts), cluster.devices_per_host)
