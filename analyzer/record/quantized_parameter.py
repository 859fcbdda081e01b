"""What quantized parameters are made of: those of bitsandbytes keep scales beside their elements, and several elements
in a byte; those of torchao are tensors around tensors.
"""
from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from analyzer.meta.tensor import is_around_tensors, names_of_parts

PARAMETER, BUFFER = "parameter", "buffer"


def parts_of_parameter(parameter: torch.Tensor) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(suffix of its name, category, tensor) of each tensor that a parameter is or keeps."""
    if is_around_tensors(parameter):
        for name in names_of_parts(parameter):
            for suffix, category, part in parts_of_parameter(getattr(parameter, name)):
                yield f".{name}{suffix}", category, part
        return
    yield "", PARAMETER, parameter
    attributes = parameter.__dict__
    if (partition := partition_of(parameter)) is not None:
        yield ".ds_tensor", PARAMETER, partition
    scales = attributes.get("SCB")  # bitsandbytes.nn.Int8Params
    if isinstance(scales, torch.Tensor):
        yield ".SCB", BUFFER, scales
    state = attributes.get("quant_state")  # bitsandbytes.nn.Params4bit
    for prefix, held in (("", state), (".state2", getattr(state, "state2", None))):
        for name in ("absmax", "code", "offset"):
            value = getattr(held, name, None)
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}", BUFFER, value


def partition_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The rank's own part of a parameter under ZeRO-3, which is itself empty but where it is gathered; None of others.
    Source: deepspeed/runtime/zero/partition_parameters.py, ``_partition_param``.
    """
    found = parameter.__dict__.get("ds_tensor")
    return found if isinstance(found, torch.Tensor) else None


def count_elements(parameter: torch.Tensor) -> int:
    """The elements of a parameter, of which several may be packed in one of a tensor; of a sharded one the part's."""
    if (part := getattr(parameter, "_local_tensor", None)) is not None:
        return count_elements(part)
    if (partition := partition_of(parameter)) is not None:
        return partition.numel()
    state: Any = parameter.__dict__.get("quant_state")
    shape = getattr(state, "shape", None)
    return parameter.numel() if shape is None else prod(shape)
