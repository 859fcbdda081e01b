"""What uses a profile to decide: plans of checkpointing, and the largest batch that fits."""
from .application import BlockChoice, PlanRegion
from .block_plan import BlockPlan, BlockPlanner, PlannedStep, plan_blocks
from .partitioner import find_memory_budget
from .plan import InfeasibleBudgetError, Plan
from .planner import Planner, solve
from .recorded_step import FrontierPoint, PartitionedStep, SavedBytes, StepInfo, StepMemory, measure_step

__all__ = [
    "BlockChoice", "BlockPlan", "BlockPlanner", "FrontierPoint", "InfeasibleBudgetError", "PartitionedStep", "Plan",
    "PlanRegion", "PlannedStep", "Planner", "SavedBytes", "StepInfo", "StepMemory", "find_memory_budget",
    "measure_step", "plan_blocks", "solve"]
