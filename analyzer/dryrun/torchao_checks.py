"""torchao asks which GPU there is, and whether torch was built with CUDA: the simulated one is enough for both."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from analyzer.cuda.sdp_choice import simulated_capability
from analyzer.meta.intercept.replacement import Undo, answer

_LEAST = {"is_sm_at_least_89": (8, 9), "is_sm_at_least_90": (9, 0), "is_sm_at_least_100": (10, 0)}


def answer_for_capability() -> Iterator[Undo]:
    """Replace the questions in ``torchao.utils``, which must be imported; each result undoes one replacement."""
    utils = sys.modules["torchao.utils"]
    for name, least in _LEAST.items():
        if hasattr(utils, name):  # versions differ
            yield answer(utils, name, _is_at_least(least))
    if hasattr(utils, "is_sm_version"):
        yield answer(utils, "is_sm_version", lambda major, minor: simulated_capability() == (major, minor))


def _is_at_least(least: tuple[int, int]) -> Callable[[], bool]:
    return lambda: simulated_capability() >= least
