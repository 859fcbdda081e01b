"""Tells what a PyTorch model will cost before anyone owns the machine that runs it."""
from .meta.mode import MetaTensorMode
from .meta.tensor import MetaTensor

__all__ = ["MetaTensor", "MetaTensorMode"]
