"""What a PyTorch model will cost, before its machine is bought: FLOPs, memory, communication and time."""
from typing import TYPE_CHECKING

from analyzer.on_use import find_later

__version__ = "0.1.0"

if TYPE_CHECKING:
    from analyzer.api.fits import fits
    from analyzer.api.phase import phase
    from analyzer.api.profile import ProfileOptions, profile
    from analyzer.api.result import Profile
    from analyzer.api.symbolic_profile import reprofile, run_passes, symbolic_profile
    from analyzer.dropins.torch_checkpoint import auto_checkpoint, undo_checkpoint
    from analyzer.dropins.torch_cuda import estimate_memory
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
    from analyzer.report.comparison.compare import compare
    from analyzer.results.comparison import ProfileChange
    from analyzer.results.node_info import NodeInfo, SavedTensorInfo, TensorInfo
    from analyzer.results.run_cost import Roofline, RunCost
    from analyzer.results.verdict import Advice, FitTable, Verdict
    from analyzer.results.view import register_exporter, register_report
    from analyzer.tools.advice.search import advise
    from analyzer.tools.dryrun.script import dry_run
    from analyzer.tools.generation import profile_generate
    from analyzer.tools.job import Job, JobError, read_command, read_job
    from analyzer.tools.posttrain import PosttrainProfile, posttrain
    from analyzer.tools.solver.fit import max_batch_size, max_sequence_length
    from analyzer.tools.solver.solver_registry import register_solver

__all__ = ["__version__", "Advice", "FitTable", "Job", "JobError", "MetaTensor", "MetaTensorMode", "NodeInfo",
           "PosttrainProfile", "Profile", "ProfileChange", "ProfileOptions", "Roofline", "RunCost", "SavedTensorInfo",
           "TensorInfo", "Verdict", "advise", "auto_checkpoint", "compare", "dry_run", "estimate_memory", "fits",
           "max_batch_size", "max_sequence_length", "phase", "posttrain", "profile", "profile_generate", "read_command",
           "read_job", "register_exporter", "register_flop_impl", "register_leaf_module", "register_leaf_module_impl",
           "register_memory_impl", "register_non_leaf_module", "register_report", "register_shape_impl",
           "register_solver", "register_time_impl", "register_tracer_impl", "reprofile", "run_passes",
           "symbolic_profile", "symbolic_trace", "undo_checkpoint"]

_PLACES = {
    "analyzer.api.fits": "fits", "analyzer.api.phase": "phase",
    "analyzer.api.profile": "ProfileOptions profile", "analyzer.api.result": "Profile",
    "analyzer.api.symbolic_profile": "reprofile run_passes symbolic_profile",
    "analyzer.dropins.torch_checkpoint": "auto_checkpoint undo_checkpoint",
    "analyzer.dropins.torch_cuda": "estimate_memory", "analyzer.fx.trace.tracer": "symbolic_trace",
    "analyzer.fx.trace.tracer_impl":
        "register_leaf_module register_leaf_module_impl register_non_leaf_module register_tracer_impl",
    "analyzer.meta.mode": "MetaTensorMode", "analyzer.meta.operator_info": "register_memory_impl register_shape_impl",
    "analyzer.meta.tensor": "MetaTensor", "analyzer.profilers.flop_registry": "register_flop_impl",
    "analyzer.profilers.operator.registration": "register_time_impl",
    "analyzer.report.comparison.compare": "compare", "analyzer.results.comparison": "ProfileChange",
    "analyzer.results.node_info": "NodeInfo SavedTensorInfo TensorInfo",
    "analyzer.results.run_cost": "Roofline RunCost", "analyzer.results.verdict": "Advice FitTable Verdict",
    "analyzer.results.view": "register_exporter register_report",
    "analyzer.tools.advice.search": "advise", "analyzer.tools.dryrun.script": "dry_run",
    "analyzer.tools.generation": "profile_generate",
    "analyzer.tools.job": "Job JobError read_command read_job",
    "analyzer.tools.posttrain": "PosttrainProfile posttrain",
    "analyzer.tools.solver.fit": "max_batch_size max_sequence_length",
    "analyzer.tools.solver.solver_registry": "register_solver"}

# Each is imported when it is used first: the command line prints its help without torch.
__getattr__ = find_later(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted(__all__)
