"""Every claim tried against something that was not written for it; writes the blocks of docs/reliability.md.

    python -m benchmarks.fuzz.trust                         # all sections, an hour or more on two cores
    python -m benchmarks.fuzz.trust --only replay           # one section; the others stay as they were measured last
    python -m benchmarks.fuzz.trust --only replay --count 50    # a smaller round, printed and not kept

Exits 1 where something did not hold.
"""
from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import re
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.page import DOCS, Found, read_block, write_block

PAGE = "reliability.md"
#: Sections in the order of the page, each with the module whose `measure` finds it.
MODULES = {"versions": "coverage.matrix", "replay": "fuzz.replay_equality", "inputs": "fuzz.inputs",
           "long-use": "fuzz.long_use", "programs": "fuzz.programs", "faults": "fuzz.fault_trial"}


def describe(name: str, found: Found, seconds: float) -> str:
    """A block: what was tried, when and where, its tables, and what did not hold."""
    tried = ", ".join(f"{count:,} {what}" for what, count in found.tried.items())
    lost = "".join(["\n\nDid not hold:\n\n", *(f"- {line}\n" for line in found.lost)]) if found.lost else ""
    return (f"{tried}; {len(found.lost)} did not hold. By `python -m benchmarks.fuzz.trust --only {name}`, "
            f"{datetime.date.today():%d %B %Y}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{os.cpu_count()} cores, {seconds:.0f} s.\n\n{found.text.strip()}{lost}")


def sum_up() -> str:
    """The table at the top of the page, of what the blocks say first, each under the heading that it stands below."""
    page, rows = (DOCS / PAGE).read_text("utf-8"), []
    for name in MODULES:
        title = re.findall("^## (.*)$", page.partition(f"<!-- fuzz.trust {name} -->")[0], re.MULTILINE)[-1]
        tried, lost = re.findall(r"^(.*); (\d+) did not hold\.", read_block(PAGE, f"fuzz.trust {name}"))[0]
        rows.append(f"| [{title}](#{title.lower().replace(' ', '-')}) | {tried} | {lost} |")
    return "\n".join(["| | tried | did not hold |", "|---|---:|---:|", *rows])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz.trust", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(MODULES), metavar="SECTION",
                        help=f"a section, of: {', '.join(MODULES)}; may be given again")
    parser.add_argument("--count", type=int, help="how many trials, where the page has more; the page is not written")
    options = parser.parse_args(argv)
    lost = 0
    for name in options.only or MODULES:
        start = time.perf_counter()
        found = importlib.import_module(f"benchmarks.{MODULES[name]}").measure(options.count)
        lost += len(found.lost)
        text = describe(name, found, time.perf_counter() - start)
        print(f"## {name}\n\n{text}\n", flush=True)
        if options.count is None:
            write_block(PAGE, f"fuzz.trust {name}", text)
            write_block(PAGE, "fuzz.trust", sum_up())
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
