"""How near predictions of served models come to measurements: ``python -m benchmarks.accuracy_serving``, minutes.

Data: ``benchmarks/truth/serving``, see its README.md. Nothing here was fitted to the cases that it judges: the
constants of a server's host work (``benchmarks/calibration/serving.py``) are fitted with the model that is judged left
out, or with ``--left-out device`` the device.

What the sources do not say is taken from how they measure: SemiAnalysis's InferenceMAX (Llama-3.1-70B and gpt-oss)
asks for random lengths between 0.8 of those given and the whole and holds the cache in 8 bits; ten requests a client.
"""
from __future__ import annotations

import argparse
import csv
import functools
import gzip
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analyzer.errors import UnknownDeviceError
from analyzer.hardware import DeviceSpec, cluster_of, find_device
from analyzer.tools.serving.deployment import ENGINES, Deployment, Engine, Layout
from analyzer.tools.serving.pass_time import Batch, Chunk, PassTimer
from analyzer.tools.serving.power import watts_of
from analyzer.tools.serving.read_model import read_served_model
from analyzer.tools.serving.served_model import ServedModel
from analyzer.tools.serving.simulation import Timeline, Traffic, simulate
from analyzer.zoo.published_shape import find_shape
from analyzer.zoo.target import load_target

TRUTH = Path(__file__).parent / "truth" / "serving"
LEFT_OUT = TRUTH / "left_out.json"  # written by the calibration
#: What the source calls formats.
_FORMATS = {"": "bf16", "bfloat16": "bf16", "float16": "fp16", "fp8_ootb": "fp8", "fp8_static": "fp8",
            "fp8_block": "fp8-block", "int4_wo": "int4", "int8_wo": "int8", "w4a16_mxfp4": "mxfp4", "w4afp8": "int4"}


def name_of(model: str) -> str:
    """A model's own part of the name of its published shape: one of an organisation, or instructed, is the same."""
    shape = find_shape(model) or find_shape(model.rpartition("/")[2]) or find_shape(model.removesuffix("-Instruct"))
    assert shape is not None, f"{model}: its shape is not among the published ones"
    return shape.name.rpartition("/")[2].lower()


def find_named(device: str) -> DeviceSpec:
    """A device by the source's name, which may have its socket behind it."""
    try:
        return find_device(device)
    except UnknownDeviceError:
        return find_device(device.removesuffix("_sxm"))


@functools.cache
def read_model(name: str) -> ServedModel:
    return read_served_model(load_target(f"hf:{name}").build, name)


_folders = [TRUTH]  # the last one is read


def read_rows(file: str) -> list[dict[str, str]]:
    path = _folders[-1] / file
    if not path.exists():
        return []
    with gzip.open(path, "rt") as stream:
        return list(csv.DictReader(stream))


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
                          engine=engine_of(self.engine, self.version), weights=self.weights, experts=self.experts,
                          cache=self.cache)


def engine_of(name: str, version: str) -> Engine:
    """Rows of vLLM without a version are of autumn 2025: before 0.14, so the device waits for the host."""
    return ENGINES[name]._replace(overlaps=False) if name == "vllm" and not version else ENGINES[name]


def read_cases() -> Iterator[Case]:
    for row in read_rows("served.csv.gz"):
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
    for row in read_rows("power.csv.gz"):
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


@functools.cache
def timer_of(key: tuple[Any, ...]) -> tuple[Deployment, PassTimer]:
    case: Case = key[-1]
    deployment = case.deployment()
    return deployment, PassTimer(deployment)


def predict(case: Case, constants: Mapping[str, float] | None = None, requests: int | None = None) -> Timeline:
    shared = replace(case, traffic=Traffic(1, 1, 1), ttft=None, tpot=0.0)
    deployment, timer = timer_of((shared,))
    if constants is not None:
        timer = PassTimer(deployment)
        timer.constants = {**timer.constants, **constants}
    return simulate(deployment, timer, case.traffic, requests)


def describe(errors: Iterable[float]) -> str:
    found = sorted(map(abs, errors))
    if not found:
        return "none"
    return (f"median {statistics.median(found):.1%}, nine in ten {found[int(0.9 * (len(found) - 1))]:.1%} of "
            f"{len(found)}")


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's."""
    def ranks(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        found = [0.0] * len(values)
        for place, index in enumerate(order):
            found[index] = place
        return found

    return statistics.correlation(ranks([a for a, _ in pairs]), ranks([b for _, b in pairs]))


def left_out(kind: str, model: str, device: str, engine: str = "vllm") -> Mapping[str, float]:
    """Constants that neither this model's (``kind`` model) nor this device's cases helped to fit. The rate of grouped
    products is of the other engine's cases: all served models with experts are of one release, on one device.
    """
    name = model if kind == "device" else "gpt-oss" if model.startswith("gpt-oss") else model
    found: dict[str, dict[str, float]] = _read_left_out()
    own = found.get(f"model: {name}" if kind == "model" else f"device: {device}", {})  # none: all are of others
    return own | found.get(f"engine: {engine}", {})


@functools.cache
def _read_left_out() -> Any:
    return json.loads(LEFT_OUT.read_text())


TABLE = {8: 7.4, 32: 9.9, 128: 19.3}  # milliseconds a token: Llama-3.1-8B, bf16, H100, 1,024 + 512 tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--left-out", choices=("model", "device"), default="model")
    parser.add_argument("--every", type=int, default=1, help="judge every Nth case")
    parser.add_argument("--rows", type=Path, help="write all predictions here")
    parser.add_argument("--model", help="judge only models with this in their name")
    parser.add_argument("--truth", type=Path, default=TRUTH, help="a folder of other tables in the same form")
    arguments = parser.parse_args()
    _folders.append(arguments.truth)
    groups: dict[str, list[tuple[Case, Timeline]]] = defaultdict(list)
    rows = []
    for case in list(read_cases())[::arguments.every]:
        if arguments.model and arguments.model not in case.model:
            continue
        found = predict(case, left_out(arguments.left_out, case.model, case.deployment().device.name,
                                        case.engine))
        groups[case.model].append((case, found))
        rows.append({"model": case.model, "device": case.device, "engine": case.engine, "version": case.version,
                     "layout": str(case.layout), "prompt": case.traffic.prompt_tokens, "new": case.traffic.new_tokens,
                     "slots": case.traffic.slots, "ttft": case.ttft, "tpot": case.tpot,
                     "p_ttft": found.mean("first_seconds"), "p_tpot": found.mean("token_seconds"),
                     "running": found.running, "full": found.is_full})
    if arguments.rows:
        arguments.rows.write_text(json.dumps(rows))
    report(groups)
    if not arguments.model and arguments.truth == TRUTH:
        report_table()
    if not arguments.model:
        report_power(arguments.left_out)


def report(groups: Mapping[str, list[tuple[Case, Timeline]]]) -> None:
    of: dict[str, list[float]] = defaultdict(list)
    for model, found in groups.items():
        tpot = [line.mean("token_seconds") / case.tpot - 1 for case, line in found]
        ttft = [line.mean("first_seconds") / case.ttft - 1 for case, line in found
                if case.ttft and (case.traffic.slots or 0) <= 16]
        kind = "experts" if found[0][0].has_experts else "dense"
        of[f"{kind}, TPOT"] += tpot
        of[f"{kind}, TTFT at 16 or fewer"] += ttft
        pairs = [(line.mean("token_seconds"), case.tpot) for case, line in found]
        print(f"{model}: TPOT {describe(tpot)}; TTFT at 16 or fewer {describe(ttft)}; Spearman of TPOT "
              f"{rank_correlation(pairs):.3f}; mean {statistics.mean(tpot):+.1%}, {statistics.mean(ttft):+.1%}")
    for what, errors in sorted(of.items()):
        print(f"{what}: {describe(errors)}")


def report_table() -> None:
    deployment, constants = None, left_out("model", "llama-3.1-8b", "")
    for concurrency, measured in TABLE.items():
        case = next(case for case in read_cases() if case.model == "llama-3.1-8b" and case.layout.tp == 1 and (
            case.traffic.slots, case.traffic.prompt_tokens, case.traffic.new_tokens) == (concurrency, 1024, 512))
        deployment = case.deployment()
        seconds = predict(case, constants).mean("token_seconds")
        print(f"{deployment.device.name}, {concurrency} sequences: {seconds * 1e3:.1f} ms a token, measured {measured} "
              f"({seconds * 1e3 / measured - 1:+.1%})")


def report_power(kind: str) -> None:
    watts: dict[str, list[float]] = defaultdict(list)
    joules: dict[str, list[float]] = defaultdict(list)
    for itl in read_itls():
        timer = PassTimer(itl.deployment)
        timer.constants = {**timer.constants, **left_out(kind, itl.model, itl.deployment.device.name)}
        found = watts_of(timer.spent(itl.batch), itl.deployment.device, timer.constants)
        assert found is not None
        seconds = timer.time(itl.batch).seconds
        mixed = replace(itl.batch, chunks=(Chunk(itl.prompt, itl.prompt),))
        prompts = itl.batch.sequences / itl.new  # of a pass, in the mean
        throughput = itl.batch.sequences / (seconds + prompts * (timer.time(mixed).seconds - seconds))
        watts[itl.deployment.device.name].append(found / itl.watts - 1)
        joules[itl.deployment.device.name].append(found * itl.deployment.layout.gpus / throughput / itl.joules - 1)
    for what, errors in (("watts", watts), ("joules a token", joules)):
        for device, found_errors in errors.items():
            print(f"{what}, {device}: {describe(found_errors)}; mean {statistics.mean(found_errors):+.1%}")
        print(f"{what}: {describe(error for each in errors.values() for error in each)}")


if __name__ == "__main__":
    main()
