"""Figures as DeepSpeed's FLOPs profiler prints them, under the names of its functions.

>>> [number_to_string(58_182_404_096), number_to_string(1234, units="M", precision=4), number_to_string(2e-4)]
['58.18 G', '0.0012 M', '200 u']
>>> number_to_string(0), flops_to_string(1.5e12), macs_to_string(29_029_179_392), bytes_to_string(46_758_048)
('0 ', '1.5 TFLOPS', '29.03 GMACs', '46.76 MB')
>>> params_to_string(11_689_512), params_to_string(7e9), duration_to_string(0.00123)
('11.69 M', '7 B', '1.23 ms')
"""
from __future__ import annotations

_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """``num`` with an SI prefix: the given one, else the largest that keeps it at 1 or above."""
    if units is None:
        units = "" if num == 0 else next((u for u, size in _MAGNITUDES.items() if num >= size), "u")
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """A rate."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """A count."""
    return f"{number_to_string(macs, units, precision)}MACs"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """A size, with powers of 1000."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """With B for 10^9."""
    return number_to_string(params_num, "G" if units == "B" else units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds."""
    return f"{number_to_string(duration, units, precision)}s"
