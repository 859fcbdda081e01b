"""The user's own line of code behind what runs now."""
from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_SKIPPED = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
            os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, "<eval_with_key>", "<string>", "<frozen")
_OWN_MODELS = os.path.join(_SKIPPED[0], "zoo")
_is_users: dict[str, bool] = {}  # by file name


def user_frame() -> FrameType | None:
    """The innermost frame outside torch and this package (the shipped models count as the user's)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def is_user_code(filename: str) -> bool:
    """Whether a source file is neither torch's nor this package's (its models count as the user's)."""
    found = _is_users.get(filename)
    if found is None:
        found = _is_users[filename] = filename.startswith(_OWN_MODELS) or not filename.startswith(_SKIPPED)
    return found


def user_line() -> str | None:
    """``file.py:123`` of the innermost frame outside torch and this package."""
    frame = user_frame()
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def asked_by(folder: str) -> bool:
    """Whether the innermost frame outside this package and torch's tensor classes is code in ``folder``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(folder):
            return True
        if not name.startswith(_SKIPPED) or name.startswith(_OWN_MODELS):
            return False
        frame = frame.f_back
    return False
