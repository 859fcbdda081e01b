"""An option of the command line as a record, and the readers of what options are given."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from analyzer.facts import fill_in, read_facts


def parse_depth(text: str) -> int:
    """The number that ``--depth`` gives, as a type of argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of levels, 0 or more")
    return int(text)


def split_words(text: str) -> list[str]:
    """Words between commas, as a type of argparse."""
    return [word.strip() for word in text.split(",") if word.strip()]


def read_wait(text: str) -> tuple[int, float]:
    """Passes and a share, as a type of argparse.

    >>> read_wait("20:0.9")
    (20, 0.9)
    """
    passes, _, share = text.partition(":")
    try:
        return int(passes), float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be PASSES:SHARE, such as 20:0.9") from None


def read_size(text: str) -> tuple[int, int]:
    """Width and height in pixels, as a type of argparse.

    >>> read_size("1024x768")
    (1024, 768)
    """
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r}: must be WIDTHxHEIGHT in pixels, such as 1024x768")
    return int(width), int(height)


def read_numbers(text: str) -> list[int]:
    """Numbers between commas, as a type of argparse."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers between commas, as in 1,8,64")
    return [int(word) for word in words]


class Option:
    """An option of a command, or a word by its position where ``flag`` has no dashes. ``settings`` are argparse's, of
    which a text may be a place; what has a place in ``help`` is named there.
    """

    def __init__(self, flag: str, help: str, *, name: str = "", **settings: Any) -> None:
        self.flag, self.help, self.settings = flag, help, settings
        self.name = name or flag.lstrip("-")  #: by which commands name it: their flags may be alike

    @property
    def needed(self) -> str:
        """How it stands in a command's usage, where it is a word by its position or must be given."""
        metavar = self.settings.get("metavar", "")
        if self.flag.startswith("-"):
            return f"{self.flag} {metavar}" if self.settings.get("required") else ""
        forms = {"*": f"[{metavar} ...]", "?": f"[{metavar}]", "+": f"{metavar} [{metavar} ...]"}
        return forms.get(self.settings.get("nargs", ""), str(metavar))

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add it to a parser, or to a group of its options."""
        settings: dict[str, Any] = {
            key: read_facts()[value] if isinstance(value, str) and value.startswith("analyzer.") else value
            for key, value in self.settings.items()}
        text = self.help if self.help == argparse.SUPPRESS else fill_in(self.help).replace("%", "%%")
        parser.add_argument(*self.flag.split(), help=text, **settings)


def number_option(flag: str, help: str, usual: object = None, **settings: Any) -> Option:
    """An option that takes a whole number; ``usual`` is what it is where it is not given, and the help says so."""
    said = "" if usual is None else f" (default {usual if isinstance(usual, int) else f'{{{usual}}}'})"
    return Option(flag, help + said, **{"type": int, "metavar": "N", "default": usual, **settings})


def file_option(flag: str, help: str, **settings: Any) -> Option:
    """An option that takes the path of a file."""
    return Option(flag, help, type=Path, metavar="FILE", **settings)


def switch_option(flag: str, help: str, name: str = "") -> Option:
    """An option that takes no value, and is False where it is not given."""
    return Option(flag, help, name=name, action="store_true")
