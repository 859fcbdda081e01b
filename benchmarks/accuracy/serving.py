"""How near predictions of served models come to measurements: ``python -m benchmarks.accuracy.serving``, a few
minutes, which writes the block of docs/accuracy.md.

Data: ``benchmarks/truth/serving``, see its README.md. Nothing here was fitted to the cases that it judges: the
constants of a server's host work (``benchmarks/calibration/serving.py``) are fitted with the model that is judged left
out, and once more with its device left out.

What the sources do not say is taken from how they measure: SemiAnalysis's InferenceMAX (Llama-3.1-70B and gpt-oss)
asks for random lengths between 0.8 of those given and the whole and holds the cache in 8 bits; ten requests a client.
"""
from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from analyzer.errors import UnknownDeviceError
from analyzer.hardware import DeviceSpec, cluster_of, find_device
from analyzer.hardware.power import watts_of
from analyzer.tools.serving.batch import Batch, Chunk
from analyzer.tools.serving.deployment import Deployment, Layout
from analyzer.tools.serving.engine import Engine, find_engine
from analyzer.tools.serving.pass_time import PassTimer
from analyzer.tools.serving.read_model import read_served_model
from analyzer.tools.serving.served_model import ServedModel
from analyzer.tools.serving.simulation import Timeline, Traffic, simulate
from analyzer.tools.serving.watts import find_work
from analyzer.zoo.published_shape import find_shape
from analyzer.zoo.target import load_target
from benchmarks.page import correlate_ranks, describe_run, known, markdown, percent, publish, quantile
from benchmarks.truth.table import read_left_out, read_rows, read_truth

LEFT_OUT = "serving/left_out"  # written by the calibration
POWER_LEFT_OUT = "diffusion/power_left_out"  # watts of servers and of pipelines are fitted together
KINDS = ("model", "device")  # what is left out
MOST_SLOTS = 16              # requests at once, of cases whose time to the first token is judged: few wait for others
#: What the source calls formats.
_FORMATS = {"": "bf16", "bfloat16": "bf16", "float16": "fp16", "fp8_ootb": "fp8", "fp8_static": "fp8",
            "fp8_block": "fp8-block", "int4_wo": "int4", "int8_wo": "int8", "w4a16_mxfp4": "mxfp4", "w4afp8": "int4"}


def name_of(model: str) -> str:
    """A model's own part of the name of its published shape: one of an organisation, or instructed, is the same."""
    shape = find_shape(model) or find_shape(model.rpartition("/")[2]) or find_shape(model.removesuffix("-Instruct"))
    assert shape is not None, f"{model}: its shape is not among the published ones"
    return shape.name.rpartition("/")[2].lower()


def family(model: str) -> str:
    """Models of one release are one for leaving out."""
    return "gpt-oss" if model.startswith("gpt-oss") else model


def find_named(device: str) -> DeviceSpec:
    """A device by the source's name, which may have its socket behind it."""
    try:
        return find_device(device)
    except UnknownDeviceError:
        return find_device(device.removesuffix("_sxm"))


@functools.cache
def read_model(name: str) -> ServedModel:
    return read_served_model(load_target(f"hf:{name}").build, name)


@dataclass(frozen=True)
class Case:
    """A measured point, and what is served in it."""

    model: str
    device: str
    engine: str
    version: str
    layout: Layout
    weights: str
    experts: str | None
    cache: str
    traffic: Traffic
    ttft: float | None
    tpot: float

    @property
    def has_experts(self) -> bool:
        return self.experts is not None

    def deployment(self) -> Deployment:
        device = find_named(self.device)
        return Deployment(model=read_model(self.model), device=device, cluster=cluster_of(device), layout=self.layout,
                          engine=self._find_engine(), weights=self.weights, experts=self.experts, cache=self.cache)

    def _find_engine(self) -> Engine:
        """As the scripts of InferenceMAX launch it (github.com/InferenceMAX/InferenceMAX 1b563c8 of September 2025,
        benchmarks/70b_fp8_h200_trt_slurm.sh and gptoss_fp4_h200_trt_slurm.sh): with TensorRT-LLM prompts of 1,024
        tokens wait for others where answers have as many, on fewer than 8 ranks.
        """
        found = engine_of(self.engine, self.version)
        if self.engine != "trtllm" or not self.traffic.bursts:
            return found
        if self.has_experts:
            return found._replace(chunk=20_000, stream_interval=20, memory_share=0.85)
        waits = (self.traffic.prompt_tokens, self.traffic.new_tokens) == (1024, 1024) and self.layout.tp < 8
        return found._replace(chunk=16_384, stream_interval=10, wait_passes=20 * waits, wait_share=0.9 * waits)


def engine_of(name: str, version: str) -> Engine:
    """Rows of vLLM without a version are of autumn 2025: before 0.14, so the device waits for the host."""
    return find_engine(name, "0.13" if name == "vllm" and not version else None)


def read_cases() -> Iterator[Case]:
    for row in read_rows("served", "serving"):
        tp, pp, dp, moe_tp, moe_ep = (int(row[name] or 1) for name in ("tp", "pp", "attention_dp", "moe_tp", "moe_ep"))
        if moe_tp == moe_ep > 1 and tp == moe_tp * moe_ep:  # the source multiplies them (their times are those of one)
            tp = moe_ep
        model = name_of(row["model"])
        is_max = row["version"] != "1.0.0rc3"  # InferenceMAX's
        weights, experts = (_FORMATS.get(form, form) for form in (row["gemm"] or row["precision"], row["moe"]))
        if model.startswith("gpt-oss"):  # whatever the source says: experts are in MXFP4, all else in 16 bits
            weights, experts = "bf16", "mxfp4"
        has_experts = read_model(model).has_experts
        concurrency = max(1, int(row["concurrency"]) // max(1, int(row["concurrency"]) // int(row["batch"])))
        traffic = Traffic(int(row["input_tokens"]), int(row["output_tokens"]), concurrency + (not is_max),
                          least_share=0.8 if is_max else 1.0, slots=concurrency, bursts=is_max)
        yield Case(model, row["device"], row["backend"], row["version"],
                   Layout(tp, pp, dp, tp * dp if moe_ep > 1 else 1), weights, experts if has_experts else None,
                   "fp8" if weights.startswith("fp8") else "bf16", traffic,
                   float(row["ttft_ms"]) / 1e3 if row["ttft_ms"] else None, float(row["tpot_ms"]) / 1e3)


@dataclass(frozen=True)
class Itl:
    """A measured median of inter-token latencies, and watts, of a server that decodes for most of the time."""

    model: str
    deployment: Deployment
    batch: Batch
    seconds: float
    watts: float                 # of one device
    tokens_per_second: float
    joules: float                # of a token, of all devices
    prompt: int
    new: float                   # tokens of an answer, in the mean


_PROMPTS = {"gpqa": 250, "lm-arena-chat": 150}  # assumed: tokens of a prompt, which the source does not give


def read_itls() -> Iterator[Itl]:
    for row in read_rows("power", "serving"):
        name = name_of(row["model"])
        device = find_device(row["gpu_model"])
        ranks = json.loads(row["parallelization"])
        deployment = Deployment(model=read_model(name), device=device, cluster=cluster_of(device),
                                layout=Layout(ranks["tensor_parallel"], dp=ranks.get("data_parallel", 1)),
                                engine=engine_of("vllm", ""), experts="mxfp4" if "oss" in name else None)
        prompt, new = _PROMPTS.get(row["task"], 200), float(row["avg_output_len"])
        yield Itl(name, deployment, Batch(max(1, round(float(row["avg_batch_size"]))), round(prompt + new / 2)),
                  float(row["median_itl_ms"]) / 1e3, float(row["avg_power_watts"]) / int(row["num_gpus"]),
                  float(row["output_throughput_tokens_per_sec"]), float(row["energy_per_token_joules"]), prompt, new)


def predict(case: Case, constants: Mapping[str, float]) -> Timeline:
    timer = timer_of(case.deployment(), tuple(constants.items()))
    return simulate(timer.deployment, timer, case.traffic)


#: One for all cases that differ in their traffic alone.
_TIMERS: dict[Any, PassTimer] = {}


def timer_of(deployment: Deployment, constants: tuple[tuple[str, float], ...]) -> PassTimer:
    key = (*(getattr(deployment, name) for name in ("device", "layout", "engine", "weights", "experts", "cache")),
           deployment.model.name, constants)
    if key not in _TIMERS:
        _TIMERS[key] = PassTimer(deployment, dict(constants))
    return _TIMERS[key]


def left_out(kind: str, model: str, device: str, engine: str = "vllm") -> Mapping[str, float]:
    """Constants that neither this model's (``kind`` model) nor this device's cases helped to fit. The rate of grouped
    products is of the other engine's cases: all served models with experts are of one release, on one device.
    """
    grouped: dict[str, float] = read_truth(LEFT_OUT).get(f"engine: {engine}", {})
    return read_left_out(LEFT_OUT, kind, family(model), device) | grouped


class Judged(NamedTuple):
    """A case, what is predicted for it, and how far off: predicted over measured less 1."""

    case: Case
    token_seconds: float
    token_error: float
    first_error: float | None    # None where it was not measured, or requests wait for each other


class Power(NamedTuple):
    """How far predicted watts and joules of a token are off."""

    device: str
    watts_error: float
    joules_error: float


class Judgement(NamedTuple):
    cases: list[Judged]
    power: list[Power]

    def errors(self, has_experts: bool) -> tuple[list[float], list[float]]:
        """Of times of a token, and to the first token."""
        found = [judged for judged in self.cases if judged.case.has_experts is has_experts]
        return ([judged.token_error for judged in found],
                [judged.first_error for judged in found if judged.first_error is not None])


@functools.cache
def judge(kind: str) -> Judgement:
    """All cases, by constants of which ``kind`` is left out."""
    return Judgement([judge_case(case, kind) for case in read_cases()], [judge_power(itl, kind) for itl in read_itls()])


def judge_case(case: Case, kind: str) -> Judged:
    found = predict(case, left_out(kind, case.model, case.deployment().device.name, case.engine))
    token, first = found.mean("token_seconds"), None
    if case.ttft and (case.traffic.slots or 0) <= MOST_SLOTS:
        first = found.mean("first_seconds") / case.ttft - 1
    return Judged(case, token, token / case.tpot - 1, first)


def judge_power(itl: Itl, kind: str) -> Power:
    device = itl.deployment.device
    timer = PassTimer(itl.deployment, left_out(kind, itl.model, device.name))
    power = read_left_out(POWER_LEFT_OUT, kind, family(itl.model), device.name)
    watts = known(watts_of(find_work(timer, itl.batch), device, power))
    seconds = timer.time(itl.batch).seconds
    mixed = replace(itl.batch, chunks=(Chunk(itl.prompt, itl.prompt),))
    prompts = itl.batch.sequences / itl.new  # of a pass, in the mean
    throughput = itl.batch.sequences / (seconds + prompts * (timer.time(mixed).seconds - seconds))
    return Power(device.name, watts / itl.watts - 1, watts * itl.deployment.layout.gpus / throughput / itl.joules - 1)


def describe(errors: Iterable[float]) -> str:
    """Median and nine in ten, without sign."""
    found = [abs(error) for error in errors]
    return f"{percent(statistics.median(found))}, {percent(quantile(found, 0.9))}" if found else "-"


def tell_errors(judgements: Sequence[Judgement]) -> str:
    """A row for each quantity, a column for each of ``KINDS``."""
    rows = []
    for name, has_experts in (("dense", False), ("experts", True)):
        parts = [judgement.errors(has_experts) for judgement in judgements]
        for place, what in enumerate(("time of a token", f"time to the first token, {MOST_SLOTS} requests or fewer")):
            rows.append([f"{name}, {what} ({len(parts[0][place])}): median error, nine in ten",
                         *(describe(part[place]) for part in parts)])
    for model in dict.fromkeys(judged.case.model for judged in judgements[0].cases):
        of = [[judged for judged in judgement.cases if judged.case.model == model] for judgement in judgements]
        ranks = [correlate_ranks([(judged.case.tpot, judged.token_seconds) for judged in part]) for part in of]
        rows.append([f"{model} ({len(of[0])}), time of a token: rank correlation", *(f"{rank:.3f}" for rank in ranks)])
        rows.append([f"{model}, time of a token: median with sign",
                     *(percent(statistics.median(judged.token_error for judged in part), signed=True) for part in of)])
    devices = list(dict.fromkeys(power.device for power in judgements[0].power))
    for field, what in (("watts_error", "watts"), ("joules_error", "joules a token")):
        for name, some in ((what, devices), *((f"{what}, {device}", [device]) for device in devices)):
            errors = [[getattr(power, field) for power in judgement.power if power.device in some]
                      for judgement in judgements]
            rows.append([f"{name} ({len(errors[0])}): median error, nine in ten", *map(describe, errors)])
    return markdown(["", *(f"{kind} left out" for kind in KINDS)], rows)


def tell_first(judgement: Judgement) -> str:
    """Times to the first token by engine, and by how requests come."""
    rows = []
    for engine in dict.fromkeys(judged.case.engine for judged in judgement.cases):
        for bursts, what in ((True, "all clients at once"), (False, "a request more than slots, always")):
            errors = [judged.first_error for judged in judgement.cases if judged.first_error is not None
                      and (judged.case.engine, judged.case.traffic.bursts) == (engine, bursts)]
            if errors:
                rows.append([engine, what, len(errors), describe(errors),
                             percent(statistics.median(errors), signed=True)])
    return ("Time to the first token, " + f"{MOST_SLOTS} requests or fewer, {KINDS[0]} left out:\n\n"
            + markdown(["engine", "requests", "cases", "median error, nine in ten", "median with sign"], rows, text=2))


def find_factor(error: float) -> float:
    """How far off a prediction is, to either side: a factor less 1. An error is predicted over measured less 1."""
    return max(1 + error, 1 / (1 + error)) - 1


def find_width(cases: Sequence[Judged], field: str) -> float:
    """The factor less 1 that nine in ten cases of each model and each engine are within, by the name of an error."""
    return max(quantile(list_factors(cases, field, what, name), 0.9) for what in ("model", "engine")
               for name in {getattr(judged.case, what) for judged in cases if getattr(judged, field) is not None})


def list_factors(cases: Sequence[Judged], field: str, what: str, name: str) -> list[float]:
    return [find_factor(error) for judged in cases
            if getattr(judged.case, what) == name and (error := getattr(judged, field)) is not None]


def tell_coverage(judgement: Judgement) -> str:
    """Shares of measurements within ranges that hold nine in ten of each other model, or each other engine."""
    rows = []
    for what in ("model", "engine"):
        for name in dict.fromkeys(getattr(judged.case, what) for judged in judgement.cases):
            row = []
            for field in ("token_error", "first_error"):
                own = list_factors(judgement.cases, field, what, name)
                width = find_width([judged for judged in judgement.cases if getattr(judged.case, what) != name], field)
                row.append(f"{percent(sum(off <= width for off in own) / len(own))} of {len(own)}" if own else "-")
            rows.append([f"{what} {name}", *row])
    return ("Measurements within the range that holds nine in ten of each other model, or of each other engine:\n\n"
            + markdown(["left out", "time of a token", "time to the first token"], rows))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    start = time.perf_counter()
    judgements = [judge(kind) for kind in KINDS]
    parts = [f"{describe_run(time.perf_counter() - start)}.", tell_errors(judgements), tell_first(judgements[0]),
             tell_coverage(judgements[0])]
    publish("accuracy.md", {"accuracy.serving": "\n\n".join(parts)}, True)


if __name__ == "__main__":
    main()
