"""The user's own line of code behind what runs now."""
from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SKIPPED = (_PACKAGE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, contextlib.__file__,
            "<eval_with_key>", "<string>", "<frozen")
_INSTALLED = tuple({path for name, path in sysconfig.get_paths().items() if "lib" in name})
_OWN_MODELS = os.path.join(_PACKAGE, "zoo")


def first_frame(is_wanted: Callable[[str], bool]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_wanted(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_frame() -> FrameType | None:
    """The innermost frame outside torch and this package (the shipped models count as the user's)."""
    return first_frame(is_user_code)


@functools.cache  # every operator asks, of each frame
def is_user_code(filename: str) -> bool:
    """Whether a source file is neither torch's nor this package's (its models count as the user's)."""
    return filename.startswith(_OWN_MODELS) or not filename.startswith(_SKIPPED)


def is_outside(filename: str) -> bool:
    """Whether a source file is not this package's (its models count as the user's)."""
    return filename.startswith(_OWN_MODELS) or not filename.startswith(_PACKAGE)


def is_called_by_user(check: str = "") -> bool:
    """Whether a frame outside torch and this package asks; those of ``check``, a file of this package, are as such."""
    frame = first_frame(lambda filename: is_outside(filename) or filename == check)
    return frame is not None and (is_user_code(frame.f_code.co_filename) or frame.f_code.co_filename == check)


def user_line() -> str | None:
    frame = user_frame()
    return None if frame is None else name_line(frame.f_code.co_filename, frame.f_lineno)


@functools.lru_cache(4096)  # like layers share a line: one string for all their operators
def name_line(filename: str, line: int) -> str:
    return f"{filename}:{line}"


def asked_by(folder: str) -> bool:
    """Whether the innermost frame outside this package and torch's tensor classes is code in ``folder``."""
    frame = first_frame(lambda filename: filename.startswith(folder) or is_user_code(filename))
    return frame is not None and frame.f_code.co_filename.startswith(folder)


# Lines of a script, beside those of the libraries that it calls.

def name_frame(frame: FrameType) -> str:
    """The file and the line of a frame, with the folder of a library's file.

    >>> name_frame(sys._getframe()).rpartition(":")[0]
    '<doctest analyzer.meta.source_line.name_frame[0]>'
    """
    return shorten_line(name_line(frame.f_code.co_filename, frame.f_lineno))


def script_line(inner: str | None = None) -> str | None:
    """The line of the script that runs now, and behind > the line of a library that it is in; or ``inner``, the line of
    the forward pass of which a gradient is computed. None where no such line runs.
    """
    own = first_frame(_is_script)
    asks = None if own is not None and inner is None and own is user_frame() else user_frame()
    behind = None if asks is None else name_frame(asks)
    if inner is not None:
        behind = f"the gradient of {shorten_line(inner)}"
    return behind if own is None else name_frame(own) if behind is None else f"{name_frame(own)} > {behind}"


@functools.cache
def _is_script(filename: str) -> bool:
    """Whether a file is neither of an installed package nor of Python's library."""
    return is_user_code(filename) and not filename.startswith((*_INSTALLED, "<"))


@functools.lru_cache(4096)
def shorten_line(place: str) -> str:
    """The line of a script with its file's name, one of a package with the folders in it."""
    installed = next((path for path in sorted(_INSTALLED, key=len, reverse=True) if place.startswith(path)), None)
    return place[len(installed) + 1:] if installed is not None else place.rpartition("/")[2]
