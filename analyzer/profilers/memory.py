"""What the log says of memory: saved tensors, temporaries and peaks."""
from __future__ import annotations

import functools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any

from analyzer.distributed.world_state import BUFFER, RESHARDED, UNSHARDED
from analyzer.hardware.catalogue import simulated_spec
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import StorageLifetime

from .annotation import Annotation, SavedRow
from .deferred_free import Peaks, find_inferred_peaks, find_timed_peaks, has_inferred, hold_back, times_kernels
from .growth import Growth, list_growing
from .held_memory import forward_ends, held_bytes, outlives_forward

_HELD_BY_THE_MODEL = {"parameter": "param_bytes", "buffer": "buffer_bytes"}


def list_saved(log: Log, saved: Collection[int]) -> dict[int, list[SavedRow]]:
    """By node of the last step: what it made of the ``saved`` storages, then what else its gradient reads."""
    last = log.steps - 1
    made: defaultdict[int, dict[int, Any]] = defaultdict(dict)
    read: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # the storages, with the spec of a tensor in each
    for call in log.calls:
        if call.step == last and call.phase == "backward" and call.node >= 0:
            for number, spec in zip(call.inputs, call.signature.inputs):
                lifetime = log.storages.get(number)
                if number in saved or lifetime is not None and lifetime.category in _HELD_BY_THE_MODEL:
                    read[call.node].setdefault(number, spec)
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
                made[lifetime.node][number] = specs[number]
    found: dict[int, list[SavedRow]] = {}
    for node_index in sorted({*made, *read}):
        own, used = made.get(node_index, {}), read.get(node_index, {})
        found[node_index] = [SavedRow(number, spec, number in used) for number, spec in own.items()]
        found[node_index] += [SavedRow(number, spec, True) for number, spec in used.items() if number not in own]
    return found


#: categories of what the forward pass makes, and no module computes
NO_ACTIVATIONS = frozenset({"loss", "workspace", "host copy", UNSHARDED, RESHARDED, BUFFER})


def profile_memory(log: Log) -> Annotation:
    """Bytes saved, temporary and held, of the last step; peaks of the whole run.

    A storage that a forward operator made and still alive when backward begins is saved for backward, by whatever means
    (autograd, a checkpoint's arguments, a tensor on the context); it counts once, at the node that made it. Of a step
    with several backward passes, as of micro-batches, modules count what is saved where that is most.
    """
    out = Annotation(functools.partial(_fill_rows, log))
    for record in log.phases:
        row = out.phases[record.step, record.phase]
        row["allocated_bytes"], row["reserved_bytes"] = record.allocated_bytes, record.reserved_bytes
        row["peak_allocated_bytes"] = max(row.get("peak_allocated_bytes", 0), record.peak_allocated_bytes)
        if record.peak_reserved_bytes is not None:
            row["peak_reserved_bytes"] = max(row.get("peak_reserved_bytes", 0), record.peak_reserved_bytes)
    out.totals = {
        "peak_allocated_bytes": log.peak_bytes,
        "peak_reserved_bytes": max((r.peak_reserved_bytes for r in log.phases if r.peak_reserved_bytes is not None),
                                   default=None),
        "peak_reserved_bytes_range": None, "peak_allocated_bytes_range": None,
        "param_bytes": held_bytes(log, "parameter"), "buffer_bytes": held_bytes(log, "buffer"),
        "optimizer_bytes": held_bytes(log, "optimizer state")}
    low = out.totals["peak_reserved_bytes"]
    if low is not None and (held := hold_back(log)) is not None:  # the bounds where ``record_stream`` holds blocks back
        high = max(low, held.peak_reserved_bytes)
        out.totals["peak_reserved_bytes_range"] = (low, high)
        out.assumptions.append(
            f"record_stream: {held.blocks} blocks are used on other streams when they die. peak_reserved_bytes takes "
            "them to be free at once, as the allocator has them where memory is short; held until the host has waited "
            f"for those streams (at the latest at the end of a step) they are up to {held.peak_bytes:,} bytes, and up "
            f"to {high:,} bytes are reserved. Allocated bytes are the same")
    spec, predicted = simulated_spec(), Peaks(log.peak_bytes, out.totals["peak_reserved_bytes"])
    if has_inferred(log, spec):
        out.find_peaks.append(functools.partial(find_inferred_peaks, log, spec, predicted))
    if times_kernels(log) and log.shortage is None:
        out.find_peaks.append(functools.partial(find_timed_peaks, log, predicted))
    if ends := list_growing(log):
        out.find_peaks.append(functools.partial(Growth, log, ends))
    return out


def _fill_rows(log: Log, out: Annotation) -> None:
    last = log.steps - 1
    ends = forward_ends(log).get(last, [])
    trains = any(r.phase == "backward" for r in log.phases)
    saved_at: dict[int, int] = {}
    passes = _SavedByPass(ends)
    out.start_rows(log, {"output_bytes": 0, "temp_bytes": 0, "param_bytes": 0, "buffer_bytes": 0,
                         "incremental_bytes": 0, "backward_bytes": 0 if trains else None, "saved_tensors": ()})
    for i in range(len(log.modules)):
        out.modules[i].update(activation_bytes=0, saved_bytes=0)

    for lifetime in log.storages.values():
        if lifetime.category in _HELD_BY_THE_MODEL:
            out.add(out.modules, lifetime.module, _HELD_BY_THE_MODEL[lifetime.category], lifetime.nbytes)
            continue
        if lifetime.category == "input":
            if trains and lifetime.number in log.saved_inputs:
                saved_at[lifetime.number] = lifetime.nbytes
            continue
        if lifetime.step != last or lifetime.phase != "forward" or lifetime.category in NO_ACTIVATIONS:
            continue
        saved = trains and outlives_forward(lifetime, ends, log)
        if saved:
            saved_at[lifetime.number] = lifetime.nbytes
        passes.note(lifetime, saved)
        out.add(out.modules, lifetime.module, "activation_bytes", lifetime.nbytes)
        if lifetime.node >= 0 and saved and log.nodes[lifetime.node].step == last:
            out.add(out.nodes, lifetime.node, "incremental_bytes", lifetime.nbytes)
    for module, nbytes in passes.list_most_saved():
        out.add(out.modules, module, "saved_bytes", nbytes)
    _describe_nodes(log, last, out, saved_at, trains, passes)
    for node, rows in list_saved(log, saved_at).items() if trains else ():
        out.nodes[node]["saved_tensors"] = tuple(rows)


class _SavedByPass:
    """What is saved when each backward pass of a step begins."""

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends = ends or [0]
        self.pass_of_node: dict[int, int] = {}
        self._saved: list[StorageLifetime] = []
        #: changes from pass to pass of what is saved, and of what passes before it saved and it does not use
        self._total, self.kept = [0] * (len(self.ends) + 1), [0] * (len(self.ends) + 1)

    def note(self, lifetime: StorageLifetime, is_saved: bool) -> None:
        place = min(bisect_left(self.ends, lifetime.born), len(self.ends) - 1)
        self.pass_of_node[lifetime.node] = place
        if is_saved:
            self._saved.append(lifetime)
            stop = len(self.ends) if lifetime.died is None else max(place + 1, bisect_left(self.ends, lifetime.died))
            of_node = lifetime.nbytes if lifetime.node >= 0 else 0
            for changes, first, nbytes in ((self._total, place, lifetime.nbytes), (self.kept, place + 1, of_node)):
                changes[first] += nbytes
                changes[stop] -= nbytes

    def list_most_saved(self) -> Iterator[tuple[int, int]]:
        """Module and bytes of each storage that is saved when the pass begins for which most is."""
        totals = list(accumulate(self._total[:-1]))
        end = self.ends[totals.index(max(totals))]
        for lifetime in self._saved:
            if len(self.ends) == 1 or lifetime.born <= end and (lifetime.died is None or lifetime.died > end):
                yield lifetime.module, lifetime.nbytes


def _charge_held(log: Log, last: int, out: Annotation) -> set[int]:
    """Charge parameters and buffers to the first node that reads each; their numbers."""
    seen: set[int] = set()

    def take(node: int, number: int) -> None:
        held = log.storages.get(number)
        if held is not None and held.category in _HELD_BY_THE_MODEL and number not in seen:
            seen.add(number)
            out.nodes[node][_HELD_BY_THE_MODEL[held.category]] += held.nbytes

    for i, node in enumerate(log.nodes):
        if node.step == last and node.op == "get_attr":
            for number, _ in node.outputs:
                take(i, number)
    for call in log.calls:
        if call.step == last and call.phase == "forward" and call.node >= 0:
            for number in call.inputs:
                take(call.node, number)
    return seen


def _describe_nodes(log: Log, last: int, out: Annotation, saved_at: dict[int, int], trains: bool,
                    passes: _SavedByPass) -> None:
    """Fill the columns of the node table that depend on the order of nodes."""
    accumulated, place, kept = 0, 0, list(accumulate(passes.kept[:-1]))
    seen = _charge_held(log, last, out)
    for i, node in enumerate(log.nodes):
        if node.step != last:
            continue
        row = out.nodes[i]
        if (own := passes.pass_of_node.get(i, place)) > place:  # the first of another pass
            place, accumulated = own, kept[own]
        for number in node.reads:
            lifetime = log.storages.get(number)
            if lifetime is not None and trains and lifetime.requires_grad:
                row["backward_bytes"] += lifetime.nbytes
        for number, _ in node.outputs:
            lifetime = log.storages.get(number)
            if lifetime is None or number in seen or lifetime.category in _HELD_BY_THE_MODEL:
                continue
            if node.op != "placeholder" and lifetime.node != i:
                continue  # an alias of what another node made
            seen.add(number)
            if number in saved_at:
                row["output_bytes"] += lifetime.nbytes
                if node.op == "placeholder":
                    row["incremental_bytes"] += lifetime.nbytes
            else:
                row["temp_bytes"] += lifetime.nbytes
        accumulated += row["incremental_bytes"]
        row["accumulate_bytes"] = accumulated
