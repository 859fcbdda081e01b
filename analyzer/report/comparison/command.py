"""``analyzer compare``: what changed between two saved profiles, or several of them side by side."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import check_output
from analyzer.record.options import report_progress
from analyzer.report.check import CONDITION_GRAMMAR, EXCEEDED
from analyzer.report.choice import emit, parse_depth, split_words
from analyzer.report.module_comparison import compare_modules
from analyzer.report.node_table import FORMATS
from analyzer.report.page.document import check_page
from analyzer.report.summary import DEFAULT_COLUMNS, model_table
from analyzer.report.text_width import escape_controls
from analyzer.results.comparison import ProfileChange
from analyzer.results.profile import Profile

from .compare import compare
from .wording import describe_condition

_MODULE_COLUMNS = ("fwd_seconds", "bwd_seconds")
_HELP = f"""\
Tells what changed from the first profile to the second: peaks, time, FLOPs, memory at the peak by category, and for
each quantity the deepest modules that explain it, alike blocks as one.

--fail-if CONDITION makes it a gate: it exits with {EXCEEDED} where a condition is met, or asks for what is unknown.
  'FIELD > +N%'   more than N percent above the first profile (-N%: less than N percent below it)
  'FIELD > +N'    more than so much above it, e.g. 'peak_allocated_bytes > +200MiB'
  'FIELD > N'     more than N, whatever the first one's, e.g. 'step_seconds > 0.5'
with >, >=, < or <=. FIELD is any quantity of `analyzer check`, also by its path: peak_by_category.activation.

With --by module (or --columns, --depth), the modules of two profiles, predicted or measured, stand side by side, joined
by their paths; of more profiles, or with --by model, one table has a row for each.
"""

_EXAMPLES = f"""\
examples:
  analyzer profile mynet.py:Net --input 8x3x224x224 --json before.json          # on the base branch
  analyzer profile mynet.py:Net --input 8x3x224x224 --json after.json           # with a change
  analyzer compare before.json after.json
  analyzer compare before.json after.json --fail-if "peak_allocated_bytes > +2%" --fail-if "step_seconds > 0.5"
  analyzer compare before.json after.json --markdown "$GITHUB_STEP_SUMMARY"     # examples/ci/ has the workflow
  analyzer compare predicted.json measured.json --depth 2 --columns fwd_seconds,bwd_seconds,fwd_flops
  analyzer compare small.json medium.json large.json
  analyzer compare before.json after.json --by model --columns params,phases.forward.peak_allocated_bytes
  analyzer compare *.json --by model --format latex --output models.tex     # or csv: numbers unrounded; markdown

exit codes: 0 done; 2 the command line or an input cannot be used; {EXCEEDED} a condition of --fail-if is met, or a
quantity that it needs is unknown
"""


def add_compare_command(commands: Any) -> None:
    """Add ``compare`` to the subparsers of the command line."""
    parser = commands.add_parser(
        "compare", help="what changed between two saved profiles, and which modules explain it", epilog=_EXAMPLES,
        description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, metavar="FILE", help="a profile saved with --json")
    parser.add_argument("second", type=Path, metavar="FILE", help="another one")
    parser.add_argument("others", type=Path, nargs="*", metavar="FILE", help="more of them")
    parser.add_argument("--by", choices=("change", "module", "model"),
                        help="what a row is (default: change for two profiles, module with --columns or --depth, model "
                        "for more profiles)")
    parser.add_argument("--fail-if", action="append", default=[], metavar="CONDITION",
                        help=f"{CONDITION_GRAMMAR.replace('%', '%%')}; may be repeated")
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="also write what changed as Markdown that suits a comment on a pull request")
    parser.add_argument("--html", type=Path, metavar="FILE",
                        help="also write what changed as one HTML page (needs the extra report)")
    parser.add_argument("--columns", type=split_words, metavar="NAMES",
                        help="quantities, separated by commas (default: "
                        f"{','.join(_MODULE_COLUMNS)} by module, {','.join(DEFAULT_COLUMNS)} by model)")
    parser.add_argument("--depth", type=parse_depth, metavar="N", help="show modules down to this depth")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text",
                        help="default text; of what changed, markdown is as of --markdown, others are one table of all "
                        "changes; in tables modules stand by their paths, and in csv numbers are unrounded")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="write what would be printed to this file")


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
        emit(compare_modules(profiles[0], profiles[1], arguments.columns or _MODULE_COLUMNS, depth=arguments.depth,
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
