"""Every view and file of a profile whose names are hostile: none may fail or let a name out of its place."""
from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from analyzer import Profile
from analyzer.report.comparison.compare import compare
from benchmarks.fuzz.hostile_reader import profile_net

#: Names that mean something to a spreadsheet, a browser, LaTeX, a terminal, a file system, a codec.
NAMES = (
    '=HYPERLINK("http://x","y")', "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "<script>alert(1)</script>",
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"><svg onload=alert(1)>', "<!--", "-->",
    "]]>", "&amp;", "javascript:alert(1)", "\\input{/etc/passwd}", "\\write18{ls}", "a_b^c%d&e#f$g{h}~i", "a|b\nc",
    "x\x00y", "\x1b[2J", "\u202eabc", "\ud800", "\ud83d", "é水🙂", "a" * 100_000, "`ls`", "$(ls)", "../../x", '"; x',
    'a\\"b', '{"a":1}', "--x", "\u2028", "%s%n", "{0}", "{{x}}", "\ufeff", "\uffff", "CON", "  ", "")
_REPORTS = ("deepspeed", "flops-profiler", "torchinfo", "tids")
_FILES = ("json", "chrome_trace", "memory_snapshot", "html")
_TABLES = ("csv", "md", "tex")


def rename(name: str) -> Profile:  # a profile whose model, modules, operators and inputs have that name
    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return value.replace("first", name).replace("Linear", name).replace("Net", name) if isinstance(
            value, str) else value

    data = walk(json.loads(profile_net().to_json()))
    data |= {"assumptions": [name], "inputs": {name: data["inputs"]["x"]}}
    return Profile.from_json(json.dumps(data))


def list_writes(name: str, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each way in which a profile of such names is written, under what to call it."""
    found, shown = rename(name), ascii(name)[:30]
    calls: dict[str, Callable[[], object]] = {
        "summary": found.summary, "table": found.table, "dataframe": found.to_dataframe,
        "networkx": found.to_networkx, "notebook": found._repr_html_, "screen": lambda: repr(found),
        "markdown": lambda: _check_bars(found.module_tree(fmt="markdown")),
        "LaTeX": lambda: _check_latex(found.module_tree(fmt="latex"), name),
        "CSV": lambda: _check_cells(found.module_tree(fmt="csv")),
        "HTML": lambda: _check_html(found.module_tree(fmt="html")),
        "comparison": lambda: compare(found, found).to_markdown(),
        **{f"report {kind}": partial(found.report, kind) for kind in _REPORTS},
        **{f"file {kind}": partial(found.export, kind, folder / "file") for kind in _FILES},
        **{f"table of {what} in {ending}": partial(found.export, "table", folder / f"table.{ending}", what=what)
           for what in ("nodes", "modules") for ending in _TABLES}}
    yield from ((f"name {shown}: {way}", call) for way, call in calls.items())
    yield f"name {shown}: tags of the page", lambda: _check_html(found.to_html())


class _Tags(HTMLParser):  # the tags of a page that could run something, each once
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("img", "svg") and any(key.startswith("on") for key, _ in attrs):
            self.found.add(tag)


def _check_html(text: str) -> None:
    tags = _Tags()
    tags.feed(text)
    assert not tags.found, f"a name became the tag {tags.found}"
    assert "<script>alert" not in text, "a name became a script"


def _check_cells(text: str) -> None:
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    formulas = [cell for cell in cells if cell[:1] in ("=", "+", "-", "@", "\t", "\r") and len(cell) > 1]
    assert not formulas, f"a cell is a formula: {formulas[0][:30]!r}"


def _check_bars(text: str) -> None:
    bars = {line.replace(r"\|", "").count("|") for line in text.splitlines()}
    assert len(bars) == 1, "a name ends a cell"


def _check_latex(text: str, name: str) -> None:
    assert not name.startswith("\\") or name not in text, "a name is a command"


def list_places(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Where files are written: each is refused in words, or written where the path says and nowhere else."""
    found, target, link = profile_net(), folder / "target.json", folder / "link.json"
    target.write_text("before")
    os.symlink(target, link)
    os.symlink(folder / "nowhere" / "x.json", folder / "broken.json")

    def follow() -> None:
        found.to_json(link)
        assert link.is_symlink() and target.read_text().startswith("{"), "a link was not followed"

    def refuse(name: str) -> None:
        found.to_json(name)
        raise AssertionError("was written")

    yield "path of a link", follow
    for name in ("", ".", "/", "a\0b", "x" * 5000, f"{folder}/no/such/x.json", f"{folder}/broken.json",
                 "/dev/full", "/proc/self/x", f"{folder}/target.json/x"):
        yield f"path {name[:30]!r}", partial(refuse, name)


