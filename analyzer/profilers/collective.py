"""What a collective sends: how its call is read, rules by operator, bytes on the wire, and what is not known."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from analyzer.meta.spec import Signature
from analyzer.record.process_group import ProcessGroupSpec, takes_group

from .operator.registration import tensors

RESULT = "(result)"  #: of `CollectiveCall.nbytes`: what the call gives


class CollectiveCall(NamedTuple):
    """A call of a signature: its arguments by name, and its group."""

    signature: Signature
    given: dict[str, Any]
    group: ProcessGroupSpec | None

    def nbytes(self, name: str) -> int | None:
        """Bytes of the tensors of an argument, or of the result; None of sparse ones."""
        return _sum_bytes(self.signature.outputs if name == RESULT else self.given.get(name))

    def parts(self, name: str) -> list[int]:
        """Bytes of each tensor of a list; of lists of lists, of the first."""
        value = self.given.get(name) or []
        return [_sum_bytes(one) or 0 for one in (value[0] if value and isinstance(value[0], list) else value)]


def _sum_bytes(value: Any) -> int | None:
    specs = list(tensors(value))
    if any(not spec.stride and len(spec) for spec in specs):  # sparse: how many values it has is not known
        return None
    return sum(spec.nbytes for spec in specs)


#: Operators that send nothing: they look at or mark what this rank has, wait, or exchange addresses once for a buffer.
SILENT = frozenset((
    "c10d::check_for_nan _c10d_functional::wait_tensor _c10d_functional::_wrap_tensor_autograd "
    "_dtensor::mesh_get_process_group symm_mem::_rendezvous symm_mem::_barrier symm_mem::get_remote_tensors "
    "symm_mem::memset32_ symm_mem::stream_write_value32_ symm_mem::nccl_wait_for_signal symm_mem::nccl_wait_signal "
    "symm_mem::nvshmem_wait_for_signal symm_mem::_async_input_mm").split())
#: Operators that communicate bytes which are unknown, and why.
NOT_UNDERSTOOD = {f"symm_mem::{name}": reason for reason, names in {
    "its scales are gathered too, or not, which their shapes do not tell": "fused_all_gather_scaled_matmul",
    "how much goes where stands in tensors on the device":
        "all_to_all_vdev all_to_all_vdev_2d all_to_all_vdev_2d_offset",
    "how much of it a switch that adds up or copies carries for one rank is not documented":
        "_low_contention_all_gather_ce_multicast _low_contention_all_gather_ce_multicast_out memcpy_to_multicast_ "
        "multimem_all_gather_out multimem_all_reduce_ multimem_one_shot_all_reduce multimem_one_shot_all_reduce_out "
        "multimem_one_shot_reduce_out",
    "one-sided: the whole is what the kernel that calls it makes of it":
        "nvshmem_all_to_all nvshmem_broadcast multi_root_tile_reduce tile_reduce nccl_all_to_all_nd nccl_get "
        "nccl_get_out nccl_put nccl_put_signal nccl_put_with_signal nccl_reduce_scatter_offset nvshmem_get "
        "nvshmem_get_out nvshmem_put nvshmem_put_with_signal"}.items() for name in names.split()}


# The bytes that one rank sends of a message, by the algorithms of NCCL, whose bandwidths are defined so.
#
# NVIDIA/nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth": of n ranks an all-reduce has the factor 2(n-1)/n, all-gather,
# reduce-scatter and all-to-all (n-1)/n, broadcast and reduce 1. Rings carry the first three, pipelined chains the last
# two, sends beside each other the others (pytorch, torch/csrc/cuda/nccl.cpp, `all2all`, `gather`, `scatter`).
#
# Each rule takes the call, its whole bytes, and its group; None where the group does not say which of its ranks this
# is.

WireRule = Callable[[CollectiveCall, int, ProcessGroupSpec], "int | None"]


def by_size(sent: Callable[[int, int], int]) -> WireRule:
    """A rule of the whole bytes and the number of ranks alone."""
    return lambda call, whole, group: sent(whole, group.size)


# a ring in which each rank passes on every block but one, once or, for an all-reduce, twice; rounded up
once_around = by_size(lambda whole, ranks: -(-whole * (ranks - 1) // ranks))
twice_around = by_size(lambda whole, ranks: -(-whole * 2 * (ranks - 1) // ranks))
# a chain from the root, in an order of NCCL's: each rank sends the message on; this one is not the last
passed_on = by_size(lambda whole, ranks: whole if ranks > 1 else 0)
own_part = by_size(lambda whole, ranks: whole // ranks)
# every other rank reads the buffer: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu, one_shot
read_by_each = by_size(lambda whole, ranks: whole * (ranks - 1))
everything, nothing = by_size(lambda whole, ranks: whole), by_size(lambda whole, ranks: 0)


def all_but_block(name: str, after: int) -> WireRule:
    """A ring over blocks of any size: in an all-gather each rank passes on all but that of the rank ``after`` it, in a
    reduce-scatter all but its own. ProcessGroupNCCL broadcasts or reduces uneven blocks one by one, which sends the
    same (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `allgather` and `reduce_scatter`).
    """
    def sent(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
        blocks = call.parts(name)
        if len(blocks) != group.size or len(set(blocks)) == 1:
            return once_around(call, whole, group)
        return None if group.rank is None else sum(blocks) - blocks[(group.rank + after) % group.size]
    return sent


def all_but_own(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
    """All parts of the input but this rank's: as tensors, by the sizes of the splits, else as large as each other."""
    parts = call.parts("input_tensors") or list(call.given.get("input_split_sizes") or ())
    if len(parts) != group.size or len(set(parts)) == 1:
        return once_around(call, whole, group)
    if group.rank is None:
        return None
    return -(-whole * (sum(parts) - parts[group.rank]) // sum(parts)) if sum(parts) else 0


def by_role(of_root: WireRule, of_others: WireRule) -> WireRule:
    def sent(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
        if group.rank is None:
            return None
        return (of_root if group.rank == call.given.get("root_rank") else of_others)(call, whole, group)
    return sent


# What each operator of torch.distributed communicates: kind, whole bytes, and what this rank sends.
#
# The whole message is the gathered output of an all-gather or gather, the unscattered input of a reduce-scatter or
# scatter, the whole input of an all-to-all, and what is reduced, broadcast or sent of the others. The operators'
# schemas are those of torch/csrc/distributed/c10d/Ops.cpp and Functional.cpp.

#: The kinds that are messages from one rank to another; ``"send_recv"`` is a batch of both.
POINT_TO_POINT = ("send", "recv", "send_recv")
#: The kinds that add up what ranks have, as gradients are.
SUMS = ("all_reduce", "reduce_scatter")


class Message(NamedTuple):
    """What a call communicates; None is unknown. ``peer`` is the global rank of the other end, or of the root."""

    kind: str | None
    bytes: int | None
    wire_bytes: int | None
    peer: int | None = None


_Reader = Callable[[CollectiveCall], "int | None"]


class _Rule(NamedTuple):
    kind: str
    whole: _Reader
    sent: WireRule
    peer: _Reader


def _rules(kind: str, message: str | _Reader, sent: WireRule, names: str,
           peer: _Reader = lambda call: None) -> dict[str, _Rule]:
    """Of operators whose argument (or result) of a name is the whole message."""
    whole = message if callable(message) else lambda call: call.nbytes(message)
    return {name if "::" in name else f"c10d::{name}": _Rule(kind, whole, sent, peer) for name in names.split()}


def _times_ranks(name: str) -> _Reader:
    """Every rank's part, taken to be as large as this one's, which is the argument of that name."""
    def whole(call: CollectiveCall) -> int | None:
        part = call.nbytes(name)
        return None if part is None or call.group is None else part * call.group.size
    return whole


def _rank_at(name: str) -> _Reader:
    """The global rank of one that the argument counts in the group."""
    def peer(call: CollectiveCall) -> int | None:
        index, ranks = call.given.get(name), None if call.group is None else call.group.ranks
        return ranks[index] if ranks is not None and isinstance(index, int) and 0 <= index < len(ranks) else None
    return peer


_ROOT, _F, _A = _rank_at("root_rank"), "_c10d_functional::", "_c10d_functional_autograd::"
_RULES: dict[str, _Rule] = {
    **_rules("all_reduce", "tensors", twice_around, "allreduce_ allreduce_coalesced_"),
    **_rules("all_gather", "output_tensors", all_but_block("output_tensors", 1), "allgather_"),
    **_rules("all_gather", "output_tensor", once_around, "_allgather_base_"),
    **_rules("all_gather", "output_lists", once_around, "allgather_coalesced_"),
    **_rules("all_gather", "outputs", once_around, "allgather_into_tensor_coalesced_"),
    **_rules("reduce_scatter", "input_tensors", all_but_block("input_tensors", 0), "reduce_scatter_"),
    **_rules("reduce_scatter", "input_tensor", once_around, "_reduce_scatter_base_"),
    **_rules("reduce_scatter", "inputs", once_around,
             f"reduce_scatter_tensor_coalesced_ {_F}reduce_scatter_tensor_coalesced"),
    **_rules("all_to_all", "input_tensors", all_but_own, "alltoall_"),
    **_rules("all_to_all", "input", all_but_own,
             f"alltoall_base_ {_F}all_to_all_single {_A}all_to_all_single _dtensor::shard_dim_alltoall"),
    **_rules("broadcast", "tensors", passed_on, "broadcast_", _ROOT),
    **_rules("reduce", "tensors", by_role(nothing, passed_on), "reduce_", _ROOT),  # a chain that ends at the root
    # ranks other than the root hold no outputs of a gather, and no inputs of a scatter
    **_rules("gather", _times_ranks("input_tensors"), by_role(nothing, own_part), "gather_", _ROOT),
    **_rules("gather", _times_ranks("input_tensor"), by_role(nothing, own_part), "gather_into_tensor_", _ROOT),
    **_rules("scatter", _times_ranks("output_tensors"), by_role(once_around, nothing), "scatter_", _ROOT),
    **_rules("send", "tensors", everything, "send", _rank_at("dst")),
    **_rules("recv", "tensors", nothing, "recv_", _rank_at("src")),
    **_rules("recv", "tensors", nothing, "recv_any_source_"),
    # what the backend sends, a number of its own (ProcessGroupNCCL.cpp, `barrier`), is no message of the program's
    **_rules("barrier", lambda call: 0, nothing, "barrier monitored_barrier_"),
    **_rules("all_reduce", "input", twice_around,
             f"{_F}all_reduce {_F}all_reduce_ symm_mem::two_shot_all_reduce_ symm_mem::two_shot_all_reduce_out"),
    **_rules("all_reduce", "inputs", twice_around, f"{_F}all_reduce_coalesced {_F}all_reduce_coalesced_"),
    **_rules("broadcast", "input", passed_on, f"{_F}broadcast {_F}broadcast_", _rank_at("src")),
    # of symm_mem each rank reads the others' shards or products: torch/distributed/_symmetric_memory/__init__.py,
    # `_pipelined_multi_all_gather_and_consume` and `_pipelined_produce_and_all2all`
    **_rules("all_gather", RESULT, once_around,
             f"{_F}all_gather_into_tensor {_A}all_gather_into_tensor {_F}all_gather_into_tensor_out "
             f"{_F}all_gather_into_tensor_coalesced symm_mem::_low_contention_all_gather"),
    **_rules("reduce_scatter", "input", once_around,
             f"{_F}reduce_scatter_tensor {_A}reduce_scatter_tensor {_F}reduce_scatter_tensor_out "
             "symm_mem::reduce_scatter_out"),
    **_rules("reduce_scatter", "tensor", once_around, "symm_mem::_low_contention_reduce_scatter"),
    **_rules("all_gather", _times_ranks("A"), once_around, "symm_mem::fused_all_gather_matmul"),
    **_rules("reduce_scatter", _times_ranks(RESULT), once_around,
             "symm_mem::fused_matmul_reduce_scatter symm_mem::fused_scaled_matmul_reduce_scatter"),
    **_rules("all_reduce", "input", read_by_each, "symm_mem::one_shot_all_reduce symm_mem::one_shot_all_reduce_out"),
    **_rules("all_reduce", "local_input", read_by_each,
             "symm_mem::one_shot_all_reduce_copy symm_mem::one_shot_all_reduce_copy_out"),
    # peers are global ranks here: torch/distributed/_functional_collectives.py, `isend_inplace`
    **_rules("send", "tensor", everything, f"{_F}isend", lambda call: call.given.get("dst")),
    **_rules("recv", "tensor", nothing, f"{_F}irecv", lambda call: call.given.get("src")),
    **_rules("send_recv", "tensors", lambda call, whole, group: sum(
        size for op, size in zip(call.given["op_list"], call.parts("tensors")) if op == "isend"), f"{_F}batch_p2p_ops"),
}


def _name_of(signature: Signature) -> str:
    """An operator's name with its namespace; "" of a function and of an operator of higher order, which have none."""
    return str(getattr(getattr(signature.op, "_schema", None), "name", ""))


def kind_of(signature: Signature) -> str | None:
    """The kind of communication that calls of a signature are; None of others, and where not known."""
    rule = _RULES.get(_name_of(signature))
    if rule is None:
        return None
    if rule.kind == "send_recv":
        ops = set(signature.named_arguments()["op_list"])
        return {frozenset({"isend"}): "send", frozenset({"irecv"}): "recv"}.get(frozenset(ops), rule.kind)
    return rule.kind


def message_of(signature: Signature, group: ProcessGroupSpec | None) -> Message | None:
    """What a call in ``group`` communicates; None where it is no communication."""
    name = _name_of(signature)
    rule = _RULES.get(name)
    if rule is not None:
        call = CollectiveCall(signature, signature.named_arguments(), group)
        whole = rule.whole(call)
        sent = None if whole is None or group is None else rule.sent(call, whole, group)
        return Message(kind_of(signature), whole, sent, rule.peer(call))
    if name in NOT_UNDERSTOOD or name not in SILENT and takes_group(signature):
        return Message(None, None, None)
    return None
