"""JSON from outside: whatever is wrong with a text that should be it is said in words."""
from __future__ import annotations

import codecs
import json
import os
import stat
from typing import Any

from .errors import InputError

MOST_BYTES = 2**30  #: of a file: one of saved profiles has some hundred megabytes at most, `/dev/zero` no end
_EXCERPT_CHARS = 30  # of damaged text, on each side of the damage
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def load_json(path: str | os.PathLike[str]) -> Any:
    """What a file of JSON holds. Raises OSError where it cannot be read, and InputError as `decode_json` does."""
    return decode_json(read_text(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file of UTF-8. Raises OSError where it cannot be read, InputError where it is too long or holds
    something else.
    """
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
        content = file.read(MOST_BYTES + 1) if about.st_size <= MOST_BYTES or not stat.S_ISREG(about.st_mode) else None
    if content is None or len(content) > MOST_BYTES:
        raise InputError(f"longer than {MOST_BYTES:,} bytes, which is more than is read")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "it is UTF-16: save it as UTF-8" if content.startswith(_UTF_16) else f"byte {error.start}"
        raise InputError(f"not UTF-8 text ({hint})") from error


def decode_json(text: str | bytes) -> Any:
    """The value of a text of JSON. Raises InputError where it is damaged, nested too deep to be a record, or says what
    JSON cannot: a field twice, NaN, a number of thousands of digits.

    >>> decode_json('{"a": [1, null]}')
    {'a': [1, None]}
    >>> decode_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    analyzer.errors.InputError: field 'a' is given twice
    >>> decode_json('{"a": 1, }')
    Traceback (most recent call last):
    analyzer.errors.InputError: damaged at line 1 column 10 (character 9 of 10): Expecting property name enclosed in \
double quotes, near '{"a": 1, }'; write it again
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text (byte {error.start})") from error
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        excerpt = text[max(0, error.pos - _EXCERPT_CHARS):error.pos + _EXCERPT_CHARS]
        raise InputError(f"damaged at line {error.lineno} column {error.colno} (character {error.pos} of {len(text)}): "
                         f"{error.msg}, near {excerpt!r}; write it again") from error
    except RecursionError as error:
        raise InputError("nested too deep to be a record") from error
    except InputError:
        raise
    except ValueError as error:  # a number with more digits than Python reads
        raise InputError(f"damaged: {error}") from error


def _refuse_constant(name: str) -> Any:
    raise InputError(f"{name} is no quantity; an unknown one is null")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InputError(f"field {twice!r} is given twice")
    return data
