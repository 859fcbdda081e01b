"""Files that users ask for: whether one can be written is said before the work, and each is written whole or not."""
from __future__ import annotations

import os
import secrets
from pathlib import Path

from .errors import OutputError


def check_output(path: str | Path | None) -> None:
    """Raise OutputError where no file can be written at ``path``; None is no file.

    >>> check_output(".")
    Traceback (most recent call last):
    analyzer.errors.OutputError: '.': is a folder; give the name of a file
    """
    if path is None:
        return
    if not isinstance(path, (str, Path)):
        raise OutputError(f"{path!r}: must be the path of a file")
    if problem := _find_problem(path):
        raise OutputError(f"{str(path)!r}: {problem}")


def _find_problem(path: str | Path) -> str | None:
    """What keeps a file from being written at ``path``."""
    if "\0" in str(path):
        return "a path cannot have a NUL in it"
    if str(path) == "":
        return "is empty; give the name of a file"
    target = Path(path).absolute()
    try:
        if target.is_dir():
            return "is a folder; give the name of a file"
        if not target.parent.is_dir():
            return f"the folder {target.parent} does not exist"
        return None if os.access(target.parent if _is_replaced(target) else target, os.W_OK) else "may not be written"
    except OSError as error:  # e.g. a name that is too long
        return error.strerror or str(error)


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write a file whole: where that fails, what was there before is as it was, and OutputError says why. Text is
    UTF-8. A device or a pipe (``/dev/stdout``) is written to as it is; of a link, the file that it names.
    """
    check_output(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        if _is_replaced(Path(path)):
            _replace(Path(os.path.realpath(path)), data)
        else:
            Path(path).write_bytes(data)
    except OSError as error:
        raise OutputError(f"{str(path)!r}: could not be written: {error.strerror or error}") from error


def _is_replaced(target: Path) -> bool:
    return target.is_file() or not target.exists()


def _replace(target: Path, data: bytes) -> None:
    """Put a file that was written beside ``target`` in its place."""
    beside = target.with_name(f".analyzer-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(data)
        if target.exists():
            beside.chmod(target.stat().st_mode)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
