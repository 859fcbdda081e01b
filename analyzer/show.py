"""``analyzer profile`` and ``analyzer show``: what they print and save."""
from __future__ import annotations

import argparse
from pathlib import Path

from analyzer.advice.search import find_advice
from analyzer.api.prediction import check_world_options, predict
from analyzer.errors import InputError
from analyzer.generation.generation_profile import FORMAT, GenerationProfile
from analyzer.output import check_output
from analyzer.report import choice
from analyzer.report.export.table_file import read_exports, write_exports
from analyzer.report.page.document import check_page
from analyzer.report.summary import DEFAULT_COLUMNS, model_table
from analyzer.report.verdict import format_cheapest, judge
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.zoo.target import import_file, import_own_code


def run_profile(arguments: argparse.Namespace) -> int:
    """``analyzer profile``."""
    import_own_code(arguments.target)  # which may register reports and exporters
    shown = choice.read_shown(arguments.show)
    check_output(arguments.json)
    check_page(arguments.html)
    exports = read_exports(arguments.export)
    check_world_options(arguments)
    if arguments.others:
        return _run_models(arguments)
    found, = predict(arguments)
    choice.save_profile(found, arguments.json, arguments.html)  # before anything is printed, for a reader that goes
    write_exports(found, exports)
    print(choice.make_text(found, shown))
    is_told = "screen" in shown
    code = choice.end_with_verdict(found.verdict, is_told)
    if code:
        advice = find_advice(arguments, quick=True)
        print(format_cheapest(advice) if is_told else advice.summary())
    return code


def _run_models(arguments: argparse.Namespace) -> int:
    """Several targets: a row each, and the verdicts."""
    names = [arguments.target, *arguments.others]
    for flag in ("show", "json", "html", "export"):
        if (value := getattr(arguments, flag)) not in (None, [], "screen"):
            raise InputError(f"--{flag} {value[0] if flag == 'export' else value}: is of one model, and here are "
                             f"{len(names)}, which make one table; profile them one at a time")
    rows = list(zip(names, predict(arguments, arguments.others), strict=True))
    verdicts = [(name, judge(found, is_brief=True)) for name, found in rows]
    print(model_table(rows, DEFAULT_COLUMNS))
    print("\n" + "\n".join(f"{name} {verdict}" for name, verdict in verdicts))
    return 3 if any(verdict is not None and verdict.fits is False for _, verdict in verdicts) else 0


_LAYOUT = ("depth", "sort", "columns", "module_depth", "top_modules", "detailed", "ignore_modules", "fmt", "as_string")
_COST = ("tokens", "samples", "price", "gpus", "power")
_FLAGS = {"col_names": "columns", "detailed": "no-detail", "fmt": "format", "as_string": "raw"}


def run_show(arguments: argparse.Namespace) -> int:
    """``analyzer show``."""
    given = {name: value for name in (*_LAYOUT, *_COST) if (value := getattr(arguments, name)) is not None}
    usual = "cost" if given.keys() & set(_COST) else "screen"
    words = (usual if arguments.report is None else arguments.report).split(",")
    for word in words:
        if ":" in word:
            import_file(word.rpartition(":")[0], f"--report {word}")  # which registers reports
    shown = choice.read_shown(",".join(word.rpartition(":")[2] for word in words), "--report", given)
    if "columns" in given and "torchinfo" in shown:
        given["col_names"] = given["columns"] if len(shown) > 1 else given.pop("columns")
    for name in given:
        if not any(register_report.takes(report, name) for report in shown):
            takers = [report for report in register_report if register_report.takes(report, name)]
            raise InputError(f"--{_FLAGS.get(name, name).replace('_', '-')}: --report {','.join(shown)} has no such "
                             f"option; it is of {', '.join(takers)}")
    check_output(arguments.output)
    choice.emit("\n\n".join(choice.make_text(profile, shown, **given) for profile in _read(arguments.file)),
                arguments.output)
    return 0


def _read(path: Path) -> list[Profile]:
    """The profiles of a file: one, or the prefill and the last token of a generation."""
    try:
        with path.open(encoding="utf-8") as file:
            is_generation = f'"{FORMAT.name}"' in file.read(200)
    except (OSError, ValueError):  # which the reader of profiles tells
        is_generation = False
    if not is_generation:
        return [Profile.from_json(path)]
    found = GenerationProfile.from_json(path)
    return [part for part in (found.prefill, found.decode) if part is not None]
