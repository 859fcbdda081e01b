"""What each operator of torch.distributed communicates: kind, whole bytes, and what this rank sends.

The whole message is the gathered output of an all-gather or gather, the unscattered input of a reduce-scatter or
scatter, the whole input of an all-to-all, and what is reduced, broadcast or sent of the others. The operators' schemas
are those of torch/csrc/distributed/c10d/Ops.cpp and Functional.cpp.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from analyzer.meta.signature import Signature
from analyzer.record.process_group import ProcessGroupSpec, takes_group

from . import wire
from .call import RESULT, CollectiveCall
from .omission import NOT_UNDERSTOOD, SILENT

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
    sent: wire.WireRule
    peer: _Reader = _no_peer


def _rule(kind: str, name: str, sent: wire.WireRule, peer: _Reader = _no_peer) -> _Rule:
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
    "c10d::allreduce_": _rule("all_reduce", "tensors", wire.twice_around),
    "c10d::allreduce_coalesced_": _rule("all_reduce", "tensors", wire.twice_around),
    "c10d::allgather_": _rule("all_gather", "output_tensors", wire.all_but_block("output_tensors", 1)),
    "c10d::_allgather_base_": _rule("all_gather", "output_tensor", wire.once_around),
    "c10d::allgather_coalesced_": _rule("all_gather", "output_lists", wire.once_around),
    "c10d::allgather_into_tensor_coalesced_": _rule("all_gather", "outputs", wire.once_around),
    "c10d::reduce_scatter_": _rule("reduce_scatter", "input_tensors", wire.all_but_block("input_tensors", 0)),
    "c10d::_reduce_scatter_base_": _rule("reduce_scatter", "input_tensor", wire.once_around),
    "c10d::reduce_scatter_tensor_coalesced_": _rule("reduce_scatter", "inputs", wire.once_around),
    "c10d::alltoall_": _rule("all_to_all", "input_tensors", wire.all_but_own),
    "c10d::alltoall_base_": _rule("all_to_all", "input", wire.all_but_own),
    "c10d::broadcast_": _rule("broadcast", "tensors", wire.passed_on, _ROOT),
    "c10d::reduce_": _rule("reduce", "tensors", wire.towards_root, _ROOT),
    # ranks other than the root hold no outputs of a gather, and no inputs of a scatter
    "c10d::gather_": _Rule("gather", _times_ranks("input_tensors"), wire.own_to_root, _ROOT),
    "c10d::gather_into_tensor_": _Rule("gather", _times_ranks("input_tensor"), wire.own_to_root, _ROOT),
    "c10d::scatter_": _Rule("scatter", _times_ranks("output_tensors"), wire.from_root, _ROOT),
    "c10d::send": _rule("send", "tensors", wire.everything, _rank_at("dst")),
    "c10d::recv_": _rule("recv", "tensors", wire.nothing, _rank_at("src")),
    "c10d::recv_any_source_": _rule("recv", "tensors", wire.nothing),
    # what the backend sends, a number of its own (ProcessGroupNCCL.cpp, `barrier`), is no message of the program's
    "c10d::barrier": _Rule("barrier", _no_bytes, wire.nothing),
    "c10d::monitored_barrier_": _Rule("barrier", _no_bytes, wire.nothing),
    "_c10d_functional::all_reduce_coalesced": _rule("all_reduce", "inputs", wire.twice_around),
    "_c10d_functional::all_reduce_coalesced_": _rule("all_reduce", "inputs", wire.twice_around),
    "_c10d_functional::all_gather_into_tensor_out": _rule("all_gather", RESULT, wire.once_around),
    "_c10d_functional::all_gather_into_tensor_coalesced": _rule("all_gather", RESULT, wire.once_around),
    "_c10d_functional::reduce_scatter_tensor_out": _rule("reduce_scatter", "input", wire.once_around),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _rule("reduce_scatter", "inputs", wire.once_around),
    # peers are global ranks here: torch/distributed/_functional_collectives.py, `isend_inplace`
    "_c10d_functional::isend": _rule("send", "tensor", wire.everything, _given("dst")),
    "_c10d_functional::irecv": _rule("recv", "tensor", wire.nothing, _given("src")),
    "_c10d_functional::batch_p2p_ops": _rule("send_recv", "tensors", wire.sends_of_batch),
    "_dtensor::shard_dim_alltoall": _rule("all_to_all", "input", wire.all_but_own),
    # each rank reads the others' shards, or their products: torch/distributed/_symmetric_memory/__init__.py,
    # `_pipelined_multi_all_gather_and_consume` and `_pipelined_produce_and_all2all`
    "symm_mem::_low_contention_all_gather": _rule("all_gather", RESULT, wire.once_around),
    "symm_mem::_low_contention_reduce_scatter": _rule("reduce_scatter", "tensor", wire.once_around),
    "symm_mem::fused_all_gather_matmul": _Rule("all_gather", _times_ranks("A"), wire.once_around),
    "symm_mem::fused_matmul_reduce_scatter": _Rule("reduce_scatter", _times_ranks(RESULT), wire.once_around),
    "symm_mem::fused_scaled_matmul_reduce_scatter": _Rule("reduce_scatter", _times_ranks(RESULT), wire.once_around),
    "symm_mem::one_shot_all_reduce": _rule("all_reduce", "input", wire.read_by_each),
    "symm_mem::one_shot_all_reduce_out": _rule("all_reduce", "input", wire.read_by_each),
    "symm_mem::one_shot_all_reduce_copy": _rule("all_reduce", "local_input", wire.read_by_each),
    "symm_mem::one_shot_all_reduce_copy_out": _rule("all_reduce", "local_input", wire.read_by_each),
    "symm_mem::two_shot_all_reduce_": _rule("all_reduce", "input", wire.twice_around),
    "symm_mem::two_shot_all_reduce_out": _rule("all_reduce", "input", wire.twice_around),
    "symm_mem::reduce_scatter_out": _rule("reduce_scatter", "input", wire.once_around),
    **{f"_c10d_functional::{name}": _rule("all_reduce", "input", wire.twice_around)
       for name in ("all_reduce", "all_reduce_")},
    **{f"_c10d_functional::{name}": _rule("broadcast", "input", wire.passed_on, _rank_at("src"))
       for name in ("broadcast", "broadcast_")},
}
for _namespace in ("_c10d_functional", "_c10d_functional_autograd"):
    _RULES[f"{_namespace}::all_gather_into_tensor"] = _rule("all_gather", RESULT, wire.once_around)
    _RULES[f"{_namespace}::reduce_scatter_tensor"] = _rule("reduce_scatter", "input", wire.once_around)
    _RULES[f"{_namespace}::all_to_all_single"] = _rule("all_to_all", "input", wire.all_but_own)


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
