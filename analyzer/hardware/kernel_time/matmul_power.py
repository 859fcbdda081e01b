"""The clock under a long product: what multiply-adds draw, against the power limit of the board."""
from __future__ import annotations

from analyzer.hardware.device_spec import DeviceSpec

#: Joules of a FLOP if a board's whole power limit went into its peak rate, by architecture: on the CUDA cores in
#: float32, on the tensor cores in 16 bits; from data sheets. 16 and 12 nm: V100 PCIe (250 W, 14 TFLOP/s, 112 TFLOP/s),
#: P40 (250 W, 12 TFLOP/s), Quadro RTX 8000 (260 W, 16.3 TFLOP/s, 130 TFLOP/s). 8 and 7 nm: RTX 3090 (350 W,
#: 35.6 TFLOP/s), A40 (300 W, 150 TFLOP/s), A100 SXM (400 W, 312 TFLOP/s). 5 and 4 nm: RTX 4090 (450 W, 82.6 TFLOP/s),
#: L40S (350 W, 362 TFLOP/s), RTX PRO 6000 Blackwell (600 W, 125 TFLOP/s, 504 TFLOP/s), H100 SXM (700 W,
#: 989 TFLOP/s), B200 (1000 W, 2250 TFLOP/s).
BOARD_JOULES = {
    "Pascal": (21e-12, 21e-12), "Volta": (18e-12, 2.2e-12), "Turing": (16e-12, 2.0e-12), "Ampere": (9.8e-12, 1.3e-12),
    "Ampere GA10x": (9.8e-12, 2.0e-12), "Ada Lovelace": (5.4e-12, 0.97e-12), "RTX Blackwell": (4.8e-12, 1.2e-12),
    "Hopper": (5.4e-12, 0.71e-12), "Blackwell": (5.4e-12, 0.44e-12)}


def slowdown_under_load(device: DeviceSpec, on_cuda_cores: bool, itemsize: int, flops_per_second: float,
                        joules_scale: float) -> float:
    """How many times longer a product takes once the clock has come down to what the power limit leaves; 1 or more.

    ``flops_per_second`` is what the kernels reach at the boost clock, ``joules_scale`` the fitted share of
    `BOARD_JOULES` that a FLOP really takes, on tensor cores in proportion to ``itemsize``, in bytes. 1 where the
    architecture or the limit is unknown.

    >>> from analyzer.hardware import find_device
    >>> slowdown_under_load(find_device("t4"), True, 4, 6e12, 1.0)  # 6e12 FLOP/s would draw 96 W of 70
    1.3714285714285714
    """
    joules = BOARD_JOULES.get(device.architecture or "")
    if joules is None or device.power_watts is None:
        return 1.0
    each = joules[0] if on_cuda_cores else joules[1] * itemsize / 2
    return max(flops_per_second * each * joules_scale / device.power_watts, 1.0)
