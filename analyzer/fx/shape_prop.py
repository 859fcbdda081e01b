"""Runs a graph node by node without data: shapes, and a recorded step."""
from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from analyzer.errors import AnalyzerError, InputError
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.opaque import call_opaque
from analyzer.meta.output_cache import to_specs
from analyzer.meta.shape_registry import register_shape_impl
from analyzer.meta.stand_in import stand_in_arguments
from analyzer.record.recorder import Recorder, tensors_in

from .module_borrow import borrow_module
from .region import CheckpointRegion, enter_region


class GraphInterpreter(fx.Interpreter):
    """Runs the nodes of a graph module in their regions; one overridable method per kind of node, as torch.fx does.

    Consecutive nodes of one checkpoint region run under ``torch.utils.checkpoint``, as the generated code would run them.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._groups = checkpoint_groups(list(module.graph.nodes))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the graph for these arguments, given as the traced forward takes them.

        Raises InputError where they do not fit its signature.
        """
        signature = inspect.signature(self.module.forward)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"forward{signature} cannot be called with {len(args)} positional arguments and {sorted(kwargs)}: {error}") from None
        bound.apply_defaults()
        self._arguments = bound.arguments
        return super().run(enable_io_processing=False)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._arguments[target.lstrip("*")]

    def run_node(self, n: fx.Node) -> Any:
        group = self._groups.get(n)
        if group is None:
            return self.run_in_regions(n)
        if n is group[0]:
            self._run_checkpointed(group)
        return self.env[n]

    def run_in_regions(self, n: fx.Node) -> Any:
        """Run one node with the grad mode and autocast that it was traced under."""
        with ExitStack() as stack:
            for region in n.meta.get("region", ()):
                enter_region(region, stack)
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in register_shape_impl and not isinstance(target, torch._ops.OpOverload):
            return call_opaque(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _run_checkpointed(self, group: list[fx.Node]) -> None:
        region = checkpoint_region(group[0])
        assert region is not None
        inside = set(group)
        inputs = list(dict.fromkeys(i for n in group for i in n.all_input_nodes if i not in inside))
        outputs = [n for n in group if any(u not in inside for u in n.users)]

        def run(*values: Any) -> tuple[Any, ...]:
            outer, self.env = self.env, dict(zip(inputs, values))
            try:
                for n in group:
                    self.env[n] = self.run_in_regions(n)
                return tuple(self.env[n] for n in outputs)
            finally:
                self.env = outer

        results = region.call(run, *[self.env[i] for i in inputs])
        self.env.update(dict.fromkeys(group))
        self.env.update(zip(outputs, results))


def checkpoint_region(n: fx.Node) -> CheckpointRegion | None:
    """The outermost checkpoint region that a node runs in; a region that is a note only does not count."""
    return next((r for r in n.meta.get("region", ()) if isinstance(r, CheckpointRegion) and r.replay), None)


def checkpoint_groups(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Each checkpointed node with the run of consecutive nodes of its region."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    before: CheckpointRegion | None = None
    for n in nodes:
        region = checkpoint_region(n) if n.op not in ("placeholder", "output") else None
        if region is not None:
            groups[n] = groups[n.prev] if region == before else []
            groups[n].append(n)
        before = region
    return groups


class ShapeProp(GraphInterpreter):
    """Runs a graph under `MetaTensorMode` and notes the specs of every node's result in ``node.meta["spec"]``.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> from analyzer.fx.shape_prop import ShapeProp
    >>> gm = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 2)), meta_args={"input": torch.empty(3, 4)})
    >>> _ = ShapeProp(gm).propagate(torch.empty(3, 4))
    >>> [(n.name, n.meta["spec"]) for n in gm.graph.nodes][1]
    ('_0', float32[3, 2]@cpu)
    """

    def propagate(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arguments with or without data; the result has none."""
        mode = MetaTensorMode()
        with mode, borrow_module(self.module), torch.no_grad():
            claims = [t.device for t in tensors_in((args, kwargs))]
            claim = next((c for c in claims if c.type not in ("cpu", "meta")), torch.device("cpu"))
            run_args, run_kwargs = stand_in_arguments(mode.state, (args, kwargs), claim)
            return self.run(*run_args, **run_kwargs)

    def run_in_regions(self, n: fx.Node) -> Any:
        try:
            result = super().run_in_regions(n)
        except AnalyzerError:
            raise
        except Exception as error:
            raise InputError(f"node {n.name} ({n.op} {n.target}) of module {n.meta.get('module_path', '')!r} at {n.meta.get('source')}: "
                             f"{type(error).__name__}: {error}") from error
        n.meta["spec"] = to_specs(result)
        return result


class RecordingInterpreter(GraphInterpreter):
    """Runs a graph under a recorder: each node is a row of the log."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self.recorder = recorder
        self.rows: dict[fx.Node, int] = {}
        self._values: dict[fx.Node, Any] = {}

    def begin_step(self) -> None:
        """Make the rows of a new step."""
        root = self.recorder.log.modules
        paths = {m.path: i for i, m in enumerate(root)}
        for n in self.graph.nodes:
            row = self.recorder.add_node(n.op, n.name, str(n.target) if isinstance(n.target, str) else _target_name(n.target),
                                         paths.get(n.meta.get("module_path", ""), 0))
            self.rows[n] = row
            record = self.recorder.log.nodes[row]
            record.source = n.meta.get("source")
            record.region = tuple(r.describe() for r in n.meta.get("region", ()))
            record.inputs = [self.rows[i] for i in n.all_input_nodes]

    def run_in_regions(self, n: fx.Node) -> Any:
        row = self.rows[n]
        recorder = self.recorder
        if recorder.phase == "forward":
            recorder.read(row, tensors_in([self.env[i] for i in n.all_input_nodes]))
        with recorder.at(row, n.meta.get("module_path", "")):
            result = super().run_in_regions(n)
        if recorder.phase == "forward":
            recorder.set_outputs(row, result)
        return result


def _target_name(target: Any) -> str:
    return f"{getattr(target, '__module__', '') or ''}.{getattr(target, '__qualname__', getattr(target, '__name__', target))}".lstrip(".")
