"""What a user may choose about a profiled step."""
from __future__ import annotations

from dataclasses import dataclass

from analyzer.meta.options import MetaOptions


@dataclass(frozen=True)
class ProfileOptions(MetaOptions):
    """Settings of `profile`: those of `MetaOptions` and the step's own.

    ``steps`` training steps are run; the first makes gradients and optimizer states, the last is the steady state.
    ``set_to_none`` is what ``zero_grad`` gets.
    """

    steps: int = 2
    set_to_none: bool = True
