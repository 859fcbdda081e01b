"""The reports of a profile, measured on the device at hand. Scripts written for the profilers of DeepSpeed and
flops-profiler or TIDSProfiler run with their import changed to this package.
"""
from analyzer.report.compat.deepspeed import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

from .flops_profiler import FlopsProfiler, TIDSProfiler, get_model_profile
from .measure import measure

__all__ = ["FlopsProfiler", "TIDSProfiler", "bytes_to_string", "duration_to_string", "flops_to_string",
           "get_model_profile", "macs_to_string", "measure", "number_to_string", "params_to_string"]
