"""What to change so that a step fits on a device, or takes less: each change is profiled."""
from analyzer.results.verdict import Advice, AdviceOption

from .search import advise

__all__ = ["Advice", "AdviceOption", "advise"]
