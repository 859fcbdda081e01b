"""``analyzer profile``: what it prints and saves."""
from __future__ import annotations

import argparse
from collections.abc import Callable

from analyzer.advice.search import find_advice
from analyzer.api.prediction import check_world_options, predict
from analyzer.output import check_output
from analyzer.report import choice
from analyzer.report.export.table_file import read_exports, write_exports
from analyzer.report.page.document import check_page
from analyzer.report.run_cost import check_run_options, describe_run_cost
from analyzer.report.summary import DEFAULT_COLUMNS, describe_for_verdict, model_table
from analyzer.report.verdict import format_cheapest, judge
from analyzer.zoo.target import import_own_code

_SHOWN = ("screen", "table", "summary", "modules", "brief")
_DEFAULT_SHOWN = "screen"


def run_profile(arguments: argparse.Namespace) -> int:
    """``analyzer profile``."""
    shown = choice.read_shown(arguments.show, _SHOWN)
    import_own_code(arguments.target)  # which may register reports and exporters
    for path in (arguments.json, arguments.output):
        check_output(path)
    check_page(arguments.html)
    exports = read_exports(arguments.export)
    check_run_options(arguments)
    check_world_options(arguments)
    if arguments.others:
        choice.check_model_options(arguments, _DEFAULT_SHOWN)
        rows = list(zip([arguments.target, *arguments.others], predict(arguments, arguments.others), strict=True))
        table = model_table(rows, arguments.columns or DEFAULT_COLUMNS, arguments.format or "text")
        choice.emit(table, arguments.output)
        verdicts = [(name, judge(found, is_brief=True)) for name, found in rows]
        if arguments.output is None and arguments.format in (None, "text"):
            print("\n" + "\n".join(f"{name} {verdict}" for name, verdict in verdicts))
        return 3 if any(verdict is not None and verdict.fits is False for _, verdict in verdicts) else 0
    make_table = choice.read_table_options(arguments, shown)
    found, = predict(arguments)
    choice.save_profile(found, arguments.json, arguments.html)  # before anything is printed, for a reader that goes
    write_exports(found, exports)
    if arguments.roofline is not None:
        found.export("roofline", arguments.roofline)
    cost = describe_run_cost(found, arguments)
    texts: dict[str, Callable[[], str]] = {
        "screen": lambda: choice.draw_screen(found),
        "table": lambda: found.table(sort=arguments.sort, depth=arguments.depth),
        "summary": found.summary, "modules": lambda: found.module_tree(depth=arguments.depth, sort=arguments.sort),
        "brief": lambda: describe_for_verdict(found)}
    if arguments.report is not None:
        choice.print_report(found, arguments)
    else:
        text = "\n\n".join(texts[word]() for word in shown) if make_table is None else make_table(found)
        choice.emit(text, arguments.output)
    if arguments.explain_replay and found.replay is not None:
        print("\n" + found.replay.explain())
    if cost is not None and choice.is_text(arguments):
        print("\n" + cost)
    is_told = arguments.report == "screen" or arguments.report is None and "screen" in shown
    code = choice.end_with_verdict(found.verdict, arguments, is_told)
    if code and choice.is_text(arguments):
        advice = find_advice(arguments, quick=True)
        print(format_cheapest(advice) if is_told else advice.summary())
    return code
