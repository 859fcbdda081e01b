"""Configurations as text, with the line of each value: YAML, TOML and JSON, read as data alone and changed in place."""
from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from analyzer.errors import InputError, MissingExtraError, how_to_install

MOST_BYTES = 1 << 20   #: of a file: the largest example of the programs that are read here has 20 KiB
_MOST_VALUES = 20_000  # of a file, aliases written out
_MOST_DEPTH = 40

Keys = tuple[str | int, ...]  #: where a value stands: ("zero_optimization", "stage")


class JobError(InputError):
    """A configuration that cannot be read, or that its own program would refuse. Names the file, line and key."""


class RepeatedKey(NamedTuple):
    """A key that is given twice, with both lines, from 0."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Edit:
    """A value to be written in the place of another; ``before`` None where the key is added."""

    keys: Keys
    before: Any
    after: Any

    def __str__(self) -> str:
        name = ".".join(map(str, self.keys))
        told = "not set" if self.before is None else write_value(self.before)
        return f"{name}: {told} -> {write_value(self.after)}"


@dataclass(frozen=True)
class Document:
    """A configuration: its text, the data in it, and the line of each key. ``name`` is what errors call it."""

    name: str
    text: str
    data: Mapping[str, Any]
    lines: Mapping[Keys, int] = field(default_factory=dict)
    form: str = "yaml"
    switches: frozenset[str] = frozenset()  #: of a command: options that take no value
    repeats: tuple[RepeatedKey, ...] = ()   #: keys of a YAML that are given twice, of which the last value counts

    def place(self, *keys: str | int) -> str:
        """The file, with the line where that is known: ``qlora.yml:12``."""
        line = self.lines.get(keys)
        return self.name if line is None else f"{self.name}:{line + 1}"

    def change(self, edits: Sequence[Edit]) -> str:
        """Its text with values changed; comments, order and all else stay. Raises JobError."""
        text = self.text
        for edit in edits:
            text = _CHANGES[self.form](replace(self, text=text), edit)
        return text


@dataclass(frozen=True)
class Files:
    """The files that a job is read from: each is read once. ``texts`` are those that were, or stand for one."""

    folder: Path = Path()
    texts: dict[str, str] = field(default_factory=dict)

    def find(self, name: str | Path) -> str | None:
        """The path of a file: from here, or beside the configuration and above it (programs are started in the folder
        of their project); None where there is none.
        """
        for folder in (Path(), self.folder, *self.folder.absolute().parents[:6]):
            if str(path := folder / name) in self.texts or path.is_file():
                return str(path)
        return None

    def text(self, path: str) -> str:
        """The text of a file. Raises JobError for what is no text, or larger than configurations are."""
        if path not in self.texts:
            self.texts[path] = _read_file(Path(path))
        return self.texts[path]

    def document(self, path: str) -> Document:
        """Read a file by its ending: ``.yaml``, ``.yml``, ``.toml``, ``.json``. Raises JobError."""
        form = FORMS.get(Path(path).suffix.lower())
        if form is None:
            raise JobError(f"{path}: not the name of a configuration: it must end in {', '.join(FORMS)}")
        return read_text(self.text(path), path, form)

    def replace(self, path: str, text: str) -> Files:
        """The same files, one with another text."""
        return Files(self.folder, {**self.texts, path: text})


def _read_file(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise JobError(f"{path}: has {path.stat().st_size:,} bytes, a configuration at most {MOST_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: is no text in UTF-8: byte {error.start}") from error


def read_text(text: str, name: str, form: str = "yaml") -> Document:
    """A document of a text. Raises JobError where it is not of that form, or holds no mapping."""
    data, lines, repeats = _READERS[form](text, name)
    if not isinstance(data, Mapping):
        what = "is empty" if data is None else "holds a list" if isinstance(data, list) else "holds no names"
        raise JobError(f"{name}: {what}, and a configuration is a mapping of names to values")
    return Document(name, text, data, lines, form, repeats=tuple(repeats))


def write_value(value: Any) -> str:
    """A value as configurations have it: ``true``, ``null``, numbers and words as they are."""
    return value if isinstance(value, str) else json.dumps(value)


# YAML, by ruamel.yaml, whose reader of comments makes no object of a tag: `!!python/object` stays a text.

_Read = tuple[Any, dict[Keys, int], Sequence[RepeatedKey]]


def _read_yaml(text: str, name: str) -> _Read:
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.constructor import RoundTripConstructor
        from ruamel.yaml.error import YAMLError
    except ImportError as error:
        raise _missing(name, "ruamel.yaml") from error
    repeats: list[RepeatedKey] = []

    class LastCounts(RoundTripConstructor):
        """As PyYAML, by which most programs read: of a key that is given twice the last value counts."""

        def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
            if key in mapping:
                repeats.append(RepeatedKey(str(key), mapping.lc.data[key][0], key_node.start_mark.line))
            return True

    reader = YAML(typ="rt", pure=True)
    reader.preserve_quotes = True
    reader.Constructor = LastCounts
    try:
        tree = reader.load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or next(iter(str(error).splitlines()), "nested too deep")
        raise JobError(f"{where}: is no YAML: {problem}") from error
    lines: dict[Keys, int] = {}
    return _copy(tree, (), lines, [0], name), lines, repeats


def _missing(name: str, library: str) -> MissingExtraError:
    return MissingExtraError(f"{name}: {library} reads it, and it is not installed: {how_to_install('jobs')}")


def _copy(node: Any, keys: Keys, lines: dict[Keys, int], count: list[int], name: str) -> Any:
    """Plain data of a tree, aliases written out: as many values as a configuration may have."""
    count[0] += 1
    if count[0] > _MOST_VALUES or len(keys) > _MOST_DEPTH:
        raise JobError(f"{name}: has more than {_MOST_VALUES:,} values, or {_MOST_DEPTH} levels (aliases written out)")
    places = getattr(getattr(node, "lc", None), "data", None) or {}
    if isinstance(node, Mapping):
        copies = {}
        for key, value in node.items():
            inner: Keys = (*keys, str(key))
            if key in places:
                lines[inner] = places[key][0]
            copies[str(key)] = _copy(value, inner, lines, count, name)
        return copies
    if isinstance(node, (list, tuple)):
        return [_copy(value, (*keys, at), lines, count, name) for at, value in enumerate(node)]
    if isinstance(node, bool) or node is None:
        return node
    if isinstance(node, int):
        return int(node)
    if isinstance(node, float):
        return float(node)
    if isinstance(node, str):
        return _OLD_WORDS.get(node, str(node)) if type(node) is str else str(node)  # else it was quoted
    return getattr(node, "value", None) if hasattr(node, "tag") else str(node)


#: YAML 1.1, which PyYAML reads, knows more words for true and false than 1.2 does.
_OLD_WORDS = {word: said for said, words in ((True, "yes Yes YES on On ON"), (False, "no No NO off Off OFF"))
              for word in words.split()}


def _change_yaml(document: Document, edit: Edit) -> str:
    now = read_text(document.text, document.name, "yaml")
    lines = document.text.splitlines(keepends=True)
    at = now.lines.get(edit.keys)
    if at is not None:
        match = re.match(r"(\s*(?:- )*[^:#]+:[ \t]*)(.*?)([ \t]+#.*)?(\r?\n)?$", lines[at])
        if match is None or not _is_scalar(edit.before):
            raise JobError(f"{document.place(*edit.keys)}: {edit.keys[-1]} is not a value on one line; change it by "
                           "hand")
        start = match[1] if match[1].endswith((" ", "\t")) else f"{match[1]} "
        lines[at] = f"{start}{_write_yaml(edit.after)}{match[3] or ''}{match[4] or ''}"
        return "".join(lines)
    if len(edit.keys) != 1:
        raise JobError(f"{document.name}: {'.'.join(map(str, edit.keys))} is not there; add it by hand")
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return "".join([*lines, f"{edit.keys[0]}: {_write_yaml(edit.after)}\n"])


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bool))


def _write_yaml(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value not in _OLD_WORDS
    return str(value) if plain else json.dumps(value)


# TOML, by tomlkit, and JSON, as DeepSpeed has it.

def _read_toml(text: str, name: str) -> _Read:
    try:
        import tomlkit
        from tomlkit.exceptions import TOMLKitError
    except ImportError as error:
        raise _missing(name, "tomlkit") from error
    try:
        data = tomlkit.parse(text).unwrap()
    except (TOMLKitError, RecursionError) as error:
        line = getattr(error, "line", None)
        if line is None:
            found = _list_toml_lines(text)
            line = next((at + 1 for number, (keys, at) in enumerate(found) if keys in dict(found[:number])), None)
        raise JobError(f"{name if line is None else f'{name}:{line}'}: is no TOML: {error}") from error
    return data, dict(_list_toml_lines(text)), ()


def _list_toml_lines(text: str) -> list[tuple[Keys, int]]:
    found: list[tuple[Keys, int]] = []
    table: tuple[str, ...] = ()
    for at, line in enumerate(text.splitlines()):
        if match := re.match(r"\s*\[+\s*([\w.\"'-]+)\s*\]+", line):
            table = tuple(match[1].replace('"', "").split("."))
            if not line.lstrip().startswith("[["):
                found.append((table, at))
        elif match := re.match(r"\s*([\w\"'-]+)\s*=", line):
            found.append(((*table, match[1].strip("\"'")), at))
    return found


def _change_toml(document: Document, edit: Edit) -> str:
    import tomlkit

    tree = tomlkit.parse(document.text)
    inner: Any = tree
    for key in edit.keys[:-1]:
        if key not in inner:
            inner[key] = tomlkit.table()
        inner = inner[key]
    inner[edit.keys[-1]] = edit.after
    return tomlkit.dumps(tree)


def _read_json(text: str, name: str) -> _Read:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"{name}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else name
        raise JobError(f"{where}: is no JSON: {getattr(error, 'msg', error)}") from error
    lines: dict[Keys, int] = {}
    for keys, line in _list_json_lines(text):
        if keys in lines:  # as DeepSpeed, runtime/config_utils.py, refuses it
            raise JobError(f"{name}:{line + 1}: {'.'.join(map(str, keys))}: is given twice, on line {lines[keys] + 1} "
                           "too")
        lines[keys] = line
    return data, lines, ()


def _list_json_lines(text: str) -> Iterator[tuple[Keys, int]]:
    """The keys of a text that is JSON, each with its line; an element of a list is a number."""
    path: list[str | int] = []
    pattern = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}\[\],]')
    opened: list[str] = []
    for match in pattern.finditer(text):
        if match[2]:
            path[-1] = json.loads(match[1])
            yield tuple(path), text.count("\n", 0, match.start())
        elif match[0] in "{[":
            opened.append(match[0])
            path.append(0 if match[0] == "[" else "")
        elif match[0] in "}]":
            opened.pop()
            path.pop()
        elif match[0] == "," and opened[-1] == "[":
            path[-1] = int(path[-1]) + 1


def _change_json(document: Document, edit: Edit) -> str:
    data = json.loads(document.text)
    inner = data
    for key in edit.keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[edit.keys[-1]] = edit.after
    indent = re.search(r"\n([ \t]+)", document.text)
    return json.dumps(data, indent=indent[1] if indent else None) + "\n"


# Command lines and shell scripts, which `shell` reads.

def _change_command(document: Document, edit: Edit) -> str:
    name = ".".join(map(str, edit.keys))
    pattern = re.compile(rf"((?<!\S)--?{re.sub('[-_]', '[-_]', name)}(?:=|\s+))(?:'[^']*'|\"[^\"]*\"|\S+)")
    value = shlex.quote(write_value(edit.after))
    if edit.before is not None and (places := list(pattern.finditer(document.text))):
        last = places[-1]  # of an option that is given twice the last value counts
        return document.text[:last.end(1)] + value + document.text[last.end():]
    lines = document.text.rstrip("\n").splitlines()
    at = max(document.lines.values(), default=len(lines) - 1)  # of the command's last option
    more = lines[at].rstrip().endswith("\\")
    added = f"--{name}" if edit.after is True and name in document.switches else f"--{name} {value}"
    lines[at] = f"{lines[at].rstrip()[:-1].rstrip()} {added} \\" if more else f"{lines[at]} {added}"
    return "\n".join(lines) + "\n" * document.text.endswith("\n")


FORMS = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
_READERS = {"yaml": _read_yaml, "toml": _read_toml, "json": _read_json}
_CHANGES = {"yaml": _change_yaml, "toml": _change_toml, "json": _change_json, "command": _change_command}
