"""What help and choices of commands say of the package, kept in a file, as what it is from imports torch."""
from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FunctionType

from analyzer.on_use import load

_PLACE = re.compile(r"\{(analyzer[\w.]+:\w+)\}")


@cache
def read_facts() -> dict[str, str | int | list[str]]:
    """What help and choices say of the package: place -> a text, a number or names. The file holds what `find_fact`
    finds, for the files of these places import torch, and help is to be printed at once; a test compares both.
    """
    facts: dict[str, str | int | list[str]] = json.loads(Path(__file__).with_name("facts.json").read_text("utf-8"))
    return facts


def find_fact(place: str) -> str | int | list[str]:
    """What is at a place such as ``analyzer.recipe.quantize:LAYERS``: a text or a number as it is, else names."""
    found = load(place)
    found = found() if isinstance(found, FunctionType) else found
    return found if isinstance(found, (int, str)) else list(found)


def write_facts(places: Iterable[str]) -> str:
    """The file of facts, a line a place."""
    lines = [f" {json.dumps(place)}: {json.dumps(find_fact(place))}" for place in sorted(places)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def fill_in(text: str) -> str:
    """A text with what its places hold (``{analyzer.recipe.quantize:LAYERS}``): a line that is nothing but a place is
    folded.

    >>> fill_in("one of {analyzer.recipe.quantize:LAYERS}")
    'one of int8, int4, nf4, fp8'
    """
    def name(match: re.Match[str]) -> str:
        fact = read_facts()[match[1]]
        named = str(fact) if isinstance(fact, (int, str)) else ", ".join(fact)
        is_alone = match.string[:match.start()].endswith("\n") and match.string[match.end():].startswith("\n")
        return textwrap.fill(named, 110, initial_indent="  ", subsequent_indent="  ") if is_alone else named

    return _PLACE.sub(name, text)
