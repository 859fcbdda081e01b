"""`reprofile`: annotates a graph again after an edit, running only what the edit changed."""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from analyzer.errors import AnalyzerError, InputError
from analyzer.fx.graph.codegen import RegionCodeGen
from analyzer.fx.graph.interpreter import (
    RecordingInterpreter,
    RunRecord,
    Unknown,
    Value,
    fingerprint_nodes,
    held_tensors,
)
from analyzer.fx.graph.statement import GradRegion, statements_of
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.spec import TensorSpec
from analyzer.meta.state import MetaState
from analyzer.meta.tensor import new_storage, tensor_on
from analyzer.record.options import ProfileOptions
from analyzer.record.recorder import Recorder
from analyzer.record.reference_count import ReferenceCount
from analyzer.record.tensor_walk import tensors_in
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile

from .symbolic_profile import LastRun, last_runs

Tensor = torch.Tensor
#: Fields of a profile that only a whole run can tell.
_OF_A_WHOLE_RUN = frozenset(
    """recompute_macs executed_flops uncounted operators peak_allocated_bytes peak_reserved_bytes
    peak_allocated_bytes_range peak_reserved_bytes_range peak_by_category holders first_step phases timeline
    memory_events out_of_memory step_seconds step_seconds_range kernel_seconds spans replay
    modules module_calls""".split())
_SUMS = ("fwd_flops", "bwd_flops", "fwd_macs", "bwd_macs", "recompute_flops", "fwd_seconds", "bwd_seconds")
_SAVED = ("incremental_bytes", "output_bytes", "temp_bytes")


class _CannotTell(Exception):
    """The whole graph must run."""


def reprofile(gm: fx.GraphModule) -> fx.GraphModule:
    """Bring ``node.meta["info"]`` of a graph up to date after an edit of the graph or of its annotations; the same
    ``gm`` is returned.

    `symbolic_profile` must have run on ``gm`` before (on this object, not on what it was copied from). Nodes that were
    changed or added, those that read and write the same values, and those downstream whose inputs have other specs than
    before are run again, forward and backward; all other records stay as they are, but for their columns of the node
    table that depend on the order of nodes. The records equal those of a whole run. ``gm.meta["profile"]`` then has the
    new nodes and sums; what only a whole run can tell (peaks, seconds of the step, phases, timeline, modules) is worked
    out by one when it is first read, and is None or empty where the graph was edited again by then. A whole run is made
    at once where most nodes changed, where the inputs or output did, where a part of the graph runs without
    gradients, or where a value cannot be made again from its record. Raises InputError where ``gm`` has not been
    profiled, and what `symbolic_profile` raises.

    >>> import torch
    >>> from analyzer import symbolic_profile, symbolic_trace
    >>> from analyzer.fx import set_region
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(16)])
    >>> x = torch.empty(4, 8)
    >>> gm = symbolic_profile(symbolic_trace(model, meta_args={"input": x}), x)
    >>> _ = set_region(gm, ["_7", "_8"])
    >>> p = reprofile(gm).meta["profile"]
    >>> p.recompute_flops, p.peak_allocated_bytes == symbolic_profile(gm, x).meta["profile"].peak_allocated_bytes
    (512, True)
    """
    last = last_runs.get(gm)
    if last is None:
        raise InputError(
            "reprofile(): this graph module has not been profiled; call symbolic_profile(gm, ...) first (a copy needs "
            "it too)"
        )
    last.record.complete()
    now = fingerprint_nodes(gm.graph)
    try:
        _check_comparable(now, last.record)
        changed = {n for n in gm.graph.nodes
                   if now[n.name] != last.record.fingerprints.get(n.name) or "info" not in n.meta}
        changed -= {n for n in changed if n.op == "output"}
        infos = _Window(gm, last).run(changed) if changed else {}
    except (_CannotTell, AnalyzerError, RuntimeError):  # an error of the model's own comes again in the whole run
        return last.repeat(gm)
    for node, info in infos.items():
        node.meta["info"] = info
    _sum_up(gm, last, now, is_edited=bool(infos))
    last.record.fingerprints = now
    return gm


def run_passes(gm: fx.GraphModule, *passes: Callable[[fx.GraphModule], object]) -> fx.GraphModule:
    """Run each of ``passes``, a function that edits the graph of ``gm`` in place, and bring annotations up to date with
    `reprofile` after each. A graph that has not been profiled is left without annotations. Raises what a pass raises.

    >>> import torch
    >>> from analyzer import symbolic_profile, symbolic_trace
    >>> from analyzer.fx import split_biases
    >>> x = torch.empty(2, 4)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    >>> gm = run_passes(symbolic_profile(symbolic_trace(model, meta_args={"input": x}), x), split_biases)
    >>> [(n.name, n.meta["info"].fwd_flops) for n in gm.graph.nodes if n.op.startswith("call")]
    [('linear', 128), ('add', 16), ('_1', 16)]
    """
    for edit in passes:
        edit(gm)
        gm.graph.lint()
        gm.recompile()
        if gm in last_runs:
            reprofile(gm)
    return gm


def _check_comparable(now: dict[str, tuple[Any, ...]], record: RunRecord) -> None:
    """The inputs and the output must be those of the run; and where a part runs without gradients, now or before, what
    far nodes save depends on the paths around it.
    """
    edges, edges_before = ({name: p[:5] for name, p in prints.items() if p[0] in ("placeholder", "output")}
                           for prints in (now, record.fingerprints))
    if edges != edges_before or any(isinstance(region, GradRegion) for prints in (now, record.fingerprints)
                                    for p in prints.values() for region in p[4]):
        raise _CannotTell


class _Window:
    """The part of a graph that runs again: what changed, what shares memory with it, and all that read these."""

    def __init__(self, gm: fx.GraphModule, last: LastRun) -> None:
        self.gm, self.last, self.record = gm, last, last.record
        self.nodes = list(gm.graph.nodes)
        self.units: dict[fx.Node, list[fx.Node]] = {}  #: a node and those that run with it, in one checkpoint
        for statement in statements_of(self.nodes):
            inside = statement.nodes()
            self.units.update(dict.fromkeys(inside, inside))
        self.result = RunRecord()

    def run(self, changed: set[fx.Node]) -> dict[fx.Node, NodeInfo]:
        """The records of the nodes that ``changed``, or change with them."""
        changed = changed | self._beside(changed) | {
            u for n in changed if "offload" in (n.meta.get("saved"), *self.record.fingerprints.get(n.name, ())[5:6])
            for m in self._sharing({n}) for u in m.users if u.op != "output"}
        while True:
            changed = {m for n in changed for m in self.units[n]}
            if 2 * len(changed) > len(self.nodes):
                raise _CannotTell
            shared = self._sharing(changed)
            rows = self._run({m for n in shared for u in (n, *n.users) for m in self.units[u] if m.op != "output"})
            more = self._spread(changed, shared)
            if not more:
                break
            changed |= more
        self._keep(changed, set(rows))
        infos: dict[fx.Node, NodeInfo] = {}
        for node in shared:
            row = rows.get(node)
            if row is None:
                continue
            if node in changed:
                row.module_path = node.meta.get("module_path", "")
                row.saved, row.sharding = node.meta.get("saved"), node.meta.get("sharding")
                infos[node] = row
            else:
                infos[node] = replace(node.meta["info"], **{name: getattr(row, name) for name in _SAVED})
        return infos

    def _beside(self, changed: set[fx.Node]) -> set[fx.Node]:
        """What reads the same values or uses the same parameters: gradients are summed where the last of them is."""
        held = {id(t) for n in changed if n.op == "call_module" for t in held_tensors(n)}
        holders = {n for n in self.nodes
                   if n.op == "call_module" and not held.isdisjoint(map(id, held_tensors(n)))} if held else set()
        return holders | {u for n in changed for i in n.all_input_nodes for u in i.users if u.op != "output"}

    def _sharing(self, changed: set[fx.Node]) -> set[fx.Node]:
        """``changed``, and all whose results share memory with what they read or returned."""
        read = {i for n in changed for i in n.all_input_nodes}
        storages = {s for n in (*changed, *read) for s in self.record.storages(n.name)}
        offloaded = {n for n in self.nodes if n.meta.get("saved") == "offload"}
        return changed | read | offloaded | self._beside(changed) | {
            n for n in self.nodes if not storages.isdisjoint(self.record.storages(n.name))}

    def _spread(self, changed: set[fx.Node], shared: set[fx.Node]) -> set[fx.Node]:
        """Nodes that have other inputs than before, or other gradients, now that ``changed`` ones ran."""
        more: set[fx.Node] = set()
        for node in shared:
            if node.name not in self.result.values:
                continue
            before, after = (pytree.tree_leaves(r.values.get(node.name)) for r in (self.record, self.result))
            alike = len(before) == len(after) and all(
                a.is_like(b) if isinstance(a, Value) else a == b for a, b in zip(after, before))
            if node in changed and not alike:
                more |= set(node.users)
            if self.result.differentiable.get(node.name) != self.record.differentiable.get(node.name):
                made = self.record.storages(node.name)
                more |= {u for n in self.nodes if not made.isdisjoint(self.record.storages(n.name)) for u in n.users}
            if node.op not in ("placeholder",
                               "get_attr") and self.result.gradients[node.name] != self.record.gradients.get(node.name):
                more |= {node, *node.users} | self._beside({node})
        return {n for n in more if n.op != "output"} - changed

    def _keep(self, changed: set[fx.Node], ran: set[fx.Node]) -> None:
        """Put what ``changed`` nodes did into the record of the whole run."""
        numbers: dict[int, int] = {}  # storages of this run -> those of the whole run
        for node in ran - changed:
            numbers.update(
                (a.storage, b.storage) for a, b in zip(self.result.tensors(node.name), self.record.tensors(node.name)))
        for node in changed:
            values = self.result.values.get(node.name)
            self.record.values[node.name] = pytree.tree_map(
                lambda v: replace(v, storage=numbers.get(v.storage, v.storage)) if isinstance(v, Value) else v, values)
            self.record.gradients[node.name] = self.result.gradients.get(node.name, {})
            self.record.held[node.name] = self.result.held.get(node.name, [])
            self.record.differentiable[node.name] = self.result.differentiable.get(node.name, ())

    def _run(self, window: set[fx.Node]) -> dict[fx.Node, NodeInfo]:
        """Run the nodes of ``window`` as a graph of their own; their records."""
        inside = [n for n in self.nodes if n in window and n.op != "placeholder"]
        members = set(inside)
        given = [n for n in self.nodes
                 if n not in members and any(u in members for u in n.users) or n in window and n.op == "placeholder"]
        results = [n for n in inside if any(u not in members for u in n.users)]
        graph = fx.Graph()
        graph.set_codegen(RegionCodeGen())
        env: dict[fx.Node, fx.Node] = {n: graph.create_node("placeholder", n.name, name=n.name) for n in given}
        for n in inside:
            env[n] = graph.node_copy(n, env.__getitem__)
        graph.output(tuple(env[n] for n in results))
        if any(copied.name != n.name for n, copied in env.items()):
            raise _CannotTell
        found = self._profile(fx.GraphModule(self.gm, graph), given, results)
        return {n: found[n.name] for n in (*given, *inside) if n in window}

    def _profile(self, part: fx.GraphModule, given: list[fx.Node], results: list[fx.Node]) -> dict[str, NodeInfo]:
        with self.last.session.open(part, ProfileOptions(steps=1), eager=False) as run:
            with run.recording() as recorder:
                makers = _Makers(recorder.mode.state)
                leaves = {n.name: makers.make_tree(self.record.values.get(n.name, Unknown())) for n in given}
                inputs = {n.name: leaves[n.name] for n in given if n.op == "placeholder"}
                run.register_inputs((), inputs, ())
                self._step(recorder, part, makers, given, leaves, results)
            self.result.log = recorder.log
            self.result.complete()
            return {row.name: row for row in run.build().nodes}

    def _step(self, recorder: Recorder, part: fx.GraphModule, makers: _Makers, given: list[fx.Node],
              leaves: dict[str, Any], results: list[fx.Node]) -> None:
        """As `GraphStep`, with the gradients that the results had in the whole run in place of a loss."""
        session = self.last.session
        interpreter = RecordingInterpreter(part, recorder)
        self.result = interpreter.record
        holds = [ReferenceCount(t) for n in given if n.op == "placeholder" for t in tensors_in(leaves[n.name])]
        recorder.start_step(0, placeholders=False)
        interpreter.begin_step()
        recorder.begin("forward")
        with torch.set_grad_enabled(session.mode == "train"):
            values = {n.name: leaves[n.name] if n.op == "placeholder" else pytree.tree_map(_pass_on, leaves[n.name])
                      for n in given}
            leaves.clear()
            with session.casting():
                output = interpreter.run(**values)
        values.clear()
        if session.mode == "infer":
            recorder.end()
            return
        edges, gradients = [], []
        for node, value in zip(results, output):
            known = self.record.gradients.get(node.name, {})
            for i, tensor in enumerate(pytree.tree_leaves(value)):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None and i in known:
                    edges.append(get_gradient_edge(tensor))
                    gradients.append(makers.make_gradient(known[i]))
                tensor = None
        del output, value
        for hold in holds:
            if hold.has_grown():
                recorder.log.saved_inputs.add(hold.tensor.untyped_storage().number)  # type: ignore[attr-defined]
        recorder.mark(gradients, "gradient")
        recorder.begin("backward")  # also where nothing has a gradient
        if edges:
            torch.autograd.backward(edges, gradients)
        recorder.end()


class _Makers:
    """Tensors like those of an earlier run."""

    def __init__(self, state: MetaState) -> None:
        self._state = state
        self._storages: dict[int, MetaStorage] = {}

    def make_tree(self, tree: Any) -> Any:
        def make(value: Any) -> Any:
            if isinstance(value, Unknown):
                raise _CannotTell
            return self._make(value) if isinstance(value, Value) else value

        if isinstance(tree, Unknown):
            raise _CannotTell
        leaves, spec = tree
        with without_modes():
            return pytree.tree_unflatten(map(make, leaves), spec)

    def make_gradient(self, spec: TensorSpec) -> Tensor:
        numel = 1 + sum(stride * (size - 1) for size, stride in zip(spec, spec.stride)) if spec.numel else 0
        with without_modes():
            return self._make(Value(spec, 0, False, -1 - len(self._storages), numel * spec.dtype.itemsize, None))

    def _make(self, value: Value) -> Tensor:
        storage = self._storages.get(value.storage)
        if storage is None:
            storage = new_storage(value.storage_bytes, torch.device(value.spec.device), self._state.space)
            storage.known = value.known
            self._storages[value.storage] = storage
        out = tensor_on(storage, value.spec.dtype, value.offset, tuple(value.spec), value.spec.stride)
        return out.requires_grad_(value.requires_grad)


def _pass_on(value: Any) -> Any:
    """A tensor that a node made, not one that was given: it can be written to in place."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    whole = value.numel() * value.element_size() == value.untyped_storage().nbytes()
    return value.clone() if whole else value.view_as(value)


def _sum_up(gm: fx.GraphModule, last: LastRun, now: dict[str, tuple[Any, ...]], is_edited: bool) -> None:
    """What depends on the order of nodes, and the profile."""
    nodes, record = list(gm.graph.nodes), last.record
    profile: Profile = gm.meta["profile"]
    mine = {n.name for n in nodes} | set(record.fingerprints)
    rest = [row for row in profile.nodes if row.name not in mine]  # the loss
    first: dict[str, dict[str, int]] = {n.name: {"parameter": 0, "buffer": 0} for n in nodes}
    seen: set[str] = set()
    for n in sorted(nodes, key=lambda n: n.op != "get_attr"):
        for category, path, nbytes in record.held.get(n.name, ()):
            if path not in seen:
                seen.add(path)
                first[n.name][category] += nbytes
    accumulated, rows = 0, []
    for row in [*(n.meta["info"] for n in nodes), *rest]:
        accumulated += row.incremental_bytes or 0
        row = replace(row, accumulate_bytes=None if row.accumulate_bytes is None else accumulated,
                      saved_tensors=None if is_edited else row.saved_tensors)
        if row.name in first and row.param_bytes is not None:
            row.param_bytes, row.buffer_bytes = first[row.name]["parameter"], first[row.name]["buffer"]
        rows.append(row)
    for n, row in zip(nodes, rows):
        n.meta["info"] = row
    known = {f.name: getattr(profile, f.name) for f in fields(profile) if f.name not in _OF_A_WHOLE_RUN}
    for name in _SUMS:
        total, before, after = known[name], [getattr(r, name) for r in profile.nodes], [getattr(r, name) for r in rows]
        known[name] = None if None in (total, *before, *after) else total - sum(before) + sum(after)
    whole = functools.cache(functools.partial(_run_whole, gm, last, now))
    gm.meta["profile"] = Profile.deferred({**known, "nodes": tuple(rows)}, {
        functools.partial(lambda name: {name: getattr(whole(), name)}, name): (name,) for name in _OF_A_WHOLE_RUN})


def _run_whole(gm: fx.GraphModule, last: LastRun, fingerprints: dict[str, tuple[Any, ...]]) -> Profile:
    """The profile of a whole run of a copy of ``gm``; an empty one where it was edited since."""
    if fingerprint_nodes(gm.graph) != fingerprints:
        return Profile(name="", mode=last.session.mode)
    copied = copy.copy(gm)
    copied.meta = {}
    profile: Profile = last.repeat(copied).meta["profile"]
    return profile
