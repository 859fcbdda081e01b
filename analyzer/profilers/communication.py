"""What collectives and messages between ranks move, per call, node, module and phase."""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from analyzer.meta.signature import Signature
from analyzer.record.log import Log
from analyzer.record.op_call import OpCall
from analyzer.record.process_group import communicates, takes_group

from .annotation import WAYS, Annotation
from .collective.omission import NOT_UNDERSTOOD
from .collective.rule import Message, message_of
from .message_flow import find_purposes


def is_message(signature: Signature) -> bool:
    """Whether calls of a signature communicate."""
    return communicates(signature) or takes_group(signature)


def find_message(log: Log, call: OpCall) -> Message | None:
    """What a call communicates; None where it is no communication."""
    return message_of(call.signature, log.group_of(call.signature)) if is_message(call.signature) else None


def profile_communication(log: Log) -> Annotation:
    """Whole bytes of every call that communicates, at the node and module that ran it, and what it sends in rows of
    its own, both of the last step; totals by phase of every step. What is not known is None, and said.
    """
    out = Annotation(functools.partial(_fill_rows, log))
    for record in log.phases:
        out.phases[record.step, record.phase].setdefault("comm_bytes", 0)
    unknown: Counter[str] = Counter()
    for step, phase, call, number in _list_calls(log):
        message = find_message(log, call)
        if message is None:
            continue
        row = out.phases[step, phase]
        if message.bytes is None:
            row["comm_bytes"] = None
        elif row["comm_bytes"] is not None:
            row["comm_bytes"] += number * message.bytes
        if message.wire_bytes is None and step == log.steps - 1:
            unknown[_explain(call, message)] += number
    out.assumptions = [text.format(number) for text, number in unknown.items()]
    return out


def _list_calls(log: Log) -> Iterator[tuple[int, str, OpCall, int]]:
    """Calls that are alike: step and phase that they are for, one of them, and how many there are. None of a log in
    which nothing communicates.
    """
    if not any(map(is_message, log.signatures())):
        return
    purposes = find_purposes(log)
    if not purposes:
        yield from ((step, call.phase, call, number) for step, call, _, number in log.tallies())
        return
    for index, call in enumerate(log.calls):
        yield call.step, purposes[index].phase if index in purposes else call.phase, call, 1


def _explain(call: OpCall, message: Message) -> str:
    """Why it is not known what a call sends, with a place for how many calls there are."""
    name: str = call.signature.op._schema.name
    shown = f"communication of {name.replace('::', '.')} ({{}} calls in a step): "
    if message.kind is not None:
        return shown + ("how many bytes a sparse tensor has is unknown" if message.bytes is None else
                        "the bytes on the wire are unknown, for its process group is")
    return shown + "its bytes are unknown: " + NOT_UNDERSTOOD.get(
        name, "it takes a process group, and is no operator of torch.distributed")


def leave_communication_unknown(log: Log) -> Annotation:
    """The quantities of `profile_communication`, each None: for a model of which ranks communicate unseen."""
    out = Annotation(lambda out: out.start_rows(log, {"fwd_comm_bytes": None, "bwd_comm_bytes": None}))
    for record in log.phases:
        out.phases[record.step, record.phase]["comm_bytes"] = None
    return out


def _fill_rows(log: Log, out: Annotation) -> None:
    out.start_rows(log, {"fwd_comm_bytes": 0, "bwd_comm_bytes": 0})
    if not any(map(is_message, log.signatures())):
        return
    unknown: list[tuple[OpCall, str]] = []
    purposes = find_purposes(log)
    # what a hook of a parameter's gradient communicates, as DDP's do, has no node of its own: its module's last one
    last_nodes = {node.module: i for i, node in enumerate(log.nodes) if node.step == log.steps - 1}
    for index, call in enumerate(log.calls):
        if call.step != log.steps - 1 or (message := find_message(log, call)) is None:
            continue
        if index in purposes:
            call = replace(call, **purposes[index]._asdict())
        elif call.node < 0 and call.phase in WAYS:
            call = replace(call, node=last_nodes.get(call.module, call.node))
        out.communication[index].update(message._asdict(), phase=call.phase, module=call.module, node=call.node)
        if call.phase not in WAYS:
            continue
        name = f"{WAYS[call.phase]}_comm_bytes"
        if message.bytes is None:
            unknown.append((call, name))
        else:
            out.add_where(call, name, message.bytes)
    for call, name in unknown:
        out.modules[call.module][name] = None
        if call.node >= 0:
            out.nodes[call.node][name] = None
