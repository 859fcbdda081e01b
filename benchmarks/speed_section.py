"""Sections of the speed benchmark that set profiles beside other runs: warm, cold, depth, reuse, memory, imports."""
from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import fields

from analyzer import Profile, profile

from .page import markdown
from .replay_equality import ABOUT_REPLAY
from .speed_case import REUSE_CASES
from .speed_contender import OTHERS, OURS, Prepared, prepare
from .speed_process import run_worker, time_imports
from .speed_table import CPU, MIB, Report, Timing, format_ratio, median_known, ratio, say, slope, time_in_turn


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
    report.add("ratios", markdown(["model", "bare, ms", *(name for name, _, _ in pairs)], rows))


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
    report.add("others", f"Rounds: {rounds}; in the first, nothing is warm.", markdown(["model", *names], rows),
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
    report.add("cold", markdown(["model", "bare, ms", *columns], rows))


DEPTHS = (16, 64, 128)


def measure_depth(report: Report) -> None:
    """What a further identical layer costs."""
    pairs = [("profile", "bare", 0.1), ("profile + AdamW", "bare + AdamW", 0.15)]
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
    columns = [f"{layers} layers" for layers in DEPTHS]
    report.add("depth", markdown(["", *columns, "each further layer", "at most"], rows))


def compare_profiles(one: Profile, other: Profile) -> list[str]:
    """The fields in which two profiles differ."""
    return [f.name for f in fields(Profile) if f.name not in ABOUT_REPLAY
            and getattr(one, f.name) != getattr(other, f.name)]


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
    report.add("reuse", markdown(["model", "profiles", "time to that of reuse=False"], rows, 2))


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
    report.add("memory", markdown(["model", "run", "before", "peak"], rows, 2),
               markdown(["", "operator calls a layer", "bytes a call"], cells))


def measure_llama(report: Report) -> None:
    """The 405-billion-parameter Llama, from the callable that builds it."""
    lines = {what: run_worker("memory", "llama_405b", what)[0] for what in ("bare", "profile")}
    ours, bare = lines["profile"], lines["bare"]
    report.targets += [("405-billion-parameter Llama: seconds", ours["seconds"], None, 2.0),
                       ("405-billion-parameter Llama: resident MB", ours["peak_bytes"] / 1e6, None, 700.0)]
    rows = [[what, f"{line['seconds']:.2f}", f"{line['peak_bytes'] / 1e6:.0f}"] for what, line in lines.items()]
    rows.append(["profile / bare", *(format_ratio(ours[name] / bare[name]) for name in ("seconds", "peak_bytes"))])
    report.add("llama", markdown(["", "seconds", "resident MB at the peak"], rows))


def measure_imports(report: Report) -> None:
    """What ``import analyzer`` adds to ``import torch``."""
    found = time_imports(max(5, report.rounds))
    adds = [statistics.median(ours[i] / alone[i] for alone, ours in found) for i in (0, 1)]
    report.targets.append(("import of analyzer beyond torch, to import of torch", adds[0], adds[1], 0.15))
    seconds = statistics.median(ours[0] for _, ours in found)
    report.add(
        "import",
        f"In a fresh process that has imported torch, `import analyzer` takes {seconds:.3f} s more: "
        f"{format_ratio(adds[0])} of the time that "
        f"`import torch` took (processor time: {format_ratio(adds[1])}).")
