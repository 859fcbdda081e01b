"""Post-training: what a step of sampling, scoring and learning costs, phase by phase, and which way to do it."""
from .answers import Answers
from .plan import ALGORITHMS, EnginePlan, PosttrainPlan
from .planner import Planner
from .result import PosttrainPhase, PosttrainProfile
from .run import posttrain

__all__ = ["ALGORITHMS", "Answers", "EnginePlan", "Planner", "PosttrainPhase", "PosttrainPlan", "PosttrainProfile",
           "posttrain"]
