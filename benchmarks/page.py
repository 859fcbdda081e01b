"""What benchmarks share: their command lines and processes, tables, and the blocks of docs/ that they write.

The words around a block stand in the page alone. A table with a row a case is a data file beside the benchmark, which
a page of docs/cases/ shows when the site is built (docs/extension/cases.py).
"""
from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import re
import resource
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tabulate
import torch

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
#: A table of cases in a text that is to be written: the name of its file, its lines, and notes on them below.
_CASES = re.compile(r"<!-- cases (\w+)/(\w+) -->\n((?:\|[^\n]*(?:\n|$))+)"
                    r"(?:((?:(?!<!-- cases ).)*?)\n<!-- /cases -->\n?)?", re.DOTALL)
Item = TypeVar("Item")
Result = TypeVar("Result")


class Found(NamedTuple):
    """What one kind of trial found: how many of what were tried, a line for each that did not hold, and tables."""

    tried: Mapping[str, int]
    lost: Sequence[str]
    text: str


def read_block(page: str, name: str) -> str:
    """What stands between ``<!-- name -->`` and ``<!-- /name -->`` in a page. Raises ValueError where either lacks."""
    return _split(page, name)[1].strip()


def write_block(page: str, name: str, text: str) -> None:
    """Put a text in the place of what stands between the marks of a block; its tables of cases go into their files."""
    before, _, after = _split(page, name)
    (DOCS / page).write_text(f"{before}\n\n{_CASES.sub(_keep_cases, text).strip()}\n\n{after}", "utf-8")


def _keep_cases(table: re.Match[str]) -> str:
    """Write a table of cases into its file, a row a line. Returns what stands in its place: where it is shown."""
    folder, name, text, below = table.groups()
    headers, _, *rows = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                         for line in text.splitlines()]
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    _cases_file(f"{folder}/{name}").write_text(
        f'{{"headers": {json.dumps(headers, ensure_ascii=False)}, "below": {json.dumps((below or "").strip())},\n'
        f' "rows": [\n {lines}\n]}}\n', "utf-8")
    return f"[Every row](cases/{folder}.md#{name.replace('_', '-')}).\n"


def read_cases(name: str) -> list[list[str]]:
    """The rows of a table of cases, of its name as "accuracy/memory"."""
    rows: list[list[str]] = json.loads(_cases_file(name).read_text("utf-8"))["rows"]
    return rows


def _cases_file(name: str) -> Path:
    folder, _, table = name.partition("/")
    return ROOT / "benchmarks" / folder / "tables" / f"{table}.json"


def _split(page: str, name: str) -> tuple[str, str, str]:
    """What stands before a block, with its mark, in it, and behind it, with its other mark."""
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, begins, rest = (DOCS / page).read_text("utf-8").partition(first)
    inside, ends, after = rest.partition(last)
    if not begins or not ends:
        raise ValueError(f"docs/{page} has no block {name!r}: write {first} and {last} where it is to stand")
    return before + begins, inside, ends + after


def publish(page: str, blocks: Mapping[str, str], is_whole: bool) -> None:
    """Print blocks, and write those of a whole run into their page."""
    for name, text in blocks.items():
        print(re.sub("<!-- /?cases.*?-->\n?", "", text) + "\n", flush=True)
        if is_whole:
            write_block(page, name, text)


def make_parser(doc: str | None, what: str = "predict the rows whose id") -> argparse.ArgumentParser:
    """Of a command that runs rows in processes, all of them or those that are named."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{what} contains one of these; nothing is written then")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser


def parse_parts(doc: str | None, what: str = "predict the rows whose id") -> argparse.Namespace:
    return make_parser(doc, what).parse_args()


def is_named(name: str, parts: Sequence[str]) -> bool:
    """Whether one of ``parts`` is in a name; with none, every name is meant.

    >>> is_named("gpt2-train", ["bert", "train"]), is_named("gpt2-train", ["bert"]), is_named("gpt2-train", [])
    (True, False, True)
    """
    return not parts or any(part in name for part in parts)


def map_apart(function: Callable[[Item], Result], items: Iterable[Item], processes: int, chunksize: int = 1,
              tasks: int | None = None) -> list[Result]:
    """A function of each item in processes of their own, each of so many tasks at most; of one process, in this one."""
    if processes == 1:
        return [function(item) for item in items]
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=tasks) as pool:
        return pool.map(function, items, chunksize)


def in_fork(work: Callable[[], Result]) -> Result:
    """What ``work`` gives in a copy of this process. Raises RuntimeError where that ends without an answer."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(work()))
    process.start()
    sender.close()
    try:
        answer: Result = receiver.recv()
        return answer
    except EOFError:
        raise RuntimeError("a forked process ended without an answer") from None
    finally:
        process.join()


def processor_seconds(*who: int) -> float:
    """Of this process (`resource.RUSAGE_SELF`), or of those that it waited for (`resource.RUSAGE_CHILDREN`)."""
    return sum(sum(resource.getrusage(one)[:2]) for one in who)


def describe_run(seconds: float) -> str:
    """When a prediction was made, by what, and in which time."""
    return (f"On {datetime.date.today()} with PyTorch {torch.__version__} on a machine without a GPU, "
            f"in {seconds:.0f} seconds")


def describe_machine() -> str:
    """Versions, processor, cores and memory, and how busy it was."""
    model, info = platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        model = next((line.split(":", 1)[1].strip() for line in info.read_text().splitlines()
                      if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (f"Python {platform.python_version()}, torch {torch.__version__}; {model}, {os.cpu_count()} cores, "
            f"{memory:.0f} GiB; load average at the end {os.getloadavg()[0]:.1f}, one thread used")


def markdown(headers: Sequence[str], rows: Iterable[Sequence[object]], text: int = 1, cases: str = "") -> str:
    """A Markdown table: the first columns are ``text``, all others figures; ``cases`` names its file, of a row a case.

    >>> print(markdown(["model", "ratio"], [["a|b", "0.5"]]))
    | model   |   ratio |
    |---------|---------|
    | a\\|b    |     0.5 |
    """
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    align = ["left"] * text + ["right"] * (len(headers) - text)
    return (f"<!-- cases {cases} -->\n" if cases else "") + str(tabulate.tabulate(
        cells, headers, tablefmt="github", disable_numparse=True, colalign=align if cells else None))


def end_cases(*below: str) -> str:
    """What ends a table of cases: notes and sources that go into its file with it."""
    return "\n".join(["", *(f"{text}\n" for text in below if text), "<!-- /cases -->"])


def percent(part: float | None, digits: int = 1, signed: bool = False) -> str:
    """A part of one as text.

    >>> percent(0.071), percent(-0.02, 2, signed=True), percent(None)
    ('7.1 %', '-2.00 %', '-')
    """
    return "-" if part is None else f"{100 * part:{'+' if signed else ''}.{digits}f} %"


def quantile(errors: Sequence[float], share: float) -> float:
    """The error that ``share`` of all do not exceed.

    >>> quantile([0.1, 0.4, 0.2, 0.3], 0.5)
    0.2
    """
    return sorted(errors)[max(0, -(-round(share * 1000) * len(errors) // 1000) - 1)]


def correlate_ranks(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's coefficient, between the first of each pair and the second.

    >>> correlate_ranks([(1.0, 10.0), (2.0, 11.0), (3.0, 90.0)])
    1.0
    """
    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return sorted(range(len(values)), key=order.__getitem__)

    return statistics.correlation(*(ranks([pair[place] for pair in pairs]) for place in (0, 1)))


def known(value: Item | None) -> Item:
    """A figure that must be known. Raises AssertionError where it is not."""
    assert value is not None, "a figure is not known"
    return value


def keep(into: list[Any]) -> Callable[[Any], Any]:
    """A profiler that keeps the log of a profile, and tells nothing."""
    from analyzer.profilers.annotation import Annotation

    def profiler(log: Any) -> Annotation:
        into.append(log)
        return Annotation()

    return profiler
