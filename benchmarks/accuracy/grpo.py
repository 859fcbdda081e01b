"""How right the peaks of a GRPO step's phases are beside vLLM on one card, on others' measurements.

    python -m benchmarks.accuracy.grpo [RUN ...]

The loop is `grpo_script`. Lengths of prompts are not told, and rows vary with the answers, so the largest of ten steps
is compared with rows of 1,229 tokens. vLLM's pool is told apart: before it sizes its cache, version 0.11 samples once
for 256 requests with top-k and top-p, whose sort of [256, 151,936] scores holds 1.38 GiB
(v1/worker/gpu_model_runner.py, ``_dummy_sampler_run``; v1/sample/ops/topk_topp_sampler.py); the stand-in is a newer
version, which does not sort there.
"""
from __future__ import annotations

import json
import time
from pathlib import Path

from analyzer.tools.dryrun.script import dry_run
from benchmarks.page import describe_run, is_named, markdown, parse_parts, publish
from benchmarks.speed.case import import_libraries

GIB = 2**30
TRUTH = json.loads((Path(__file__).parents[1] / "truth" / "grpo_4090.json").read_text())["runs"]
SCRIPT = Path(__file__).with_name("grpo_script.py")


def measure(name: str) -> list[list[str]]:
    """A row for each phase of the second cycle: GiB measured, predicted, and without what was held before it."""
    arguments = ["--checkpoints"] if name == "checkpoints" else []
    run = dry_run(SCRIPT, arguments, device="rtx_4090", steps=2)
    if run.error is not None:
        raise run.error
    cycle, real = run.profile.cycles[-1], TRUTH[name]
    held = next(phase for phase in cycle.phases if phase.name == "rollout").allocated_bytes / GIB
    rows = []
    for phase in cycle.phases:
        if phase.name in real:
            found = phase.peak_allocated_bytes / GIB
            own, told = found - held, real[phase.name] - real["held"]
            rows.append([name, phase.name, f"{real[phase.name]:.2f}", f"{found:.2f}",
                         f"{found / real[phase.name] - 1:+.1%}", f"{told:.2f}", f"{own:.2f}"])
    return rows


if __name__ == "__main__":
    parts = parse_parts(__doc__, "run those whose name").parts
    import_libraries()
    begin = time.perf_counter()
    found = [row for name in TRUTH if is_named(name, parts) for row in measure(name)]
    table = markdown(["Run", "Phase", "Measured, GiB", "Predicted", "Off", "Above what was held", "Predicted"], found)
    publish("jobs/posttraining.md", {"grpo_4090": f"{describe_run(time.perf_counter() - begin)}\n\n{table}"}, not parts)
