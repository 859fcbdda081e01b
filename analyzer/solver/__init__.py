"""What uses a profile to decide: plans of checkpointing, and the largest batch that fits."""
from .application import PlanRegion
from .plan import FrontierPoint, InfeasibleBudgetError, Plan, StepInfo
from .recorded_step import measure_step
from .solve import Planner, solve

__all__ = [
    "FrontierPoint", "InfeasibleBudgetError", "Plan", "PlanRegion", "Planner", "StepInfo", "measure_step", "solve"]
