"""The commands of profiles, new and saved: ``analyzer profile``, ``show``, ``view`` and ``compare``."""
from __future__ import annotations

import argparse
import sys
import tempfile
import webbrowser
from pathlib import Path

from analyzer.api.prediction import check_world_options, predict
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.hardware.price import read_prices
from analyzer.on_use import load
from analyzer.output import check_output, print_error, write_output
from analyzer.parallel.rank_table import RankTable
from analyzer.record.progress import report_progress
from analyzer.report import choice
from analyzer.report.check import EXCEEDED
from analyzer.report.comparison.compare import compare
from analyzer.report.comparison.text import describe_condition
from analyzer.report.export.table_file import read_exports, write_exports
from analyzer.report.page.document import check_page
from analyzer.report.summary import DEFAULT_COLUMNS, model_table
from analyzer.report.text_width import escape_controls
from analyzer.report.verdict import format_cheapest, judge
from analyzer.results.comparison import ProfileChange
from analyzer.results.verdict import Headroom
from analyzer.results.view import register_report
from analyzer.tools.advice.search import find_advice
from analyzer.tools.generation.generation_profile import FORMAT, GenerationProfile
from analyzer.zoo.target import import_file, import_own_code

_RUN_LENGTHS = "analyzer.tools.lengths.command:run_lengths"
_OF_LENGTHS = ("batching", "padding")


def run_profile(arguments: argparse.Namespace) -> int:
    """``analyzer profile``."""
    import_own_code(arguments.target)  # which may register reports and exporters
    if arguments.lengths is not None:
        return load(_RUN_LENGTHS)(arguments)  # type: ignore[no-any-return]
    for name in _OF_LENGTHS:
        if (value := getattr(arguments, name)) is not None:
            raise InputError(f"--{name.replace('_', '-')} {value}: is of an epoch of batches; add --lengths")
    shown = choice.read_shown(arguments.show)
    check_output(arguments.json)
    check_page(arguments.html)
    exports = read_exports(arguments.export)
    check_world_options(arguments)
    headroom = None if arguments.headroom is None else Headroom.parse(arguments.headroom)
    if arguments.others:
        return _run_models(arguments)
    found, = predict(arguments)
    choice.save_profile(found, arguments.json, arguments.html)  # before anything is printed, for a reader that goes
    write_exports(found, exports)
    print(choice.make_text(found, shown))
    code = choice.end_with_verdict(found.verdict, "screen" in shown, headroom)
    sys.stdout.flush()  # the answer is there before what would mend it is sought
    if code and not found.verdict and not arguments.no_advice:
        print(format_cheapest(find_advice(arguments, quick=True, baseline=_as_plain(arguments, found))))
    return code


def _as_plain(arguments: argparse.Namespace, found: Profile) -> Profile | None:
    """The profile, where it is of the step that changes are made to: of one process on one device."""
    plain = arguments.world is None and arguments.devices in (None, 1) and not arguments.skew
    return found if plain and found.out_of_memory is None else None


def _run_models(arguments: argparse.Namespace) -> int:
    names = [arguments.target, *arguments.others]
    for flag in ("show", "json", "html", "export"):
        if (value := getattr(arguments, flag)) not in (None, [], "screen"):
            raise InputError(f"--{flag} {value[0] if flag == 'export' else value}: is for one model, and these "
                             f"are {len(names)}, which make one table; profile them one at a time")
    rows = list(zip(names, predict(arguments, arguments.others), strict=True))
    verdicts = [(name, judge(found, is_brief=True)) for name, found in rows]
    print(model_table(rows, DEFAULT_COLUMNS))
    print("\n" + "\n".join(f"{name} {verdict}" for name, verdict in verdicts))
    return 3 if any(verdict is not None and verdict.fits is False for _, verdict in verdicts) else 0


_LAYOUT = ("depth", "sort", "columns", "module_depth", "top_modules", "detailed", "ignore_modules", "fmt", "as_string")
_COST = ("tokens", "samples", "prices", "gpus", "power", "carbon")
_FLAGS = {"col_names": "columns", "detailed": "no-detail", "fmt": "format", "as_string": "raw"}


def run_show(arguments: argparse.Namespace) -> int:
    """``analyzer show``."""
    given = {name: value for name in (*_LAYOUT, *_COST) if (value := getattr(arguments, name)) is not None}
    usual = "cost" if given.keys() & set(_COST) else "screen"
    prices = read_prices(given.pop("prices", None), "--price ")
    if arguments.prices is not None:
        given["price"] = prices.others
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
                             f"option; these have it: {', '.join(takers)}")
    check_output(arguments.output)
    path = arguments.file
    if _holds(path, FORMAT.name):  # a generation: its prefill, and the last token
        whole = GenerationProfile.from_json(path)
        found = [part for part in (whole.prefill, whole.decode) if part is not None]
    else:
        found = [Profile.from_json(path)]
    def find_price(profile: Profile) -> dict[str, float | None]:
        return {} if "price" not in given or profile.device is None else {
            "price": prices.find(profile.find_device(profile.device))}

    choice.emit("\n\n".join(choice.make_text(profile, shown, **{**given, **find_price(profile)})
                            for profile in found), arguments.output)
    return 0


def _holds(path: Path, kind: str) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return f'"{kind}"' in file.read(200)
    except (OSError, ValueError):  # which the reader of profiles tells
        return False


def run_view(arguments: argparse.Namespace) -> int:
    """``analyzer view``: write the page of what was saved, and open it in a browser."""
    check_page(arguments.html or arguments.files[0].with_suffix(".html"))
    text = write_view(arguments.files)
    path = arguments.html or Path(tempfile.mkdtemp(prefix="analyzer-"), arguments.files[-1].stem + ".html")
    write_output(path, text)
    print(path)
    if not arguments.no_browser:
        webbrowser.open(path.absolute().as_uri())
    return 0


def write_view(paths: list[Path]) -> str:
    """The page of one file, or of what changed between two. Raises InputError or ProfileFormatError."""
    if len(paths) > 2:
        raise InputError(f"{', '.join(map(str, paths))}: view shows one file, or what changed between two profiles; "
                         f"`analyzer compare` has a row for each of more")
    if len(paths) == 2:
        before, after = map(Profile.from_json, paths)
        return compare(before, after).to_html()
    path, = paths
    return RankTable.from_json(path).to_html() if _holds(path, "analyzer.ranks") else Profile.from_json(path).to_html()


def run_compare(arguments: argparse.Namespace) -> int:
    """``analyzer compare``: what changed between two saved profiles, or several of them side by side."""
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
        choice.emit(model_table([(str(path), profile) for path, profile in zip(files, profiles, strict=True)],
                                arguments.columns or DEFAULT_COLUMNS, arguments.format), arguments.output)
        return 0
    change = compare(profiles[0], profiles[1], arguments.fail_if)
    if arguments.markdown is not None:
        change.to_markdown(arguments.markdown)
    if arguments.html is not None:
        change.to_html(arguments.html)
    try:
        choice.emit(_render(change, arguments.format), arguments.output)
        sys.stdout.flush()  # what failed follows on the other stream
    except BrokenPipeError:  # the reader (head, less) has gone, and what was found still counts
        if not change.failed:
            raise
    for row in change.failed:
        print_error(escape_controls(f"--fail-if {describe_condition(row)}"))
    return EXCEEDED if change.failed else 0


def _render(change: ProfileChange, fmt: str) -> str:
    if fmt == "markdown":
        return change.to_markdown().rstrip("\n")
    return change.render() if fmt == "text" else change.table(fmt)


def _find_rows(arguments: argparse.Namespace, files: int) -> str:
    """What a row is. Raises InputError for an option that such rows do not have."""
    by: str = arguments.by or ("change" if files == 2 and arguments.columns is None else "model")
    if by == "change" and files > 2:
        raise InputError(f"--by change compares two profiles, and {files} were given; give two, or --by model")
    if by == "change" and arguments.columns is not None:
        raise InputError(f"--columns {','.join(arguments.columns)}: works with --by model, and with --by change a "
                         "row is a change; leave one of them out")
    for flag, value in (("--fail-if", " ".join(map(repr, arguments.fail_if))), ("--markdown", arguments.markdown),
                        ("--html", arguments.html)):
        if value and by != "change":
            raise InputError(f"{flag} {value}: shows what changed between two profiles; give two, without --columns "
                             f"and --by {by}")
    return by
