"""Graphs: traced from a model's own code, transformed, and run without data. docs/solvers.md lists what is here."""
from typing import TYPE_CHECKING

from analyzer.on_use import find_later

if TYPE_CHECKING:
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

# a profile that traces nothing imports no tracer
__getattr__ = find_later(__name__, {
    "analyzer.fx.graph.alias": "is_pure makers may_share written_by",
    "analyzer.fx.graph.graph_module": "GraphModule",
    "analyzer.fx.graph.interpreter": "GraphInterpreter ShapeProp",
    "analyzer.fx.graph.region_edit": "clear_region nodes_in set_region set_saved",
    "analyzer.fx.graph.statement": "AutocastRegion CheckpointRegion GradRegion",
    "analyzer.fx.trace.tracer": "symbolic_trace",
    "analyzer.fx.trace.tracer_impl":
        "register_leaf_function register_leaf_module register_leaf_module_impl register_non_leaf_module "
        "register_tracer_impl"})


def __dir__() -> list[str]:
    return sorted(__all__)
