"""Tensors without data, and the mode under which any torch code makes them. docs/solvers.md lists what is here."""
from .mode import MetaTensorMode
from .operator_info import MemoryNeed, Stage, register_memory_impl, register_shape_impl
from .spec import TensorSpec, spec_of
from .state import MetaOptions
from .tensor import MetaTensor, device_of

__all__ = ["MemoryNeed", "MetaOptions", "MetaTensor", "MetaTensorMode", "Stage", "TensorSpec", "device_of",
           "register_memory_impl", "register_shape_impl", "spec_of"]


def __dir__() -> list[str]:
    return sorted(__all__)
