"""Compiled code runs as it was written while operators are watched one by one, which compiled code does not run."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from analyzer.meta.intercept.replacement import replace


@contextmanager
def run_as_written() -> Iterator[None]:
    """Run compiled functions and modules eagerly, also those that are compiled in the block."""
    with ExitStack() as undo:
        is_set = False

        def set_stance() -> None:
            nonlocal is_set
            # nothing was compiled before, where it is not there
            if not is_set and "torch._dynamo.eval_frame" in sys.modules:
                stance = torch.compiler.set_stance("force_eager")
                undo.callback(stance.__exit__, None, None, None)
                is_set = True

        def compile(original: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                set_stance()
                return result

            return run

        undo.callback(replace(torch, "compile", compile))
        set_stance()
        yield
