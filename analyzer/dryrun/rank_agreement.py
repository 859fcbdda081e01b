"""What libraries do so that all ranks agree, or to see that they do: they are taken to, as no other rank runs."""
from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import current

from .late_import import Make

_RANDOM, _ZERO = "accelerate.utils.random", "deepspeed.runtime.zero.utils"


def replace_agreements() -> Mapping[str, Make]:
    """What to replace in which module."""
    return {_RANDOM: _keep_states, _ZERO: _trust_lists}


def _keep_states() -> Iterator[Undo]:
    """Accelerate broadcasts the states of random generators, which have no data."""
    yield answer(sys.modules[_RANDOM], "synchronize_rng_state",
                 lambda *args, **kwargs: _assume("Accelerate's broadcasts of random generators' states were left out"))


def _trust_lists() -> Iterator[Undo]:
    """ZeRO-3 compares lists of numbers with those that rank 0 broadcasts, in the first passes."""
    for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        if hasattr(sys.modules[_ZERO], name):  # versions differ
            yield answer(sys.modules[_ZERO], name,
                         lambda *args, **kwargs: _assume("DeepSpeed's comparisons with rank 0 were left out"))


def _assume(text: str) -> Any:
    state = current()
    if state is not None:
        state.assume(text)
