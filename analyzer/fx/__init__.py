"""Graphs: traced from a model's own code, transformed, and run without data. docs/solvers.md lists what is here."""
from .graph.alias import makers, may_share, written_by
from .graph.graph_module import GraphModule
from .graph.interpreter import GraphInterpreter
from .graph.purity import is_pure
from .graph.region import AutocastRegion, CheckpointRegion, GradRegion
from .graph.region_edit import clear_region, nodes_in, set_region
from .graph.saved_edit import set_saved
from .passes.checkpoint_module import checkpoint_modules
from .passes.dead_code import eliminate_dead_code
from .passes.shape_prop import ShapeProp
from .passes.split_bias import split_biases
from .trace.bias_split import register_bias_split
from .trace.leaf_module import register_leaf_module, register_leaf_module_impl, register_non_leaf_module
from .trace.tracer import symbolic_trace
from .trace.tracer_impl import register_leaf_function, register_tracer_impl

__all__ = ["AutocastRegion", "CheckpointRegion", "GradRegion", "GraphInterpreter", "GraphModule", "ShapeProp",
           "checkpoint_modules", "clear_region", "eliminate_dead_code", "is_pure", "makers", "may_share", "nodes_in",
           "register_bias_split", "register_leaf_function", "register_leaf_module", "register_leaf_module_impl",
           "register_non_leaf_module", "register_tracer_impl", "set_region", "set_saved", "split_biases",
           "symbolic_trace", "written_by"]


def __dir__() -> list[str]:
    return sorted(__all__)
