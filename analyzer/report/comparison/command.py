"""``analyzer compare``: what changed between two saved profiles, or several of them side by side."""
from __future__ import annotations

import argparse
import sys

from analyzer.errors import InputError
from analyzer.output import check_output
from analyzer.record.options import report_progress
from analyzer.report.check import EXCEEDED
from analyzer.report.choice import emit
from analyzer.report.module_comparison import compare_modules
from analyzer.report.page.document import check_page
from analyzer.report.summary import DEFAULT_COLUMNS, model_table
from analyzer.report.text_width import escape_controls
from analyzer.results.comparison import ProfileChange
from analyzer.results.profile import Profile

from .compare import compare
from .wording import describe_condition

MODULE_COLUMNS = ("fwd_seconds", "bwd_seconds")
def run_compare(arguments: argparse.Namespace) -> int:
    """``analyzer compare``; the result is the exit code."""
    for path in (arguments.output, arguments.markdown):
        check_output(path)
    check_page(arguments.html)
    files = [arguments.first, arguments.second, *arguments.others]
    by = _find_rows(arguments, len(files))
    profiles = []
    for i, path in enumerate(files):
        report_progress(i / len(files), str(path))
        profiles.append(Profile.from_json(path))
    if by == "model":
        emit(model_table([(str(path), profile) for path, profile in zip(files, profiles, strict=True)],
                         arguments.columns or DEFAULT_COLUMNS, arguments.format), arguments.output)
        return 0
    if by == "module":
        emit(compare_modules(profiles[0], profiles[1], arguments.columns or MODULE_COLUMNS, depth=arguments.depth,
                             fmt=arguments.format), arguments.output)
        return 0
    return _tell_change(compare(profiles[0], profiles[1], arguments.fail_if), arguments)


def _find_rows(arguments: argparse.Namespace, files: int) -> str:
    """What a row is. Raises InputError for an option that such rows do not have."""
    of_modules = arguments.columns is not None or arguments.depth is not None
    by: str = arguments.by or ("model" if files > 2 else "module" if of_modules else "change")
    if by == "model" and arguments.depth is not None:
        raise InputError(f"--depth {arguments.depth}: only modules have depths, and here a row is a model; leave it "
                         "out, or give two profiles and --by module")
    if by == "module" and files > 2:
        raise InputError(f"--by module: modules of two profiles are set side by side, and these are {files}; give "
                         "two, or --by model")
    if by == "change" and files > 2:
        raise InputError(f"--by change: what changed is told of two profiles, and these are {files}; give two, or --by "
                         "model")
    if by == "change" and of_modules:
        flag = f"--columns {','.join(arguments.columns)}" if arguments.columns else f"--depth {arguments.depth}"
        raise InputError(f"{flag}: is of --by module, and here a row is a change; leave one of them out")
    for flag, value in (("--fail-if", " ".join(map(repr, arguments.fail_if))), ("--markdown", arguments.markdown),
                        ("--html", arguments.html)):
        if value and by != "change":
            raise InputError(f"{flag} {value}: is of what changed between two profiles; give two, without --columns, "
                             f"--depth and --by {by}")
    return by


def _tell_change(change: ProfileChange, arguments: argparse.Namespace) -> int:
    if arguments.markdown is not None:
        change.to_markdown(arguments.markdown)
    if arguments.html is not None:
        change.to_html(arguments.html)
    try:
        emit(_render(change, arguments.format), arguments.output)
        sys.stdout.flush()  # what failed follows on the other stream
    except BrokenPipeError:  # the reader (head, less) has gone, and what was found still counts
        if not change.failed:
            raise
    for row in change.failed:
        print(escape_controls(f"analyzer: --fail-if {describe_condition(row)}"), file=sys.stderr)
    return EXCEEDED if change.failed else 0


def _render(change: ProfileChange, fmt: str) -> str:
    if fmt == "markdown":
        return change.to_markdown().rstrip("\n")
    return change.render() if fmt == "text" else change.table(fmt)
