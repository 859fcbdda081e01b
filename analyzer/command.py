"""A command of the command line as a record."""
from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import fill, indent
from typing import Any

from .facts import fill_in
from .option import Option
from .options import OPTIONS


@dataclass(frozen=True)
class Command:
    """One command. Options are by their names in `OPTIONS`, with commas between them."""

    name: str
    help: str                           #: in a line
    run: str                            #: the place of its function, which is imported when it is called
    options: str
    description: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)  #: further options, by the title they stand under
    examples: str = ""
    exits: Mapping[int, str] = field(default_factory=dict)

    @property
    def all_options(self) -> list[Option]:
        """Those of its groups too."""
        return [OPTIONS[name] for names in (self.options, *self.groups.values()) for name in _split(names)]

    @property
    def flags(self) -> list[str]:
        """Those that it takes."""
        return [flag for option in self.all_options for flag in option.flag.split() if flag.startswith("-")]

    def add_to(self, commands: argparse._SubParsersAction[Any], with_options: bool) -> None:
        """Add it to those of the command line; ``with_options`` only where it is the one that is called."""
        if not with_options:
            commands.add_parser(self.name, help=self.help)
            return
        codes = "; ".join(f"{code} {text}" for code, text in self.exits.items())
        parser = commands.add_parser(
            self.name, help=self.help, usage=" ".join(
                ["analyzer", self.name, "[options]", *(option.needed for option in self.all_options if option.needed)]),
            description=fill_in(self.description),
            formatter_class=argparse.RawDescriptionHelpFormatter, epilog="\n".join(
                [f"examples:\n{indent(self.examples, '  ', lambda line: line.startswith('analyzer '))}"]
                * bool(self.examples) + [fill(f"exit codes: {codes}", 118)] * bool(codes)))
        for title, names in {"": self.options, **self.groups}.items():
            group = parser.add_argument_group(title) if title else parser
            for name in _split(names):
                OPTIONS[name].add_to(group)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]
