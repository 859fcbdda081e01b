"""What the mode asks of CUDA."""
from __future__ import annotations

from collections.abc import Iterator

from analyzer.meta.intercept.gated_kernel import GatedKernels
from analyzer.meta.intercept.replacement import Undo

from . import autocast, data_parallel, facade, kernel_registry
from .workspaces.library import library_needs, take_library_workspaces


class CudaDevice:
    """CUDA as a `SimulatedDevice`."""

    gates: tuple[GatedKernels, ...] = (kernel_registry.gate, autocast.gate)
    library_needs = staticmethod(library_needs)
    take_library_workspaces = staticmethod(take_library_workspaces)

    def replacements(self) -> Iterator[Undo]:
        """Register the kernels and replace what asks the driver; each result undoes one step."""
        yield kernel_registry.install()
        for replacements in kernel_registry.kernel_replacements:
            yield from replacements()
        yield from autocast.replacements()
        yield from data_parallel.replacements()
        yield from facade.replacements()

    def enter_thread(self) -> None:
        """Let this thread's operator calls take CUDA's paths and be cast by autocast."""
        kernel_registry.gate.set_open(True)
        autocast.follow_switch(True)

    def leave_thread(self) -> None:
        """The mode of this thread ends, and with it what autocast kept."""
        kernel_registry.gate.set_open(False)
        autocast.follow_switch(False)
        autocast.clear_cache()
