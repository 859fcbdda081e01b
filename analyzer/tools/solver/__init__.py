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

# plans of blocks, which a search makes, need neither the tracer nor graphs
__getattr__ = find_later(__name__, {
    "analyzer.tools.solver.block_choice": "BlockChoice",
    "analyzer.tools.solver.block_plan": "BlockPlan BlockPlanner PlannedStep plan_blocks",
    "analyzer.tools.solver.budget": "InfeasibleBudgetError",
    "analyzer.tools.solver.partitioner": "find_memory_budget",
    "analyzer.tools.solver.plan": "Plan",
    "analyzer.tools.solver.plan_region": "PlanRegion",
    "analyzer.tools.solver.recorded_step": "FrontierPoint PartitionedStep SavedBytes StepInfo StepMemory measure_step",
    "analyzer.tools.solver.planner": "Planner solve"})


def __dir__() -> list[str]:
    return sorted(__all__)
