"""What the host takes to launch a step: Python, dispatch, autograd and the driver, each in seconds."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from .device_spec import DeviceSpec
from .kernel_time.constants import find_constants


@dataclass(frozen=True)
class HostSpec:
    """The pace of a host that runs a PyTorch step, seconds each.

    - ``module_seconds``: one call of a module: Python's own work in its forward, hooks looked up.
    - ``forward_seconds``, ``backward_seconds``, ``update_seconds``: one operator called by the model's code, by
      autograd's engine, by the optimizer: arguments parsed, dispatched, outputs made; the launch of kernels left out.
    - ``gradient_seconds``: more for an operator called by the model's code while gradients are recorded.
    - ``list_tensor_seconds``: one tensor in the lists of an operator that takes lists (``_foreach_*``, ``_fused_*``).
    - ``library_seconds``: one convolution more, as cuDNN looks up its plan.
    - ``checkpoint_seconds``: more for each operator of a checkpointed region, when it runs and when it runs again: the
      hooks that pack what it would save and unpack what the recomputation gives.
    - ``launch_seconds``: one kernel given to the driver.
    - ``gap_seconds``: between two kernels of a full queue, on the device.
    - ``synchronize_seconds``: from a kernel's end to the host's going on after it waited for it.
    - ``spread``: nine in ten measured hosts take at most that part more for all of it, or less by the same factor.
    """

    module_seconds: float
    forward_seconds: float
    gradient_seconds: float
    backward_seconds: float
    update_seconds: float
    list_tensor_seconds: float
    library_seconds: float
    checkpoint_seconds: float
    launch_seconds: float
    gap_seconds: float
    synchronize_seconds: float
    spread: float

    @classmethod
    def from_constants(cls, constants: Mapping[str, float]) -> HostSpec:
        """The host of fitted or measured constants, which are those of the family ``host``."""
        return cls(**{field.name: constants[field.name] for field in dataclasses.fields(cls)})


def host_of(device: DeviceSpec) -> HostSpec:
    """The host that a device is taken to stand in: its own calibration, else the one that the constants were fitted on.

    >>> from analyzer.hardware import find_device
    >>> 0 < host_of(find_device("h200")).launch_seconds < 1e-4
    True
    """
    return HostSpec.from_constants(find_constants("host", device))
