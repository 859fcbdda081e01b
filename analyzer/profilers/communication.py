"""What ranks communicate: messages, their buffers and their totals."""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from analyzer.distributed.world_state import BUFFER, RESHARDED, UNSHARDED
from analyzer.meta.spec import Signature
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log
from analyzer.record.memory_recorder import BUILT
from analyzer.record.process_group import communicates, takes_group

from .annotation import WAYS, Annotation
from .collective import NOT_UNDERSTOOD, POINT_TO_POINT, Message, kind_of, message_of
from .held_memory import forward_ends, outlives_forward

# Which part of a step a message between two ranks is for: that which made what is sent, or reads what is received.
#
# Pipeline schedules send and receive outside of modules and of the backward pass, whichever the message is for.

class Purpose(NamedTuple):
    """The phase, module and node that a message is for."""

    phase: str
    module: int
    node: int


def find_purposes(log: Log) -> dict[int, Purpose]:
    """By index in ``log.calls``: what each send and receive outside of nodes is for, where that is not where it ran. A
    send is for the last call before it that made its tensor, a receive for the first after it that reads its own, views
    aside. Replays are written out where there are messages, and not else.
    """
    if not any(kind_of(signature) in POINT_TO_POINT for signature in log.signatures()):
        return {}
    made: dict[int, Purpose] = {}                    # by number of the storage
    awaited: dict[int, tuple[int, Purpose]] = {}     # receives of which nothing was read yet
    found: dict[int, Purpose] = {}
    step = -1
    for index, call in enumerate(log.calls):
        if call.step != step:
            step = call.step
            made.clear()
            awaited.clear()
        own = Purpose(call.phase, call.module, call.node)
        kind = kind_of(call.signature)
        if kind in POINT_TO_POINT:
            if call.node < 0 and call.inputs:
                number = call.inputs[0]
                if kind == "recv":
                    awaited[number] = index, own
                elif made.get(number, own) != own:
                    found[index] = made[number]
        elif not _is_view(call):
            for number in call.inputs:
                if number in awaited:
                    receive, before = awaited.pop(number)
                    if own != before:
                        found[receive] = own
            made.update(dict.fromkeys(call.outputs, own))
    return found


def _is_view(call: OpCall) -> bool:
    """Whether a call makes nothing and reads nothing; what it gives is in storages that it was given."""
    return bool(call.outputs) and set(call.outputs) <= set(call.inputs) and not any(
        a.alias_info is not None and a.alias_info.is_write
        for a in getattr(getattr(call.signature.op, "_schema", None), "arguments", ()))


CAST = "cast copy"  #: of a parameter
_GATHERS = {"c10d::_allgather_base_", "c10d::allgather_into_tensor_coalesced_"}
_COPIES = {"aten::copy_", "aten::_to_copy"}  # of FSDP1: a shard in the dtype of computation, or from the host


def name_buffers(log: Log, made: Iterable[tuple[int, str]] = ()) -> None:
    """Give storages of a log that wrappers keep a category. What parameters, or copies of them, are gathered into is an
    *unsharded parameter*, what FSDP keeps of it for the backward pass (on a smaller mesh) a *resharded parameter*. A
    *communication buffer* is what FSDP packs parameters and gradients into
    (``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``); and what else a collective of c10d reads or writes
    in place, but for activations: what outlives the forward pass that made it. ``made``: storages by number, with the
    category that is known of them.
    """
    storages, ends = log.storages, forward_ends(log)
    copies: set[int] = set()  # storages of copies of parameters

    def name_all(numbers: Iterable[int], category: str) -> None:
        for number in numbers:
            if number in storages and storages[number].category in ("", BUILT):
                storages[number].category = category

    def is_parameter(number: int) -> bool:
        return number in storages and storages[number].category == "parameter"

    def is_activation(number: int) -> bool:
        lifetime = storages[number]
        return not lifetime.category and lifetime.phase == "forward" and outlives_forward(
            lifetime, ends.get(lifetime.step, ()), log)

    for number, category in made:
        name_all([number], category)
    for call in log.calls:
        name = str(getattr(getattr(call.signature.op, "_schema", None), "name", ""))
        if name == "fsdp::split_with_sizes_copy":
            name_all(call.inputs[:1], BUFFER)
            name_all(call.inputs[1:], UNSHARDED)
        elif name == "fsdp::all_gather_copy_in":
            name_all(call.outputs, BUFFER)
            for number in filter(storages.__contains__, call.inputs):  # what a smaller mesh's forward left, or casts
                name_all([number], RESHARDED if is_activation(number) else CAST)
        elif name == "fsdp::chunk_cat":
            name_all(call.inputs[-1:], BUFFER)  # out=
        elif name.startswith("c10d::") and name != "c10d::send":  # what is sent is what a stage computed
            if name in _GATHERS and (call.inputs[-1] in copies or is_parameter(call.inputs[-1])):
                name_all(call.inputs[:-1], UNSHARDED)
            name_all([n for n in call.inputs if n in storages and not is_activation(n)], BUFFER)
        elif name in _COPIES and is_parameter(call.inputs[-1]):
            copies.add(call.inputs[0] if len(call.inputs) == 2 else call.outputs[0])


def find_message(log: Log, call: OpCall) -> Message | None:
    return message_of(call.signature, log.group_of(call.signature)) if is_message(call.signature) else None


def is_message(signature: Signature) -> bool:
    return communicates(signature) or takes_group(signature)


def profile_communication(log: Log) -> Annotation:
    """Bytes that calls communicate, by node, module and phase, and what each sends; the unknown is None, and said."""
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
    """Alike calls: step and phase that they are for, one of them, their number. None where nothing communicates."""
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
