"""Conditions on unknown data that only decide whether the code raises: ``assert x.isfinite().all()``, ``if (i >=
n).any(): raise``. Which branch raises is read from the bytecode of the function that asks. No model is meant to fail
its own checks, so the other branch is taken.
"""
from __future__ import annotations

import dis
import functools
from types import CodeType

import torch

from analyzer.meta.source_line import first_frame, is_outside

# What stands between a call that gives a truth value and the jump that it decides.
_BETWEEN = {"CACHE", "NOP", "TO_BOOL", "PRECALL", "EXTENDED_ARG", "NOT_TAKEN"}
_ENDS = ("RETURN", "YIELD", "RERAISE", "SEND", "FOR_ITER", "BEFORE_WITH", "SETUP")
_LONGEST = 200  #: instructions; a message that takes more to build is not looked for


def passing_value() -> bool | None:
    """The truth value with which the asking function goes on where the other makes it raise, else None."""
    frame = first_frame(is_outside)
    if frame is None:
        return None
    # what it asks is passed on to a function that raises
    if frame.f_code is torch._check_tensor_all_with.__code__:
        return True
    return _find_passing_value(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1 << 10)  # a loop asks at the same place again and again
def _find_passing_value(code: CodeType, offset: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    place = {i.offset: n for n, i in enumerate(instructions)}
    at = place.get(offset)
    if at is None:
        return None
    turned = False
    while not _jumps_on_truth(instructions[at]):
        at += 1
        if at >= len(instructions) or not (_jumps_on_truth(instructions[at])
                                           or instructions[at].opname in _BETWEEN | {"UNARY_NOT"}):
            return None
        turned ^= instructions[at].opname == "UNARY_NOT"
    jump = instructions[at]
    target = place.get(jump.argval)
    if target is None:
        return None
    jumping, falling = _raises(instructions, target), _raises(instructions, at + 1)
    if jumping == falling:
        return None
    value = ("TRUE" in jump.opname) != jumping  # a jump taken for the value, unless that is the way to the raise
    return value != turned


def _jumps_on_truth(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith(("POP_JUMP", "JUMP_IF")) and "NONE" not in instruction.opname


def _raises(instructions: list[dis.Instruction], start: int) -> bool:
    """Whether what begins at ``start`` raises without a choice."""
    for instruction in instructions[start:start + _LONGEST]:
        name = instruction.opname
        if name == "RAISE_VARARGS":
            return True
        if "JUMP" in name or name.startswith(_ENDS):
            return False
    return False
