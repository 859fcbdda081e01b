"""Sections of the speed benchmark: profiles beside bare steps (warm, cold, by depth), memory, what measuring takes."""
from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

from analyzer.tools.runtime import FlopsProfiler
from analyzer.zoo import MODELS
from benchmarks.page import markdown
from benchmarks.speed.case import CONTENDERS, Prepared, Run, prepare
from benchmarks.speed.timing import (
    CPU,
    MIB,
    Report,
    apart,
    format_ratio,
    measure_cold,
    measure_compiled,
    measure_depth,
    measure_memory,
    ratio,
    say,
    slope,
    time_help,
    time_imports,
    time_in_turn,
)


def report_ratios(report: Report) -> None:
    pairs = [("profile", "bare", 0.5), ("profile, all read", "bare", None), ("profile + AdamW", "bare + AdamW", 0.6),
             ("trace + profile", "bare", 0.8), ("FlopCounterMode", "bare", None)]
    rows: list[list[str]] = []
    wall: dict[str, list[float]] = {name: [] for name, _, _ in pairs}
    cpu: dict[str, list[float]] = {name: [] for name, _, _ in pairs}
    for case in report.cases:
        on = Prepared(case)
        timings = time_in_turn({name: prepare(name, on) for name in CONTENDERS}, report.rounds)
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


def report_cold(report: Report) -> None:
    taken = apart(measure_cold, max(2, report.rounds // 2), [case.name for case in report.cases])
    rows, columns, cpu = [], {"profile": [], "trace + profile": []}, []  # type: ignore[var-annotated]
    for case in report.cases:
        bare = taken[case.name, "bare"]
        for what, found in columns.items():
            found.append(ratio(taken[case.name, what], bare))
        cpu.append(ratio(taken[case.name, "profile"], bare, CPU))
        rows.append([case.name, f"{statistics.median(t.wall_seconds for t in bare) * 1e3:.0f}",
                     *(format_ratio(found[-1]) for found in columns.values())])
    rows.append(["**median**", "", *(f"**{format_ratio(statistics.median(found))}**" for found in columns.values())])
    report.targets.append(
        ("profile, cold, to bare", statistics.median(columns["profile"]), statistics.median(cpu), 1.0))
    report.add("cold", markdown(["model", "bare, ms", *columns], rows))


DEPTHS = (16, 64, 128)


def report_depth(report: Report) -> None:
    taken, rows = apart(measure_depth, max(5, report.rounds), DEPTHS), []
    for name, under, limit in (("profile", "bare", 0.1), ("profile + AdamW", "bare + AdamW", 0.15)):
        over, below = ({layers: taken[what, layers] for layers in DEPTHS} for what in (name, under))
        further, cpu = (statistics.median(a / b for a, b in zip(slope(over, field), slope(below, field)))
                        for field in ("wall_seconds", CPU))
        rows.append([f"{name} / {under}", *(format_ratio(ratio(over[layers], below[layers])) for layers in DEPTHS),
                     f"**{format_ratio(further)}**", format_ratio(limit)])
        report.targets.append((f"each further OPT layer, {name} to {under}", further, cpu, limit))
        say(f"  {rows[-1]}")
    columns = [f"{layers} layers" for layers in DEPTHS]
    report.add("depth", markdown(["", *columns, "each further layer", "at most"], rows))


def report_memory(report: Report) -> None:
    rows = []
    for name in (case.name for case in report.cases if case.name in ("resnet152", "opt_350m")):
        for what, told in (("bare", "bare"), ("profile", "profile"), ("whole", "profile, reuse=False")):
            found = apart(measure_memory, name, what)
            rows.append([name, told, *(f"{found[key] / MIB:.0f}" for key in ("before_bytes", "peak_bytes"))])
    report.add("memory", markdown(["model", "run", "before", "peak"], rows, 2))


def report_llama(report: Report) -> None:  # the 405-billion-parameter Llama, from the callable that builds it
    bare, ours = (apart(measure_memory, "llama_405b", what) for what in ("bare", "profile"))
    report.targets += [("405-billion-parameter Llama: seconds", ours["seconds"], None, 2.0),
                       ("405-billion-parameter Llama: resident MB", ours["peak_bytes"] / 1e6, None, 700.0)]
    rows = [[what, f"{found['seconds']:.2f}", f"{found['peak_bytes'] / 1e6:.0f}"]
            for what, found in (("bare", bare), ("profile", ours))]
    rows.append(["profile / bare", *(format_ratio(ours[name] / bare[name]) for name in ("seconds", "peak_bytes"))])
    report.add("llama", markdown(["", "seconds", "resident MB at the peak"], rows))


def report_compile(report: Report) -> None:  # Llama 2 7B under torch.compile, and others of its layers
    rows = []
    for mode, told, is_own in (("train", "a training step with AdamW", False), ("infer", "inference", False),
                               ("infer", "inference, without a mask", True)):
        taken = {layers: apart(measure_compiled, layers, mode, is_own) for layers in (0, 1, 32, 64)}
        first = f"first, {CPU}"
        further, cpu = [(taken[64][name] - taken[32][name]) / 32 / (taken[1][name] - taken[0][name])
                        for name in ("first", first)]
        report.targets.append((f"compiled Llama, {told}: each further layer to the first one", further, cpu, 0.05))
        if mode == "train":
            report.targets += [
                ("compiled Llama, 32 layers: seconds of the first profile", taken[32]["first"], taken[32][first], 15.0),
                ("the same: seconds of the next", taken[32]["next"], taken[32][f"next, {CPU}"], 3.0),
                ("the same: resident MB", taken[32]["peak_bytes"] / 1e6, None, 2000.0)]
        rows += [[told, str(layers), *(f"{found[name]:.2f}" for name in found if name != "peak_bytes"),
                  f"{found['peak_bytes'] / 1e6:.0f}"] for layers, found in taken.items()]
    report.add("compile", markdown(["step", "layers", "first, s", "processor", "next, s", "processor",
                                    "resident MB at the peak"], rows, cases="speed/compiled"))


def report_imports(report: Report) -> None:
    found = time_imports(max(5, report.rounds))
    adds, uses = [[statistics.median(taken[part][i] / taken[0][i] for taken in found) for i in (0, 1)]
                  for part in (1, 2)]
    report.targets.append(("import of analyzer beyond torch, to import of torch", adds[0], adds[1], 0.15))
    said = time_help(max(5, report.rounds))
    report.targets.append(("`analyzer --help`: seconds", said, None, 0.3))
    seconds, then = [statistics.median(taken[part][0] for taken in found) for part in (1, 2)]
    report.add("import", f"In a fresh process that has imported torch, `import analyzer` takes {seconds:.3f} s more: "
               f"{format_ratio(adds[0])} of the time that `import torch` took (processor time: "
               f"{format_ratio(adds[1])}). Names are imported when they are used first: `symbolic_trace` and "
               f"`symbolic_profile` take {then:.2f} s then, {format_ratio(uses[0])} of the import of torch (processor "
               f"time: {format_ratio(uses[1])}). `analyzer --help` takes {said:.2f} s, and imports no torch.")


# ---- what measuring costs the model that is measured, on real tensors


def _resnet(depth: int, batch: int, size: int, trains: bool = True, remark: str = "") -> tuple[Any, ...]:
    name = f"ResNet-{depth}, {'a training step with SGD' if trains else 'inference'}, {batch}×3×{size}×{size}{remark}"
    return name, MODELS[f"resnet{depth}"].factory, {"x": torch.rand(batch, 3, size, size)}, trains


def _bert() -> nn.Module:
    import transformers

    model: nn.Module = transformers.BertModel(transformers.BertConfig())
    return model


MEASURED = [_resnet(50, 8, 224), _resnet(50, 1, 224), _resnet(50, 8, 224, trains=False),
            ("BERT-base, inference, 1×128 tokens", _bert, {"input_ids": torch.ones(1, 128, dtype=torch.int64)}, False),
            _resnet(18, 2, 32, remark=": as much overhead as can be")]


def make_steps(model: nn.Module, inputs: dict[str, torch.Tensor], trains: bool) -> dict[str, Run]:
    """The step by itself, and with the profiler around it."""
    optimizer = torch.optim.SGD(model.train(trains).parameters(), lr=1e-4)

    def step() -> None:
        with torch.set_grad_enabled(trains):
            output = model(**inputs)
        if trains:
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    profiler = FlopsProfiler(model)

    def watched() -> None:
        profiler.start_profile()
        step()
        profiler.stop_profile()

    return {"alone": step, "analyzer": watched}


def report_overhead(report: Report) -> None:  # a step that is measured, set against the same step alone
    rows, ratios = [], []
    for name, build, inputs, trains in MEASURED:
        steps = make_steps(build(), inputs, trains)
        for run in steps.values():
            run()  # warm
        found = time_in_turn(steps, report.rounds)
        ratios.append([ratio(found["analyzer"], found["alone"], kind) for kind in ("wall_seconds", CPU)])
        rows.append([name, f"{1e3 * statistics.median(t.wall_seconds for t in found['alone']):.0f}",
                     *(f"{part:.3f}" for part in ratios[-1])])
        say(f"  {rows[-1]}")
    report.targets.append(("ResNet-50 in training, measured, to the step alone", ratios[0][0], ratios[0][1], 1.1))
    report.add("overhead", markdown(("step", "alone, ms", "analyzer", "by processor time"), rows))
