"""``--export KIND=FILE``: files of a profile, each by the exporter of that name or of the file's ending."""
from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from analyzer.errors import InputError
from analyzer.output import check_output
from analyzer.report.page.document import check_page
from analyzer.report.roofline import check_roofline
from analyzer.results.profile import Profile
from analyzer.results.view import register_exporter

from .table_file import FORMATS, TABLES, check_table

#: Kinds by the endings of files, the longer ones first.
ENDINGS = {".trace.json": "chrome_trace", ".speedscope.json": "speedscope", ".snapshot.pickle": "memory_snapshot",
           ".json": "json", ".html": "html", ".dot": "dot", **dict.fromkeys(FORMATS, "nodes")}
_KIND = re.compile(r"(\w+)=(.*)", re.DOTALL)


class Export(NamedTuple):
    """A file that is asked for: the exporter that writes it, with its options."""

    exporter: str
    path: Path
    options: dict[str, Any]


def add_export_option(parser: argparse.ArgumentParser) -> None:
    """``--export``, as often as there are files."""
    parser.add_argument("--export", action="append", default=[], metavar="[KIND=]FILE",
                        help=f"save a file for another tool, of one of {', '.join(list_kinds())}, or one that the "
                        "TARGET's file registers with register_exporter; without KIND by the file's ending, one of "
                        f"{', '.join(ENDINGS)}; may be given several times")


def list_kinds() -> list[str]:
    """What files there are: exporters that write one, and tables."""
    return [*(name for name in register_exporter if name != "table" and register_exporter.takes(name, "path")), *TABLES]


def read_exports(given: Sequence[str]) -> list[Export]:
    """The files that ``--export`` asks for. Raises InputError, OutputError and MissingExtraError before any work."""
    found = [_read_export(text) for text in given]
    for export in found:
        if export.exporter == "table":
            check_table(export.path)
        elif export.exporter == "roofline":
            check_roofline(export.path)
        elif export.exporter == "html":
            check_page(export.path)
        else:
            check_output(export.path)
        if sum(other.path == export.path for other in found) > 1:
            raise InputError(f"--export {export.path}: two files of that name are asked for")
    return found


def _read_export(text: str) -> Export:
    match = _KIND.fullmatch(text)
    kind, file = (match[1], match[2]) if match else ("", text)
    if not kind:
        kind = next((kind for ending, kind in ENDINGS.items() if file.lower().endswith(ending)), "")
        if not kind:
            raise InputError(f"--export {text}: its ending tells no kind of file; write KIND={file}, of one of "
                             f"{', '.join(list_kinds())}, or end it in {', '.join(ENDINGS)}")
    if kind not in list_kinds():
        raise InputError(f"--export {text}: {kind!r} is no kind of file; there are {', '.join(list_kinds())}; "
                         "register_exporter in the TARGET's file adds one")
    if not file:
        raise InputError(f"--export {text}: which file? write {kind}=FILE")
    return Export("table", Path(file), {"what": kind}) if kind in TABLES else Export(kind, Path(file), {})


def write_exports(profile: Profile, exports: Iterable[Export]) -> None:
    """Write the files."""
    for export in exports:
        profile.export(export.exporter, path=export.path, **export.options)
