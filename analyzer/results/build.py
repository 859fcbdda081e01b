"""Builds a `Profile` of a log and its annotations."""
from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

import torch

from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.profilers.annotation import Annotation, operator_key
from analyzer.profilers.held_memory import alive_at, category_of, forward_ends, peak_by_category
from analyzer.profilers.schedule import Lanes
from analyzer.record.call_table import OpCall
from analyzer.record.device_log import EVALUATION, NO_STEP, PREPARATION
from analyzer.record.log import CompiledCall, Log, LogNode, OuterCall
from analyzer.record.options import choose_samples, count_tokens
from analyzer.record.process_group import ProcessGroupSpec
from analyzer.units import add_quantities

from .info import (
    OPERATOR_COSTS,
    BreakInfo,
    CompiledInfo,
    HolderInfo,
    OperatorInfo,
    OutOfMemoryInfo,
    PhaseInfo,
    TimelinePoint,
    UncountedInfo,
)
from .lane import describe_spans
from .node_info import NodeInfo, PeakNode, TensorInfo, describe_saved, describe_spec
from .profile import AnyProfile, ProfileData
from .run_cost import CommInfo
from .timeline import (
    describe_first_shortage,
    describe_shortage,
    find_peak_call,
    find_unfinished,
    list_finished_phases,
    list_inputs,
    read_memory,
)
from .tree import ModulePaths, ModuleShape, ModuleTree, describe_all, list_module_calls
from .view import Groups
from .world import list_copies, list_devices

_LOOKUPS = ("aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only")


def list_micro_batches(log: Log, step: int) -> list[OuterCall]:
    """The call of the model of each micro-batch of a step, which says how many samples and tokens it takes. A
    micro-batch is a forward pass of the model with a backward pass of its own. Calls that one backward pass is for (two
    views of a batch) are one; of several models (a GAN) the one that had fewest counts, for the others run more than
    once on a batch. Empty where the step was replayed from another or no model was called.
    """
    backward = [record.first_call for record in log.phases if record.step == step and record.phase == "backward"]
    by_module: dict[int, list[OuterCall]] = {}
    for call in log.outer_calls:
        if call.step == step:
            by_module.setdefault(call.module, []).append(call)
    found = []
    for calls in by_module.values():  # the last call before each backward pass
        ends = [*(call.position for call in calls[1:]), None]
        found.append([call for call, end in zip(calls, ends)
                      if any(call.position <= first and (end is None or first < end) for first in backward)])
    return min((passes for passes in found if passes), key=len, default=[])


def count_step(log: Log, inputs: Mapping[str, TensorInfo]) -> dict[str, int | None]:
    """The samples and tokens of the last step: those of its inputs, unless it has micro-batches. None where they are
    not known, and of tokens where the inputs that could be some are features.
    """
    calls, features = list_micro_batches(log, log.steps - 1), list_features(log)
    tokens = count_tokens([(name, tensor) for name, tensor in inputs.items() if tensor.shape not in features])
    if len(calls) < 2:
        rows = next((t.shape[0] for t in inputs.values() if t.shape), None)
        return {"batch_size": choose_samples(log.listed_samples, rows), "tokens": tokens}
    return {"batch_size": add_quantities([call.samples for call in calls]),
            "tokens": None if tokens is None and features else add_quantities([call.tokens for call in calls])}


def list_features(log: Log) -> set[tuple[int, ...]]:
    """Shapes of indices of which none is a token's: looked up as bags (`nn.EmbeddingBag`), or column by column."""
    found: dict[tuple[int, ...], bool] = {}
    for step, call, storages, _ in log.tallies():
        name = getattr(getattr(call.signature.op, "_schema", None), "name", "")
        if step != log.steps - 1 or name not in _LOOKUPS:
            continue
        for number, index in zip(call.inputs[1:3], call.signature.inputs[1:3]):  # behind the table: indices, offsets
            spec: Any = storages[number].spec if number in storages else None
            if spec is not None:
                is_whole = name == _LOOKUPS[0] and (len(index.shape) > 1 or index.numel == spec.numel)
                found[tuple(spec.shape)] = found.get(tuple(spec.shape), False) or is_whole
    return {shape for shape, has_tokens in found.items() if not has_tokens}


_NODE_FIELDS, _PHASE_FIELDS, _COMM_FIELDS, _PROFILE_FIELDS = (
    {f.name for f in fields(record)} for record in (NodeInfo, PhaseInfo, CommInfo, ProfileData))
_COMPILED_COUNTS = ("operators", "recomputed", "fwd_kernels", "bwd_kernels", "fwd_extern_kernels", "bwd_extern_kernels")
_BOUNDS = ("peak_allocated_bytes_range", "peak_reserved_bytes_range")
_LATER = {*_BOUNDS, "step_seconds_range"}  # totals that are worked out when they are read


class ProfileBuilder:
    """Builds the profile of one recorded run; where profilers give the same quantity, the last one counts. ``paths``
    says where modules stand in the user's model. ``blanks`` are records, by index in the log's nodes, that are filled
    and put into the table of nodes. ``groups`` are the names of process groups.
    """

    def __init__(self, log: Log, shape: ModuleShape, annotations: Sequence[Annotation],
                 paths: ModulePaths, blanks: Mapping[int, NodeInfo], groups: Mapping[ProcessGroupSpec, str]) -> None:
        self.log, self.shape, self.annotations = log, shape, annotations
        self.paths, self.blanks, self.groups = paths, blanks, groups
        self.is_unfinished = find_unfinished(log)
        self.phase_rows = self._merge(a.phases for a in annotations)
        self.totals = self._merge(({0: a.totals} for a in annotations), may_end=True)[0]
        self._lanes: tuple[Lanes | None] | None = None

    def build(self, kind: type[AnyProfile], *, is_final: bool = False, **facts: Any) -> AnyProfile:
        """The profile, a ``kind`` of record, with ``facts`` in place of what the log says; rows of a final log are made
        when first read.
        """
        sums = {**self._find_sums(), **facts}
        assumptions = [*self.log.assumptions, *(text for a in self.annotations for text in a.assumptions)]
        if len(self.log.listed_samples) > 1:
            assumptions.append("samples are not counted: whether each tensor of the list of inputs is a sample, or has "
                               f"a row of each, is not known ({' or '.join(map(str, self.log.listed_samples))})")
        groups: Groups = {self._find_nodes: ("nodes",), self._find_communication: ("comm",),
                  self._find_modules: ("modules", "module_calls", "operators"),
                  self._find_spans: ("spans",), self._find_step_range: ("step_seconds_range",),
                  functools.partial(self._find_bounds, assumptions): (*_BOUNDS, "assumptions"),
                  self._find_memory: ("timeline", "memory_events", "holders", "peak_by_category"),
                  self._find_devices: ("devices", "copies")}
        if is_final:
            found = kind.deferred(sums, groups)
            found.complete(_peak=self._find_peak)
            return found
        return kind(**sums, **{name: value for find in groups for name, value in find().items()})

    def _find_sums(self) -> dict[str, Any]:
        log, last = self.log, self.log.steps - 1
        ended_early = log.shortage is not None and log.shortage.step < 2  # before a second step was whole
        known = {name: value for name, value in self.totals.items() if name in _PROFILE_FIELDS and name not in _LATER}
        known["uncounted"] = tuple(UncountedInfo(*row) for row in known.get("uncounted") or ())
        inputs = {s.label: describe_spec(s.spec) for s in list_inputs(log)}
        params = sum(p.numel for p in self.shape.distinct_parameters().values())
        return {**known, "params": params, "fullest_device": log.device if log.others else None,
                "inputs": inputs, **count_step(log, inputs),
                "torch_version": str(torch.__version__), "analyzer_version": package_version(),
                "first_step": self._find_phases(0), "phases": {} if ended_early else self._find_phases(last),
                "out_of_memory": describe_shortage(log, self.paths),
                "first_shortage": describe_first_shortage(log, self.paths), "compiled": self._describe_compiled()}

    def _describe_compiled(self) -> tuple[CompiledInfo, ...] | None:
        """A row for each module and function under torch.compile, of the last step that was run and not replayed."""
        found: dict[tuple[int, str], list[CompiledCall]] = {}
        for call in self.log.compiled_calls:
            found.setdefault((call.module, call.function), []).append(call)
        last = max([call.step for call in self.log.compiled_calls], default=0)
        return tuple([self._describe_compiled_calls(calls, [call for call in calls if call.step == last])
                      for calls in found.values()]) or None

    def _describe_compiled_calls(self, every: list[CompiledCall], calls: list[CompiledCall]) -> CompiledInfo:
        module, graphs = self.log.modules[every[0].module], [graph for call in calls for graph in call.graphs]
        saved = [graph.saved_bytes for graph in graphs if graph.saved_bytes is not None]
        counts: dict[str, int] = {name: sum([getattr(graph, name) for graph in graphs]) for name in _COMPILED_COUNTS}
        return CompiledInfo(path=self.paths.find(module.path), type=module.type, function=every[0].function,
                            calls=len(calls), graphs=len(graphs), saved_bytes=sum(saved) if saved else None, **counts,
                            breaks=tuple(dict.fromkeys([BreakInfo(*at) for call in every for at in call.breaks])),
                            recompilations=tuple([c.recompiled for c in every if c.recompiled is not None]),
                            cuda_graphs=any([call.cuda_graphs for call in calls]),
                            config={name: str(value) for name, value in sorted(every[-1].config.items())
                                    if (name, value) != ("backend", "inductor")})

    def _find_bounds(self, assumptions: list[str]) -> dict[str, Any]:
        """What peaks of memory rest on, and all that was assumed."""
        ranges = {name: self.totals.get(name) for name in _BOUNDS}
        said = list(assumptions)
        for find in next((a.find_peaks for a in reversed(self.annotations) if a.find_peaks), []):
            peaks = find()
            for name in ranges:
                found = peaks.range_of(name.removeprefix("peak_").removesuffix("_range"))
                ends = [end for known in (ranges[name], found) for end in known or ()]
                ranges[name] = (min(ends), max(ends)) if ends else None
            if (text := peaks.describe()) is not None:
                said.append(text)
        return {**ranges, "assumptions": tuple(said)}

    def _find_step_range(self) -> dict[str, Any]:
        if self.is_unfinished is not None:
            return {"step_seconds_range": None}
        for annotation in reversed(self.annotations):
            if annotation.find_step_range is not None:
                return {"step_seconds_range": annotation.find_step_range()}
            if "step_seconds_range" in annotation.totals:
                break
        return {"step_seconds_range": self.totals.get("step_seconds_range")}

    def _find_phases(self, step: int) -> dict[str, PhaseInfo]:
        places = [(step, phase) for phase in list_finished_phases(self.log)]
        places += [(NO_STEP, EVALUATION), (NO_STEP, PREPARATION)] if step == self.log.steps - 1 else []
        return {phase: PhaseInfo(**{k: v for k, v in self.phase_rows[step, phase].items() if k in _PHASE_FIELDS})
                for step, phase in places if self.phase_rows.get((step, phase))}

    def _find_nodes(self) -> dict[str, Any]:
        log = self.log
        with log.reading():
            rows = self._merge((a.nodes for a in self.annotations), may_end=True)
            saved = {i: row["saved_tensors"] for i, row in rows.items() if row.get("saved_tensors")}
            for i, tensors in describe_saved(log, saved).items():
                rows[i]["saved_tensors"] = tensors
            held = {(node.step, number): node.name for node in reversed(log.nodes) if node.op == "get_attr"
                    for number, _ in node.outputs}  # the first that gets each of the model's tensors
            infos = {i: self._describe_node(i, rows[i], held) for i, node in enumerate(log.nodes)
                     if node.step == log.steps - 1}
        for i, blank in self.blanks.items():
            blank.fill(infos[i])
        return {"nodes": tuple([self.blanks.get(i, info) for i, info in infos.items()])}

    def _find_modules(self) -> dict[str, Any]:
        with self.log.reading():
            operators = self._list_operators()
            rows = self._merge((a.modules for a in self.annotations), may_end=True)
            tree = ModuleTree(self.log, self.shape, self.paths, rows, operators, self.totals.get("optimizer_seconds"))
            calls = list_module_calls(self.log, self.paths, self._merge(a.module_calls for a in self.annotations))
            total: dict[tuple[str, str], OperatorInfo] = {}  # what is unknown in one is unknown in the sum
            for record in chain.from_iterable(operators.values()):
                key = record.phase, record.operator
                total[key] = total[key] + record if key in total else record
            return {"modules": tree.build(self.shape), "module_calls": calls, "operators": tuple(sorted(
                total.values(), key=lambda r: (r.phase, -(r.flops or 0), r.operator)))}

    def _find_communication(self) -> dict[str, Any]:
        """A record for each call of the last step that communicates, of phases that ended; None where unknown."""
        log, finished = self.log, list_finished_phases(self.log)
        rows = self._list_messages()
        known = [self.phase_rows.get((log.steps - 1, phase), {}).get("comm_bytes") for phase in finished]
        if not finished or not rows and set(known) == {None}:
            return {"comm": None}
        with log.reading():
            calls = log.calls
            return {"comm": tuple([self._describe_communication(calls[i], row) for i, row in sorted(rows.items())
                                   if "kind" in row and calls[i].phase in finished])}

    def _list_messages(self) -> Mapping[int, Mapping[str, Any]]:
        """What is communicated, by index in the log's calls."""
        return self._merge(a.communication for a in self.annotations)

    def _describe_communication(self, call: OpCall, row: Mapping[str, Any]) -> CommInfo:
        log, group = self.log, self.log.group_of(call.signature)
        module, node = row["module"], row["node"]
        return CommInfo(module_path=self.paths.find(log.modules[module].path),
                        node=log.nodes[node].name if node >= 0 else None, operator=str(call.signature.op),
                        group=None if group is None else self.groups.get(group, group.label),
                        ranks=None if group is None else group.size,
                        **{name: value for name, value in row.items() if name in _COMM_FIELDS and name != "node"})

    def _find_lanes(self) -> Lanes | None:
        """What each lane does, worked out once. A `functools.cached_property` has one lock for all instances up to
        Python 3.11, for which a child that is forked meanwhile would wait.
        """
        if self._lanes is None:
            known = [a.find_lanes for a in self.annotations if a.find_lanes is not None]
            self._lanes = (known[-1]() if known else None, )
        return self._lanes[0]

    def _find_spans(self) -> dict[str, Any]:
        with self.log.reading():
            lanes = None if self.is_unfinished is not None else self._find_lanes()
            return {"spans": () if lanes is None else describe_spans(self.log, lanes.spans, self.groups,
                                                                     self.paths.find, self._list_messages)}

    def _find_memory(self) -> dict[str, Any]:
        with self.log.reading():
            lanes = self._find_lanes() if self.log.keeps_allocator_events else None
            timeline, events = read_memory(self.log, {} if lanes is None else lanes.host_starts)
            return {"timeline": timeline, "memory_events": events, "holders": self._list_holders(timeline),
                    "peak_by_category": peak_by_category(self.log)}

    def _find_peak(self) -> PeakNode | None:
        log, found = self.log, find_peak_call(self.log)
        if found is None:
            return None
        call = log.calls[found[0]]
        said = PeakNode(found[1], call.phase, str(call.signature.op))
        name = log.nodes[call.node].name if call.node >= 0 else None
        node = next((node for node in log.nodes if node.step == log.steps - 1 and node.name == name), None)
        if name is None or node is None:
            return said._replace(name=name)
        return said._replace(name=name, op=node.op, module_path=self.paths.find(log.modules[node.module].path),
                             target=self.paths.find(node.target) if node.op == "call_module" else node.target)

    def _find_devices(self) -> dict[str, Any]:
        """Rows of several devices, and the copies of a step that was whole."""
        if not self.log.others:
            return {"devices": (), "copies": ()}
        is_whole = self.is_unfinished is None
        with self.log.reading():
            rows = list_devices(self.log, self.totals.get("device_seconds") or {} if is_whole else {})
            copies = list_copies(self.log, self.totals.get("copied_seconds") or {}) if is_whole else ()
            return {"devices": tuple(rows), "copies": tuple(copies)}

    def _merge(self, sources: Iterable[Mapping[Any, Mapping[str, Any]]], *,
               may_end: bool = False) -> defaultdict[Any, dict[str, Any]]:
        """Rows of all sources together; where they ``may_end`` before the run did, what was not complete is None."""
        merged: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for source in sources:
            for key, row in source.items():
                merged[key].update(row)
        if may_end and (is_unfinished := self.is_unfinished) is not None:
            for row in merged.values():
                row.update((name, None) for name in row if is_unfinished(name))
        return merged

    def _describe_node(self, index: int, row: Mapping[str, Any], held: Mapping[tuple[int, int], str]) -> NodeInfo:
        """The row of one node; quantities that are no field of `NodeInfo` are kept in ``extra``."""
        log, node = self.log, self.log.nodes[index]
        known = {k: v for k, v in row.items() if k in _NODE_FIELDS}
        extra = {k: v for k, v in row.items() if k not in _NODE_FIELDS}
        target = self.paths.find(node.target) if node.op == "call_module" else node.target
        number, spec = node.outputs[0] if node.outputs else (-1, ())
        # where a later operator took its first output as a part of a sharded tensor
        sharding = log.layouts.get((number, tuple(spec)))  # type: ignore[arg-type]
        return NodeInfo(op=node.op, name=node.name, target=target,
                        module_path=self.paths.find(log.modules[node.module].path), source=node.source,
                        inputs=tuple(log.nodes[i].name for i in node.inputs),
                        outputs=describe_all([spec for _, spec in node.outputs]),
                        aliases=_list_aliases(log, index, node, held),
                        region=node.region,  # type: ignore[arg-type]
                        sharding=sharding, extra=extra, **known)

    def _list_operators(self) -> dict[int, list[OperatorInfo]]:
        """By module: a record for each operator in each part of the last step that ended, the most work first."""
        log, rows = self.log, self._merge(a.operators for a in self.annotations)
        finished = None if self.is_unfinished is None else list_finished_phases(log)
        calls = Counter(operator_key(call) for call in log.calls
                        if call.step == log.steps - 1 and (finished is None or call.phase in finished))
        found: dict[int, list[OperatorInfo]] = {}
        for (module, part, op), count in calls.items():
            row = {k: v for k, v in rows.get((module, part, op), {}).items() if k in OPERATOR_COSTS}
            found.setdefault(module, []).append(OperatorInfo(op, count, phase=part, **row))
        for records in found.values():
            records.sort(key=lambda r: (r.phase, -(r.flops or 0), r.operator))
        return found

    def _list_holders(self, timeline: Sequence[TimelinePoint]) -> tuple[HolderInfo, ...]:
        """What holds memory at the peak or where it ran out. The workspace of the operator that runs is no storage."""
        log, ends = self.log, forward_ends(self.log)
        found: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        for lifetime in alive_at(log, log.peak_event if log.shortage is None else log.shortage.event):
            path = self.paths.find(log.modules[lifetime.module].path)
            found[log.name_holder(lifetime), path, category_of(lifetime, log, ends)].append(lifetime.block_bytes)
        rows = [HolderInfo(*key, sum(blocks), len(blocks)) for key, blocks in found.items()]
        if log.peak_workspace_bytes and log.shortage is None:
            running = max(timeline, key=lambda point: point.allocated_bytes, default=None)
            label = "(operator)" if running is None else str(running.label)
            path = next((log.modules[node.module].path for node in log.nodes if node.name == label), "")
            rows.append(HolderInfo(label, self.paths.find(path), "workspace", log.peak_workspace_bytes))
        return tuple(sorted(rows, key=lambda r: -r.bytes))


def _list_aliases(log: Log, index: int, node: LogNode, held: Mapping[tuple[int, int], str]) -> tuple[str, ...]:
    """The nodes whose storages the outputs share; of the model's tensors those that get them (``held``)."""
    found: list[str] = []
    for number, _ in node.outputs:
        lifetime = log.storages.get(number)
        if lifetime is not None and lifetime.node not in (index, -1) and log.nodes[lifetime.node].step == node.step:
            found.append(log.nodes[lifetime.node].name)
        elif lifetime is not None and lifetime.category == "input" and node.op != "placeholder":
            found.append(lifetime.label)
        elif (name := held.get((node.step, number), node.name)) != node.name:
            found.append(name)
    return tuple(dict.fromkeys(found))


def build_unplaced_profile(kind: type[AnyProfile], root: torch.nn.Module, error: DeviceOutOfMemoryError,
                           **facts: Any) -> AnyProfile:
    """The profile of a model that does not fit before its first step: nothing ran, so little is known."""
    tensors = list(root.parameters())
    short = OutOfMemoryInfo("placing the model and its inputs", "setup", error.requested_bytes, error.short_bytes,
                            allocated_bytes=error.allocated_bytes, reserved_bytes=error.reserved_bytes,
                            capacity_bytes=error.capacity_bytes)
    return kind(**facts, params=sum(p.numel() for p in tensors), out_of_memory=short,
                param_bytes=sum(p.numel() * p.element_size() for p in tensors),
                torch_version=str(torch.__version__), analyzer_version=package_version())


@functools.cache  # it reads the metadata of installed packages
def package_version() -> str:
    """The version of this package, ``"source"`` where it is not installed."""
    try:
        return version("symbolic-analyzer")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "source"
