"""A job as text: what was understood and what was not, what it costs, what to change."""
from __future__ import annotations

import difflib
from collections.abc import Sequence
from textwrap import fill

from analyzer.api.result import Profile
from analyzer.report.text_table import print_rows
from analyzer.report.text_width import clean
from analyzer.units import format_bytes, format_count, format_percent, format_seconds

from .change import JobChange
from .document import Edit, write_value
from .layout import LaidOutJob
from .options import OptionReading
from .plan import Plan, ServingPlan, TrainingPlan
from .read import Job
from .training import TrainedJob

_TASKS = {"sft": "trains", "anchored": "trains (ASFT)", "classify": "trains to classify with",
          "dpo": "prefers answers (DPO) with", "orpo": "prefers answers (ORPO) with",
          "simpo": "prefers answers (SimPO) with", "kto": "prefers answers (KTO) with",
          "reward": "trains a reward of", "policy": "updates the policy of", "distill": "distils into",
          "denoise": "trains"}


def describe_job(job: Job) -> str:
    """What was not understood first, then what was, with defaults that matter, then what has no effect."""
    parts = [fill(f"{clean(job.name)}: {job.program.name} {job.program.version}, {describe_plan(job.plan)}", 120,
                  subsequent_indent="  ")]
    if job.missing:
        parts.append(_list_missing(job.missing, f"{job.program.name} {job.program.version} ({job.program.source})"))
    rows = [(reading.name, _show_value(reading), reading.meaning, _line(reading))
            for reading in job.readings if reading.kind in ("understood", "default", "assumed")]
    if rows:
        parts.append(print_rows(("Option", "Value", "Meaning", "Line"), rows, left=(0, 1, 2)))
    without = sorted({reading.name for reading in job.readings if reading.kind == "no effect"})
    if without:
        parts.append(fill(f"no effect on the cost: {', '.join(map(clean, without))}", 120, subsequent_indent="  "))
    return "\n\n".join(parts)


def describe_plan(plan: Plan) -> str:
    """A plan in a line."""
    if isinstance(plan, ServingPlan):
        return f"serves {clean(plan.model)} with {plan.engine}"
    said = [f"{_TASKS[plan.task]} {clean(plan.model)}"]
    if plan.adapter is not None:
        said.append(f"LoRA of rank {plan.adapter.r}" + (f" over {plan.quantize} weights" if plan.quantize else ""))
    elif plan.trained or plan.trained_blocks is not None:
        said.append("some of its parameters")
    rows = "pairs" if plan.sequences > plan.micro_batch else "sequences"
    what = f"{rows} of {plan.length:,} tokens" if plan.picture is None else (
        f"{rows if plan.picture.priors else 'images'} of {plan.picture.width:,} x {plan.picture.height:,} pixels")
    said.append(f"{f'{plan.accumulate} x ' if plan.accumulate > 1 else ''}{plan.micro_batch} {what} a step and rank")
    said.append(_describe_ranks(plan))
    return ", ".join(said)


def _describe_ranks(plan: TrainingPlan) -> str:
    if plan.ranks == 1:
        return "one device"
    if plan.parallel is not None:
        degrees = {"TP": plan.parallel.tensor, "PP": plan.parallel.pipeline, "CP": plan.parallel.context,
                   "EP": plan.parallel.expert, "DP": plan.data_ranks}
        return f"{plan.ranks} devices by " + ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1)
    if plan.sharding is None:
        return f"{plan.ranks} devices"
    how = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": "DeepSpeed"}[plan.sharding.kind]
    zero = plan.sharding.config.get("zero_optimization")
    if isinstance(zero, dict) and "stage" in zero:
        how += f" ZeRO-{zero['stage']}"
    return f"{plan.ranks} devices by {how}"


def _list_missing(readings: Sequence[OptionReading], program: str) -> str:
    lines = ["not part of the answer:"]
    for reading in readings:
        why = reading.meaning if reading.kind == "not modelled" else "not known to this reader" + (
            f"; {reading.meaning}" if reading.meaning else "")
        lines.append(f"  {clean(reading.place or reading.name)}: {clean(reading.name)}: {_show_value(reading)}: {why}")
    if any(reading.kind == "unknown" for reading in readings):
        lines.append(f"  known are the options of {program}")
    return "\n".join(lines)


def _show_value(reading: OptionReading) -> str:
    if any(word in reading.name.lower().replace("_", "") for word in ("apikey", "secret", "password")) or (
            reading.name.lower().endswith("token")):
        return "(not shown)"
    if reading.value is None:
        return "not given"
    text = clean(write_value(reading.value))
    text = text if len(text) <= 48 else f"{text[:45]}..."
    return f"{text} (default)" if reading.kind == "default" else text


def _line(reading: OptionReading) -> str:
    line = reading.place.rpartition(":")[2]
    return line if line.isdecimal() else ""  # of a path of Windows without a line, the part behind its drive


def describe_training(result: TrainedJob | LaidOutJob, price: float | None = None) -> str:
    """Memory, time and speed of a whole step, and what was taken for granted."""
    plan = result.plan
    lines = [_describe_peak(result.profile) if isinstance(result, TrainedJob) else
             f"peak memory: {format_bytes(result.result.best.peak_bytes)} allocated by the rank that needs most"]
    if result.step_seconds is not None:
        ends = "" if result.step_range is None else f" ({' to '.join(map(format_seconds, result.step_range))})"
        rate, what = result.tokens_per_second, "tokens" if plan.picture is None else "images"
        said = format_count(rate) if plan.picture is None else f"{rate:.3g}"
        several = what if plan.tokens > 1 else what[:-1]
        lines.append(f"a step of {plan.tokens:,} {several}: {format_seconds(result.step_seconds)}{ends}, {said} {what} "
                     "a second" + (f" on {plan.ranks} devices" if plan.ranks > 1 else "") + (
                         ", padding counted" if plan.picture is None else ""))
        if price is not None and rate:
            dollars = price * plan.ranks / 3600 / rate * 1e6
            lines.append(f"cost: {dollars:.3g} dollars a million {what}")
    if isinstance(result, TrainedJob) and result.fullest is not result.profile:
        lines.append("memory is fullest before the first step, while images or texts are encoded: "
                     f"{format_bytes(result.fullest.peak_allocated_bytes)} allocated, "
                     f"{format_bytes(result.fullest.peak_reserved_bytes)} reserved")
    lines += [] if result.rollout is None else [str(result.rollout)]
    lines += [f"assumed: {sentence}" for sentence in result.assumptions]
    told = [fill(line, 120, subsequent_indent="  ") for line in lines]
    if isinstance(result, LaidOutJob):
        best = result.result.best
        bubble = "" if best.timeline is None else f"; ranks wait {format_percent(best.timeline.bubble_share)} of a step"
        told += ["", f"layout: {best.layout}{bubble}", result.result.stage_table()]
    return "\n".join(told)


def _describe_peak(found: Profile) -> str:
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(
        (found.peak_by_category or {}).items(), key=lambda item: -item[1])[:4])
    return (f"peak memory: {format_bytes(found.peak_allocated_bytes)} allocated, "
            f"{format_bytes(found.peak_reserved_bytes)} reserved" + (f"; {held}" if held else ""))


def describe_change(job: Job, change: JobChange | None, tried: Sequence[JobChange]) -> str:
    """The difference of the file with which it fits, and what else was tried."""
    lines = []
    if change is None:
        lines.append("no change that was tried makes it fit:")
    else:
        assert change.result is not None
        verdict = change.result.verdict
        need, there = (None, None) if verdict is None else (verdict.needed_bytes, verdict.capacity_bytes)
        seconds = change.result.step_seconds
        kept = "" if change.keeps_result else "; it changes what is trained"
        lines.append(f"with this it fits: {format_bytes(need)} needed of {format_bytes(there)}, a step in "
                     f"{format_seconds(seconds)}{kept}")
        lines += ["", diff_of(job, change.edits), ""]
    rows = []
    for other in tried:
        if other is change or change is not None and other.fits and other.axes == change.axes:
            continue  # of what fits, the least change is told
        verdict = None if other.result is None else other.result.verdict
        said = other.error if verdict is None else (
            f"{format_bytes(verdict.needed_bytes)} needed, {'fits' if verdict else 'does not fit'}")
        rows.append((", ".join(map(str, other.edits)), said))
    if rows:
        lines += ["tried too:" if change is not None else "", *(f"  {edits}: {said}" for edits, said in rows)]
    return "\n".join(line for at, line in enumerate(lines) if line or at)


def diff_of(job: Job, edits: Sequence[Edit]) -> str:
    """What changes in the text of the file, as `diff -u` writes it, without lines around."""
    before, after = job.files.text(job.name).splitlines(), job.change_text(edits).splitlines()
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))
    return "\n".join(f"  {clean(line)}" for line in lines[2:] if not line.startswith("@@"))
