"""A second estimate of a step: its kernels fused, or launched as one."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FusedInfo:
    """A step as ``torch.compile`` would run it: predicted, beside the eager one of the same profile.

    - ``mode``: ``"default"`` and ``"reduce-overhead"`` are modes of ``torch.compile``; ``"cudagraphs"`` is its backend
      of that name, which fuses nothing and launches the eager kernels of each pass as one.
    - ``*_seconds``: as the fields of `Profile` by these names. The optimizer's are those of an optimizer that is not
      compiled.
    - ``kernels``, ``eager_kernels``: how many a step runs, fused and not, the optimizer's included.
    - ``moved_bytes``, ``eager_moved_bytes``: what they read and write.
    - ``cuda_graphs``: whether each pass is launched as one.
    """

    mode: str
    fwd_seconds: float | None
    bwd_seconds: float | None
    optimizer_seconds: float | None
    step_seconds: float
    kernel_seconds: float
    step_seconds_range: tuple[float, float]
    kernels: int
    eager_kernels: int
    moved_bytes: int
    eager_moved_bytes: int
    cuda_graphs: bool
