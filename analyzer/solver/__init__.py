"""What uses a profile to decide: plans of checkpointing, and the largest batch that fits."""
from .check import measure_step
from .plan import FrontierPoint, Plan, PlanRegion, StepInfo
from .solve import Planner, solve

__all__ = ["FrontierPoint", "Plan", "PlanRegion", "Planner", "StepInfo", "measure_step", "solve"]
