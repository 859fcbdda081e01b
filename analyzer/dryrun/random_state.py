"""Accelerate puts the random generators of all ranks into one state, which has no data: they are taken to agree."""
from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import current

from .late_import import Make

_MODULE = "accelerate.utils.random"


def replace_random_states() -> Mapping[str, Make]:
    """What to replace in which module."""
    return {_MODULE: _keep_states}


def _keep_states() -> Iterator[Undo]:
    yield answer(sys.modules[_MODULE], "synchronize_rng_state", _keep)


def _keep(*_: Any, **__: Any) -> None:
    state = current()
    if state is not None:
        state.assume("Accelerate's broadcasts of the random generators' states were left out")
