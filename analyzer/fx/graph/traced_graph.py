"""The graph of a traced module: torch.fx's own operations on graphs, aware of effects and regions."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.graph import CodeGen

from analyzer.errors import InputError

from .codegen import RegionCodeGen
from .purity import is_pure
from .region import CheckpointRegion
from .statement import region_of


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
