"""How long a profile takes, set against running the model on meta tensors and against what else answers the same
questions.

    python -m benchmarks.speed                          # everything, about ten minutes on two cores; writes docs/performance.md
    python -m benchmarks.speed --only ratios,depth      # some sections, printed
    python -m benchmarks.speed --only ratios --models resnet50,bert_base --rounds 9

Times are compared within one round of one process, never between runs. Packages that are not installed are skipped.
"""
from __future__ import annotations

import argparse
import compileall
import cProfile
import datetime
import gc
import os
import platform
import pstats
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch  # noqa: E402

from analyzer import Profile, profile  # noqa: E402
from analyzer.replay import block_reuse  # noqa: E402
from analyzer.replay.optimizer import replay as optimizer_replay  # noqa: E402
from analyzer.replay.optimizer.capture import PROTOTYPES  # noqa: E402

from .speed_case import CASES, REUSE_CASES, SpeedCase, find_case, import_libraries, opt  # noqa: E402
from .speed_contender import OTHERS, OURS, TELLS, Prepared, prepare  # noqa: E402
from .speed_process import ROOT, run_worker, time_imports  # noqa: E402
from .speed_table import Timing, format_ratio, judge, markdown, median_known, ratio, slope, time_in_turn  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
MIB = 2**20
CPU = "cpu_seconds"
Judged = tuple[str, float | None, float | None, float]
"""What a target says, the figure by the clock, by processor time (None where it is no time), the limit."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Report:
    """The sections that ran, and the targets that they answer."""

    def __init__(self, cases: Sequence[SpeedCase], rounds: int) -> None:
        self.cases, self.rounds = cases, rounds
        self.sections: list[str] = []
        self.targets: list[Judged] = []
        self.failed: list[str] = []

    def add(self, title: str, *blocks: str) -> None:
        self.sections.append("\n\n".join([f"## {title}", *blocks]))


# -- sections ----------------------------------------------------------------------------------------------------


def measure_ratios(report: Report) -> None:
    """Warm runs of this package against bare meta runs."""
    pairs = [("profile", "bare", 0.5), ("profile, all read", "bare", None), ("profile + AdamW", "bare + AdamW", 0.6),
             ("trace + profile", "bare", 0.8), ("FlopCounterMode", "bare", None)]
    rows: list[list[str]] = []
    wall: dict[str, list[float]] = {name: [] for name, _, _ in pairs}
    cpu: dict[str, list[float]] = {name: [] for name, _, _ in pairs}
    for case in report.cases:
        on = Prepared(case)
        found = {name: prepare(name, on) for name in OURS}
        broken = {name: why for name, why in found.items() if isinstance(why, str)}
        if broken:
            raise RuntimeError(f"{case.name}: {broken}")
        timings = time_in_turn(found, report.rounds)  # type: ignore[arg-type]  # all are functions
        for name, under, _ in pairs:
            wall[name].append(ratio(timings[name], timings[under]))
            cpu[name].append(ratio(timings[name], timings[under], CPU))
        bare = statistics.median(t.wall_seconds for t in timings["bare"])
        rows.append([case.name, f"{bare * 1e3:.0f}", *(format_ratio(wall[name][-1]) for name, _, _ in pairs)])
        say(f"  {rows[-1]}")
    rows.append(["**median**", "", *(f"**{format_ratio(statistics.median(wall[name]))}**" for name, _, _ in pairs)])
    rows.append(["median, processor time", "", *(format_ratio(statistics.median(cpu[name])) for name, _, _ in pairs)])
    report.targets += [(f"{name}, warm, to {under}", statistics.median(wall[name]), statistics.median(cpu[name]), limit)
                       for name, under, limit in pairs if limit is not None]
    report.add(
        "Warm",
        "Each figure is a time divided by that of the bare step on meta tensors in the same round: forward, loss and backward "
        "(`profile`, `trace + profile`, `FlopCounterMode`), or these and an eager AdamW step whose states exist (`profile + AdamW`). "
        "`trace + profile` is `symbolic_trace` and `symbolic_profile`. A profile covers two steps, the first and a later one. It has its sums "
        "at once (FLOPs, bytes, seconds, phases, peaks); rows (nodes, modules, operators, the memory timeline) are worked out when they are read, "
        "which `profile, all read` includes.", markdown(["model", "bare, ms", *(name for name, _, _ in pairs)], rows))


def measure_others(report: Report) -> None:
    """The other packages, which are slower or tell less."""
    names = ["profile", "FlopCounterMode", *OTHERS]
    rows, reasons, columns = [], Counter[str](), {name: [] for name in names}  # type: ignore[var-annotated]
    rounds = max(1, report.rounds // 3)
    for case in report.cases:
        on = Prepared(case)
        found = {name: prepare(name, on) for name in ("bare", *names)}
        for name, why in found.items():
            if isinstance(why, str):
                reasons[f"{name}: {why}"] += 1
        timings = time_in_turn({name: run for name, run in found.items() if not isinstance(run, str)}, rounds)
        for name in names:
            columns[name].append(ratio(timings[name], timings["bare"]) if name in timings else None)
        rows.append([case.name, *(format_ratio(columns[name][-1]) for name in names)])
        say(f"  {rows[-1]}")
    rows.append(["**median**", *(f"**{format_ratio(median_known(columns[name]))}**" for name in names)])
    skipped = "\n".join(f"- {why} ({count} of {len(report.cases)} models)" for why, count in reasons.items())
    report.add(
        "Beside others",
        "Time divided by that of the bare step (forward, loss, backward on meta tensors). What each tells: " +
        "; ".join(f"{name}: {TELLS[name]}"
                  for name in names if name in TELLS) + ". MemTracker runs under `FakeTensorMode`. "
        f"Rounds: {rounds}; in the first, nothing is warm.", markdown(["model", *names], rows),
        *([f"Where there is no figure:\n\n{skipped}"] if skipped else []))


def measure_cold(report: Report) -> None:
    """First runs in a process."""
    rounds = max(2, report.rounds // 2)
    lines = run_worker("cold", str(rounds), *(case.name for case in report.cases))
    rows, columns, cpu = [], {"profile": [], "trace + profile": []}, []  # type: ignore[var-annotated]
    for case in report.cases:
        timings = {
            what: [Timing(*line["timing"]) for line in lines if (line["model"], line["what"]) == (case.name, what)]
            for what in ("bare", *columns)
        }
        for what, found in columns.items():
            found.append(ratio(timings[what], timings["bare"]))
        cpu.append(ratio(timings["profile"], timings["bare"], CPU))
        rows.append([case.name, f"{statistics.median(t.wall_seconds for t in timings['bare']) * 1e3:.0f}",
                     *(format_ratio(found[-1]) for found in columns.values())])
    rows.append(["**median**", "", *(f"**{format_ratio(statistics.median(found))}**" for found in columns.values())])
    report.targets.append(
        ("profile, cold, to bare", statistics.median(columns["profile"]), statistics.median(cpu), 1.0))
    report.add(
        "Cold",
        "The first run in a process that has imported everything, built the model and run nothing, against the first bare step in "
        "another such process.", markdown(["model", "bare, ms", *columns], rows))


DEPTHS = (16, 64, 128)


def measure_depth(report: Report) -> None:
    """What a further identical layer costs."""
    pairs = [("profile", "bare", 0.1), ("profile + AdamW", "bare + AdamW", 0.2)]
    timings: dict[str, dict[int, list[Timing]]] = {
        name: {layers: [] for layers in DEPTHS} for pair in pairs for name in pair[:2]
    }
    for line in run_worker("depth", str(max(5, report.rounds)), *map(str, DEPTHS)):
        timings[line["what"]][line["layers"]].append(Timing(*line["timing"]))
    rows = []
    for name, under, limit in pairs:
        each = [ratio(timings[name][layers], timings[under][layers]) for layers in DEPTHS]
        further, cpu = (statistics.median(a / b
                                          for a, b in zip(slope(timings[name], field), slope(timings[under], field)))
                        for field in ("wall_seconds", CPU))
        rows.append([
            f"{name} / {under}", *(format_ratio(value) for value in each), f"**{format_ratio(further)}**",
            format_ratio(limit)
        ])
        report.targets.append((f"each further OPT layer, {name} to {under}", further, cpu, limit))
        say(f"  {rows[-1]}")
    report.add(
        "Depth",
        f"An OPT of identical layers (hidden 1024, 16 heads), from {DEPTHS[0]} to {DEPTHS[-1]} of them: the whole, and what each "
        "further layer costs beside its own bare step. In a process of its own: what others left scattered in memory slows Python.",
        markdown(["", *(f"{layers} layers" for layers in DEPTHS), "each further layer", "at most"], rows))


def measure_width(report: Report) -> None:
    """What wider layers cost: nothing is computed, so nothing."""
    widths = (256, 1024, 4096, 16384)
    runs = {}
    for width in widths:
        run = prepare("profile", Prepared(SpeedCase("opt", opt(12, hidden=width), tokens=(1, 128))))
        if isinstance(run, str):
            raise RuntimeError(f"OPT of width {width}: {run}")
        runs[str(width)] = run
    timings = time_in_turn(runs, max(3, report.rounds // 2))
    report.add("Width", f"`profile` of a 12-layer OPT by hidden size, to that of size {widths[0]}.",
               markdown(["hidden size", *map(str, widths)],
                        [["time", *(format_ratio(ratio(timings[str(w)], timings[str(widths[0])])) for w in widths)]]))


def compare_profiles(one: Profile, other: Profile) -> list[str]:
    """The fields in which two profiles differ."""
    return [f.name for f in fields(Profile) if getattr(one, f.name) != getattr(other, f.name)]


def measure_reuse(report: Report) -> None:
    """Whether reuse of blocks changes anything, and what it saves."""
    rows, wrong = [], 0
    for case in REUSE_CASES:
        on = Prepared(case)

        def run(reuse: bool, on: Prepared = on) -> Profile:
            return profile(on.model, args=on.args, kwargs=on.kwargs, optimizer="adamw", reuse=reuse)

        different = compare_profiles(run(True), run(False))
        timings = time_in_turn({"with": lambda: run(True), "without": lambda: run(False)}, max(2, report.rounds // 2))
        wrong += bool(different)
        verdict = f"DIFFERENT: {', '.join(different)}" if different else "equal"
        rows.append([case.name, verdict, format_ratio(ratio(timings["with"], timings["without"]))])
        say(f"  {rows[-1]}")
    report.targets.append(("models whose profile is another with `reuse=False`", float(wrong), None, 0.0))
    report.add(
        "Reuse of blocks",
        "`profile(optimizer=\"adamw\")` with `reuse=True` and `reuse=False`: every field of the two profiles is compared.",
        markdown(["model", "profiles", "time to that of reuse=False"], rows))


class _Block(torch.nn.Module):
    """A residual block of some layers."""

    def __init__(self, leaves: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(leaves - 1)))
        self.last = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.layers(x))


def _time_blocks(report: Report, leaves_of_a_block: Iterable[int], saved: Callable[[int, int], int],
                 reusing: Callable[[torch.nn.Module, torch.Tensor],
                                   None], running: Callable[[torch.nn.Module, torch.Tensor], None]) -> str:
    """A table of the time of ``reusing(model, x)`` to that of ``running(model, x)``, after how many leaves are
    ``saved(leaves, blocks)``.
    """
    rows, counts = [], (3, 4, 6, 10, 18)
    for leaves in leaves_of_a_block:
        cells = []
        for blocks in counts:
            given = torch.nn.Sequential(*(_Block(leaves) for _ in range(blocks))), torch.empty(8, 64)
            reusing(*given)
            timings = time_in_turn({"reusing": partial(reusing, *given), "running": partial(running, *given)},
                                   2 * max(2, report.rounds))
            cells.append(f"{saved(leaves, blocks)}: {format_ratio(ratio(timings['reusing'], timings['running'], CPU))}")
        rows.append([str(leaves), *cells])
        say(f"  {rows[-1]}")
    return markdown(["leaves in a block", f"{counts[0]} blocks", *map(str, counts[1:])], rows)


def measure_blocks(report: Report) -> None:
    """From how many leaves on it pays to try a block out: where `LEAST_LEAVES_SAVED` comes from."""
    def profile_from(least: float, model: torch.nn.Module, x: torch.Tensor) -> None:
        with mock.patch.object(block_reuse, "LEAST_LEAVES_SAVED", least):
            profile(model, args=(x,))

    table = _time_blocks(report, (2, 4, 8, 16), lambda leaves, blocks: (blocks - 2) * leaves, partial(profile_from, 0),
                         partial(profile_from, float("inf")))
    report.add(
        "When a block is tried out",
        "Time of a profile in which one block is tried out and the others are played, to that of one in which all are "
        "run (processor time), by leaf modules in a block and number of blocks. Before each ratio stands how many leaves the blocks beyond the second "
        f"hold: above {block_reuse.LEAST_LEAVES_SAVED} blocks are tried out (`LEAST_LEAVES_SAVED` in `analyzer/replay/block_reuse.py`).",
        table)


class _Parameters(torch.nn.Module):
    """So many parameters of so many kinds, each of which has a gradient."""

    def __init__(self, count: int, kinds: int) -> None:
        super().__init__()
        shapes = [(1,) * i + (8,) for i in range(kinds)]  # dimensions of size 1 tell kinds apart
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(shapes[i % kinds])) for i in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(parameter.sum() for parameter in self.all)


def measure_updates(report: Report) -> None:
    """From how many parameters on it pays to try an optimizer out: where `FEWEST_TIMES` comes from."""
    rows = []
    for kinds in (1, 2, 4, 8):
        cells = []
        for times in (1, 2, 4, 8, 16):
            model, x = _Parameters(times * kinds * PROTOTYPES, kinds), torch.empty(())

            def run(least: float, model: torch.nn.Module = model, x: torch.Tensor = x) -> None:
                before, optimizer_replay.FEWEST_TIMES = optimizer_replay.FEWEST_TIMES, least  # type: ignore[assignment]
                try:
                    profile(model, args=(x,), optimizer="adamw")
                finally:
                    optimizer_replay.FEWEST_TIMES = before

            run(0)
            timings = time_in_turn({"tried": lambda: run(0), "run": lambda: run(float("inf"))},
                                   2 * max(2, report.rounds))
            cells.append(format_ratio(ratio(timings["tried"], timings["run"], CPU)))
        rows.append([str(kinds), *cells])
        say(f"  {rows[-1]}")
    report.add(
        "When an optimizer is tried out",
        "Time of a profile in which AdamW is tried out on prototypes of each kind of parameter and played, to "
        f"that of one in which it is run (processor time), by the number of kinds and of parameters for each of the {PROTOTYPES} "
        f"prototypes of a kind. Above {optimizer_replay.FEWEST_TIMES} it is tried out (`FEWEST_TIMES` in `analyzer/replay/optimizer/replay.py`).",
        markdown(["kinds", "1", "2", "4", "8", "16"], rows))


def measure_memory(report: Report) -> None:
    """Resident memory, and memory of the records."""
    names = [case.name for case in report.cases if case.name in ("resnet152", "opt_350m")]
    lines = [run_worker("memory", name, what)[0] for name in names for what in ("bare", "profile", "whole")]
    rows = [[
        line["model"], {"whole": "profile, reuse=False"}.get(line["what"], line["what"]),
        f"{line['before_bytes'] / MIB:.0f}", f"{line['peak_bytes'] / MIB:.0f}"
    ] for line in lines]
    records = run_worker("records", "16", "64")
    cells = []
    for reuse in (True, False):
        few, many = (line for line in records if line["reuse"] == reuse)
        calls = many["calls"] - few["calls"]
        cells.append([f"reuse={reuse}", f"{calls / 48:.0f}", f"{(many['peak_bytes'] - few['peak_bytes']) / calls:.0f}"])
    report.targets.append(("bytes of memory per operator call, `reuse=False`", float(cells[1][2]), None, 500.0))
    report.add(
        "Memory",
        "Resident MiB of a fresh process, before its first step (libraries imported, the model built) and at its peak.",
        markdown(["model", "run", "before", "peak"], rows),
        "What a further layer of an OPT adds to the most that Python holds during a profile (tracemalloc, from 16 to 64 layers). "
        "Two steps are in the log.", markdown(["", "operator calls a layer", "bytes a call"], cells))


def measure_llama(report: Report) -> None:
    """The 405-billion-parameter Llama, from the callable that builds it."""
    lines = {what: run_worker("memory", "llama_405b", what)[0] for what in ("bare", "profile")}
    ours, bare = lines["profile"], lines["bare"]
    report.targets += [("405-billion-parameter Llama: seconds", ours["seconds"], None, 5.0),
                       ("405-billion-parameter Llama: resident MB", ours["peak_bytes"] / 1e6, None, 700.0)]
    rows = [[what, f"{line['seconds']:.2f}", f"{line['peak_bytes'] / 1e6:.0f}"] for what, line in lines.items()]
    rows.append(["profile / bare", *(format_ratio(ours[name] / bare[name]) for name in ("seconds", "peak_bytes"))])
    report.add(
        "A 405-billion-parameter Llama",
        "Built by a callable and profiled for one training step at 1×4096 in a fresh process "
        "(building included, imports not), against building it on meta and one bare step.",
        markdown(["", "seconds", "resident MB at the peak"], rows))


def measure_imports(report: Report) -> None:
    """What ``import analyzer`` adds to ``import torch``."""
    found = time_imports(max(5, report.rounds))
    adds = [statistics.median(ours[i] / alone[i] for alone, ours in found) for i in (0, 1)]
    report.targets.append(("import of analyzer beyond torch, to import of torch", adds[0], adds[1], 0.15))
    seconds = statistics.median(ours[0] for _, ours in found)
    report.add(
        "Import",
        f"In a fresh process that has imported torch, `import analyzer` takes {seconds:.3f} s more: {format_ratio(adds[0])} of the time that "
        f"`import torch` took (processor time: {format_ratio(adds[1])}).")


ROOMS = ("meta", "record", "memory", "fx", "profilers", "hardware")


def room_of(path: str) -> str:
    """Where the time of a function counts: a room of the package, torch, the model's library, or a built-in function.

    >>> room_of("/x/analyzer/meta/dispatch.py"), room_of("/y/torch/nn/modules/module.py"), room_of("~"), room_of("/y/torchvision/models/resnet.py")
    ('analyzer/meta', 'torch', 'built-in functions', 'model libraries')
    """
    parts = Path(path).parts
    if path == "~":
        return "built-in functions"
    if "analyzer" in parts:
        room = parts[parts.index("analyzer") + 1]
        return f"analyzer/{room}" if room in ROOMS else "analyzer, other"
    if "torch" in parts:
        return "torch"
    return "model libraries" if {"torchvision", "transformers"} & set(parts) else "Python"


def measure_where(report: Report) -> None:
    """Where the time of a profile goes, by cProfile."""
    watch = cProfile.Profile()
    for case in report.cases:
        on = Prepared(case)
        run = prepare("profile", on)
        assert not isinstance(run, str), run
        gc.collect()
        watch.runcall(run)
    rooms: Counter[str] = Counter()
    functions: list[tuple[float, int, str]] = []
    for (path, line, name), (_, calls, own, _, _) in pstats.Stats(watch).stats.items():  # type: ignore[attr-defined]
        rooms[room_of(path)] += own
        where = name if path == "~" else f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"
        functions.append((own, calls, where))
    whole = sum(rooms.values())
    share = [[room, f"{own / whole:.1%}"] for room, own in rooms.most_common()]
    top = [[f"`{where}`", f"{own / whole:.1%}", f"{calls}"]
           for own, calls, where in sorted(functions, reverse=True)[:20]]
    report.add(
        "Where the time goes",
        f"`cProfile` over one warm `profile()` of each of the {len(report.cases)} models: the share of time "
        "inside functions of each room themselves (measuring makes calls dearer than they are).",
        markdown(["room", "share"], share), markdown(["function", "share", "calls"], top))


SECTIONS: dict[str, Callable[[Report], None]] = {
    "ratios": measure_ratios,
    "others": measure_others,
    "cold": measure_cold,
    "depth": measure_depth,
    "width": measure_width,
    "reuse": measure_reuse,
    "blocks": measure_blocks,
    "updates": measure_updates,
    "memory": measure_memory,
    "llama": measure_llama,
    "import": measure_imports,
    "where": measure_where,
}
SECTION_FAILED = "{} could not be measured"
# Others last: some leave torch patched.
ORDER = [name for name in SECTIONS if name != "others"] + ["others"]


# -- the page ----------------------------------------------------------------------------------------------------


def describe_machine() -> str:
    """Processor, cores and memory, and how busy it was."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next((line.split(":", 1)[1].strip()
                      for line in info.read_text().splitlines() if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB; load average at the end {load:.1f}, one thread used"


def write_page(report: Report, command: str) -> str:
    """The whole page."""
    targets = [[
        what,
        format_ratio(value) if value is None or value < 100 else f"{value:.0f}",
        format_ratio(cpu), f"{limit:g}",
        judge(value, limit)
    ] for what, value, cpu, limit in report.targets]
    head = (
        f"# Performance\n\nWritten by `{command}` on {datetime.date.today().isoformat()}: Python {platform.python_version()}, "
        f"torch {torch.__version__}; {describe_machine()}. No accelerator is used.\n\n"
        "All comparisons are made in one process and in turn, and figures are medians of ratios within a round, unless a section says otherwise; "
        "a busy machine lengthens both sides. Inputs are 8×3×224×224 images and 8×512 tokens, which change nothing: no data is computed."
    )
    return "\n\n".join([
        head, "## Targets\n\n" + markdown(["", "figure", "by processor time", "at most", ""], targets), *report.sections
    ]) + "\n"


def choose_sections(text: str) -> list[str]:
    """The sections that ``--only`` names, in the order they run."""
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in SECTIONS]
    if unknown:
        raise SystemExit(f"--only {text}: {unknown[0]!r} is none of {', '.join(SECTIONS)}")
    return [name for name in ORDER if not wanted or name in wanted]


def main(argv: Iterable[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="SECTIONS", help=f"of {', '.join(SECTIONS)} (default all)")
    parser.add_argument("--models", metavar="NAMES", help="some of the models")
    parser.add_argument("--rounds", type=int, default=5, help="times that warm runs are repeated (default 5)")
    parser.add_argument("--out", type=Path,
                        help="where the page goes (default docs/performance.md if everything runs, else the screen)")
    arguments = parser.parse_args(words)
    chosen = choose_sections(arguments.only)
    torch.set_num_threads(1)
    # as pip does for torch; PYTHONDONTWRITEBYTECODE would leave it out
    compileall.compile_dir(ROOT / "analyzer", quiet=1)
    import_libraries()
    cases = CASES if arguments.models is None else [find_case(name) for name in arguments.models.split(",")]
    report = Report(cases, arguments.rounds)
    for name in chosen:
        start = time.perf_counter()
        say(f"{name} ...")
        try:
            SECTIONS[name](report)
        except Exception as error:  # the time of the other sections is not lost for one
            traceback.print_exc()
            report.failed.append(name)
            report.add(SECTION_FAILED.format(name), f"{type(error).__name__}: {error}")
        say(f"  took {time.perf_counter() - start:.0f} s")
        gc.collect()
    page = write_page(report, " ".join(["python -m benchmarks.speed", *words]))
    out = arguments.out or (PAGE if chosen == ORDER and arguments.models is None else None)
    if out is None:
        print(page)
    else:
        out.write_text(page, encoding="utf-8")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
