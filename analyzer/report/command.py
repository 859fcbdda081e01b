"""``analyzer compare``: two saved profiles side by side."""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from analyzer.results.profile import Profile

from .choice import parse_depth, split_words
from .column import FORMATS
from .module_comparison import compare_modules

_EXAMPLES = """\
examples:
  analyzer profile resnet18 --json predicted.json && analyzer measure resnet18 --json measured.json
  analyzer compare predicted.json measured.json --depth 2 --columns fwd_seconds,bwd_seconds,fwd_flops
"""


def add_compare_command(commands: Any) -> None:
    """Add ``compare`` to the subparsers of the command line."""
    parser = commands.add_parser(
        "compare", help="two saved profiles side by side, module by module", epilog=_EXAMPLES,
        description="Joins the modules of two profiles, predicted or measured, by their paths.",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path, metavar="FILE", help="a profile saved with --json")
    parser.add_argument("second", type=Path, metavar="FILE", help="another one")
    parser.add_argument("--columns", type=split_words, default="fwd_seconds,bwd_seconds", metavar="NAMES",
                        help="quantities, separated by commas (default %(default)s)")
    parser.add_argument("--depth", type=parse_depth, metavar="N", help="show modules down to this depth")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="of the table (default text)")


def run_compare(arguments: argparse.Namespace) -> int:
    """``analyzer compare``; the result is the exit code."""
    first, second = Profile.from_json(arguments.first), Profile.from_json(arguments.second)
    print(compare_modules(first, second, arguments.columns, depth=arguments.depth, fmt=arguments.format))
    return 0
