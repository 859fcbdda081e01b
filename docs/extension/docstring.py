"""Docstrings as the API reference shows them: doctests in a fence, and the comments `#:` that fields are told by."""
from __future__ import annotations

import ast
import re
from typing import Any

import griffe

TOLD = re.compile(r"#: ?(.*)$")
#: An example of a docstring: from its first prompt to the next empty line, or the end.
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """What griffe reads, made into the Markdown that it is."""

    def on_instance(self, *, node: ast.AST, obj: griffe.Object, **kwargs: Any) -> None:
        """Fence the examples of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_attribute_instance(self, *, node: ast.AST, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Give a field its comment: those before it, and that behind it."""
        if attr.docstring is None and attr.lineno and (told := comment_of(attr)):
            attr.docstring = griffe.Docstring(told, lineno=attr.lineno, parent=attr)


def comment_of(attr: griffe.Attribute) -> str:
    """The text of the comments `#:` before and behind a field."""
    lines = attr.lines_collection[attr.filepath] if not isinstance(attr.filepath, list) else []
    first = (attr.lineno or 1) - 1
    found = []
    while first > 0 and lines[first - 1].strip().startswith("#:"):
        first -= 1
    for line in lines[first:attr.endlineno]:
        if match := TOLD.search(line):
            found.append(match[1])
    return " ".join(found)
