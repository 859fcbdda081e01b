"""`analyzer search`."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.output import check_output, print_error
from analyzer.report.progress_bar import ProgressBar
from analyzer.tools.sweep.worker import connect
from analyzer.zoo.target import model_errors

from .export import FORMATS, export
from .layout import Space
from .search import Interrupted, read_cluster, search

CHOICES = tuple(f.name for f in fields(Space))
_WORDS: dict[str, Any] = {"no": False, "yes": True, "none": None}
_OPTIONAL = ("optimizer", )  # of whose values "none" is none; of checkpointing it is one


def run_search(arguments: argparse.Namespace) -> int:
    choices: dict[str, Any] = dict(_read_choice(text) for text in arguments.choose)
    exports = [_read_export(text) for text in arguments.exports]
    price = None
    if arguments.prices is not None:
        from analyzer.hardware.price import read_prices

        price = read_prices(arguments.prices, "--price ").find(read_cluster(arguments.cluster)[1].device)
    if arguments.html is not None:
        from analyzer.report.page.document import check_page

        check_page(arguments.html)
    for path in (arguments.json, *(path for _, path in exports)):
        if path is not None:
            check_output(path)
    bar, interruption = ProgressBar(among_output=sys.stderr.isatty()), ""
    try:
        with bar, connect(arguments.dask) as executor, model_errors(arguments.target):
            found = search(arguments.target, arguments.cluster, tokens=arguments.tokens, price=price,
                           global_batch=arguments.global_batch, sequence=arguments.sequence, count=arguments.count,
                           advice=not arguments.no_advice, workers=arguments.workers, executor=executor,
                           resume=arguments.resume, progress=bar, **choices)
    except Interrupted as stop:
        bar.clear()
        interruption = f"interrupted: {stop}" + (
            "" if arguments.resume is not None else "; --resume FILE would have kept them")
        if stop.result is None:
            print_error(interruption)
            return 130
        found = stop.result
    finally:
        bar.clear()
    print(found)
    if arguments.json is not None:
        found.to_json(arguments.json)
    if arguments.html is not None:
        found.to_html(arguments.html)
    for program, path in exports:
        export(found, program, path)
    if interruption:
        print_error(interruption)
        return 130
    return 0 if found.fits else 3


def _read_choice(text: str, flag: str = "--choose") -> tuple[str, Sequence[Any]]:
    name, equals, values = text.strip().partition("=")
    if not equals or name not in CHOICES:
        raise InputError(f"{flag} {text}: write FIELD=VALUE,VALUE with a field of {', '.join(CHOICES)}")
    return name, [_read_value(name, word.strip()) for word in values.split(",")]


def read_field(text: str) -> tuple[str, Any]:
    """One field of a layout with its value, as ``tensor=4``. Raises InputError."""
    name, values = _read_choice(text, "--trainer")
    return name, values[0]


def _read_value(name: str, word: str) -> Any:
    if word.isdecimal():
        return int(word)
    if word == "none" and name not in _OPTIONAL:
        return word
    return _WORDS.get(word, word)


def _read_export(text: str) -> tuple[str, Path]:
    program, equals, path = text.partition("=")
    if not equals or program not in FORMATS:
        raise InputError(f"--export {text}: write PROGRAM=FILE with a program of {', '.join(FORMATS)}")
    return program, Path(path)
