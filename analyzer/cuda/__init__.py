"""CUDA, as the device that tensors without data are on: which kernels it takes, what these need while they run, its
casts, and `torch.cuda`.
"""
from analyzer.meta.simulated_device import register_simulated_device

from .device import CudaDevice

register_simulated_device(CudaDevice())
