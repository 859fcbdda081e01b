"""Types of values that hold no tensor and cannot change, in sets for the questions that are asked of them."""
from __future__ import annotations

import torch

NUMBERS = (bool, int, float, complex)
"""What an element of a tensor can be made of."""

LITERALS = (type(None), bool, int, float, str)
"""What settings are made of: values that read the same in any file."""

CODE_CONSTANTS = (*LITERALS, complex, bytes)
"""What the compiled code of a function can hold, besides tuples of it."""

ARGUMENTS = (*LITERALS, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What operators and forward functions take besides tensors, and cannot change."""

VALUES = (*ARGUMENTS, bytes, torch.Size)
"""What can take the place of an equal one wherever it is found."""

LEAVES = frozenset({
    str, int, float, bool, type(None), complex, bytes, type, type(len), type(lambda: 0), torch.dtype, torch.device,
    torch.Size,
})
"""Exact types of what is never looked into for tensors."""
