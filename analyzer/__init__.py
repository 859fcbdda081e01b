"""What a PyTorch model will cost, before its machine is bought: FLOPs, memory, communication and time."""
import importlib
import pkgutil
from typing import TYPE_CHECKING

from analyzer.output import find_later
from analyzer.record.collector import rare_collections

__version__ = "0.1.0"

# collections, which so many new objects set off, would walk all of torch: a third of this import's time
with rare_collections():
    import analyzer.cuda  # noqa: F401  # which registers the simulated device
    from analyzer.api.fits import fits
    from analyzer.api.profile import Profile, ProfileOptions, profile, profile_eagerly
    from analyzer.api.symbolic_profile import reprofile, run_passes, symbolic_profile
    from analyzer.fx.graph.graph_module import GraphModule
    from analyzer.fx.trace.tracer import symbolic_trace
    from analyzer.fx.trace.tracer_impl import (
        register_leaf_module,
        register_leaf_module_impl,
        register_non_leaf_module,
        register_tracer_impl,
    )
    from analyzer.meta.mode import MetaTensorMode
    from analyzer.meta.operator_info import register_memory_impl, register_shape_impl
    from analyzer.meta.tensor import MetaTensor
    from analyzer.profilers.flop_registry import register_flop_impl
    from analyzer.profilers.operator.registration import register_time_impl
    from analyzer.results.node_info import NodeInfo, SavedTensorInfo, TensorInfo
    from analyzer.results.run_cost import Roofline, RunCost
    from analyzer.results.verdict import Advice, FitTable, Verdict
    from analyzer.results.view import load_on_first_use, register_exporter, register_report, register_view

if TYPE_CHECKING:
    from analyzer.report.comparison.compare import compare
    from analyzer.results.comparison import ProfileChange
    from analyzer.tools.advice.search import advise
    from analyzer.tools.dryrun.script import dry_run
    from analyzer.tools.generation import profile_generate
    from analyzer.tools.solver.fit import max_batch_size, max_sequence_length
    from analyzer.tools.solver.solver_registry import register_solver

__all__ = ["__version__", "Advice", "FitTable", "MetaTensor", "MetaTensorMode", "NodeInfo", "Profile", "ProfileChange",
           "ProfileOptions", "Roofline", "RunCost", "SavedTensorInfo", "TensorInfo", "Verdict", "advise", "compare",
           "dry_run", "fits", "max_batch_size", "max_sequence_length", "profile", "profile_generate",
           "register_exporter", "register_flop_impl", "register_leaf_module", "register_leaf_module_impl",
           "register_memory_impl", "register_non_leaf_module", "register_report", "register_shape_impl",
           "register_solver", "register_time_impl", "register_tracer_impl", "reprofile", "run_passes",
           "symbolic_profile", "symbolic_trace"]

# what few need
__getattr__ = find_later(__name__, {
    "ProfileChange": "analyzer.results.comparison", "advise": "analyzer.tools.advice.search",
    "compare": "analyzer.report.comparison.compare", "dry_run": "analyzer.tools.dryrun.script",
    "max_batch_size": "analyzer.tools.solver.fit", "max_sequence_length": "analyzer.tools.solver.fit",
    "profile_generate": "analyzer.tools.generation", "register_solver": "analyzer.tools.solver.solver_registry"})


def __dir__() -> list[str]:
    return sorted(__all__)


@load_on_first_use
def _load_reports() -> None:
    """Import every file of `report/`; each registers the views that it holds."""
    from analyzer import report

    for found in pkgutil.walk_packages(report.__path__, f"{report.__name__}."):
        importlib.import_module(found.name)
    register_view.add("advise", _advise_on)
    register_view.add("as_eager", profile_eagerly)


def _write_graph(graph: GraphModule) -> str:
    """What a notebook shows of a graph; it is imported when it is used first."""
    from analyzer.report.page.notebook import write_graph

    return write_graph(graph)


GraphModule.to_fragment = staticmethod(_write_graph)


def _advise_on(found: Profile, device: str | None = None) -> Advice:
    """What `Profile.advise` calls; it is imported when it is used first."""
    from analyzer.tools.advice.search import advise_on

    return advise_on(found, device)
