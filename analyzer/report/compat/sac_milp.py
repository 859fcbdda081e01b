"""Layouts of other programs: PyTorch's planner of checkpoints, TIDSProfiler, Colossal-AI's table."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from analyzer.errors import InputError
from analyzer.report.module_tree import find_root, first_shape, has_own_row, plain
from analyzer.report.node_table import TEN_COLUMNS, check_layout, print_nodes
from analyzer.report.speed import note_prediction
from analyzer.report.text_width import escape_controls
from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.results.node_info import NodeInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter, register_report
from analyzer.units import UNKNOWN

# Statistics of modules in the form that PyTorch's planner of activation checkpointing reads. The records are those of
# ``torch/distributed/_tools/ilp_utils.py`` (``ModuleInfo``, ``ModStats``) and ``sac_estimator.py`` (``SACStats``);
# what
# each field is there, `aggregate_stats` and `SACEstimator` say. Times are milliseconds, memory bytes.

_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal_")
_SEGMENTS = 8  #: most lines of a trade-off curve; each adds a constraint to the planner's program


@register_exporter.shipped("module_info")
def to_module_info(profile: Profile) -> dict[str, Any]:
    """What ``parse_module_info`` reads: the order of modules, and for each its memory, time, and trade-off of the two.

    A module's trade-off curve gives the least part of its forward time that must run again when a part of its memory is
    discarded, node by node; a leaf has none. ``act_grad_per_module`` is the largest gradient that a node of the module
    makes for its inputs. Raises InputError for a profile without seconds, or of inference.
    """
    rows = _timed(profile, "to_module_info")
    modules = _Modules(profile, rows)
    stats = [modules.describe(path) for path in modules.preorder]
    return {"mod_order": {"fw_pre_order": [modules.name(p) for p in modules.preorder],
                          "fw_post_order": [modules.name(p) for p in modules.postorder],
                          "bw_pre_order": [modules.name(p) for p in reversed(modules.postorder)],
                          "bw_post_order": [modules.name(p) for p in reversed(modules.preorder)]},
            "mod_stats": stats}


def to_sac_stats(profile: Profile, module_path: str = "") -> dict[str, Any]:
    """A ``SACStats``, of nodes for operators. InputError without seconds, of inference, or where nothing runs."""
    rows = [r for r in _timed(profile, "to_sac_stats")
            if _is_in(r.module_path, module_path) and r.op.startswith("call")]
    if not rows:
        raise InputError(f"to_sac_stats(module_path={module_path!r}): no node of {profile.name} runs in it")
    index = {r.name: i for i, r in enumerate(rows)}
    return {"func_names": [r.target or r.name for r in rows], "runtimes": [1e3 * (r.fwd_seconds or 0.0) for r in rows],
            "memory": [_made_bytes(r) for r in rows],
            "view_like_ops": [i for i, r in enumerate(rows) if r.aliases and not _made_bytes(r) and not _writes(r)],
            "rand_ops": [i for i, r in enumerate(rows) if any(name in r.target.lower() for name in _RANDOM)],
            "saved_autograd_ops": [i for i, r in enumerate(rows) if r.output_bytes],
            "inplace_ops": [(i, index.get(r.aliases[0], i)) for i, r in enumerate(rows) if _writes(r)],
            "force_store_random": False}


def _timed(profile: Profile, caller: str) -> Sequence[NodeInfo]:
    if profile.mode != "train" or not profile.nodes:
        raise InputError(f"{caller}(): needs the nodes of a training step; profile the model with mode='train'")
    if any(r.fwd_seconds is None or r.bwd_seconds is None for r in profile.nodes):
        raise InputError(
            f"{caller}(): the profile holds no seconds; profile the model with device=, for instance device='h100'")
    end = next((i for i, r in enumerate(profile.nodes) if r.op == "output"), len(profile.nodes))
    return profile.nodes[:end]  # without the loss


def _made_bytes(row: NodeInfo) -> int:
    """Memory that the node's operators made, saved or not."""
    return (row.incremental_bytes or 0) + (row.temp_bytes or 0)


def _writes(row: NodeInfo) -> bool:
    name = row.target.rpartition(".")[2]
    return bool(row.aliases) and name.endswith("_") and not name.endswith("__")


def _is_in(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(module + ".")


class _Modules:
    """The modules that ran, in the order in which they were entered and left."""

    def __init__(self, profile: Profile, rows: Sequence[NodeInfo]) -> None:
        assert profile.modules is not None
        self.rows = rows
        self.root = profile.modules.type
        self.ran = {m.path: [i for i, r in enumerate(self.rows) if _is_in(r.module_path, m.path)]
                    for m in profile.modules.walk()}
        self.info = {m.path: m for m in profile.modules.walk() if self.ran[m.path]}
        self.children: dict[str, list[str]] = {path: [] for path in self.info}
        for path in sorted(self.info, key=lambda p: self.ran[p][0]):
            if path:
                self.children[path.rpartition(".")[0]].append(path)
        self.preorder: list[str] = []
        self.postorder: list[str] = []
        self._walk("")
        self.readers: dict[str, list[int]] = {}
        aliases = {r.name: r.aliases for r in profile.nodes}
        for i, r in enumerate(profile.nodes):
            for name in r.inputs:
                for read in (name, *aliases.get(name, ())):
                    self.readers.setdefault(read, []).append(i)

    def _walk(self, path: str) -> None:
        self.preorder.append(path)
        for child in self.children[path]:
            self._walk(child)
        self.postorder.append(path)

    def name(self, path: str) -> str:
        """As PyTorch's tracker names modules: from the class of the root on."""
        return f"{self.root}.{path}" if path else self.root

    def describe(self, path: str) -> dict[str, Any]:
        """The ``ModStats`` of one module."""
        inside = self.ran[path]
        own, members = [self.rows[i] for i in inside], set(inside)
        results = [r for i, r in zip(inside, own) if any(j not in members for j in self.readers.get(r.name, ()))]
        inputs = {name for r in own for name in r.inputs} - {r.name for r in own}
        params = sum(r.param_bytes or 0 for r in own)
        leaf = not self.children[path]
        curve = [] if leaf else _tradeoff(own)
        slopes, intercepts = _lines(curve)
        return {
            "fqn": self.name(path), "param_per_module": params, "grad_per_module": params,
            "grad_total": sum(r.param_bytes or 0 for r in self.rows[inside[-1] + 1:]),
            "act_fw_per_module": sum(r.incremental_bytes or 0 for r in own) - sum(r.output_bytes or 0 for r in results),
            "act_bw_per_module": own[-1].accumulate_bytes or 0,
            "act_grad_per_module": max(r.backward_bytes or 0 for r in own),
            "act_total": (own[-1].accumulate_bytes or 0) + (own[-1].temp_bytes or 0),
            "input_per_module": sum(o.nbytes for r in self.rows if r.name in inputs for o in r.outputs),
            "output_per_module": sum(o.nbytes for r in results for o in r.outputs),
            "fw_runtime_per_module": 1e3 * sum(r.fwd_seconds or 0.0 for r in own),
            "bw_runtime_per_module": 1e3 * sum(r.bwd_seconds or 0.0 for r in own), "is_leaf": leaf,
            "sac_runtime": 0.0 if leaf else 1e3 * sum(r.fwd_seconds or 0.0 for r in own),
            "sac_memory": 0 if leaf else sum(_made_bytes(r) for r in own), "n_segments": len(slopes), "slopes": slopes,
            "intercepts": intercepts, "breakpoints": [x for x, _ in curve], "tradeoff_curve": OrderedDict(curve)}


def _tradeoff(rows: Sequence[NodeInfo]) -> list[tuple[float, float]]:
    """Points (part of the memory discarded, of the time run again), cheapest first: convex, from (0, 0) to (1, 1)."""
    memory, seconds = sum(_made_bytes(r) for r in rows), sum(r.fwd_seconds or 0.0 for r in rows)
    if not memory or not seconds:
        return []
    freeing = sorted((r for r in rows if _made_bytes(r)), key=lambda r: (r.fwd_seconds or 0.0) / _made_bytes(r))
    points, x, y = [(0.0, 0.0)], 0, 0.0
    for r in freeing:
        x, y = x + _made_bytes(r), y + (r.fwd_seconds or 0.0)
        points.append((x / memory, y / seconds))
    step = max(1, -(-(len(points) - 1) // _SEGMENTS))
    return [*points[:-1:step], points[-1]]  # chords lie above a convex curve: never less than what must run again


def _lines(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in zip(points, points[1:])]
    return slopes, [y - slope * x for slope, (x, y) in zip(slopes, points)]


# The report of TIDSProfiler (ruipeterpan/torch_profiler): one indented line a module, its latency and its shapes.

_INDENT = " " * 8


@register_report.shipped("tids")
def tids_report(profile: Profile, *, depth: int | None = None) -> str:
    """One line a module: class, parameters, milliseconds and share of the forward pass, shapes of its first input and
    its first output; down to ``depth``. What a module does outside its submodules is a line of its own where it takes
    time. Raises InputError for a profile without modules.

    >>> from analyzer.results.node_info import TensorInfo
    >>> leaf = ModuleInfo(path="fc", type="Linear", depth=1, params=10, fwd_seconds=0.0005,
    ...                   outputs=(TensorInfo((2, 5), "float32", "cpu"),))
    >>> tree = ModuleInfo(path="", type="Net", params=10, fwd_seconds=0.001, children=(leaf,))
    >>> print(tids_report(Profile(name="Net", mode="infer", modules=tree)).splitlines()[1].strip())
    (fc): Linear, num_params 10, 0.5ms, 50.0% latency, input shape None, output shape [2, 5]
    """
    check_layout(depth, 0, "text", "tids_report()")
    root = find_root(profile.modules, "tids_report()")
    note = note_prediction(profile)
    return escape_controls("\n".join([*_list_lines(root, root, "model", depth), *([] if note is None else [note])]))


def _list_lines(module: ModuleInfo, root: ModuleInfo, name: str, depth: int | None) -> list[str]:
    lines = [f"({name}): {module.type}, {_tell_costs(module, root)}, "
             f"input shape {first_shape(module.inputs)}, output shape {first_shape(module.outputs)}"]
    if not module.children or module.depth == depth:
        return lines
    for child in module.children:
        lines += [_INDENT + line for line in _list_lines(child, root, child.path.rpartition(".")[2], depth)]
    if has_own_row(module) and (module.own.fwd_seconds or module.own.params):
        lines.append(f"{_INDENT}(own): {_tell_costs(module.own, root)}")
    return lines


def _tell_costs(costs: CostInfo, root: ModuleInfo) -> str:
    seconds, whole = costs.fwd_seconds, root.fwd_seconds
    time = UNKNOWN if seconds is None else f"{round(seconds * 1000, 3)}ms"
    share = UNKNOWN if seconds is None or not whole else f"{round(100 * seconds / whole, 3)}%"
    return f"num_params {plain(costs.params)}, {time}, {share} latency"


# The node table as Colossal-AI's analyzer prints it: ten columns, in full, powers of 1024 called Kb, Mb, Gb.

_COLUMNS = [replace(column, unit="Mb") if column.unit == "bytes" else column for column in TEN_COLUMNS]


@register_report.shipped("colossalai")
def colossalai_table(profile: Profile, *, sort: str | None = None, depth: int | None = None,
                     fmt: str = "simple") -> str:
    """A row a node and their totals; ``sort`` and ``depth`` are as of `Profile.table`.

    >>> from analyzer.results.node_info import NodeInfo
    >>> conv = NodeInfo("call_module", "conv1", output_bytes=0, param_bytes=37632)
    >>> print(colossalai_table(Profile(name="Net", mode="infer", nodes=(conv,))).splitlines()[2].split())
    ['call_module', 'conv1', '-', '-', '0', 'b', '-', '36.75', 'Kb', '-', '-', '-']
    """
    check_layout(depth, 1, fmt, "colossalai_table()")
    return print_nodes(profile.nodes, _COLUMNS, sort, depth, fmt)
