"""Runs a graph node by node without data, under a recorder."""
from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils import _pytree as pytree

from analyzer.errors import AnalyzerError, InputError
from analyzer.fx.module_borrow import borrow_module
from analyzer.fx.module_wrapper import count_devices, explain_call, find_place
from analyzer.fx.surroundings import keep_surroundings
from analyzer.meta.argument import fake_arguments
from analyzer.meta.function.mode import call_opaque
from analyzer.meta.intercept.replacement import InterruptsHeld
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.operator_info import register_shape_impl
from analyzer.meta.spec import to_specs
from analyzer.meta.state import MetaOptions, active_state
from analyzer.meta.structure import holds_tensor, thaw
from analyzer.meta.tensor import MetaTensor
from analyzer.record.eager import casting, check_loss, default_loss, hold_inputs, note_saved_inputs
from analyzer.record.recorder import Recorder
from analyzer.record.tensor_walk import tensors_in

from .graph_module import GraphModule
from .kept import KeptResults
from .offload import OffloadedTensors
from .statement import Block, Keeping, Offloading, Statement, last_uses, shared_blocks, statements_of


class GraphInterpreter(fx.Interpreter):
    """Runs a graph module node by node as the generated code would; one overridable method per kind of node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._statements = statements_of(list(module.graph.nodes))
        self._offloaded = OffloadedTensors()
        self._kept: dict[Statement, KeptResults] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the graph for the traced forward's arguments; raises InputError for others."""
        signature = inspect.signature(self.module.forward)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(explain_call("forward", signature, args, kwargs, error)) from None
        bound.apply_defaults()
        self._arguments = bound.arguments
        self._offloaded = OffloadedTensors()
        self.env = {}
        try:
            return self._run_function(self._statements, {}, [])
        finally:
            self._arguments = {}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return thaw(args), thaw(kwargs)  # generated code passes containers that can be changed

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._arguments[target.lstrip("*")]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function; of one with a registered shape, tensors without data."""
        if target in register_shape_impl and not isinstance(target, torch._ops.OpOverload):
            return call_opaque(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _run_function(self, statements: list[Statement], given: dict[fx.Node, Any], returned: Sequence[fx.Node]) -> Any:
        """Run a function that is given some values; its ``returned`` ones, or for forward the output of the graph."""
        outer, self.env = self.env, given
        last = last_uses(statements, {*given, *(n for s in statements for n in s.nodes())})
        open_blocks: list[tuple[Block, AbstractContextManager[Any]]] = []
        try:
            for i, statement in enumerate(statements):
                blocks = [b for b in statement.blocks if not isinstance(b, (Keeping, Offloading))]
                shared = shared_blocks([b for b, _ in open_blocks], blocks)
                _leave(open_blocks, shared)
                for block in blocks[shared:]:
                    with InterruptsHeld():
                        context = block.context()
                        context.__enter__()
                        open_blocks.append((block, context))
                with self.around(statement), ExitStack() as own:
                    for saving in statement.blocks[len(blocks):]:  # these are of one statement
                        kept: Any = self._kept[saving.checkpoint] if isinstance(saving, Keeping) else self._offloaded
                        own.enter_context(kept.on_host if isinstance(saving, Keeping) and saving.offloads else kept)
                    if statement.node is not None:
                        self.env[statement.node] = self.run_node(statement.node)
                    else:
                        self._run_checkpointed(statement)
                    for n in statement.offloaded:
                        self._offloaded.add(self.env[n])
                if statement.node is not None and statement.node.op == "output":
                    return self.env[statement.node]
                for n in last.get(i, ()):
                    if n not in returned:
                        self.env.pop(n, None)
            return tuple(self.env[n] for n in returned)
        finally:
            _leave(open_blocks, 0)
            self.env = outer

    def around(self, statement: Statement) -> AbstractContextManager[Any]:
        return nullcontext()

    def _run_checkpointed(self, statement: Statement) -> None:
        region = statement.checkpoint
        assert region is not None
        inputs, results = statement.inputs(), statement.results()
        kept = KeptResults(self.module, *statement.buffered)
        if statement.keeps or statement.buffered:
            region = replace(region, context_fn=kept.contexts)

        def run(*values: Any) -> tuple[Any, ...]:
            self._kept[statement] = kept
            return self._run_function(statement.body, dict(zip(inputs, values)), results)  # type: ignore[no-any-return]

        self.env.update(zip(results, region.call(run, *[self.env[i] for i in inputs])))


def _leave(blocks: list[tuple[Block, AbstractContextManager[Any]]], depth: int) -> None:
    while len(blocks) > depth:
        with InterruptsHeld():
            blocks.pop()[1].__exit__(*sys.exc_info())


class RecordingInterpreter(GraphInterpreter):
    """Runs a graph under a recorder: each node is a row of the log."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self.recorder = recorder
        self.rows: dict[fx.Node, int] = {}
        self._paths: dict[fx.Node, str] = {}

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a node. A device that was the host when traced is now where tensors are taken to be."""
        adopted = active_state().adopted_device
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            torch.device, lambda device: adopted if device.type in ("cpu", "meta") else device,
            super().fetch_args_kwargs_from_env(n))
        return found

    def begin_step(self) -> None:
        paths, rows = self.recorder.log.index_of_path, self.rows
        for n in self.graph.nodes:
            path = n.meta.get("module_path", "")
            # a module that was traced into and holds nothing is not there: its parent, or the root
            while path not in paths:
                path = path.rpartition(".")[0]
            self._paths[n] = path
            target: Any = n.target
            if not isinstance(target, str):
                name = getattr(target, "__qualname__", getattr(target, "__name__", target))
                target = f"{getattr(target, '__module__', '') or ''}.{name}".lstrip(".")
            row = self.recorder.modules.add_node(n.op, n.name, target, paths[path])
            rows[n] = row
            record = self.recorder.log.node_slots[row]
            record.source = n.meta.get("source")
            record.region = tuple([r.describe() for r in n.meta.get("region", ())])
            record.inputs = tuple([rows[i] for i in n.all_input_nodes if i in rows])

    def around(self, statement: Statement) -> AbstractContextManager[Any]:
        n = statement.node
        return nullcontext() if n is None else self.recorder.modules.at(self.rows[n], self._paths[n])

    def run_node(self, n: fx.Node) -> Any:
        row, recorder = self.rows[n], self.recorder
        if recorder.run.phase == "forward":
            recorder.modules.read(row, tensors_in([self.env[i] for i in n.all_input_nodes]))
        result = super().run_node(n)
        if recorder.run.phase == "forward":
            recorder.modules.set_outputs(row, result)
        return result


def run_step(recorder: Recorder, module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], *, mode: str,
             loss_fn: Callable[[Any], Tensor] | None, autocast: torch.dtype | None,
             device_type: str) -> dict[fx.Node, int]:
    """Run one step of a graph module under a recorder: in training with its backward pass. Returns the nodes' rows."""
    interpreter, holds = RecordingInterpreter(module, recorder), hold_inputs(args, kwargs)
    recorder.modules.planned_calls = max(1, sum(n.op == "call_module" for n in module.graph.nodes))
    recorder.start_step(0, placeholders=False)
    interpreter.begin_step()
    recorder.memory.begin("forward")
    with torch.set_grad_enabled(mode == "train"), casting(device_type, autocast):
        if isinstance(module, GraphModule) and module.checks_inputs:
            module.check_inputs(args, kwargs)
        output = interpreter.run(*args, **kwargs)
        interpreter.env.clear()
        if mode == "infer":
            recorder.memory.end()
            return interpreter.rows
        loss = recorder.modules.compute_loss(loss_fn or default_loss, output)
    check_loss(loss)
    del output
    recorder.memory.mark([loss], "loss")
    note_saved_inputs(recorder, holds)
    loss.backward()
    recorder.memory.mark([p.grad for p in module.parameters() if p.grad is not None], "gradient")
    recorder.memory.end()
    return interpreter.rows


class ShapeProp(GraphInterpreter):
    """Runs a graph under `MetaTensorMode` and notes what every node gives, as torch.fx's pass of this name does.

    ``node.meta["tensor_meta"]`` is torch's ``TensorMetadata`` of a tensor, or a container of them, and ``"type"`` the
    class of the result; ``node.meta["spec"]`` tells the device too. Nothing need be profiled before.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> gm = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 2)), meta_args={"input": torch.empty(3, 4)})
    >>> _ = ShapeProp(gm).propagate(torch.empty(3, 4))
    >>> [(n.name, n.meta["spec"]) for n in gm.graph.nodes][1]
    ('_0', float32[3, 2]@cpu)
    >>> [(n.name, n.meta["tensor_meta"].dtype) for n in gm.graph.nodes if n.meta["tensor_meta"].requires_grad]
    [('_0', torch.float32), ('output', torch.float32)]
    """

    def propagate(self, *args: Any, **kwargs: Any) -> Any:
        """Run on arguments with or without data; the result has none."""
        claim = find_place(self.module, (args, kwargs))
        mode = MetaTensorMode(MetaOptions(devices=count_devices(self.module, (args, kwargs))),
                              is_this_machine=claim.type == "cpu", has_plain_tensors=True)
        with mode, keep_surroundings(self.module, values=(args, kwargs)), borrow_module(self.module):
            run_args, run_kwargs = fake_arguments(mode.state, (args, kwargs), claim)
            return self.run(*run_args, **run_kwargs)

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except AnalyzerError:
            raise
        except Exception as error:
            raise InputError(f"node {n.name} ({n.op} {n.target}) of module {n.meta.get('module_path', '')!r} at "
                             f"{n.meta.get('source')}: {type(error).__name__}: {error}") from error
        n.meta["spec"] = to_specs(result)
        described = fx.node.map_aggregate(result, lambda value: (
            _extract_tensor_metadata(value) if isinstance(value, Tensor) else value))
        if described is not result and holds_tensor(result):
            n.meta["tensor_meta"] = described
        n.meta["type"] = Tensor if type(result) is MetaTensor else type(result)
        return result
