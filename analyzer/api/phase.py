"""`phase`: a name for what a script does in a block."""
from __future__ import annotations

import torch

from analyzer.errors import InputError


def phase(name: str) -> torch.profiler.record_function:
    """A block of a script, or a function that it decorates, under a name of its own: `analyzer dryrun` tells its peak
    memory, time, FLOPs and tokens apart from the rest. In a real run it is what `torch.profiler.record_function` is,
    which a script may write in its place: a label in the profiler's trace, where one is taken. Raises InputError for a
    name that is no text.

    >>> with phase("rewards"):
    ...     total = torch.ones(3).sum()
    """
    if not isinstance(name, str):
        raise InputError(f"analyzer.phase({name!r}): a phase is named by a text, such as analyzer.phase('rollout')")
    return torch.profiler.record_function(name)
