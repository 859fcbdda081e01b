"""A run that follows what is expected of unknown contents, where a model asks for them."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from analyzer.errors import DataDependentError
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.restart import Restart
from analyzer.record.options import ProfileOptions
from analyzer.results.profile import Profile


def expect_values(run: Callable[[ProfileOptions], Profile], options: ProfileOptions) -> Profile:
    """``run(options)``; expected contents are followed only in a second run, for a model that asks for them."""
    if options.unknown_value != "expected":
        return run(options)
    try:
        return run(replace(options, unknown_value="error"))
    except DataDependentError as error:
        try:
            return run(options)
        except (Restart, DeviceOutOfMemoryError):
            raise
        except Exception:  # what was expected leads nowhere
            raise error from None
