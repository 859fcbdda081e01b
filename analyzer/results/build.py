"""Puts what the profilers said together into a `Profile`."""
from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import torch

from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.profilers.annotation import Annotation, part_of
from analyzer.profilers.memory import alive_at, category_of, forward_ends, peak_by_category
from analyzer.record.log import Log, LogNode
from analyzer.replay.twin import Twin

from .info import CostInfo, HolderInfo, ModuleCall, ModuleInfo, OperatorInfo, PhaseInfo, UncountedInfo
from .module_shape import ModuleShape
from .node_info import NodeInfo, TensorInfo
from .out_of_memory import describe_placement, describe_shortage, forget_unfinished
from .parallel_size import find_parallel_sizes
from .profile import Profile
from .timeline import read_memory

_NODE_FIELDS = {f.name for f in fields(NodeInfo)}
_PHASE_FIELDS = {f.name for f in fields(PhaseInfo)}
_COST_FIELDS = {f.name for f in fields(CostInfo)}
_OPERATOR_COSTS = ("flops", "macs", "seconds", "read_bytes", "written_bytes")
_OPERATOR_FIELDS = frozenset(_OPERATOR_COSTS)
_PROFILE_FIELDS = {f.name for f in fields(Profile)}


def tensor_info(spec: Any) -> TensorInfo:
    return TensorInfo(tuple(spec), str(spec.dtype).removeprefix("torch."), spec.device)


def build_profile(log: Log, root: torch.nn.Module, annotations: Sequence[Annotation], *, is_final: bool = False,
                  blanks: Mapping[int, NodeInfo] | None = None, twins: Mapping[int, Twin] = MappingProxyType({}),
                  **facts: Any) -> Profile:
    """The profile of one recorded run; where profilers give the same quantity, the last one counts.

    ``blanks`` are records, by index in the log's nodes, that are filled and put into the table of nodes, ``twins``
    blocks that were found to be like earlier ones, by id.

    Sums are made at once. Where the log is final (nobody will change it), rows (nodes, modules, operators, the
    timeline) are worked out when they are read first.
    """
    last = log.steps - 1
    phase_rows, totals = _merge_sums(annotations)
    with without_modes():  # quantised layers unpack their weights to say what they are
        shape = ModuleShape.of(root, twins)
    rows: Rows | None = None
    if log.shortage is not None:
        rows = Rows(log, shape, annotations, totals, phase_rows, blanks or {})
        forget_unfinished(log, [*rows.nodes.values(), *rows.modules.values(), totals], phase_rows)
    ended_early = log.shortage is not None and log.shortage.step < 2  # before a second step was whole
    totals["uncounted"] = tuple(UncountedInfo(op, calls, nbytes) for op, calls, nbytes in totals.get("uncounted", ()))
    given = {k: v for k, v in totals.items() if k in _PROFILE_FIELDS}
    inputs = _inputs(log)
    sums = {**find_parallel_sizes(root), **facts, **given}
    sums.update(params=shape.count_parameters(), inputs=inputs, batch_size=next(
        (t.shape[0] for t in inputs.values() if t.shape), None),
                torch_version=str(torch.__version__), analyzer_version=package_version(), first_step=_phases(
                    phase_rows, 0), phases={} if ended_early else _phases(phase_rows, last),
                out_of_memory=describe_shortage(log), assumptions=tuple(log.assumptions))
    rows = rows or Rows(log, shape, annotations, totals, phase_rows, blanks or {})
    if log.shortage is not None or not is_final:
        return Profile(
            **sums, **{
                name: value for make in (rows.of_nodes, rows.of_modules, rows.of_memory)
                for name, value in make().items()
            })
    return Profile.deferred(sums, {rows.of_nodes: ("nodes",), rows.of_modules: ("modules", "module_calls", "operators"),
                                   rows.of_memory: ("timeline", "memory_events", "holders", "peak_by_category")})


class Rows:
    """What a profile tells in rows, group by group."""

    def __init__(self, log: Log, shape: ModuleShape, annotations: Sequence[Annotation], totals: dict[str, Any],
                 phase_rows: Any, blanks: Mapping[int, NodeInfo]) -> None:
        self.log, self.shape, self.annotations, self.totals = log, shape, annotations, totals
        self.phase_rows, self.blanks = phase_rows, blanks

    @functools.cached_property
    def nodes(self) -> defaultdict[int, dict[str, Any]]:
        return _merge_rows(a.nodes for a in self.annotations)

    @functools.cached_property
    def modules(self) -> defaultdict[int, dict[str, Any]]:
        return _merge_rows(a.modules for a in self.annotations)

    def of_nodes(self) -> dict[str, Any]:
        log = self.log
        with log.reading():
            rows = self.nodes
            infos = {i: node_info(log, i, rows[i]) for i, node in enumerate(log.nodes) if node.step == log.steps - 1}
        for i, blank in self.blanks.items():
            blank.fill(infos[i])
        return {
            "nodes": tuple(
                infos.values() if not self.blanks else [self.blanks.get(i, info) for i, info in infos.items()])
        }

    def of_modules(self) -> dict[str, Any]:
        log = self.log
        with log.reading():
            operators = _operators(log, _merge_rows(a.operators for a in self.annotations),
                                   {phase for _, phase in self.phase_rows})
            return {
                "modules": _ModuleTree(log, self.shape, self.modules, operators,
                                       self.totals.get("optimizer_seconds")).build(),
                "module_calls": _module_calls(log), "operators": _sum_operators(operators)
            }

    def of_memory(self) -> dict[str, Any]:
        with self.log.reading():
            timeline, events = read_memory(self.log)
            return {
                "timeline": timeline, "memory_events": events, "holders": _holders(self.log),
                "peak_by_category": peak_by_category(self.log)
            }


def build_unplaced_profile(root: torch.nn.Module, error: DeviceOutOfMemoryError, **facts: Any) -> Profile:
    """The profile of a model that does not fit before its first step: nothing ran, so little is known."""
    return Profile(**facts, **describe_placement(root, error), torch_version=str(torch.__version__),
                   analyzer_version=package_version())


@functools.cache  # it reads the metadata of installed packages
def package_version() -> str:
    try:
        return version("torch-analyzer")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "source"


def _merge_sums(annotations: Iterable[Annotation]) -> tuple[Any, dict[str, Any]]:
    phases: defaultdict[tuple[int, str], dict[str, Any]] = defaultdict(dict)
    totals: dict[str, Any] = {}
    for annotation in annotations:
        for key, row in annotation.phases.items():
            phases[key].update(row)
        totals.update(annotation.totals)
    return phases, totals


def _merge_rows(sources: Iterable[dict[Any, dict[str, Any]]]) -> defaultdict[Any, dict[str, Any]]:
    merged: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for source in sources:
        for key, row in source.items():
            merged[key].update(row)
    return merged


def node_info(log: Log, index: int, row: dict[str, Any]) -> NodeInfo:
    """The row of one node; quantities that are no field of `NodeInfo` are kept in ``extra``."""
    node = log.nodes[index]
    known = {k: v for k, v in row.items() if k in _NODE_FIELDS}
    extra = {k: v for k, v in row.items() if k not in _NODE_FIELDS}
    return NodeInfo(op=node.op, name=node.name, target=node.target, module_path=log.modules[node.module].path,
                    source=node.source, inputs=tuple(log.nodes[i].name for i in node.inputs), outputs=tuple(
                        tensor_info(s) for _, s in node.outputs), aliases=_aliases(log, index, node),
                    region=node.region, extra=extra, **known)  # type: ignore[arg-type]


def _aliases(log: Log, index: int, node: LogNode) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for number, _ in node.outputs:
        life = log.storages.get(number)
        if life is not None and life.node not in (index, -1) and log.nodes[life.node].step == node.step:
            found.setdefault(log.nodes[life.node].name)
        elif life is not None and life.category == "input" and node.op != "placeholder":
            found.setdefault(life.label)
    return tuple(found)


def _inputs(log: Log) -> dict[str, TensorInfo]:
    return {s.label: tensor_info(s.spec) for s in log.lives_in("input") if s.spec is not None}


def _phases(rows: dict[tuple[int, str], dict[str, Any]], step: int) -> dict[str, PhaseInfo]:
    order = ("forward", "backward", "optimizer", "zero_grad")
    return {phase: PhaseInfo(**{k: v for k, v in rows[step, phase].items() if k in _PHASE_FIELDS})
            for phase in order if rows.get((step, phase))}


def _holders(log: Log, largest: int = 50) -> tuple[HolderInfo, ...]:
    """Who holds memory at the peak (or when it ran out), by category and node (or tensor name), largest first."""
    ends = forward_ends(log)
    found: dict[tuple[str, str, str], list[int]] = {}
    for life in alive_at(log, log.peak_event if log.shortage is None else log.shortage.event):
        label = life.label or (log.nodes[life.node].name if life.node >= 0 else "(outside the model)")
        row = found.setdefault((label, log.modules[life.module].path, category_of(life, log, ends)), [0, 0])
        row[0] += life.block_bytes
        row[1] += 1
    rows = [
        HolderInfo(label, path, category, nbytes, count) for (label, path, category), (nbytes, count) in found.items()
    ]
    return tuple(sorted(rows, key=lambda r: -r.bytes)[:largest])


class _ModuleTree:
    """The tree of modules: what each does itself from the log, sums upwards.

    The optimizer runs over all parameters at once; each module gets its share by elements, to which the work of
    elementwise updates is in proportion.
    """

    def __init__(self, log: Log, root: ModuleShape, rows: dict[int, dict[str, Any]],
                 operators: dict[int, list[OperatorInfo]], optimizer_seconds: float | None) -> None:
        self.log, self.root, self.rows, self.operators, self.optimizer_seconds = log, root, rows, operators, optimizer_seconds
        self.trainable = sum(p.numel for p in root.distinct_parameters().values() if p.requires_grad)
        self.index_of = {m.path: i for i, m in enumerate(log.modules)}
        self.first_path: dict[int, str] = {}
        self.counted: set[int] = set()

    def build(self) -> ModuleInfo:
        return self._build(self.root, "", 0)

    def _build(self, module: ModuleShape, path: str, depth: int) -> ModuleInfo:
        shared = self.first_path.get(module.key)
        if shared is not None:
            zero = CostInfo(**dict.fromkeys(_COST_FIELDS, 0))
            return ModuleInfo(path=path, type=module.type, depth=depth, shared_with=shared, own=zero, **_costs(zero))
        self.first_path[module.key] = path
        index = self.index_of.get(path)
        own_row = dict(self.rows.get(index, {})) if index is not None else {}
        fresh = [p for p in module.parameters if p.key not in self.counted]
        self.counted.update(p.key for p in fresh)
        own_row["params"] = sum(p.numel for p in fresh)
        own_row["trainable_params"] = sum(p.numel for p in fresh if p.requires_grad)
        own_row["optimizer_seconds"] = self.optimizer_seconds and self.optimizer_seconds * own_row[
            "trainable_params"] / max(1, self.trainable)
        own = CostInfo(**{k: v for k, v in own_row.items() if k in _COST_FIELDS})
        children = tuple(
            [self._build(child, f"{path}.{name}" if path else name, depth + 1) for name, child in module.children])
        total = own
        for child in children:
            total = total + child
        record = self.log.modules[index] if index is not None else None
        outputs = tuple(tensor_info(s) for s in record.outputs) if record else ()
        return ModuleInfo(
            path=path, type=module.type, depth=depth, extra_repr=module.extra_repr, training=module.training,
            kernel_size=module.kernel_size, calls=record.calls if record else None,
            parameters={p.name: p.describe() for p in module.parameters}, inputs=tuple(
                tensor_info(s) for s in record.inputs) if record else (), outputs=outputs, output_bytes=sum(
                    o.nbytes for o in outputs), own=own, operators=tuple(
                        self.operators.get(index if index is not None else -1, ())), children=children, **_costs(total))


def _module_calls(log: Log) -> tuple[ModuleCall, ...]:
    return tuple(
        ModuleCall(log.modules[c.module].path, c.parent, tuple(map(tensor_info, c.inputs)),
                   tuple(map(tensor_info, c.outputs))) for c in log.module_calls)


def _costs(cost: CostInfo) -> dict[str, Any]:
    return {name: getattr(cost, name) for name in _COST_FIELDS}


def _operators(log: Log, rows: dict[tuple[int, str, str], dict[str, Any]],
               phases: set[str]) -> dict[int, list[OperatorInfo]]:
    """By module: one record for each operator in each part of the last step, the most work first.

    Of a step that memory ran out in, only those of the ``phases`` that ended.
    """
    calls: dict[tuple[int, str, str], int] = {}
    last = log.steps - 1
    for call in log.calls:
        if call.step == last and (log.shortage is None or call.phase in phases):
            key = (call.module, part_of(call), str(call.signature.op))
            calls[key] = calls.get(key, 0) + 1
    out: dict[int, list[OperatorInfo]] = {}
    for (module, part, op), count in calls.items():
        row = {k: v for k, v in rows.get((module, part, op), {}).items() if k in _OPERATOR_FIELDS}
        out.setdefault(module, []).append(OperatorInfo(op, count, phase=part, **row))
    for records in out.values():
        records.sort(key=lambda r: (r.phase, -(r.flops or 0), r.operator))
    return out


def _sum_operators(by_module: dict[int, list[OperatorInfo]]) -> tuple[OperatorInfo, ...]:
    """The same over all modules; what is unknown in one is unknown in the sum."""
    found: dict[tuple[str, str], OperatorInfo] = {}
    for records in by_module.values():
        for r in records:
            before = found.get((r.phase, r.operator))
            found[r.phase, r.operator] = r if before is None else OperatorInfo(
                r.operator, r.calls + before.calls, phase=r.phase,
                **{name: _add(getattr(r, name), getattr(before, name)) for name in _OPERATOR_COSTS})
    return tuple(sorted(found.values(), key=lambda r: (r.phase, -(r.flops or 0), r.operator)))


def _add(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a + b
