"""How long a profile takes, set against running the model on meta tensors.

    python -m benchmarks.speed.profiles     # everything, ten minutes; writes docs/performance.md too
    python -m benchmarks.speed.profiles --only runs              # what people run
    python -m benchmarks.speed.profiles --only ratios,depth      # some sections
    python -m benchmarks.speed.profiles --only ratios --models resnet50,bert_base --rounds 9

Times are compared within one round of one process, never between runs.
"""
from __future__ import annotations

import argparse
import compileall
import datetime
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch  # noqa: E402

from benchmarks.page import ROOT, describe_machine, markdown, publish  # noqa: E402
from benchmarks.speed import section as section  # noqa: E402
from benchmarks.speed.case import CASES, import_libraries  # noqa: E402
from benchmarks.speed.devices import report_devices  # noqa: E402
from benchmarks.speed.runs import report_runs  # noqa: E402
from benchmarks.speed.timing import Report, format_ratio, judge, say  # noqa: E402

#: In the order in which they run.
SECTIONS: dict[str, Callable[[Report], None]] = {
    "runs": report_runs, "devices": report_devices, "ratios": section.report_ratios, "cold": section.report_cold,
    "depth": section.report_depth,
    "memory": section.report_memory,
    "llama": section.report_llama, "compile": section.report_compile, "import": section.report_imports,
    "overhead": section.report_overhead}


def format_targets(report: Report, command: str) -> str:  # how, when and where it was run, and what came of each target
    targets = [[what, format_ratio(value) if value is None or value < 100 else f"{value:.0f}", format_ratio(cpu),
                f"{limit:g}", judge(value, limit)] for what, value, cpu, limit in report.targets]
    return (f"By `{command}` on {datetime.date.today()}: {describe_machine()}.\n\n"
            + markdown(["", "figure", "by processor time", "at most", ""], targets))


def choose_sections(text: str) -> list[str]:  # the sections that ``--only`` names, in the order they run
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in SECTIONS]
    if unknown:
        raise SystemExit(f"--only {text}: {unknown[0]!r} is none of {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if not wanted or name in wanted]


def main(argv: Iterable[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="SECTIONS", help=f"of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--models", metavar="NAMES", help="some of the models")
    parser.add_argument("--rounds", type=int, default=5, help="times that warm runs are repeated (default 5)")
    arguments = parser.parse_args(words)
    chosen = choose_sections(arguments.only)
    torch.set_num_threads(1)
    # as pip does for torch; PYTHONDONTWRITEBYTECODE would leave it out
    compileall.compile_dir(ROOT / "analyzer", quiet=1)
    import_libraries()
    by_name = {case.name: case for case in CASES}
    names = arguments.models.split(",") if arguments.models else list(by_name)
    report = Report([by_name[name] for name in names], arguments.rounds)
    for name in chosen:
        start = time.perf_counter()
        say(f"{name} ...")
        try:
            SECTIONS[name](report)
        except Exception as error:  # the time of the other sections is not lost for one
            traceback.print_exc()
            report.failed.append(name)
            report.add(name, f"{type(error).__name__}: {error}")
        say(f"  took {time.perf_counter() - start:.0f} s")
        gc.collect()
    report.add("targets", format_targets(report, " ".join(["python -m benchmarks.speed.profiles", *words])))
    publish("performance.md", {f"speed.profiles {name}": text for name, text in report.sections.items()},
            chosen == list(SECTIONS) and names == list(by_name))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
