"""Which part of a step a message between two ranks is for: that which made what is sent, or reads what is received.

Pipeline schedules send and receive outside of modules and of the backward pass, whichever of them the message is for.
"""
from __future__ import annotations

from typing import NamedTuple

from analyzer.record.log import Log
from analyzer.record.op_call import OpCall

from .collective.rule import POINT_TO_POINT, kind_of


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
