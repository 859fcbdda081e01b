"""Runs a graph node by node without data, under a recorder, and notes what its values were."""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from analyzer.errors import InputError
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.intercept.replacement import InterruptsHeld
from analyzer.meta.opaque import call_opaque
from analyzer.meta.operator_info import register_shape_impl
from analyzer.meta.spec import ARGUMENTS, TensorSpec
from analyzer.meta.state import active_state
from analyzer.meta.structure import thaw
from analyzer.record.eager import casting, check_loss, default_loss, hold_inputs, note_saved_inputs
from analyzer.record.log import Log
from analyzer.record.recorder import Recorder
from analyzer.record.tensor_walk import describe, tensors_in

from .graph_module import GraphModule, explain_call, forward_signature
from .kept import KeptResults
from .offload import OffloadedTensors
from .statement import Block, Keeping, Offloading, Statement, last_uses, shared_blocks, statements_of

# What a recorded run of a graph says of its values, so that a part of it can be run again as if all of it ran.

Tensor = torch.Tensor

@dataclass(frozen=True)
class Value:
    """A tensor that a node returned."""

    spec: TensorSpec
    offset: int
    requires_grad: bool
    storage: int          #: its number, unique in the process
    storage_bytes: int
    known: Any            #: contents of its storage, where they are known

    def is_like(self, other: object) -> bool:
        """Whether nodes that read it would do the same with ``other``."""
        return isinstance(other, Value) and (self.spec, self.offset, self.requires_grad, self.storage_bytes) == (
            other.spec, other.offset, other.requires_grad, other.storage_bytes)


class Unknown:
    """A result that cannot be made again: an object, or a tensor without strides."""


@dataclass
class RunRecord:
    """By name of node: results (leaves, as `Value`, and their tree), specs of their gradients, fingerprints; to read,
    `complete` it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, dict[int, TensorSpec]] = field(default_factory=dict)
    fingerprints: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    differentiable: dict[str, tuple[bool, ...]] = field(default_factory=dict)  #: of the storages that it made
    #: (category, path, bytes) of parameters and buffers it uses
    held: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)

    log: Log | None = None  #: of the run, until it was read

    def complete(self) -> None:
        """Write down what was left until it is asked for."""
        log, self.log = self.log, None
        if log is not None:
            self._note_storages(log)

    def _note_storages(self, log: Log) -> None:
        """Note the parameters and buffers that each node uses, in order, and whether what it made is differentiable."""
        def note(node: int, number: int) -> None:
            lifetime = log.storages.get(number)
            if lifetime is not None and lifetime.category in ("parameter", "buffer"):
                held = self.held.setdefault(log.nodes[node].name, [])
                if (lifetime.category, lifetime.label, lifetime.nbytes) not in held:
                    held.append((lifetime.category, lifetime.label, lifetime.nbytes))

        for i, node in enumerate(log.nodes):
            lifetimes = [log.storages[number] for number, _ in node.outputs if number in log.storages]
            self.differentiable[node.name] = tuple(lifetime.requires_grad for lifetime in lifetimes
                                                   if lifetime.node == i)
            for number, _ in node.outputs if node.op == "get_attr" else ():
                note(i, number)
        for call in log.calls:
            for number in call.inputs if call.phase == "forward" and call.node >= 0 else ():
                note(call.node, number)

    def note(self, node: fx.Node, result: Any) -> None:
        """``node`` returned ``result``."""
        leaves, spec = pytree.tree_flatten(result)
        self.values[node.name] = list(map(_describe, leaves)), spec  # some containers take tensors alone
        row = self.gradients[node.name] = {}
        for i, tensor in enumerate(leaves):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(_noting(row, i))

    def tensors(self, name: str) -> list[Value]:
        """The tensors that a node returned."""
        return [v for v in pytree.tree_leaves(self.values.get(name)) if isinstance(v, Value)]

    def storages(self, name: str) -> set[int]:
        """The numbers of the storages that a node's tensors are in."""
        return {v.storage for v in self.tensors(name)}


def _noting(row: dict[int, TensorSpec], index: int) -> Any:
    def note(gradient: Tensor | None) -> None:
        if gradient is not None:  # as of a custom function that has none for an input
            row[index] = describe(gradient)

    return note


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        storage = value.untyped_storage() if value.layout is torch.strided else None
        if not isinstance(storage, MetaStorage):
            return Unknown()
        return Value(describe(value), int(value.storage_offset()), value.requires_grad, storage.number,
                     storage.nbytes(), storage.known)
    return value if isinstance(value, ARGUMENTS) else Unknown()


def fingerprint_nodes(graph: fx.Graph) -> dict[str, tuple[Any, ...]]:
    """By name, what tells whether a node still does what it did, for its inputs and for the other readers of these."""
    position = {n: i for i, n in enumerate(graph.nodes)}

    def readers(node: fx.Node) -> tuple[str, ...]:
        return tuple(u.name for u in sorted(node.users, key=position.__getitem__))

    read_by = {n: readers(n) for n in graph.nodes}
    held = {n: held_tensors(n) for n in graph.nodes}
    held_by: dict[int, tuple[str, ...]] = {}
    for n, tensors in held.items():
        for t in tensors:
            held_by[id(t)] = (*held_by.get(id(t), ()), n.name)
    return {n.name: (n.op, n.target, str(n.args), str(n.kwargs), n.meta.get("region") or (), n.meta.get("saved"),
                     n.meta.get("module_path"), read_by[n], tuple((i.name, read_by[i]) for i in n.all_input_nodes),
                     _modules(n), tuple((id(t), t.shape, t.dtype, t.requires_grad, held_by[id(t)]) for t in held[n]))
            for n in graph.nodes}


def held_tensors(node: fx.Node) -> list[Tensor]:
    """The parameters and buffers behind a ``call_module`` or ``get_attr`` node."""
    root = node.graph.owning_module
    if root is None or node.op not in ("call_module", "get_attr"):
        return []
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    owner, _, name = str(node.target).rpartition(".")
    value = getattr(root.get_submodule(owner), name)
    return [value] if isinstance(value, Tensor) else []


def _modules(node: fx.Node) -> tuple[Any, ...]:
    root = node.graph.owning_module
    if root is None or node.op != "call_module":
        return ()
    return tuple((id(m), m.training) for m in root.get_submodule(str(node.target)).modules())


# Runs a graph node by node without data.

class GraphInterpreter(fx.Interpreter):
    """Runs the nodes of a graph module; one overridable method per kind of node, as torch.fx does.

    It does what the generated code would do: values die where its do, in the regions that annotations ask for.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._statements = statements_of(list(module.graph.nodes))
        self._offloaded = OffloadedTensors()
        self._kept: dict[Statement, KeptResults] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the graph for the traced forward's arguments; raises InputError for others."""
        signature = forward_signature(self.module)
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
        """The arguments of a node, in containers that can be changed."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return thaw(args), thaw(kwargs)  # generated code passes containers that can be changed

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An argument of forward."""
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
                        own.enter_context(self._context(saving))
                    self._run_statement(statement)
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
        """What surrounds a statement with the blocks that are its own."""
        return nullcontext()

    def _run_statement(self, statement: Statement) -> None:
        if statement.node is not None:
            self.env[statement.node] = self.run_node(statement.node)
        else:
            self._run_checkpointed(statement)
        for n in statement.offloaded:
            self._offloaded.add(self.env[n])

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

    def _context(self, block: Block) -> AbstractContextManager[Any]:
        if isinstance(block, Keeping):
            kept = self._kept[block.checkpoint]
            return kept.on_host if block.offloads else kept
        return self._offloaded


def _leave(blocks: list[tuple[Block, AbstractContextManager[Any]]], depth: int) -> None:
    """Leave all but the outermost ``depth`` blocks."""
    while len(blocks) > depth:
        with InterruptsHeld():
            blocks.pop()[1].__exit__(*sys.exc_info())


def _claimed(device: torch.device) -> torch.device:
    return active_state().adopted_device if device.type in ("cpu", "meta") else device


class RecordingInterpreter(GraphInterpreter):
    """Runs a graph under a recorder: each node is a row of the log."""

    def __init__(self, module: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(module)
        self.recorder, self.record = recorder, RunRecord()
        self.rows: dict[fx.Node, int] = {}
        self._paths: dict[fx.Node, str] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """As `GraphInterpreter.run`; raises InputError for shapes and dtypes that were not traced, too."""
        if isinstance(self.module, GraphModule) and self.module.checks_inputs:
            self.module.check_inputs(args, kwargs)
        return super().run(*args, **kwargs)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a node. ``x.device`` was written down as the host where the model was traced there: it is
        the device that its tensors are taken to be on now. One that the model names by a string stays.
        """
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            torch.device, _claimed, super().fetch_args_kwargs_from_env(n))
        return found

    def begin_step(self) -> None:
        """Make the rows of a new step."""
        paths, rows = self.recorder.log.index_of_path, self.rows
        for n in self.graph.nodes:
            path = n.meta.get("module_path", "")
            # a module that was traced into and holds nothing is not there: its parent, or the root
            while path not in paths:
                path = path.rpartition(".")[0]
            self._paths[n] = path
            target = n.target if isinstance(n.target, str) else _target_name(n.target)
            row = self.recorder.add_node(n.op, n.name, target, paths[path])
            rows[n] = row
            record = self.recorder.node_at(row)
            record.source = n.meta.get("source")
            record.region = tuple([r.describe() for r in n.meta.get("region", ())])
            record.inputs = tuple([rows[i] for i in n.all_input_nodes if i in rows])

    def around(self, statement: Statement) -> AbstractContextManager[Any]:
        """The row of the log that the statement's calls go to."""
        n = statement.node
        return nullcontext() if n is None else self.recorder.at(self.rows[n], self._paths[n])

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and note what it gave."""
        row = self.rows[n]
        recorder = self.recorder
        if recorder.phase == "forward":
            recorder.read(row, tensors_in([self.env[i] for i in n.all_input_nodes]))
        result = super().run_node(n)
        if recorder.phase == "forward":
            recorder.set_outputs(row, result)
            if n.op != "output":
                self.record.note(n, result)
        return result


def _target_name(target: Any) -> str:
    name = getattr(target, "__qualname__", getattr(target, "__name__", target))
    return f"{getattr(target, '__module__', '') or ''}.{name}".lstrip(".")


# Drives the recorder with a graph: one step of what a traced, perhaps transformed, model would do.

class GraphStep:
    """One forward pass, and in training its loss and backward pass, of a graph module under a recorder."""

    def __init__(self, recorder: Recorder, module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], *,
                 mode: str, loss_fn: Callable[[Any], torch.Tensor] | None, autocast: torch.dtype | None,
                 device_type: str) -> None:
        self.recorder, self.module, self.args, self.kwargs = recorder, module, args, kwargs
        self.mode, self.loss_fn, self.autocast, self.device_type = mode, loss_fn or default_loss, autocast, device_type
        self.interpreter = RecordingInterpreter(module, recorder)

    def run(self) -> dict[fx.Node, int]:
        """Run the step; the result is the row of each node in the log."""
        recorder = self.recorder
        holds = hold_inputs(self.args, self.kwargs)
        recorder.planned_calls = max(1, sum(n.op == "call_module" for n in self.module.graph.nodes))
        recorder.start_step(0, placeholders=False)
        self.interpreter.begin_step()
        recorder.begin("forward")
        with torch.set_grad_enabled(self.mode == "train"), casting(self.device_type, self.autocast):
            output = self.interpreter.run(*self.args, **self.kwargs)
            self.interpreter.env.clear()
            if self.mode == "infer":
                recorder.end()
                return self.interpreter.rows
            loss = recorder.compute_loss(self.loss_fn, output)
        check_loss(loss)
        del output
        recorder.mark([loss], "loss")
        note_saved_inputs(recorder, holds)
        loss.backward()
        recorder.mark([p.grad for p in self.module.parameters() if p.grad is not None], "gradient")
        recorder.end()
        return self.interpreter.rows
