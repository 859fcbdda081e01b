"""Conditions that one known side decides: anything or true is true, anything and false (or bits that are 0) is so."""
from __future__ import annotations

from typing import Any

import torch

from analyzer.meta.value.contents import read_known

from .resolve import OperatorCall

_OR, _AND = ("bitwise_or", "logical_or", "__or__"), ("bitwise_and", "logical_and", "__and__")
_DECIDING = {**dict.fromkeys(_OR, True), **dict.fromkeys(_AND, False)}
_MOST_ELEMENTS = 1024  # conditions of sequences in a batch, not masks


def decided_condition(call: OperatorCall) -> bool | None:
    """What every element of the new result is, where one operand alone says so; else None."""
    deciding = _DECIDING.get(call.info.name)
    if deciding is None or not call.born or call.born[0] is None:
        return None
    out: Any = call.outputs[0]
    if deciding and out.dtype is not torch.bool or out.dtype.is_floating_point or not 0 < out.numel() <= _MOST_ELEMENTS:
        return None  # of bits, only none decides
    for tensor in call.tensors:
        if tensor.shape == out.shape and not tensor.dtype.is_floating_point:
            value = read_known(tensor)
            if value is not None and bool((value == deciding).all()):
                return deciding
    return None
