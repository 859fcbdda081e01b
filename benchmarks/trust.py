"""Every claim tried against something that was not written for it; writes docs/reliability.md.

    python -m benchmarks.trust                         # all sections, an hour or more on two cores
    python -m benchmarks.trust --only replay           # one section; the others stay as they were measured last
    python -m benchmarks.trust --only replay --count 50    # a smaller round, printed and not kept
    python -m benchmarks.trust --page                  # writes the page from what was measured last

Exits 1 where something did not hold.
"""
from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .page import ROOT
from .trust_section import Section, load_sections, run_section, save_section

PAGE = ROOT / "docs" / "reliability.md"
BY_HAND = "## Faults that were reported\n"  #: the part of the page that no section prints
#: Sections in the order of the page, each with the module whose `measure` makes it.
MODULES = {
    "versions": "trust_versions",
    "replay": "replay_equality",
    "storages": "trust_storages",
    "inputs": "trust_inputs",
    "long-use": "trust_long_use",
    "programs": "trust_programs",
    "coverage": "trust_coverage",
    "faults": "trust_faults",
}


def write_page(sections: dict[str, Section]) -> None:
    """Write docs/reliability.md: what was tried and lost in a table, each section, and what was written by hand."""
    _, heading, by_hand = PAGE.read_text().partition(BY_HAND)
    PAGE.write_text(make_page([sections[name] for name in MODULES if name in sections]) + "\n" + heading + by_hand)


def make_page(sections: Sequence[Section]) -> str:
    """The page in Markdown."""
    rows = [f"| [{s.title}](#{_anchor(s.title)}) | {_told(s)} | {len(s.lost)} |" for s in sections]
    parts = [f"## {s.title}\n\n{s.text.strip()}\n\n`{s.command}`, {s.where}.\n{_list_lost(s)}" for s in sections]
    return "\n".join([
        "# Reliability", "",
        "What was done to find an answer that is silently wrong, a state that is not given back, or an input that is",
        "not refused in words. The command under each section prints it; `python -m benchmarks.trust` prints all.",
        "",
        "| | tried | did not hold |", "|---|---:|---:|", *rows, "", *parts])


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def _told(section: Section) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in section.tried.items())


def _list_lost(section: Section) -> str:
    return "".join(["\nDid not hold:\n\n", *(f"- {line}\n" for line in section.lost)]) if section.lost else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure sections, print them, write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trust", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(MODULES), metavar="SECTION",
                        help=f"a section, of: {', '.join(MODULES)}; may be given again")
    parser.add_argument("--count", type=int, help="how many trials, where the page has more; the page is not written")
    parser.add_argument("--page", action="store_true", help="measure nothing, and write the page again")
    options = parser.parse_args(argv)
    lost = 0
    for name in () if options.page else options.only or MODULES:
        measure = importlib.import_module(f".{MODULES[name]}", __package__).measure
        section = run_section(measure, options.count, f"python -m benchmarks.trust --only {name}")
        print(f"{section.title}: {_told(section)}; {len(section.lost)} did not hold; {section.seconds:.0f} s")
        print("".join(f"  {line}\n" for line in section.lost), end="", flush=True)
        lost += len(section.lost)
        if options.count is None:
            save_section(section)
    if options.count is None:
        write_page(load_sections())
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
