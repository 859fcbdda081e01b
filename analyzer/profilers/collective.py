"""What a collective sends: how its call is read, rules by operator, bytes on the wire, and what is not known."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from analyzer.meta.spec import Signature, TensorSpec
from analyzer.record.process_group import ProcessGroupSpec, takes_group

# A call that communicates, with what is asked of its arguments.

#: of `CollectiveCall.nbytes`: what the call gives
RESULT = "(result)"


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

    def rank_at(self, name: str) -> int | None:
        """The global rank of one that the argument counts in the group."""
        index, ranks = self.given.get(name), None if self.group is None else self.group.ranks
        return ranks[index] if ranks is not None and isinstance(index, int) and 0 <= index < len(ranks) else None


def _sum_bytes(value: Any) -> int | None:
    total = 0
    for spec in _specs(value):
        if not spec.stride and len(spec):  # sparse: how many values it has is not known
            return None
        total += spec.nbytes
    return total


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _specs(one)


# Operators of torch.distributed that send nothing, and those of which it is not known what they send, with why.

#: Operators that send nothing.
SILENT = {
    "c10d::check_for_nan": "looks at a tensor of this rank",
    "_c10d_functional::wait_tensor": "waits for a collective that counts where it began",
    "_c10d_functional::_wrap_tensor_autograd": "wraps the result of a collective",
    "_dtensor::mesh_get_process_group": "looks up a group",
    "symm_mem::_rendezvous": "exchanges addresses on the host, once for a buffer",
    "symm_mem::_barrier": "sets and reads signals of four bytes",
    "symm_mem::get_remote_tensors": "maps the others' memory",
    "symm_mem::memset32_": "sets signals of this rank",
    "symm_mem::stream_write_value32_": "sets a signal of this rank",
    "symm_mem::nccl_wait_for_signal": "waits",
    "symm_mem::nccl_wait_signal": "waits",
    "symm_mem::nvshmem_wait_for_signal": "waits",
    "symm_mem::_async_input_mm": "a product of what was gathered",
}

_SWITCH = "how much of it a switch that adds up or copies carries for one rank is not documented"
_SPLITS = "how much goes where stands in tensors on the device"
_PEER = "one-sided: the whole is what the kernel that calls it makes of it"

#: Operators that communicate bytes which are unknown.
NOT_UNDERSTOOD = {
    "symm_mem::fused_all_gather_scaled_matmul": "its scales are gathered too, or not, which their shapes do not tell",
    "symm_mem::all_to_all_vdev": _SPLITS,
    "symm_mem::all_to_all_vdev_2d": _SPLITS,
    "symm_mem::all_to_all_vdev_2d_offset": _SPLITS,
    "symm_mem::nvshmem_all_to_all": _PEER,
    "symm_mem::nvshmem_broadcast": _PEER,
    "symm_mem::_low_contention_all_gather_ce_multicast": _SWITCH,
    "symm_mem::_low_contention_all_gather_ce_multicast_out": _SWITCH,
    "symm_mem::memcpy_to_multicast_": _SWITCH,
    "symm_mem::multimem_all_gather_out": _SWITCH,
    "symm_mem::multimem_all_reduce_": _SWITCH,
    "symm_mem::multimem_one_shot_all_reduce": _SWITCH,
    "symm_mem::multimem_one_shot_all_reduce_out": _SWITCH,
    "symm_mem::multimem_one_shot_reduce_out": _SWITCH,
    "symm_mem::multi_root_tile_reduce": _PEER,
    "symm_mem::tile_reduce": _PEER,
    "symm_mem::nccl_all_to_all_nd": _PEER,
    "symm_mem::nccl_get": _PEER,
    "symm_mem::nccl_get_out": _PEER,
    "symm_mem::nccl_put": _PEER,
    "symm_mem::nccl_put_signal": _PEER,
    "symm_mem::nccl_put_with_signal": _PEER,
    "symm_mem::nccl_reduce_scatter_offset": _PEER,
    "symm_mem::nvshmem_get": _PEER,
    "symm_mem::nvshmem_get_out": _PEER,
    "symm_mem::nvshmem_put": _PEER,
    "symm_mem::nvshmem_put_with_signal": _PEER,
}


# The bytes that one rank sends of a message, by the algorithms of NCCL, whose bandwidths are defined so.
#
# NVIDIA/nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth": of n ranks an all-reduce has the factor 2(n-1)/n, all-gather,
# reduce-scatter and all-to-all (n-1)/n, broadcast and reduce 1. Rings carry the first three, pipelined chains the last
# two, sends beside each other the others (pytorch, torch/csrc/cuda/nccl.cpp, `all2all`, `gather`, `scatter`).
#
# Each rule takes the call, its whole bytes, and its group; None where the group does not say which of its ranks this
# is.

WireRule = Callable[[CollectiveCall, int, ProcessGroupSpec], "int | None"]


def _part(nbytes: int, numerator: int, denominator: int) -> int:
    """A fraction of bytes, rounded up to whole ones."""
    return -(-nbytes * numerator // denominator)


def once_around(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A ring in which each rank passes on every block but one, as large as the others."""
    return _part(whole, group.size - 1, group.size)


def twice_around(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A reduce-scatter, then an all-gather."""
    return _part(whole, 2 * (group.size - 1), group.size)


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
    return _part(whole, sum(parts) - parts[group.rank], sum(parts)) if sum(parts) else 0


def passed_on(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A chain from the root on, in an order that NCCL chooses: every rank sends the message to the next. The last one
    sends nothing, and this one is taken not to be the last.
    """
    return whole if group.size > 1 else 0


def towards_root(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
    """A chain that ends at the root."""
    return _by_role(call, group, 0, passed_on(call, whole, group))


def own_to_root(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
    """Every rank but the root sends its part."""
    return _by_role(call, group, 0, whole // group.size)


def from_root(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
    """The root sends each other rank its part."""
    return _by_role(call, group, once_around(call, whole, group), 0)


def _by_role(call: CollectiveCall, group: ProcessGroupSpec, of_root: int, of_others: int) -> int | None:
    return None if group.rank is None else of_root if group.rank == call.given.get("root_rank") else of_others


def read_by_each(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """Every other rank reads the buffer: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu, one_shot."""
    return whole * (group.size - 1)


def everything(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A message to one other rank."""
    return whole


def nothing(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A rank that receives only."""
    return 0


def sends_of_batch(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """Those of a batch of sends and receives that are sends."""
    sizes = call.parts("tensors")
    return sum(size for op, size in zip(call.given["op_list"], sizes) if op == "isend")


# What each operator of torch.distributed communicates: kind, whole bytes, and what this rank sends.
#
# The whole message is the gathered output of an all-gather or gather, the unscattered input of a reduce-scatter or
# scatter, the whole input of an all-to-all, and what is reduced, broadcast or sent of the others. The operators'
# schemas
# are those of torch/csrc/distributed/c10d/Ops.cpp and Functional.cpp.

#: The kinds of communication; ``"send_recv"`` is a batch of both.
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send",
         "recv", "send_recv", "barrier")
#: Those that are messages from one rank to another.
POINT_TO_POINT = ("send", "recv", "send_recv")


class Message(NamedTuple):
    """What a call communicates; None is unknown. ``peer`` is the global rank of the other end, or of the root."""

    kind: str | None
    bytes: int | None
    wire_bytes: int | None
    peer: int | None = None


_Reader = Callable[[CollectiveCall], "int | None"]


def _no_peer(call: CollectiveCall) -> None:
    return None


def _no_bytes(call: CollectiveCall) -> int:
    return 0


class _Rule(NamedTuple):
    kind: str
    whole: _Reader
    sent: WireRule
    peer: _Reader = _no_peer


def _rule(kind: str, name: str, sent: WireRule, peer: _Reader = _no_peer) -> _Rule:
    """Of an operator whose argument (or result) of that name is the whole message."""
    return _Rule(kind, lambda call: call.nbytes(name), sent, peer)


def _times_ranks(name: str) -> _Reader:
    """Every rank's part, taken to be as large as this one's, which is the argument of that name."""
    def whole(call: CollectiveCall) -> int | None:
        part = call.nbytes(name)
        return None if part is None or call.group is None else part * call.group.size
    return whole


def _rank_at(name: str) -> _Reader:
    return lambda call: call.rank_at(name)


def _given(name: str) -> _Reader:
    return lambda call: call.given.get(name)


_ROOT = _rank_at("root_rank")
_RULES: dict[str, _Rule] = {
    "c10d::allreduce_": _rule("all_reduce", "tensors", twice_around),
    "c10d::allreduce_coalesced_": _rule("all_reduce", "tensors", twice_around),
    "c10d::allgather_": _rule("all_gather", "output_tensors", all_but_block("output_tensors", 1)),
    "c10d::_allgather_base_": _rule("all_gather", "output_tensor", once_around),
    "c10d::allgather_coalesced_": _rule("all_gather", "output_lists", once_around),
    "c10d::allgather_into_tensor_coalesced_": _rule("all_gather", "outputs", once_around),
    "c10d::reduce_scatter_": _rule("reduce_scatter", "input_tensors", all_but_block("input_tensors", 0)),
    "c10d::_reduce_scatter_base_": _rule("reduce_scatter", "input_tensor", once_around),
    "c10d::reduce_scatter_tensor_coalesced_": _rule("reduce_scatter", "inputs", once_around),
    "c10d::alltoall_": _rule("all_to_all", "input_tensors", all_but_own),
    "c10d::alltoall_base_": _rule("all_to_all", "input", all_but_own),
    "c10d::broadcast_": _rule("broadcast", "tensors", passed_on, _ROOT),
    "c10d::reduce_": _rule("reduce", "tensors", towards_root, _ROOT),
    # ranks other than the root hold no outputs of a gather, and no inputs of a scatter
    "c10d::gather_": _Rule("gather", _times_ranks("input_tensors"), own_to_root, _ROOT),
    "c10d::gather_into_tensor_": _Rule("gather", _times_ranks("input_tensor"), own_to_root, _ROOT),
    "c10d::scatter_": _Rule("scatter", _times_ranks("output_tensors"), from_root, _ROOT),
    "c10d::send": _rule("send", "tensors", everything, _rank_at("dst")),
    "c10d::recv_": _rule("recv", "tensors", nothing, _rank_at("src")),
    "c10d::recv_any_source_": _rule("recv", "tensors", nothing),
    # what the backend sends, a number of its own (ProcessGroupNCCL.cpp, `barrier`), is no message of the program's
    "c10d::barrier": _Rule("barrier", _no_bytes, nothing),
    "c10d::monitored_barrier_": _Rule("barrier", _no_bytes, nothing),
    "_c10d_functional::all_reduce_coalesced": _rule("all_reduce", "inputs", twice_around),
    "_c10d_functional::all_reduce_coalesced_": _rule("all_reduce", "inputs", twice_around),
    "_c10d_functional::all_gather_into_tensor_out": _rule("all_gather", RESULT, once_around),
    "_c10d_functional::all_gather_into_tensor_coalesced": _rule("all_gather", RESULT, once_around),
    "_c10d_functional::reduce_scatter_tensor_out": _rule("reduce_scatter", "input", once_around),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _rule("reduce_scatter", "inputs", once_around),
    # peers are global ranks here: torch/distributed/_functional_collectives.py, `isend_inplace`
    "_c10d_functional::isend": _rule("send", "tensor", everything, _given("dst")),
    "_c10d_functional::irecv": _rule("recv", "tensor", nothing, _given("src")),
    "_c10d_functional::batch_p2p_ops": _rule("send_recv", "tensors", sends_of_batch),
    "_dtensor::shard_dim_alltoall": _rule("all_to_all", "input", all_but_own),
    # each rank reads the others' shards, or their products: torch/distributed/_symmetric_memory/__init__.py,
    # `_pipelined_multi_all_gather_and_consume` and `_pipelined_produce_and_all2all`
    "symm_mem::_low_contention_all_gather": _rule("all_gather", RESULT, once_around),
    "symm_mem::_low_contention_reduce_scatter": _rule("reduce_scatter", "tensor", once_around),
    "symm_mem::fused_all_gather_matmul": _Rule("all_gather", _times_ranks("A"), once_around),
    "symm_mem::fused_matmul_reduce_scatter": _Rule("reduce_scatter", _times_ranks(RESULT), once_around),
    "symm_mem::fused_scaled_matmul_reduce_scatter": _Rule("reduce_scatter", _times_ranks(RESULT), once_around),
    "symm_mem::one_shot_all_reduce": _rule("all_reduce", "input", read_by_each),
    "symm_mem::one_shot_all_reduce_out": _rule("all_reduce", "input", read_by_each),
    "symm_mem::one_shot_all_reduce_copy": _rule("all_reduce", "local_input", read_by_each),
    "symm_mem::one_shot_all_reduce_copy_out": _rule("all_reduce", "local_input", read_by_each),
    "symm_mem::two_shot_all_reduce_": _rule("all_reduce", "input", twice_around),
    "symm_mem::two_shot_all_reduce_out": _rule("all_reduce", "input", twice_around),
    "symm_mem::reduce_scatter_out": _rule("reduce_scatter", "input", once_around),
    **{f"_c10d_functional::{name}": _rule("all_reduce", "input", twice_around)
       for name in ("all_reduce", "all_reduce_")},
    **{f"_c10d_functional::{name}": _rule("broadcast", "input", passed_on, _rank_at("src"))
       for name in ("broadcast", "broadcast_")},
}
for _namespace in ("_c10d_functional", "_c10d_functional_autograd"):
    _RULES[f"{_namespace}::all_gather_into_tensor"] = _rule("all_gather", RESULT, once_around)
    _RULES[f"{_namespace}::reduce_scatter_tensor"] = _rule("reduce_scatter", "input", once_around)
    _RULES[f"{_namespace}::all_to_all_single"] = _rule("all_to_all", "input", all_but_own)


def is_understood(name: str) -> bool:
    """Whether there is a rule for the operator of that name, as ``"c10d::send"``."""
    return name in _RULES


def _name_of(signature: Signature) -> str:
    """An operator's name with its namespace; "" of a function and of an operator of higher order, which have none."""
    return str(getattr(getattr(signature.op, "_schema", None), "name", ""))


def kind_of(signature: Signature) -> str | None:
    """The kind of communication that calls of a signature are, one of `KINDS`; None of others, and where not known."""
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
