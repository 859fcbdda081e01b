"""``analyzer view``: the page of what was saved, written and opened in a browser."""
from __future__ import annotations

import argparse
import tempfile
import webbrowser
from pathlib import Path

from analyzer.errors import InputError
from analyzer.output import write_output
from analyzer.parallel.rank_table import RankTable
from analyzer.report.comparison.compare import compare
from analyzer.report.page.document import check_page
from analyzer.results.profile import Profile


def run_view(arguments: argparse.Namespace) -> int:
    """``analyzer view``; the result is the exit code."""
    check_page(arguments.html or arguments.files[0].with_suffix(".html"))
    text = write_view(arguments.files)
    path = arguments.html or Path(tempfile.mkdtemp(prefix="analyzer-"), arguments.files[-1].stem + ".html")
    write_output(path, text)
    print(path)
    if not arguments.no_browser:
        webbrowser.open(path.absolute().as_uri())
    return 0


def write_view(paths: list[Path]) -> str:
    """The page of one file, or of what changed between two profiles. Raises InputError or ProfileFormatError for files
    that hold neither a profile nor a table of ranks.
    """
    if len(paths) > 2:
        raise InputError(f"{', '.join(map(str, paths))}: view shows one file, or what changed between two profiles; "
                         f"`analyzer compare` has a row for each of more")
    if len(paths) == 2:
        before, after = map(Profile.from_json, paths)
        return compare(before, after).to_html()
    path, = paths
    return RankTable.from_json(path).to_html() if _holds_ranks(path) else Profile.from_json(path).to_html()


def _holds_ranks(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return '"analyzer.ranks"' in file.read(200)
    except (OSError, ValueError):  # which the reader of profiles tells
        return False
