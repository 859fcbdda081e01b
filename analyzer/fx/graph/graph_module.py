"""The traced module, its graph, and how both are pickled."""
from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen, PythonCode
from torch.fx.node import map_aggregate

from analyzer.errors import InputError
from analyzer.fx.trace.function_call import find_by_name, qualified_name
from analyzer.fx.trace.input_check import Asked, Expected, check_identity

from .alias import is_pure
from .codegen import RegionCodeGen
from .statement import CheckpointRegion, region_of


class TracedGraph(fx.Graph):
    """A graph whose nodes may write in place and run in regions."""

    def __init__(self, codegen: RegionCodeGen | None = None) -> None:
        super().__init__()
        self._graph_namespace.create_name("self", object())  # no node may hide the module in generated code
        self.set_codegen(RegionCodeGen() if codegen is None else codegen)

    @property
    def owning_module(self) -> fx.GraphModule | None:
        """The graph module that it is the graph of. torch's graphs hold theirs, which then waits for the collector with
        all its weights.
        """
        owner: weakref.ref[fx.GraphModule] | None = self.__dict__.get("_owner")
        return None if owner is None else owner()

    @owning_module.setter
    def owning_module(self, module: fx.GraphModule | None) -> None:
        self._owner = None if module is None else weakref.ref(module)

    def set_codegen(self, codegen: CodeGen) -> None:
        """Let ``codegen`` generate the code of this graph."""
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
class _Packed:
    """A node, by its position, or what torch has under a name: its functions and memory formats have no pickle."""

    value: int | str


def _pack_graph(graph: fx.Graph) -> tuple[Any, ...]:
    """The nodes of ``graph`` in order, and the arguments that its code takes by name only."""
    positions = {n: i for i, n in enumerate(graph.nodes)}

    def pack(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _Packed(positions[value])
        return _Packed(str(value)) if isinstance(value, torch.memory_format) else value

    def pack_target(target: Any) -> Any:
        name = None if isinstance(target, str) else qualified_name(target)
        return target if name is None else _Packed(name)

    nodes = [((n.op, pack_target(n.target), map_aggregate(n.args, pack), map_aggregate(n.kwargs, pack), n.name, n.type),
              n.meta) for n in graph.nodes]
    return nodes, getattr(graph._codegen, "keyword_only", frozenset())


def _unpack_graph(packed: tuple[Any, ...]) -> fx.Graph:
    graph = TracedGraph(RegionCodeGen(packed[1]))
    nodes: list[fx.Node] = []

    def unpack(value: Any) -> Any:
        if not isinstance(value, _Packed):
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
    lists what was taken for granted. Copies and pickles keep the graph with its annotations. Inputs unlike those of the
    trace raise InputError; set ``checks_inputs = False`` to leave that to the operators.
    """

    checks_inputs = True
    #: HTML of a graph, for notebooks; `analyzer` sets it, for this room knows no reports
    to_fragment: ClassVar[Callable[[Any], str] | None] = None

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
        """Set what the arguments of forward must be like, and the modes around it. Where code compares tensors with
        ``is``, the same ones must be one tensor, too.
        """
        self._compares_identity, self._asked = compares_identity, tuple(asked)
        self._expected: dict[str, list[Expected]] = {}
        for e in expected:
            self._expected.setdefault(e.argument, []).append(e)

    def _repr_html_(self) -> str | None:
        """What a notebook shows; its own code is in ``code``."""
        write = type(self).to_fragment
        return None if write is None else write(self)

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
        """Raise InputError where arguments are not of the shapes, dtypes and constants that were traced, or a mode that
        forward asks for is another.
        """
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
            for e in expected.get(name, ()) if name in values else ():  # else the default
                e.check(values[name], parameter.kind is Parameter.VAR_KEYWORD)
        if self._compares_identity:
            check_identity([e for found in expected.values() for e in found], values)

    # -- copies --------------------------------------------------------------------------------------------------

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
    """A copy of ``graph``; with a ``memo``, annotations are copied deeply."""
    new = copy.deepcopy(graph)
    for before, after in zip(graph.nodes, new.nodes):
        after.meta = dict(before.meta) if memo is None else copy.deepcopy(before.meta, memo)
    return new


def explain_call(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any],
                 error: TypeError) -> str:
    """Why ``name``, a forward of that signature, cannot be called so, and what to give besides.

    >>> signature = inspect.signature(lambda ids, labels: None)
    >>> print(explain_call("forward", signature, (torch.ones(32, 256),), {}, TypeError()))
    forward(ids, labels) needs labels too; give it, e.g. --input labels=int64:32 on the command line
    """
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
        lacking = [p.name for p in signature.parameters.values() if p.name not in given and p.default is p.empty
                   and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    except TypeError:  # too many, or one of no such name
        said = ", ".join([*[f"{len(args)} by position"] * bool(args), *sorted(kwargs)])
        return f"{name}{signature} cannot be called with {said}: {error}"
    batch = next((str(len(t)) for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.ndim), "SIZES")
    inputs = " ".join(f"--input {name}=int64:{batch}" for name in lacking)
    return f"{name}{signature} needs {', '.join(lacking)} too; give it, e.g. {inputs} on the command line"
