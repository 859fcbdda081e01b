"""How near steps of post-training come to those that others measured:
``python -m benchmarks.accuracy.posttraining FOLDER --recipes COPY``, some ten minutes.

FOLDER holds what was measured: ``nemo_rl_performance.json`` (NVIDIA-NeMo/RL, docs/about/performance-summary.md: whole
steps), ``nemo_rl_limits.json`` (its tests/test_suites: limits that its tests assert) and ``prime_rl.json``
(PrimeIntellect-ai/prime-rl, benchmarks/baselines: the trainer alone). COPY is a copy of NVIDIA-NeMo/RL, whose recipes
the limits are of; without it they are left out.

What the tables do not say: the mean tokens of an answer are told, how they are spread is not, so the law of most
entropy with that mean and the maximum is taken; prompts have 110 tokens (the tables' own tokens a second say 100 to
130 of prompts); engines and settings are those of the recipes of the release.
"""
from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analyzer.api.profile import profile
from analyzer.errors import AnalyzerError, InputError
from analyzer.hardware import cluster_of, find_cluster, find_device
from analyzer.memory.allocator_options import AllocatorOptions
from analyzer.parallel import world
from analyzer.record.options import ProfileOptions
from analyzer.tools.job import Job, read_job
from analyzer.tools.posttrain import Answers, EnginePlan, Planner, PosttrainPlan
from analyzer.tools.posttrain.config import plan_of_job
from analyzer.tools.search import Layout
from analyzer.tools.search.search import read_cluster
from analyzer.tools.serving import Layout as EngineLayout
from analyzer.zoo.published_shape import find_alike
from analyzer.zoo.target import load_target
from benchmarks.accuracy.prime_rl import PrimeRank
from benchmarks.page import describe_run, markdown, percent, quantile

PROMPT = 110
#: Of the models of the tables: our name, prompts of a step, answers to each, tokens of a pass without gradients by
#: the longest sequence, and whether blocks run again (recipes of r0.4.0 to r0.6.0,
#: examples/configs/recipes/llm/performance)
MODELS = {"LLAMA3.1_8B": ("llama-3.1-8b", 64, 32, 2, True), "Qwen3-30B3A": ("qwen3-30b-a3b", 64, 32, 1, False),
          "Qwen3-235B": ("qwen3-235b-a22b", 16, 32, 1, True), "DeepSeek V3": ("deepseek-v3", 32, 16, 1, True)}
_DEVICES = {"NVIDIA RTX A6000": "rtx_a6000", "NVIDIA H100 80GB HBM3": "h100_sxm", "NVIDIA H200": "h200",
            "NVIDIA B200": "b200"}
_BASES = {"PrimeIntellect/INTELLECT-3": "zai-org/GLM-4.5-Air"}  # of which its card says it was trained
_ALLOCATOR = "expandable_segments:True"  # prime-rl, .github/workflows/benchmarks.yaml
_THIRD = 1 / 3     # of a limit, below which a prediction says too little


@dataclass(frozen=True)
class Judged:
    """A row: what was measured and predicted, and a word on either."""

    name: str
    measured: float
    predicted: float | None
    said: str = ""

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1


@functools.cache
def planner_of(model: str) -> Planner:
    return Planner(load_target(f"hf:{model}"))


# Whole steps.

def read_step(row: Mapping[str, str]) -> PosttrainPlan:
    """The plan of a row of NeMo RL's tables, by Megatron with the distributed optimizer."""
    model, prompts, samples, rows, runs_again = MODELS[row["Model"]]
    device = "gb200" if row["table"].startswith("GB200") else "h100"
    devices, cluster = read_cluster(f"{row['#-GPUs']}x{device}")
    told = [int(word) for word in re.findall(r"\d+", row["Training [TP,CP,EP,PP,VPP]"])]
    tensor, context, expert, pipeline = (1, 1, 1, told[-1]) if row["Model"] == "LLAMA3.1_8B" else told[:4]
    policy = row["On/Off policy"]
    lag = 0 if policy.startswith("On") else int(policy.split("-")[0])
    apart = 0 if not lag else devices // 2 if lag == 1 else devices // 3  # recipes: half; 8 of 24 hosts of 8 steps
    longest, mean, batch, update = (int(row[name].replace(",", "")) for name in (
        "T-Max Sequence Length", "G-Average Seq len", "G-GBS", "T-GBS"))
    shard = (devices - apart) // (tensor * context * pipeline)
    layout = Layout(shard=shard, tensor=tensor, context=context, expert=expert, pipeline=pipeline,
                    sharding="distributed", checkpointing="blocks" if runs_again else "none")
    engine = EnginePlan(
        layout=EngineLayout(int(row["Generation [TP,PP]"].strip("[]").split(",")[0])), devices=apart, version="0.11.2",
        memory_share=0.8 if apart else 0.6, weights="fp8" if "FP8" in row["table"] else "bf16")
    return PosttrainPlan(
        model=f"hf:{model}", cluster=cluster, devices=devices, layout=layout, engine=engine, prompts=prompts,
        samples=samples, prompt=PROMPT, longest_prompt=2 * PROMPT, answers=Answers.of(mean, longest - 2 * PROMPT),
        tokens=longest, score_tokens=rows * longest, updates=max(1, batch // update), reference="copy", lag=lag,
        in_flight=bool(lag), pins=False)


def judge_steps(rows: list[dict[str, str]]) -> Iterator[Judged]:
    for row in rows:
        name = f"{row['release']} {row['table'].split()[0]} {row['Model']} {row['On/Off policy']} {row['#-GPUs']}"
        measured = float(row["Total Step time(s)"])
        if row["Model"] not in MODELS or row.get("Algorithm", "GRPO") != "GRPO":
            yield Judged(name, measured, None, f"{row.get('Algorithm')} of {row['Model']} is not planned here")
            continue
        try:
            plan = read_step(row)
            found = planner_of(MODELS[row["Model"]][0]).plan(plan)
        except AnalyzerError as error:
            yield Judged(name, measured, None, str(error)[:160])
            continue
        yield Judged(name, measured, found.step_seconds, ", ".join(
            f"{phase.name} {phase.seconds:.1f}" for phase in found.phases))


# Limits of tests.

def judge_limits(tests: list[dict[str, Any]], copy: Path) -> Iterator[Judged]:
    """Each limit: seconds of a step, or GB of a card as nvidia-smi tells them."""
    for test in tests:
        name = Path(test["test"]).stem
        try:
            job = read_job(copy / "examples" / "configs" / "recipes" / "llm" / f"{name}.yaml")
            seconds, nbytes, said = _predict(job, "gb200" if re.search(r"\dn4g", name) else "dgx_h100")
        except AnalyzerError as error:
            seconds, nbytes, said = None, None, str(error)[:160]
        for limit in test["limits"]:
            most = float(limit.rpartition("<")[2])
            if "step_time" in limit:
                yield Judged(f"{name} seconds", most, seconds, said)
            elif "mem_gb" in limit:
                yield Judged(f"{name} GB", most, None if nbytes is None else nbytes / 1e9, said)


def _predict(job: Job, cluster: str) -> tuple[float | None, int | None, str]:
    spec = find_cluster("gb200_nvl72") if cluster == "gb200" else find_cluster(cluster)
    plan: Any = job.plan
    if plan.policy is not None:
        found = Planner(load_target(plan_of_job(job, spec).model)).plan(plan_of_job(job, spec))
        return found.step_seconds, found.needed_bytes, "answers spread evenly up to the longest"
    laid = job.profile(spec.device.name, cluster=spec)
    said = "rollout and teacher left out" if plan.task == "distill" else "every row full"
    return laid.step_seconds, laid.verdict.needed_bytes, said


# The trainer alone.

def judge_trainers(rows: list[dict[str, Any]], only: str = "") -> Iterator[tuple[Judged, Judged, bool, bool]]:
    """Of each run GiB reserved, seconds of a step, whether it succeeded, and whether it is foretold to fail."""
    known = set()
    for row in rows:
        config, metrics = row["config"], row["metrics"]
        key = tuple(str(config[name]) for name in ("type", "num_gpus", "model_name", "lora_rank", "seq_len", "ac",
                                                   "attention", "device_name"))
        failed = not config["success"]
        if key in known or failed and "out of memory" not in (config["error_reason"] or ""):
            continue  # one run of two files; others that failed say an exit code alone
        known.add(key)
        name = " ".join(key)
        if only not in name:
            continue
        try:
            found, more = _profile_trainer(config)
        except AnalyzerError as error:
            yield Judged(name, 0, None, str(error)[:160]), Judged(name, 0, None), not failed, False
            continue
        reserved, seconds = found.peak_reserved_bytes or 0, found.step_seconds + more
        capacity = find_device(_DEVICES[config["device_name"]]).memory_bytes or 0
        yield (Judged(name, metrics["peak_memory"]["gib"], reserved / 2**30),
               Judged(name, metrics["step_time"]["mean"], seconds), not failed, reserved > capacity)


def _profile_trainer(config: Mapping[str, Any]) -> tuple[Any, float]:
    shape = find_alike(_BASES.get(config["model_name"], config["model_name"]))
    if shape is None:
        raise InputError(f"{config['model_name']}: its shape is not among the published ones")
    device, ranks = find_device(_DEVICES[config["device_name"]]), config["num_gpus"]
    rank = PrimeRank(load_target(f"hf:{shape.name}"), config, (device.compute_capability or (0, 0))[0] == 9)
    with world(ranks, 0, cluster=cluster_of(device)):
        found = profile(rank.build, rank.inputs(), device=replace(device, memory_bytes=None), step=rank.step,
                       optimizer="adamw",
                       options=ProfileOptions(keep_events=False, steps=2, unknown_value="placeholder",
                                              allocator=AllocatorOptions.from_string(_ALLOCATOR)))
    return found, rank.more_seconds(device, config["attention"] == "flash_attention_3")


# What is printed.

def describe(errors: list[float]) -> str:
    found = [abs(error) for error in errors]
    return f"{percent(statistics.median(found))}, nine in ten {percent(quantile(found, 0.9))}" if found else "-"


def tell(title: str, judged: list[Judged]) -> str:
    """The figures of some rows, the worst first."""
    errors = [row.error for row in judged if row.error is not None]
    ordered = sorted(judged, key=lambda row: -abs(row.error) if row.error is not None else 0.0)
    rows = [[row.name, f"{row.measured:.4g}", "-" if row.predicted is None else f"{row.predicted:.4g}",
             percent(row.error, signed=True) if row.error is not None else "-", row.said] for row in ordered]
    signed = percent(statistics.median(errors), signed=True) if errors else "-"
    return (f"{title}: {len(errors)} of {len(judged)} rows, median {describe(errors)}; with sign {signed}\n\n"
            + markdown(["", "measured", "predicted", "off", ""], rows))


def tell_limits(judged: list[Judged]) -> str:
    holds = [row for row in judged if row.predicted is not None and row.predicted < row.measured]
    low = [row for row in holds if (row.predicted or 0) < _THIRD * row.measured]
    known = sum(row.predicted is not None for row in judged)
    return (f"Limits: {len(holds)} of {known} predictions hold, {len(judged) - known} of {len(judged)} are not "
            f"predicted; {len(low)} are below a third of their limit\n\n"
            + tell("By row (measured: the limit)", judged))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", type=Path, metavar="COPY")
    parser.add_argument("--parts", default="steps,limits,trainers")
    parser.add_argument("--only", default="", help="trainers with this in their names")
    arguments = parser.parse_args()
    start, parts = time.perf_counter(), arguments.parts.split(",")

    def read(name: str) -> Any:
        return json.loads((arguments.folder / f"{name}.json").read_text())

    if "steps" in parts:
        print(tell("Steps of NeMo RL, seconds", list(judge_steps(read("nemo_rl_performance")))), flush=True)
    if "limits" in parts and arguments.recipes is not None:
        print(tell_limits(list(judge_limits(read("nemo_rl_limits"), arguments.recipes))), flush=True)
    if "trainers" in parts:
        found = list(judge_trainers(read("prime_rl"), arguments.only))
        dense = [row for row in found if row[2]]
        print(tell("Reserved by prime-rl's trainer, GiB", [row[0] for row in dense]))
        print(tell("Steps of prime-rl's trainer, seconds", [row[1] for row in dense]))
        print(f"foretold to fail: {sum(row[3] for row in dense)} of {len(dense)} that succeeded, "
              f"{sum(row[3] for row in found if not row[2])} of {len(found) - len(dense)} that ran out of memory")
    print(describe_run(time.perf_counter() - start))


if __name__ == "__main__":
    from benchmarks.speed.case import import_libraries

    import_libraries()
    main()
