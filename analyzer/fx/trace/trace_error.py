"""Errors of a forward, told with the module, the line and the arguments that they came from."""
from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

from analyzer.errors import AnalyzerError, InputError
from analyzer.meta.source_line import is_user_code

from .tape import Tape

Tensor = torch.Tensor


def _place(error: BaseException, tape: Tape) -> str:
    """Where in the user's code an error came up."""
    line = None
    frame: types.TracebackType | None = error.__traceback__
    while frame is not None:
        if is_user_code(frame.tb_frame.f_code.co_filename):
            line = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    path, kind = tape.failed_in or ("", "")
    module = f"module {path!r} ({kind.rpartition('.')[2]})" if path else "the root module"
    return f"in {module}" + (f" at {line}" if line else "")


def _describe(meta_args: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return type(value).__name__

    return ", ".join(f"{name}={text(value)}" for name, value in meta_args.items()) or "no arguments"


def locate(error: AnalyzerError, tape: Tape, meta_args: Mapping[str, Any]) -> AnalyzerError:
    """An error of this package's, with the place added."""
    return type(error)(f"{error}\nWhile tracing with {_describe(meta_args)}, {_place(error, tape)}.")


def wrap(error: Exception, tape: Tape, meta_args: Mapping[str, Any]) -> InputError:
    """An error of torch's or of the model's: the arguments do not fit it, or it cannot run with them."""
    return InputError(
        f"forward failed {_place(error, tape)}, traced with {_describe(meta_args)}: {type(error).__name__}: {error}")
