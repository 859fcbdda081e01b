"""Every claim tried against something that was not written for it, part by part; writes into docs/reliability.md.

    python -m benchmarks.fuzz.run                         # parts with a block on the page: twenty minutes on two cores
    python -m benchmarks.fuzz.run replay                  # one part; the others stay as they were measured last
    python -m benchmarks.fuzz.run replay --count 50       # a smaller round, printed and not kept
    python -m benchmarks.fuzz.run replay --only 100017    # one program, and where its two profiles differ
    python -m benchmarks.fuzz.run operators --samples 3   # a part that is printed, with figures that the page names

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
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.fuzz import refused_dtypes, torch_samples
from benchmarks.page import DOCS, Found, read_block, write_block

PAGE = "reliability.md"
#: Parts in the order of the page, each with the module whose `measure` finds what its block says.
MEASURED = {"versions": "coverage.matrix", "replay": "fuzz.replay_equality", "programs": "fuzz.programs"}
#: Parts that are printed.
TOLD: dict[str, Callable[[argparse.Namespace], bool]] = {
    **{part: partial(torch_samples.tell, part) for part in torch_samples.PARTS}, "refused-dtypes": refused_dtypes.tell}


def describe(name: str, found: Found, seconds: float) -> str:
    """A block: what was tried, when and where, its tables, and what did not hold."""
    tried = ", ".join(f"{count:,} {what}" for what, count in found.tried.items())
    lost = "".join(["\n\nDid not hold:\n\n", *(f"- {line}\n" for line in found.lost)]) if found.lost else ""
    return (f"{tried}; {len(found.lost)} did not hold. By `python -m benchmarks.fuzz.run {name}`, "
            f"{datetime.date.today():%d %B %Y}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{os.cpu_count()} cores, {seconds:.0f} s.\n\n{found.text.strip()}{lost}")


def sum_up() -> str:
    """The table at the top of the page, of what the blocks say first, each under the heading that it stands below."""
    page, rows = (DOCS / PAGE).read_text("utf-8"), []
    for name in MEASURED:
        title = re.findall("^## (.*)$", page.partition(f"<!-- fuzz.run {name} -->")[0], re.MULTILINE)[-1]
        tried, lost = re.findall(r"^(.*); (\d+) did not hold\.", read_block(PAGE, f"fuzz.run {name}"))[0]
        rows.append(f"| [{title}](#{title.lower().replace(' ', '-')}) | {tried} | {lost} |")
    return "\n".join(["| | tried | did not hold |", "|---|---:|---:|", *rows])


def measure(name: str, count: int | None) -> bool:
    """Print what a part finds, and write its block unless it is a smaller round. Returns whether all held."""
    start = time.perf_counter()
    found = importlib.import_module(f"benchmarks.{MEASURED[name]}").measure(count)
    text = describe(name, found, time.perf_counter() - start)
    print(f"## {name}\n\n{text}\n", flush=True)
    if count is None:
        write_block(PAGE, f"fuzz.run {name}", text)
        write_block(PAGE, "fuzz.run", sum_up())
    return not found.lost


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz.run", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join([*MEASURED, *TOLD])}")
    parser.add_argument("--count", type=int, help="how many trials, where the page has more; the page is not written")
    parser.add_argument("--only", action="append", metavar="WHICH",
                        help="a program by its number, or what has this text in its name; may be given again")
    parser.add_argument("--samples", type=int, metavar="N", help="of each operator")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of calls that are refused, and of modules")
    parser.add_argument("--differing", action="store_true", help="a line for each that differs, also for known ones")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - {*MEASURED, *TOLD}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join([*MEASURED, *TOLD])}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    holds = True
    for name in options.parts or MEASURED:
        if name in TOLD:
            holds &= TOLD[name](options)
        elif options.only:
            holds &= importlib.import_module(f"benchmarks.{MEASURED[name]}").show(map(int, options.only))
        else:
            holds &= measure(name, options.count)
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
