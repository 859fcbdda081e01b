"""What uses a profile to decide: plans of checkpointing, and the largest batch that fits."""
from typing import TYPE_CHECKING

from analyzer.on_use import find_later

if TYPE_CHECKING:
    from .block_choice import BlockChoice
    from .block_plan import BlockPlan, BlockPlanner, PlannedStep, plan_blocks
    from .budget import InfeasibleBudgetError
    from .partitioner import find_memory_budget
    from .plan import Plan
    from .plan_region import PlanRegion
    from .planner import Planner, solve
    from .recorded_step import FrontierPoint, PartitionedStep, SavedBytes, StepInfo, StepMemory, measure_step

__all__ = [
    "BlockChoice", "BlockPlan", "BlockPlanner", "FrontierPoint", "InfeasibleBudgetError", "PartitionedStep", "Plan",
    "PlanRegion", "PlannedStep", "Planner", "SavedBytes", "StepInfo", "StepMemory", "find_memory_budget",
    "measure_step", "plan_blocks", "solve"]

_PLACES = {
    "block_choice": "BlockChoice", "block_plan": "BlockPlan BlockPlanner PlannedStep plan_blocks",
    "budget": "InfeasibleBudgetError", "partitioner": "find_memory_budget", "plan": "Plan", "plan_region": "PlanRegion",
    "recorded_step": "FrontierPoint PartitionedStep SavedBytes StepInfo StepMemory measure_step",
    "planner": "Planner solve"}
# plans of blocks, which a search makes, need neither the tracer nor graphs
__getattr__ = find_later(
    __name__, {name: f"{__name__}.{place}" for place, names in _PLACES.items() for name in names.split()})


def __dir__() -> list[str]:
    return sorted(__all__)
