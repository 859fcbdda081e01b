"""Graphs: traced from a model's own code, transformed, and run without data. docs/solvers.md lists what is here."""
from .graph.alias import is_pure, makers, may_share, written_by
from .graph.graph_module import GraphModule
from .graph.interpreter import GraphInterpreter, ShapeProp
from .graph.region_edit import clear_region, nodes_in, set_region, set_saved
from .graph.statement import AutocastRegion, CheckpointRegion, GradRegion
from .trace.tracer import symbolic_trace
from .trace.tracer_impl import (
    register_leaf_function,
    register_leaf_module,
    register_leaf_module_impl,
    register_non_leaf_module,
    register_tracer_impl,
)

__all__ = ["AutocastRegion", "CheckpointRegion", "GradRegion", "GraphInterpreter", "GraphModule", "ShapeProp",
           "clear_region", "is_pure", "makers", "may_share", "nodes_in", "register_leaf_function",
           "register_leaf_module", "register_leaf_module_impl", "register_non_leaf_module", "register_tracer_impl",
           "set_region", "set_saved", "symbolic_trace", "written_by"]


def __dir__() -> list[str]:
    return sorted(__all__)
