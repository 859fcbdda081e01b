"""Bytes that collectives move, per node, module and phase."""
from __future__ import annotations

import functools

from analyzer.meta.signature import Signature
from analyzer.record.log import Log
from analyzer.record.op_call import OpCall
from analyzer.record.recorder import communicates

from .annotation import WAYS, Annotation

# Collectives by name, of all namespaces (c10d, _c10d_functional, _c10d_functional_autograd); what their largest tensor
# holds is the message.
_COLLECTIVES = ("allreduce", "all_reduce", "allgather", "all_gather", "reduce_scatter", "alltoall", "all_to_all",
                "broadcast", "reduce_", "gather_", "scatter_", "send", "recv")


def collective_of(call: OpCall) -> str | None:
    """The kind of collective that a call is, or None."""
    return kind_of_collective(call.signature)


def kind_of_collective(signature: Signature) -> str | None:
    """The kind of collective that calls of a signature are, or None."""
    if not communicates(signature):
        return None
    name = signature.op._schema.name.partition("::")[2]
    for kind in _COLLECTIVES:
        if kind in f"{name.lstrip('_')}_":
            return kind.rstrip("_")
    return None


def message_bytes(call: OpCall) -> int:
    """The whole message: an all-gather's gathered output, a reduce-scatter's whole input, else the tensors given."""
    return message_bytes_of(call.signature)


def message_bytes_of(signature: Signature) -> int:
    """The whole message of any call of a signature."""
    if signature.op._schema.name.startswith("c10d::"):  # inputs and outputs are both arguments: a sum would count both
        return max(map(_nbytes, signature.args), default=0)
    return max(sum(s.nbytes for s in signature.inputs), sum(s.nbytes for s in signature.outputs))


def _nbytes(argument: object) -> int:
    if isinstance(argument, list):
        return sum(_nbytes(a) for a in argument)
    return int(getattr(argument, "nbytes", 0))


def profile_communication(log: Log) -> Annotation:
    """Bytes of every collective of the last step, at the node and module that ran it; totals by phase of every step."""
    out = Annotation(functools.partial(_fill_rows, log))
    for record in log.phases:
        out.phases[record.step, record.phase].setdefault("comm_bytes", 0)
    for step, call, _, number in log.tallies():
        if collective_of(call) is not None:
            out.add(out.phases, (step, call.phase), "comm_bytes", number * message_bytes(call))
    return out


def leave_communication_unknown(log: Log) -> Annotation:
    """The quantities of `profile_communication`, each None: for a model of which ranks communicate unseen."""
    out = Annotation(lambda out: out.start_rows(log, {"fwd_comm_bytes": None, "bwd_comm_bytes": None}))
    for record in log.phases:
        out.phases[record.step, record.phase]["comm_bytes"] = None
    return out


def _fill_rows(log: Log, out: Annotation) -> None:
    out.start_rows(log, {"fwd_comm_bytes": 0, "bwd_comm_bytes": 0})
    for call in log.calls:
        if call.step == log.steps - 1 and call.phase in WAYS and collective_of(call) is not None:
            out.add_where(call, f"{WAYS[call.phase]}_comm_bytes", message_bytes(call))
