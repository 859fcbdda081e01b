"""The head of what is saved as JSON to be read again: which kind of record it is, by which number of its format."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ProfileFormatError

_SHOWN_CHARS = 80  # of a value that is refused

Fields = dict[str, Any]  #: of a record, by name, as JSON holds them


@dataclasses.dataclass(frozen=True)
class SavedFormat:
    """How one kind of record is saved. A change of any of its fields raises ``version``.

    ``upgrades[n]`` makes the fields of version ``n`` those of the version after it, what is new there unknown; versions
    that it lacks are refused. ``unnumbered`` is the version of a text that names none.

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

    def read(self, data: Any) -> Fields:
        """The fields of a decoded text, as of today's version. Raises ProfileFormatError for another kind of record and
        for a version that is not read; the message says which are.
        """
        if not isinstance(data, dict) or data.get("format") != self.name:
            is_named = isinstance(data, dict) and "format" in data
            found = f'"format": {shorten(data["format"])}' if is_named else f"a {name_json(data)}"
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
