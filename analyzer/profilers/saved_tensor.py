"""Which tensors a node keeps for backward, and which its gradient reads."""
from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from analyzer.record.log import Log

_OF_THE_MODEL = frozenset(("parameter", "buffer"))


class SavedRow(NamedTuple):
    """A storage that is alive when backward begins: as a node made it, or as its gradient reads it."""

    number: int
    spec: Any         #: the TensorSpec of one tensor in it
    is_read: bool     #: by the gradient of the node, or where the node is run again


def list_saved(log: Log, saved: Collection[int]) -> dict[int, list[SavedRow]]:
    """By node of the last step: what it made of the ``saved`` storages (numbers), then what its gradient reads of what
    others made and of the model's own tensors.
    """
    last = log.steps - 1
    read = _find_reads(log, last, saved)
    made: dict[int, dict[int, Any]] = {}
    for i, node in enumerate(log.nodes):
        if node.step == last and node.op == "placeholder":
            made[i] = {number: spec for number, spec in node.outputs if number in saved}
    calls = log.calls
    for number in saved:
        lifetime = log.storages[number]
        if lifetime.node >= 0 and log.nodes[lifetime.node].step == last and lifetime.born_call < len(calls):
            call = calls[lifetime.born_call]
            specs = dict(zip(call.outputs, call.signature.outputs))
            specs.update(zip(call.inputs, call.signature.inputs))  # a collective writes into what it is given
            if number in specs:
                made.setdefault(lifetime.node, {})[number] = specs[number]
    found: dict[int, list[SavedRow]] = {}
    for node_index in sorted({*made, *read}):
        own, used = made.get(node_index, {}), read.get(node_index, {})
        found[node_index] = [SavedRow(number, spec, number in used) for number, spec in own.items()]
        found[node_index] += [SavedRow(number, spec, True) for number, spec in used.items() if number not in own]
    return found


def _find_reads(log: Log, last: int, saved: Collection[int]) -> dict[int, dict[int, Any]]:
    """By node: the storages, with the spec of a tensor in each, that its calls in backward read."""
    storages = log.storages
    found: dict[int, dict[int, Any]] = {}
    for call in log.calls:
        if call.step != last or call.phase != "backward" or call.node < 0:
            continue
        for number, spec in zip(call.inputs, call.signature.inputs):
            lifetime = storages.get(number)
            if number in saved or lifetime is not None and lifetime.category in _OF_THE_MODEL:
                found.setdefault(call.node, {}).setdefault(number, spec)
    return found
