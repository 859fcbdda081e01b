"""What uses a profile to decide: plans of checkpointing, and the largest batch that fits."""
from .application import PlanRegion
from .plan import InfeasibleBudgetError, Plan
from .recorded_step import FrontierPoint, SavedBytes, StepInfo, StepMemory, measure_step
from .solve import Planner, solve

__all__ = [
    "FrontierPoint", "InfeasibleBudgetError", "Plan", "PlanRegion", "Planner", "SavedBytes",
    "StepInfo", "StepMemory", "measure_step", "solve"]
