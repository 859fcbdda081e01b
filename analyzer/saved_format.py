"""JSON that is saved to be read again: the text of a record, and the head that names its kind and version."""
from __future__ import annotations

import codecs
import dataclasses
import json
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

from analyzer.errors import InputError, ProfileFormatError

MOST_BYTES = 2**30  #: of a file: one of saved profiles has some hundred megabytes at most, `/dev/zero` no end
_EXCERPT_CHARS = 30  # of damaged text, on each side of the damage
#: The first bytes of files that are no text, and what the error says about such a file.
_BINARY = {
    codecs.BOM_UTF16_LE: "it is UTF-16: save it as UTF-8", codecs.BOM_UTF16_BE: "it is UTF-16: save it as UTF-8",
    b"\x1f\x8b": "it is compressed by gzip: unpack it first", b"PK\x03\x04": "it is a zip archive, such as torch.save "
    "writes", **{b"\x80" + bytes([protocol]): "it is a pickle" for protocol in range(2, 6)}}


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
        hint = next((what for start, what in _BINARY.items() if content.startswith(start)), f"byte {error.start}")
        raise InputError(f"not UTF-8 text ({hint})") from error


def decode_json(text: str | bytes) -> Any:
    """The value of a text of JSON. Raises InputError where it is none, is nested too deep to be a record, or says what
    JSON cannot: a field twice, NaN, a number of thousands of digits.

    >>> decode_json('{"a": [1, null]}')
    {'a': [1, None]}
    >>> decode_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    analyzer.errors.InputError: field 'a' is given twice
    >>> decode_json('{"a": 1, }')
    Traceback (most recent call last):
    analyzer.errors.InputError: not valid JSON at line 1 column 10 (character 9 of 10): Expecting property name \
enclosed in double quotes, near '{"a": 1, }'
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise InputError("there is no text in it")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
    except json.JSONDecodeError as error:
        excerpt = text[max(0, error.pos - _EXCERPT_CHARS):error.pos + _EXCERPT_CHARS]
        raise InputError(f"not valid JSON at line {error.lineno} column {error.colno} (character {error.pos} of "
                         f"{len(text)}): {error.msg}, near {excerpt!r}") from error
    except RecursionError as error:
        raise InputError("nested too deep to be a record") from error
    except InputError:
        raise
    except ValueError as error:  # a number with more digits than Python reads
        raise InputError(f"not valid JSON: {error}") from error


def _refuse_constant(name: str) -> Any:
    raise InputError(f"{name} is no quantity; an unknown one is null")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InputError(f"field {twice!r} is given twice")
    return data


_SHOWN_CHARS = 80  # of a value that is refused

Fields = dict[str, Any]  #: of a record, by name, as JSON holds them


@dataclasses.dataclass(frozen=True)
class SavedFormat:
    """How one kind of record is saved. A change of any of its fields raises ``version``. ``upgrades[n]`` makes the
    fields of version ``n`` those of the version after it, what is new there unknown; versions that it lacks are
    refused. ``unnumbered`` is the version of a text that names none.

    >>> plan = SavedFormat("demo.plan", 2, "plan", "solve again", {1: lambda fields: {**fields, "cost": None}})
    >>> plan.read({**plan.head, "name": "a", "cost": 3}), plan.read({"format": "demo.plan", "version": 1, "name": "a"})
    ({'name': 'a', 'cost': 3}, {'name': 'a', 'cost': None})
    """

    name: str     #: what the text says that it is, "analyzer.plan"
    version: int
    what: str     #: in messages: "plan"
    again: str    #: what to do instead of reading it: "solve again"
    upgrades: Mapping[int, Callable[[Fields], Fields]] = dataclasses.field(default_factory=dict)
    unnumbered: int | None = None

    @property
    def head(self) -> Fields:
        """What a saved text begins with."""
        return {"format": self.name, "version": self.version}

    def decode(self, text: str) -> Any:
        """What a saved text holds, for `read`. Raises ProfileFormatError for a damaged one, and for any other text."""
        try:
            return decode_json(text)
        except InputError as error:
            is_ours = f'"{self.name}"' in text
            raise ProfileFormatError(f"damaged: {error}; {self.again}" if is_ours else
                                     f"not a saved {self.what}: {error}") from error

    def read(self, data: Any) -> Fields:
        """The fields of a decoded text, as of today's version. Raises ProfileFormatError for another kind of record and
        for a version that is not read; the message says which are.
        """
        if not isinstance(data, dict) or data.get("format") != self.name:
            is_named = isinstance(data, dict) and "format" in data
            found = f'"format": {shorten(data["format"])}' if is_named else _describe(data)
            raise ProfileFormatError(
                f'not a saved {self.what}: expected an object with "format": "{self.name}", got {found}')
        version = data.get("version", self.unnumbered)
        if type(version) is not int or not (version == self.version or version in self.upgrades):
            raise ProfileFormatError(self._refuse(version, data.get("analyzer_version")))
        fields = {key: value for key, value in data.items() if key not in ("format", "version")}
        for number in range(version, self.version):
            try:
                fields = self.upgrades[number](fields)
            except (AttributeError, KeyError, TypeError) as error:
                raise ProfileFormatError(f"damaged: no {self.what} of format version {number} has such fields "
                                         f"({error!r})") from error
        return fields

    def _refuse(self, version: Any, writer: Any) -> str:
        """Why a version is not read, and what to do."""
        by = f", written by analyzer {str(writer)[:_SHOWN_CHARS]}" if writer else ""
        known = " and ".join(map(str, sorted({*self.upgrades, self.version})))
        is_newer = type(version) is int and version > self.version
        mend = "read it with the analyzer that wrote it, or a newer one than this" if is_newer else (
            "read it with the analyzer that wrote it")
        return (f"format version {shorten(version)}{by}, and this analyzer reads version {known} of a saved "
                f"{self.what}: {mend}, or {self.again}")


def _describe(data: Any) -> str:
    """What a decoded text without a format holds, as a sentence says it."""
    if isinstance(data, dict):
        return f"an object with {', '.join(map(shorten, [*data][:3]))}" if data else "an empty object"
    names = {list: "a list", str: "a text", type(None): "null", bool: "true or false"}
    return names.get(type(data), "a number")


def name_json(value: Any) -> str:
    """The type of a decoded value, by JSON's name of it.

    >>> name_json({}), name_json(None), name_json(1.5)
    ('object', 'null', 'float')
    """
    names: dict[type, str] = {dict: "object", list: "list", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def shorten(value: Any) -> str:
    """A value as messages repeat it.

    >>> shorten([1]), shorten("x" * 100)[-19:]
    ('[1]', '.. (102 characters)')
    """
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text):,} characters)"
