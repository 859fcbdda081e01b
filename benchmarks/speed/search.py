"""Processor seconds of `analyzer search`, until the best ten are known and with advice; writes into docs/search.md.

    python -m benchmarks.speed.search [8b] [70b] [1b] [--save FOLDER] [--against FOLDER]

Each search runs in a process of its own, on one core. ``--save`` keeps its best ten in FOLDER, ``--against`` compares
them with those that another version kept there: which differ, and how far the seconds and bytes of the others are off.
With searches named nothing is written into the page.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.page import describe_machine, markdown, processor_seconds, publish


class Case(NamedTuple):
    target: str
    cluster: str
    options: dict[str, Any]


CASES = {"1b": Case("llama_1b", "8xh100", {"global_batch": 64, "sequence": 2048}),
         "8b": Case("hf:llama-3-8b", "64xh100", {"global_batch": 512, "sequence": 8192}),
         "70b": Case("hf:llama-3-70b", "512xh100", {"global_batch": 1024, "sequence": 8192})}


def run(name: str) -> dict[str, Any]:
    """A search in this process, which has done nothing before: what it found, and processor seconds with imports."""
    from analyzer.parallel import search
    from analyzer.tools.search import search as module

    case, known = CASES[name], list[float]()
    list_changes = vars(module)["list_changes"]

    def note(searcher: module.Searcher) -> Any:
        known.append(processor_seconds(resource.RUSAGE_SELF))
        return list_changes(searcher)

    module.list_changes = note  # type: ignore[attr-defined]
    began = time.perf_counter()
    found = search(case.target, case.cluster, **case.options)
    return {"layouts": found.rows(), "counts": dict(found.counts), "ranks": found.profiles, "best_seconds": known[0],
            "seconds": processor_seconds(resource.RUSAGE_SELF), "wall_seconds": time.perf_counter() - began}


def compare(found: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> str:
    """Whether the best are the same layouts in the same order, and how far their figures are off."""
    pairs = [(new, old) for new, old in zip(found, before) if new["layout"] == old["layout"]]
    off = {name: max((abs(new[name] / old[name] - 1) for new, old in pairs), default=0.0)
           for name in ("step_seconds", "needed_bytes")}
    return (f"{len(pairs)} of {len(before)} the same; seconds within {off['step_seconds']:.2%}, "
            f"bytes within {off['needed_bytes']:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[], metavar="CASE")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.cases or CASES:
        case = CASES[name]
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(run, (name, ))
        if given.save is not None:
            (given.save / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
        if given.against is not None:
            before = json.loads((given.against / f"{name}.json").read_text(encoding="utf-8"))
            print(f"{name}: {compare(found['layouts'], before['layouts'])}", flush=True)
        rows.append([f"{case.target} on {case.cluster}", f"{found['counts']['layouts']:,}",
                     f"{found['counts']['composed']:,}", f"{found['ranks']:,}", f"{found['best_seconds']:.0f}",
                     f"{found['seconds']:.0f}", found["layouts"][0]["layout"]])
    table = markdown(["search", "layouts", "composed", "ranks", "best ten, s", "with advice, s", "best"], rows)
    publish("search.md", {"speed.search": f"{table}\n\n{describe_machine()}."}, not given.cases)


if __name__ == "__main__":
    main()
