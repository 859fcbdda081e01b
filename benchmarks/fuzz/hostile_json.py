"""What can be wrong with a text that should be a saved record: damage, and records with one thing changed."""
from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

Path = tuple[str | int, ...]
_LONGEST_ROW = 4  # items of a list that stand for different things
_MOST_ITEMS = 50  # of a list that are looked at for kinds of places


class Mutation(NamedTuple):  # a text that is not what it should be. ``must_fail``: no reader may take it.
    name: str
    content: bytes
    must_fail: bool = True


class _Raw(str):  # a word that stands in JSON as it is: `json.dumps` would write none like it
    MARK = r"\u2060"

    def __new__(cls, word: str) -> _Raw:
        return super().__new__(cls, f"\u2060{word}\u2060")


_MARKED = re.compile(r'"\\u2060([^"\\]*)\\u2060"')


def damage(text: str) -> Iterator[Mutation]:  # what is no text of a record at all, or only a part of it
    whole = text.encode()
    yield from (Mutation(*named) for named in (
        ("empty", b""), ("a blank", b" \n"), ("cut in half", whole[:len(whole) // 2]),
        ("cut by one", whole.rstrip()[:-1]), ("followed by another", whole + whole),
        ("in UTF-16", text.encode("utf-16")), ("in UTF-32", text.encode("utf-32")),
        ("a lone continuation byte", whole[:-2] + b"\xff" + whole[-2:]), ("zeros", bytes(64)),
        ("a NUL in it", whole[:1] + b"\0" + whole[1:]),
        ("a pickle", b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."),
        ("ELF", b"\x7fELF\x02\x01\x01" + bytes(200)), ("gzip", b"\x1f\x8b\x08" + bytes(50)),
        ("300,000 empty lists", b"[" + b"[]," * 300_000 + b"[]]"),
        ("a number of 10,000 digits", _insert(whole, b'"zz":' + b"9" * 10_000)),
        ("a number of 10,000 digits alone", b"9" * 10_000)))
    for depth in (500, 100_000):
        yield Mutation(f"{depth} lists", b"[" * depth + b"]" * depth)
        yield Mutation(f"{depth} objects", b'{"a":' * depth + b"1" + b"}" * depth)
        yield Mutation(f"{depth} lists in a field", _insert(whole, b'"zz":' + b"[" * depth + b"]" * depth))
    for word in (b"null", b"true", b"3", b'"x"', b"[]", b"{}", b"NaN", b"[1, 2]", b"{'a': 1}", b"// no\n{}", b"<html>"):
        yield Mutation(f"only {word.decode()!r}", word)


def _insert(whole: bytes, field: bytes) -> bytes:  # an object with one more field
    start = whole.index(b"{") + 1
    return whole[:start] + field + b"," + whole[start:]


def mutate(data: Any, loose: Callable[[Path], bool] = lambda path: False, is_partial: bool = False,
           skips: Callable[[Path], bool] = lambda path: False) -> Iterator[Mutation]:
    """The record with one thing changed, at every kind of place in it but those that ``skips`` names. Of what is
    ``loose``, any value may be right; of one that ``is_partial``, fields may be left out.
    """
    for path in _list_places(data, skips):
        where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path) or "."
        value, is_loose = reduce(getitem, path, data), loose(path)
        for name, other, must_fail in _others(value):
            yield _change(f"{where}: {name}", data, path, other, must_fail and not is_loose)
        if path and isinstance(path[-1], str):
            yield Mutation(f"{where}: left out", _leave_out(data, path), not is_loose and not is_partial)
            yield Mutation(f"{where}: given twice", _give_twice(data, path))


def _others(value: Any) -> Iterator[tuple[str, Any, bool]]:
    """Other values: what they are called, the value, and whether none of them can be right."""
    if isinstance(value, bool):
        yield from (("a number", 1, True), ("a text", "true", True))
    elif isinstance(value, int | float):
        yield from (("negative", -1, True), ("-1e30", -1e30, True), ("a text", "3", True), ("true", True, True),
                    ("a list", [value], True), ("NaN", _Raw("NaN"), True), ("Infinity", _Raw("Infinity"), True),
                    ("-Infinity", _Raw("-Infinity"), True), ("1e400", _Raw("1e400"), True),
                    ("5,000 digits", _Raw("1" + "0" * 5000), True), ("10^300", _Raw("1" + "0" * 300), False),
                    ("10^18", 10**18, False), ("0", 0, False), ("half", 0.5, isinstance(value, int)))
    elif isinstance(value, str):
        yield from (("a number", 3, True), ("a list", [value], True), ("lone surrogate", "\ud800", False),
                    ("controls", "\x00\x1b[2J\u202e", False), ("a million characters", "x" * 1_000_000, False),
                    ("empty", "", False), ("a path", "../../../etc/passwd", False))
    elif isinstance(value, list):
        yield from (("an object", {"a": value}, True), ("a text", "x", True), ("negative", -1, True),
                    ("empty", [], False), ("null inside", [*value, None], True), ("twice as long", value * 2, False))
    elif isinstance(value, dict):
        yield from (("a list", list(value), True), ("a text", "x", True), ("a strange field", {**value, "zz": 1}, True),
                    ("empty", {}, False))
    if value is not None:
        yield "null", None, False


def _list_places(data: Any, skips: Callable[[Path], bool]) -> list[Path]:
    """A path to each kind of place: all items of a long list are one kind, those of a short one of scalars each one."""
    found: dict[Path, Path] = {}
    waiting: list[tuple[Path, Path, Any]] = [((), (), data)]
    while waiting:
        kind, path, value = waiting.pop()
        found.setdefault(kind, path)
        if isinstance(value, dict):
            inner = [((*kind, key), (*path, key), item) for key, item in value.items()]
        elif isinstance(value, list):
            is_row = len(value) <= _LONGEST_ROW and not any(isinstance(item, list | dict) for item in value)
            inner = [((*kind, i if is_row else "[]"), (*path, i), item) for i, item in enumerate(value)][:_MOST_ITEMS]
        else:
            continue
        waiting += [place for place in reversed(inner) if not skips(place[1])]
    return list(found.values())


def _change(name: str, data: Any, path: Path, value: Any, must_fail: bool) -> Mutation:
    if not path:
        return Mutation(name, _write(value), must_fail)
    with _changed(data, path) as (holder, key):
        holder[key] = value
        return Mutation(name, _write(data), must_fail)


def _leave_out(data: Any, path: Path) -> bytes:
    with _changed(data, path) as (holder, key):
        del holder[key]
        return _write(data)


def _give_twice(data: Any, path: Path) -> bytes:
    """The field at ``path`` again, with another value, as the last of its object."""
    with _changed(data, path) as (holder, key):
        holder["\u2060again"] = _Raw("7")
        return _write(data).replace(json.dumps("\u2060again").encode(), json.dumps(key).encode())


@contextmanager
def _changed(data: Any, path: Path) -> Iterator[tuple[Any, Any]]:
    """The object or list that holds what is at ``path``, and its key there; it is afterwards as it was."""
    holder, key = reduce(getitem, path[:-1], data), path[-1]
    before = copy.copy(holder)
    try:
        yield holder, key
    finally:
        holder.clear()
        holder.update(before) if isinstance(holder, dict) else holder.extend(before)


def _write(value: Any) -> bytes:
    text = json.dumps(value)
    return _MARKED.sub(lambda found: found[1], text).encode() if _Raw.MARK in text else text.encode()
