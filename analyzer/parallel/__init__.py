"""Training on many devices: a world of ranks that moves no data, and pipelines of stages joined into one timeline."""
from typing import TYPE_CHECKING, Any

from analyzer.distributed.deepspeed import make_engine
from analyzer.distributed.world import world

from .mesh_spec import MeshSpec
from .pipeline_schedule import PipelineAction, RankTime, StageAction, list_actions, read_schedule
from .pipeline_timeline import PipelineTimeline, join_timeline
from .profile_ranks import profile_ranks
from .rank_row import RankRow, StageCost
from .rank_table import RankTable

if TYPE_CHECKING:
    from analyzer.tools.search.search import search

__all__ = ["MeshSpec", "PipelineAction", "PipelineTimeline", "RankRow", "RankTable", "RankTime", "StageAction",
           "StageCost", "join_timeline", "list_actions", "make_engine", "profile_ranks", "read_schedule", "search",
           "world"]


def __getattr__(name: str) -> Any:
    """`search`, which imports files of this package, when it is asked for."""
    if name == "search":
        from analyzer.tools.search.search import search

        return search
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
