"""Writing files whole, also beside forks."""
from __future__ import annotations

import codecs
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from textwrap import fill
from typing import Any, TypeGuard, Union

from analyzer.errors import OutputError

FilePath = Union[str, "os.PathLike[str]"]


def hold_over_forks(lock: Any) -> None:  # of `threading`
    """Let a fork wait for who holds ``lock``: the child would find it taken for good, and what it guards halfway. A
    lock that is taken inside another one is given before that one.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def is_path(value: object) -> TypeGuard[FilePath]:
    """Whether a value is the path of a file: a text, or an object that stands for one (`os.PathLike`)."""
    return isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str)


def check_output(path: FilePath | None) -> None:
    """Raise OutputError where no file can be written at ``path``; None is no file.

    >>> check_output(".")
    Traceback (most recent call last):
    analyzer.errors.OutputError: '.': is a folder; give the name of a file
    """
    if path is None:
        return
    if not is_path(path):
        raise OutputError(f"{path!r}: must be the path of a file")
    if problem := _find_problem(os.fspath(path)):
        raise OutputError(f"{os.fspath(path)!r}: {problem}")


def _find_problem(path: str) -> str | None:
    if "\0" in path:
        return "a path cannot have a NUL in it"
    if path == "":
        return "is empty; give the name of a file"
    try:
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            return "is a link that leads to itself"
        if target.is_dir():
            return "is a folder; give the name of a file"
        if not target.parent.is_dir():
            return f"the folder {target.parent} does not exist"
        return None if os.access(target.parent if _is_replaced(target) else target, os.W_OK) else "may not be written"
    except OSError as error:  # e.g. a name that is too long
        return error.strerror or str(error)


def write_output(path: FilePath, content: str | bytes) -> None:
    """Write a file whole: where that fails, what was there before is as it was, and OutputError says why. Text is
    UTF-8, in which half a surrogate pair, as names of files can have, stands as its escape. A device or a pipe
    (``/dev/stdout``) is written to as it is; of a link, the file that it names.
    """
    check_output(path)
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        if not _is_replaced(Path(path)):
            Path(path).write_bytes(data)
            return
        target = Path(os.path.realpath(path))
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
    except OSError as error:
        raise OutputError(f"{os.fspath(path)!r}: could not be written: {error.strerror or error}") from error


def _is_replaced(target: Path) -> bool:
    return target.is_file() or not target.exists()


#: What stands for characters that an encoding does not have: of the same width where tables are drawn with them.
_PLAIN = str.maketrans({
    **dict.fromkeys("│├┃", "|"), **dict.fromkeys("─━", "-"), "└": "`", "█": "#", "░": ".", "…": "...", "–": "-",
    "×": "x", "÷": "/", "·": "*", "→": "->", "≤": "<=", "≥": ">=", "µ": "u", "μ": "u"})
_DRAWN_PLAINLY = "analyzer.plain"


def _draw_plainly(error: UnicodeError) -> tuple[str, int]:
    r"""Error handler of a codec: ASCII for what tables are drawn with, a question mark for all else.

    >>> "\u251c\u2500Linear \u2192 caf\u00e9 \u6c34".encode("cp1252", _DRAWN_PLAINLY)
    b'|-Linear -> caf\xe9 ?'
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start:error.end]
    return "".join(c if c.isascii() else "?" for c in missing.translate(_PLAIN)), error.end


codecs.register_error(_DRAWN_PLAINLY, _draw_plainly)


def print_error(text: str, who: str = "analyzer") -> None:
    """Print to standard error what a user of the command line must know, in lines as wide as the terminal, or as
    ``COLUMNS`` says, and at most 120; elsewhere as it is.
    """
    lines = f"{who}: {text}".split("\n")
    if sys.stderr.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        width = max(40, min(120, shutil.get_terminal_size((120, 24)).columns))
        lines = [line if len(line) <= width else fill(
            line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) for line in lines]
    print("\n".join(lines), file=sys.stderr)


@contextmanager
def drawing_plainly() -> Iterator[None]:
    """What is printed in the block is drawn in ASCII where stdout's encoding does not have the character; how its
    user wants such characters treated (``PYTHONIOENCODING=ascii:replace``) stays.
    """
    stream = sys.stdout
    if not isinstance(stream, TextIOWrapper) or stream.errors not in ("strict", "surrogateescape"):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors=_DRAWN_PLAINLY)
    try:
        yield
    finally:
        if not stream.closed:
            stream.reconfigure(errors=before)
