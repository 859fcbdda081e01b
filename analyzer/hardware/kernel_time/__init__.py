"""How long kernels take, by family: functions of sizes and a device."""
from .estimate import BOUNDS, NO_TIME, KernelTime, join

__all__ = ["BOUNDS", "NO_TIME", "KernelTime", "join"]
