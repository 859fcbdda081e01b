"""The second estimate of a step's time, compiled, as text."""
from __future__ import annotations

from collections.abc import Iterator

from analyzer.results.fused import FusedInfo
from analyzer.units import format_seconds


def title_fused(fused: FusedInfo) -> str:
    """What a second estimate is of, as a title.

    >>> title_fused(FusedInfo("default", 1e-3, None, None, 1e-3, 1e-3, (9e-4, 1.1e-3), 40, 90, 10**6, 10**7, False))
    'Time, compiled (predicted; mode default, 40 kernels instead of 90)'
    """
    if fused.mode == "cudagraphs":
        return f"Time, launched as CUDA graphs (predicted; {fused.kernels:,} kernels as they are)"
    return (f"Time, compiled (predicted; mode {fused.mode}, {fused.kernels:,} kernels instead of "
            f"{fused.eager_kernels:,})")


def list_fused_times(fused: FusedInfo) -> Iterator[tuple[str, str]]:
    """Name and time of each part of the step."""
    low, high = map(format_seconds, fused.step_seconds_range)
    for name, seconds in (("forward", fused.fwd_seconds), ("backward", fused.bwd_seconds),
                          ("optimizer (not compiled)", fused.optimizer_seconds)):
        if seconds is not None:
            yield name, format_seconds(seconds)
    yield "step (wall time)", f"{format_seconds(fused.step_seconds)} ({low} to {high})"
    yield "kernels (their sum)", format_seconds(fused.kernel_seconds)


def describe_fused(fused: FusedInfo | None) -> list[str]:
    """The same in a line, none where there is no second estimate.

    >>> describe_fused(FusedInfo("default", 2e-3, None, None, 2e-3, 1e-3, (1e-3, 4e-3), 40, 90, 10**6, 10**7, False))
    ['compiled (predicted): step 2.00 ms (1.00 ms to 4.00 ms), 1.00 ms of kernels']
    """
    if fused is None:
        return []
    what = "launched as CUDA graphs" if fused.mode == "cudagraphs" else "compiled"
    low, high = map(format_seconds, fused.step_seconds_range)
    return [f"{what} (predicted): step {format_seconds(fused.step_seconds)} ({low} to {high}), "
            f"{format_seconds(fused.kernel_seconds)} of kernels"]
