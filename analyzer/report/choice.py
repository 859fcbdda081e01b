"""What a command prints of a profile: the reports that are asked for by name, and at the end the verdict."""
from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import write_output
from analyzer.results.profile import ProfileData
from analyzer.results.verdict import Headroom, Verdict
from analyzer.results.view import register_exporter, register_report
from analyzer.units import format_bytes

from .screen.layout import find_width, takes_color
from .verdict import format_verdict

#: How a command with ``--show`` prints the rest.
LONG_TABLES = "--show summary,modules,table, --html FILE, --json FILE"


def read_shown(text: str, flag: str = "--show", given: Collection[str] = ()) -> list[str]:
    """Names of reports. Raises InputError, before any work, for an unknown one, and for a cost without a run."""
    shown = [word.strip() for word in text.split(",") if word.strip()]
    if not shown:
        raise InputError(f"{flag} {text!r}: nothing to print; give some of {', '.join(register_report)}")
    for word in shown:
        if word not in register_report:
            near = difflib.get_close_matches(word, register_report, n=1)
            raise InputError(f"{flag} {text}: {word!r} is no report" + (f"; did you mean {near[0]}?" if near else "")
                             + f"; there are {', '.join(register_report)}; register_report in your own file adds one")
    if "cost" in shown and not {"tokens", "samples"} & set(given):
        raise InputError(f"{flag} {text}: cost of what run? `analyzer show FILE --tokens N` or --samples N says it")
    return shown


def make_text(profile: ProfileData, shown: Sequence[str], **options: Any) -> str:
    """The reports one after the other, each with those of ``options`` that it takes."""
    of_screen = {"width": find_width(sys.stdout), "color": takes_color(sys.stdout), "more": LONG_TABLES}
    return "\n\n".join(make_report(profile, name, **{
        option: value for option, value in (of_screen if name == "screen" else options).items()
        if register_report.takes(name, option)}) for name in shown)


def make_report(profile: ProfileData, kind: str, **options: Any) -> str:
    """What `Profile.report` gives."""
    text = register_report.call("report", kind, profile, **options)
    if not isinstance(text, str):
        raise InputError(f"report({kind!r}): returned {text!r:.200}: a report returns text, and prints none")
    return text


def save_profile(profile: ProfileData, json: Path | None, html: Path | None) -> None:
    """Write the files that a command was asked for."""
    if json is not None:
        register_exporter.call("export", "json", profile, json)
    if html is not None:
        register_exporter.call("export", "html", profile, html)


def emit(text: str, output: Path | None) -> None:
    """Write a text to the file that ``--output`` names, or print it."""
    if output is None:
        print(text)
    else:
        write_output(output, text + "\n")


def end_with_verdict(verdict: Verdict | None, is_told: bool = False, headroom: Headroom | None = None,
                     way: str | None = None) -> int:
    """Print the verdict last, unless it was told, and give the command's exit code: 3 where a step does not fit, or
    leaves less than the ``headroom`` asked for. ``way`` is what would leave more (`describe_air`).
    """
    if verdict is not None and not is_told:
        print(f"\n{format_verdict(verdict, way)}")
    if verdict is not None and verdict.fits and headroom is not None and not headroom.is_left(verdict):
        print(f"less than the headroom of {headroom} is left: {format_bytes(verdict.free_bytes)}")
        return 3
    return 3 if verdict is not None and verdict.fits is False else 0
