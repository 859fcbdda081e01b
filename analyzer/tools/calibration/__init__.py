"""A device measured: `analyzer calibrate` times kernels on the device at hand and writes what they tell as a file."""
from .calibrate import calibrate

__all__ = ["calibrate"]
