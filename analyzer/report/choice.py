"""Which report a command prints, with which options."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import write_output
from analyzer.results.profile import Profile
from analyzer.results.verdict import Verdict
from analyzer.results.view import register_report

from .quantity import find_quantity, is_drawn, list_modules, list_nodes
from .screen.layout import find_width, takes_color

#: How a command with ``--show`` prints the rest.
LONG_TABLES = "--show summary,modules,table, --html FILE, --json FILE"
#: By the words of ``--show``.
_TABLES: dict[str, Callable[..., str]] = {"table": list_nodes, "modules": list_modules}


def save_profile(profile: Profile, json: Path | None, html: Path | None) -> None:
    """Write the files that a command was asked for."""
    if json is not None:
        profile.to_json(json)
    if html is not None:
        profile.to_html(html)


def read_report_options(arguments: argparse.Namespace, own: Collection[str] = ()) -> dict[str, Any]:
    """Options of the report, or ``own`` ones of a command. InputError, before any work, for one that none follows, and
    for a report that neither the package nor the target's file, which is imported by then, has registered.
    """
    kind = arguments.report
    if kind is not None and kind not in register_report:
        raise InputError(f"argument --report: invalid choice: {kind!r} (choose from "
                         f"{', '.join(map(repr, register_report))}); register_report in the TARGET's file adds one")
    given = {"depth": arguments.depth, "sort": arguments.sort, "module_depth": arguments.module_depth,
             "top_modules": arguments.top_modules, "detailed": False if arguments.no_detail else None,
             "ignore_modules": arguments.ignore_modules, "fmt": arguments.format,
             "as_string": False if arguments.raw else None,
             "col_names" if kind == "torchinfo" else "columns": arguments.columns}
    flags = {"fmt": "format", "col_names": "columns", "detailed": "no-detail", "as_string": "raw"}
    options = {name: value for name, value in given.items() if value is not None}
    for name in options:
        flag = f"--{flags.get(name, name).replace('_', '-')}"
        if kind is None and name not in own:
            takers = [report for report in register_report if register_report.takes(report, name)]
            raise InputError(f"{flag}: only reports have this option; add --report, one of {', '.join(takers)}")
        if kind is not None and not register_report.takes(kind, name):
            raise InputError(f"{flag}: --report {kind} has no such option")
    if kind is None and arguments.output is not None and "output" not in own:
        raise InputError(f"--output {arguments.output}: only a report is written to a file; add --report")
    return options


def read_shown(text: str, known: Collection[str]) -> list[str]:
    """The words of ``--show``. Raises InputError where there is none, or one that is not known."""
    shown = [word.strip() for word in text.split(",") if word.strip()]
    if not shown:
        raise InputError(f"--show {text!r}: nothing to print; give some of {', '.join(known)}")
    for word in shown:
        if word not in known:
            raise InputError(f"--show {text}: {word!r} is none of {', '.join(known)}")
    return shown


def read_table_options(arguments: argparse.Namespace, shown: Sequence[str]) -> Callable[[Profile], str] | None:
    """The table that ``--format`` asks for where there is no report: the one that ``shown`` names, None where what is
    shown is as it is for a terminal. Raises InputError, before any work, for an option that nothing follows.
    """
    if arguments.report is None:
        check_rows(shown, depth=arguments.depth, sort=arguments.sort)
    if arguments.format is None or arguments.report is not None:
        read_report_options(arguments, own=("depth", "sort"))
        return None
    if len(shown) != 1 or shown[0] not in _TABLES:
        takers = [report for report in register_report if register_report.takes(report, "fmt")]
        raise InputError(f"--format {arguments.format}: is that of one table; add --show table, --show modules, or "
                         f"--report, one of {', '.join(takers)}")
    if is_drawn(arguments.format):
        read_report_options(arguments, own=("depth", "sort", "fmt", "output"))
        return None
    options = read_report_options(arguments, own=("depth", "sort", "columns", "fmt", "output"))
    make = _TABLES[shown[0]]
    return lambda profile: make(profile, **options)


def check_rows(shown: Collection[str], **given: object) -> None:
    """Raise InputError for an option of rows where nothing that is shown has rows that it could be of."""
    for flag, value in given.items():
        if value is not None and not _TABLES.keys() & set(shown):
            raise InputError(f"--{flag} {value}: is of the long tables; add --show table or --show modules")


def check_model_options(arguments: argparse.Namespace, default_show: str) -> None:
    """Raise InputError for an option that is of one profile, where several targets make one table."""
    of_one = {"report": arguments.report, "json": arguments.json, "html": arguments.html,
              "export": next(iter(arguments.export), None),
              "show": None if arguments.show == default_show else arguments.show,
              "explain-replay": arguments.explain_replay or None, "depth": arguments.depth, "sort": arguments.sort}
    for flag, value in of_one.items():
        if value is not None:
            given = "" if value is True else f" {value}"
            raise InputError(f"--{flag}{given}: is of one model, and here are {1 + len(arguments.others)}, which make "
                             "one table; profile them one at a time")
    read_report_options(arguments, own=("columns", "fmt", "output"))
    for name in arguments.columns or ():
        if "." not in name:  # of paths, those of the profiles tell which there are
            find_quantity(name, [], "--columns")


def print_report(profile: Profile, arguments: argparse.Namespace) -> None:
    """Print the report, or write it to the file that ``--output`` names."""
    if arguments.report == "screen" and arguments.output is None:
        read_report_options(arguments)
        print(draw_screen(profile, more="--report summary, --report tree, --html FILE, --json FILE"))
        return
    emit(profile.report(arguments.report, **read_report_options(arguments)), arguments.output)


def emit(text: str, output: Path | None) -> None:
    """Write a text to the file that ``--output`` names, or print it."""
    if output is None:
        print(text)
    else:
        write_output(output, text + "\n")


def draw_screen(profile: Profile, more: str = LONG_TABLES) -> str:
    """The first screen, as wide as stdout and in colours if that takes them; ``more`` names the longer tables."""
    return profile.report("screen", width=find_width(sys.stdout), color=takes_color(sys.stdout), more=more)


def end_with_verdict(verdict: Verdict | None, arguments: argparse.Namespace | None = None,
                     is_told: bool = False) -> int:
    """Print the verdict as the last of a command's output, and give the command's exit code: 3 where a step does not
    fit. It is not printed where it was told, or beside a report that goes to a file or that a program is to read.
    """
    if verdict is not None and not is_told and (arguments is None or is_text(arguments)):
        print(f"\n{verdict}")
    return 3 if verdict is not None and verdict.fits is False else 0


def is_text(arguments: argparse.Namespace) -> bool:
    """Whether a command prints for people, neither to a file nor for a program."""
    return arguments.output is None and arguments.format in (None, "text") and not arguments.raw
