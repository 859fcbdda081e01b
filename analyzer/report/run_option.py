"""Options of a command that asks what a run costs, and for the roofline of its step."""
from __future__ import annotations

import argparse
from pathlib import Path

from analyzer.errors import InputError
from analyzer.results.profile import Profile

from .choice import is_text
from .roofline import check_roofline
from .run_cost import check_run, title_cost

_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """``--tokens --samples --price --gpus --power``, and ``--roofline``."""
    group = parser.add_argument_group("cost of a run")
    for name, what in (("tokens", "batch times sequence of each step"), ("samples", "the batch of each step")):
        group.add_argument(f"--{name}", type=read_amount, metavar="N",
                           help=f"how many {name} the run takes, e.g. 2e12 or 2T; {what} counts: prints steps, hours, "
                           "dollars and kWh")
    group.add_argument("--price", type=float, metavar="DOLLARS", help="of an hour of one device")
    group.add_argument("--gpus", type=int, metavar="N",
                       help="how many devices share the run, each copy of the model as fast as one alone (default 1)")
    group.add_argument("--power", type=float, metavar="WATTS",
                       help="what one device takes (default: its power limit, the most that it may)")
    parser.add_argument("--roofline", type=Path, metavar="FILE",
                        help="save where operators and modules stand under the device's roofline: .json or .csv, or "
                        "drawn as .png, .svg or .pdf (needs matplotlib)")


def read_amount(text: str) -> float:
    """A number of tokens or samples, as a type of argparse.

    >>> read_amount("2e12"), read_amount("1.5T"), read_amount("300_000")
    (2000000000000.0, 1500000000000.0, 300000.0)
    """
    scale = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        return round(float(text[:-1] if scale != 1.0 else text) * scale, 6)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number, such as 2e12, 300B or 2T") from None


def check_run_options(arguments: argparse.Namespace) -> None:
    """Raise InputError, before any work, for a run that cannot be and a file that cannot be written."""
    amounts = {"tokens": arguments.tokens, "samples": arguments.samples}
    settings = {"price": arguments.price, "gpus": arguments.gpus, "power": arguments.power}
    given = [(f"--{name}", value) for name, value in {**amounts, **settings}.items() if value is not None]
    if arguments.others:
        for flag, value in [*given, *([("--roofline", arguments.roofline)] if arguments.roofline else [])]:
            raise InputError(f"{flag} {value}: is of one model, and here are {1 + len(arguments.others)}; profile them "
                             "one at a time")
    if given and all(value is None for value in amounts.values()):
        flag, value = given[0]
        raise InputError(f"{flag} {value}: of what run? add --tokens N or --samples N")
    if given and not is_text(arguments):
        flag, value = given[0]
        raise InputError(f"{flag} {value}: what a run costs is printed as text; leave out --format, --output and --raw")
    if given:
        check_run(**amounts, **settings)
    if arguments.roofline is not None:
        check_roofline(arguments.roofline)


def describe_run_cost(profile: Profile, arguments: argparse.Namespace) -> str | None:
    """What the run costs, under its title; None where no run is asked for. Raises InputError where the model takes
    none of what was counted.
    """
    if arguments.tokens is None and arguments.samples is None:
        return None
    cost = profile.cost_of(tokens=arguments.tokens, samples=arguments.samples, price=arguments.price,
                           gpus=arguments.gpus, power=arguments.power)
    lines = "\n".join(f"  {line}" for line in str(cost).splitlines())
    return f"{title_cost(cost)}\n{lines}"
