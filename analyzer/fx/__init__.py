"""Graphs: traced from a model's own code, transformed, and run without data. docs/solvers.md lists what is here."""
from .graph.alias import is_pure, makers, may_share, written_by
from .graph.graph_module import GraphModule
from .graph.interpreter import GraphInterpreter
from .graph.region_edit import clear_region, nodes_in, set_region, set_saved
from .graph.statement import AutocastRegion, CheckpointRegion, GradRegion
from .passes.dead_code import ShapeProp, checkpoint_modules, eliminate_dead_code
from .passes.split_bias import split_biases
from .trace.tracer import symbolic_trace
from .trace.tracer_impl import (
    register_bias_split,
    register_leaf_function,
    register_leaf_module,
    register_leaf_module_impl,
    register_non_leaf_module,
    register_tracer_impl,
)

__all__ = ["AutocastRegion", "CheckpointRegion", "GradRegion", "GraphInterpreter", "GraphModule", "ShapeProp",
           "checkpoint_modules", "clear_region", "eliminate_dead_code", "is_pure", "makers", "may_share", "nodes_in",
           "register_bias_split", "register_leaf_function", "register_leaf_module", "register_leaf_module_impl",
           "register_non_leaf_module", "register_tracer_impl", "set_region", "set_saved", "split_biases",
           "symbolic_trace", "written_by"]


def __dir__() -> list[str]:
    return sorted(__all__)
