"""The traced module, its graph, the code that is generated from it, and how both are pickled."""
from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
import torch.utils.checkpoint  # noqa: F401  # the generated code calls it
from torch import fx, nn
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen, PythonCode
from torch.fx.node import map_aggregate

from analyzer.errors import InputError
from analyzer.fx.trace.function_call import find_by_name, qualified_name
from analyzer.fx.trace.input_check import Asked, Expected, check_identity
from analyzer.on_use import load

from .alias import is_pure
from .kept import KeptResults
from .offload import OffloadedTensors
from .statement import (
    Block,
    CheckpointRegion,
    Keeping,
    Offloading,
    Statement,
    last_uses,
    region_of,
    shared_blocks,
    statements_of,
)

_INDENT = "    "
_COUNTER = "# COUNTER: "  # what torch.fx writes before the lines of a node
_ANNOTATIONS = ("region", "saved", "module_path", "module_stack", "source")


class RegionCodeGen(CodeGen):
    """torch.fx's code generator, with ``with`` blocks and checkpoints; nodes that share a region share its block."""

    def __init__(self, keyword_only: Iterable[str] = ()) -> None:
        super().__init__()
        self.keyword_only = frozenset(keyword_only)
        self._extra: list[tuple[str, Any]] = []
        self.home: Callable[[], Graph | None] = lambda: None  #: the graph that it was made for

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """The head of forward, with a star before the arguments that it takes by name only."""
        named = [v for v in free_vars if v.split("=")[0].split(":")[0].strip() in self.keyword_only]
        if named and not any(v.startswith("*") and not v.startswith("**") for v in free_vars):
            free_vars.insert(free_vars.index(named[0]), "*")
        return super().gen_fn_def(free_vars, maybe_return_annotation, **options)

    def additional_globals(self) -> list[tuple[str, Any]]:
        return self._extra

    def _gen_python_code(self, nodes: Any, root_module: str, namespace: Any, **options: Any) -> PythonCode:
        ordered = list(nodes)
        home = self.home()
        if home is not None and ordered and ordered[0].graph is not home:
            by_name = {n.name: n for n in home.nodes}
            for n in ordered:  # that `torch.fx.Transformer` made have the annotations of what they were made for
                sources = n.meta.get("from_node") if "region" not in n.meta else None
                maker = by_name.get(sources[0].node_info.name) if sources and sources[0].node_info else None
                if maker is not None:
                    n.meta.update({key: maker.meta[key] for key in _ANNOTATIONS if key in maker.meta})
        nests = any(region_of(n) or n.meta.get("saved") == "offload" for n in ordered)
        if not nests:
            return super()._gen_python_code(nodes, root_module, namespace, **options)
        users, self._extra = self._body_transformer, []

        def nest(body: list[str]) -> list[str]:
            nested = _Writer(ordered, body, namespace.create_name, self._extra).write()
            return users(nested) if users is not None else nested

        self._body_transformer = nest
        try:
            return super()._gen_python_code(nodes, root_module, namespace, **options)
        finally:
            self._body_transformer, self._extra = users, []


class _Writer:
    """Rearranges the lines that torch.fx wrote, one group per node, into nested blocks and functions."""

    def __init__(self, nodes: list[Node], body: list[str], create_name: Callable[[str, Any], str],
                 extra: list[tuple[str, Any]]) -> None:
        self.nodes, self.create_name, self.extra = nodes, create_name, extra
        self.offloaded = ""
        self.kept: dict[Statement, str] = {}
        self.preamble: list[str] = []
        self.text: dict[Node, list[str]] = {}
        lines = self.preamble
        for line in body:
            if line.startswith(_COUNTER):
                lines = self.text[nodes[int(line.removeprefix(_COUNTER))]] = []
            lines.append(line)

    def write(self) -> list[str]:
        statements = statements_of(self.nodes)
        if any(s.offloaded for s in statements):  # else nothing waits on the host outside of checkpoints
            self.offloaded = self.create_name("offloaded", object())
            self.preamble.append(f"{self.offloaded} = {self._global(OffloadedTensors)}()\n")
        return [*self.preamble, *self._function(statements, "", set(), set())]

    def _function(self, statements: list[Statement], indent: str, given: set[Node], returned: set[Node]) -> list[str]:
        local = given | {n for s in statements for n in s.nodes()}
        last = last_uses(statements, local)
        out: list[str] = []
        open_blocks: tuple[Block, ...] = ()
        for i, statement in enumerate(statements):
            for depth in range(shared_blocks(open_blocks, statement.blocks), len(statement.blocks)):
                block = statement.blocks[depth]
                if isinstance(block, Keeping):
                    header = self.kept[block.checkpoint] + (".on_host" if block.offloads else "")
                else:
                    header = self.offloaded if isinstance(block, Offloading) else block.header()
                out.append(f"{indent}{_INDENT * depth}with {header}:\n")
            open_blocks = statement.blocks
            inner = indent + _INDENT * len(open_blocks)
            dead = [n for n in last.get(i, []) if n not in returned]
            late = [n for n in dead if n in statement.offloaded]  # offloaded before they go
            dead = [n for n in dead if n not in late]
            out.extend(self._checkpoint(statement, inner, dead) if statement.node is None
                       else self._node(statement.node, inner, dead))
            for n in statement.offloaded:
                out.append(f"{inner}{self.offloaded}.add({n!r}){f';  {n!r} = None' if n in late else ''}\n")
        return out

    def _node(self, node: Node, indent: str, dead: list[Node]) -> list[str]:
        counter, *lines = self.text[node]
        frees = dead and node.op not in ("placeholder", "output")
        ending = f";  {' = '.join(map(repr, dead))} = None\n" if frees else "\n"
        text = "".join(ending if line == "\n" or line.startswith(";  ") else line for line in lines)
        indented = "".join(indent + line for line in text.splitlines(keepends=True) if line.strip())
        return [counter, indented]

    def _checkpoint(self, statement: Statement, indent: str, dead: list[Node]) -> list[str]:
        assert statement.checkpoint is not None
        members = set(statement.nodes())
        inputs, outputs = statement.inputs(), statement.results()
        options = {k: self._global(v, k) if callable(v) else repr(v) for k, v in statement.checkpoint.options().items()}
        out: list[str] = []
        if statement.keeps or statement.buffered:
            kept = self.kept[statement] = self.create_name(f"kept_{statement.checkpoint.id}", object())
            given = ["self", *map(repr, statement.buffered)] if statement.buffered else []
            given += [] if statement.checkpoint.preserve_rng_state else ["skips_draws = False"]
            out.append(f"{indent}{kept} = {self._global(KeptResults)}({', '.join(given)})\n")
            options["context_fn"] = f"{kept}.contexts"
        name = self.create_name(f"checkpoint_{statement.checkpoint.id}", object())
        out.append(f"{indent}def {name}({', '.join(map(repr, inputs))}):\n")
        out.extend(self._function(statement.body, indent + _INDENT, set(inputs), set(outputs)))
        result = ", ".join(map(repr, outputs))
        out.append(f"{indent}{_INDENT}return {result}\n" if outputs else f"{indent}{_INDENT}return None\n")
        arguments = ", ".join([name, *map(repr, inputs), *(f"{k} = {v}" for k, v in options.items())])
        call = f"torch.utils.checkpoint.checkpoint({arguments})"
        dead = [n for n in dead if n not in members or n in outputs]
        ending = f";  {' = '.join([*map(repr, dead), name])} = None\n"
        out.append(f"{indent}{result} = {call}{ending}" if outputs else f"{indent}{call}{ending}")
        return out

    def _global(self, value: Any, name: str = "") -> str:
        for known, held in self.extra:
            if held is value:
                return known
        known = self.create_name(getattr(value, "__name__", name), value)
        self.extra.append((known, value))
        return known


class TracedGraph(fx.Graph):
    """A graph whose nodes may write in place and run in regions."""

    def __init__(self, codegen: RegionCodeGen | None = None) -> None:
        super().__init__()
        self._graph_namespace.create_name("self", object())  # no node may hide the module in generated code
        self.set_codegen(RegionCodeGen() if codegen is None else codegen)

    @property
    def owning_module(self) -> fx.GraphModule | None:
        """The graph module, held weakly: with torch's strong reference it waits for the collector with its weights."""
        owner: weakref.ref[fx.GraphModule] | None = self.__dict__.get("_owner")
        return None if owner is None else owner()

    @owning_module.setter
    def owning_module(self, module: fx.GraphModule | None) -> None:
        self._owner = None if module is None else weakref.ref(module)

    def set_codegen(self, codegen: CodeGen) -> None:
        super().set_codegen(codegen)
        if isinstance(codegen, RegionCodeGen):
            codegen.home = weakref.ref(self)

    def __deepcopy__(self, memo: Any = None) -> TracedGraph:
        new: Any = super().__deepcopy__({} if memo is None else memo)
        new.__class__ = TracedGraph
        new.set_codegen(new._codegen)
        return new  # type: ignore[no-any-return]

    def eliminate_dead_code(self, is_impure_node: Callable[[fx.Node], bool] | None = None) -> bool:
        """Erase nodes whose results are not read and that do nothing else; whether there were any."""
        return super().eliminate_dead_code(is_impure_node or (lambda node: not is_pure(node)))

    def process_inputs(self, *args: Any) -> Any:
        """The arguments of `torch.fx.Interpreter.run`, refused where it would leave out autocast or grad mode."""
        for node in self.nodes:
            region = next((r for r in region_of(node) if not isinstance(r, CheckpointRegion)), None)
            if region is not None:
                raise InputError(f"torch.fx.Interpreter runs {node.name} without {region.header()}, which changes its "
                                 f"result; call the graph module, or derive from analyzer.fx.GraphInterpreter")
        return super().process_inputs(*args)


# A graph as plain data: pickling the linked nodes themselves would recurse as deep as the graph is long.

@dataclass(frozen=True)
class _PickledNode:
    """A node, by its position, or what torch has under a name: its functions and memory formats have no pickle."""

    value: int | str


def _pack_graph(graph: fx.Graph) -> tuple[Any, ...]:
    positions = {n: i for i, n in enumerate(graph.nodes)}

    def pack(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _PickledNode(positions[value])
        return _PickledNode(str(value)) if isinstance(value, torch.memory_format) else value

    def pack_target(target: Any) -> Any:
        name = None if isinstance(target, str) else qualified_name(target)
        return target if name is None else _PickledNode(name)

    nodes = [((n.op, pack_target(n.target), map_aggregate(n.args, pack), map_aggregate(n.kwargs, pack), n.name, n.type),
              n.meta) for n in graph.nodes]
    return nodes, getattr(graph._codegen, "keyword_only", frozenset())


def _unpack_graph(packed: tuple[Any, ...]) -> fx.Graph:
    graph = TracedGraph(RegionCodeGen(packed[1]))
    nodes: list[fx.Node] = []

    def unpack(value: Any) -> Any:
        if not isinstance(value, _PickledNode):
            return value
        return nodes[value.value] if isinstance(value.value, int) else find_by_name(value.value)

    for (op, target, args, kwargs, *named), meta in packed[0]:
        nodes.append(graph.create_node(op, unpack(target), map_aggregate(args, unpack), map_aggregate(kwargs, unpack),
                                       *named))
        nodes[-1].meta = meta
    return graph


_COMPILED = ("_graph", "_code", "_lineno_map", "_prologue_start", "forward")  # made anew from the graph


class GraphModule(fx.GraphModule):
    """A `torch.fx.GraphModule` that shares parameters and buffers with the module it was traced from.

    Nodes know ``node.meta["module_path"]``, ``["module_stack"]``, ``["source"]`` and ``["region"]`` (see
    `analyzer.fx.graph.statement`). Call `recompile` after an edit of the graph or of a region. ``meta["assumptions"]``
    lists what was assumed. Copies and pickles keep the graph with its annotations. Inputs unlike those of the
    trace raise InputError; set ``checks_inputs = False`` to leave that to the operators.
    """

    checks_inputs = True

    def __init__(self, root: nn.Module, graph: fx.Graph, class_name: str = "GraphModule") -> None:
        empty = fx.Graph()
        super().__init__(nn.Module(), empty, class_name)
        empty.owning_module = None  # a graph is in a cycle with its nodes, and would keep the module in it
        self.training = root.training
        for name, value in vars(root).items():
            if name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                getattr(self, name).update(value)
            elif name not in self.__dict__:
                self.__dict__[name] = value
        self.graph = graph

    def expect(self, expected: Iterable[Expected], compares_identity: bool, asked: Iterable[Asked]) -> None:
        """Set what arguments of forward must be like, whether the same ones must be one tensor, and modes around it."""
        self._compares_identity, self._asked = compares_identity, tuple(asked)
        self._expected: dict[str, list[Expected]] = {}
        for e in expected:
            self._expected.setdefault(e.argument, []).append(e)

    def _repr_html_(self) -> str:
        html: str = load("analyzer.report.page.notebook:write_graph")(self)  # reports are made of what stands here
        return html

    def recompile(self) -> PythonCode:
        """Generate the code of `forward` from the graph; to be called after edits of the graph or of annotations."""
        code = super().recompile()
        generated = type(self).forward

        @functools.wraps(generated)
        def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
            if self.checks_inputs:
                self.check_inputs(args, kwargs)
            return generated(self, *args, **kwargs)

        type(self).forward = forward
        return code

    def check_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise InputError where shapes, dtypes, constants or modes that are asked for are not those of the trace."""
        for asked in self.__dict__.get("_asked", ()):
            asked.check()
        expected: dict[str, list[Expected]] = self.__dict__.get("_expected") or {}
        if not expected:
            return
        signature = inspect.signature(self.forward)
        try:
            values = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # of which Python's own message tells, in the call itself
            return
        for name, parameter in signature.parameters.items():
            if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
                values.setdefault(name, () if parameter.kind is Parameter.VAR_POSITIONAL else {})
            for e in expected.get(name, ()):  # a default is what was traced, or None where a tensor is needed
                if name in values or e.varies and parameter.default is None:
                    e.check(values.get(name), parameter.kind is Parameter.VAR_KEYWORD)
        if self._compares_identity:
            check_identity([e for found in expected.values() for e in found], values)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphModule:
        result = memo[id(self)] = _make(type(self).__name__, {}, None)
        result.__dict__.update(copy.deepcopy(self._state(), memo))
        result.graph = _copy_graph(self.graph, memo)
        return result

    def __copy__(self) -> GraphModule:
        return _make(type(self).__name__, self._state(), _copy_graph(self.graph, None))

    def __reduce__(self) -> Any:
        return _make, (type(self).__name__, self._state(), _pack_graph(self.graph))

    def _state(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _COMPILED}


def _make(class_name: str, state: dict[str, Any], graph: fx.Graph | tuple[Any, ...] | None) -> GraphModule:
    result: GraphModule = GraphModule.__new__(GraphModule)
    nn.Module.__init__(result)
    type(result).__name__ = class_name
    result.__dict__.update(state)
    if graph is not None:
        result.graph = _unpack_graph(graph) if isinstance(graph, tuple) else graph
    return result


def _copy_graph(graph: fx.Graph, memo: dict[int, Any] | None) -> fx.Graph:
    new = copy.deepcopy(graph)
    for before, after in zip(graph.nodes, new.nodes):
        after.meta = dict(before.meta) if memo is None else copy.deepcopy(before.meta, memo)
    return new
