"""Many configurations of one model: a grid in, a table out, on any executor, and gone on with where it stopped."""
from .configuration import Configuration, expand_grid
from .result import SweepResult
from .run import SweepInterrupted, sweep

__all__ = ["Configuration", "SweepInterrupted", "SweepResult", "expand_grid", "sweep"]
