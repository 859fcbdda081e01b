"""Training on many devices: a world of ranks that moves no data, and pipelines of stages joined into one timeline."""
from analyzer.distributed.deepspeed import make_engine
from analyzer.distributed.world import world
from analyzer.on_use import find_later

from .mesh_spec import MeshSpec
from .pipeline_schedule import PipelineAction, RankTime, StageAction, list_actions, read_schedule
from .pipeline_timeline import PipelineTimeline, join_timeline
from .profile_ranks import profile_ranks
from .rank_row import RankRow, StageCost
from .rank_table import RankTable

__all__ = ["MeshSpec", "PipelineAction", "PipelineTimeline", "RankRow", "RankTable", "RankTime", "StageAction",
           "StageCost", "join_timeline", "list_actions", "make_engine", "profile_ranks", "read_schedule", "search",
           "world"]

# a tool, which stands on this package and is found when it is asked for
__getattr__ = find_later(__name__, {"analyzer.tools.search.search": "search"})
