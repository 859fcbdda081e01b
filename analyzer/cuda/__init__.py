"""CUDA, as the device that tensors without data are on: its kernels, what these hold, its casts, and `torch.cuda`."""
from collections.abc import Iterator

from analyzer.meta.intercept.patch import mode_replacements
from analyzer.meta.intercept.replacement import Undo
from analyzer.meta.simulated_device import SimulatedDevice, register_simulated_device
from analyzer.output import hold_over_forks

from . import autocast, binding, comm, early_name, facade, kernel_registry, stream
from .workspaces.library import library_needs, take_library_workspaces


def _replacements() -> Iterator[Undo]:
    yield kernel_registry.install()
    for replacements in kernel_registry.kernel_replacements:
        yield from replacements()
    yield from autocast.replacements()
    yield from facade.replacements()
    yield from binding.replacements()
    yield from comm.replacements()
    yield from stream.replacements()
    yield from early_name.replacements()


def _enter_thread() -> None:
    kernel_registry.gate.set_open(True)
    autocast.follow_switch(True)


def _leave_thread() -> None:
    kernel_registry.gate.set_open(False)
    autocast.follow_switch(False)


register_simulated_device(
    SimulatedDevice((kernel_registry.gate, autocast.gate), _replacements, _enter_thread, _leave_thread, library_needs,
                    take_library_workspaces))

hold_over_forks(autocast.lock)  # which is taken inside the next
hold_over_forks(mode_replacements.lock)
