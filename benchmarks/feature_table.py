"""Tables of small modules: features of models and of blocks, a few lines each, from which their classes are written.

``== NAME`` begins a room: the Python that its features use. ``-- NAME: ...`` begins a feature: what it is, or what it
is called with. ``+ name: expression`` says what it holds, beside what every feature of the table holds, or in its place
where it is ``(alone)``; of these ``+ also:`` is done at the end, ``+ link:`` is a function that connects those of all
blocks to a model, ``+ takes:`` names the arguments of its forward pass, which is of ``x`` without. The forward pass
follows, as the body of a method; without one it is that of every feature. ``? CONDITION`` at its end goes another way
where that holds. A feature may also be a class of its own, or ``= expression`` that builds a model.
"""
from __future__ import annotations

import linecache
import re
import textwrap
from pathlib import Path
from types import CodeType
from typing import NamedTuple


class Entry(NamedTuple):
    """A feature: its name, what is told behind that, whether it holds nothing of what all do, and its lines."""

    name: str
    told: str
    is_alone: bool
    text: str

    def write(self, kind: str) -> str:
        """The source of a class of that name, which derives from ``Feature``.

        >>> print(Entry("twice", "", False, "+ times: at.index\\n? self.times > 1").write("Twice"))
        class Twice(Feature):
            def build(self, at):
                super().build(at)
                self.times = at.index
            def forward(self, x):
                return self.linear(x).relu() if self.times > 1 else self.linear(x)
        """
        if self.text.startswith("class "):
            return self.text
        held = dict(re.findall(r"^\+ (\w+): (.*)$", self.text, re.MULTILINE))
        link, takes = held.pop("link", None), held.pop("takes", "x")
        body = re.sub(r"^\+ .*\n?", "", self.text, flags=re.MULTILINE).strip("\n")
        body = re.sub(r"^\? (.*)", r"return self.linear(x).relu() if \1 else self.linear(x)", body, flags=re.MULTILINE)
        build = [*([] if self.is_alone else ["super().build(at)"]),
                 *(f"self.{part} = {what}" if part != "also" else what for part, what in held.items())]
        return "\n".join([
            f"class {kind}(Feature):", *([f"    link = staticmethod({link})"] if link else []),
            *(["    def build(self, at):", _indent("\n".join(build))] if held or self.is_alone else []),
            *([f"    def forward(self, {takes}):", _indent(body)] if body else [])])


def _indent(text: str) -> str:
    return textwrap.indent(text, " " * 8)


class Room(NamedTuple):
    """Features of one kind, and the Python that they use."""

    head: str
    entries: tuple[Entry, ...]


def read_table(path: Path) -> dict[str, Room]:
    """The rooms of a table, by name."""
    found = {}
    for name, text in re.findall(r"^== (\w+).*\n((?:(?!== ).*\n)*)", path.read_text("utf-8"), re.MULTILINE):
        head, *parts = re.split(r"^-- (.*?)( \(alone\))?: (.*)\n", text, flags=re.MULTILINE)
        found[name] = Room(head, tuple(Entry(parts[i], parts[i + 2], bool(parts[i + 1]), parts[i + 3].strip("\n"))
                                       for i in range(0, len(parts), 4)))
    return found


def compile_classes(room: Room, kinds: dict[str, Entry], place: str) -> CodeType:
    """The code of a room's Python and of the classes of its features, whose lines tracebacks show as of ``place``."""
    source = "\n\n".join([room.head, *(e.write(kind) for kind, e in kinds.items() if not e.text.startswith("= "))])
    linecache.cache[place] = (len(source), None, source.splitlines(True), place)
    return compile(source, place, "exec")
