"""The smallest fleets that answer so many requests a second within given times."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from shlex import quote
from textwrap import fill

from analyzer.errors import InputError, UnknownSpeedError
from analyzer.hardware.price import read_prices
from analyzer.report.export.json_format import write_record
from analyzer.report.text_table import print_rows
from analyzer.report.text_width import escape_controls
from analyzer.saved_format import SavedFormat
from analyzer.units import format_seconds

from .deployment import CACHE_BYTES, Deployment, Layout
from .engine import ENGINES
from .pass_time import PassTimer
from .simulation import NoRoomError, Traffic, simulate

_REQUESTS = 160      # that are simulated for each size of a fleet
_MOST_REPLICAS = 4096
_MOST_FLEETS = 8     # that are told
_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class FleetTarget:
    """What a fleet must keep: seconds to the first token and of each token, for so many of a hundred requests."""

    first_seconds: float
    token_seconds: float
    rate: float
    percentile: float = 90.0

    def __post_init__(self) -> None:
        if min(self.first_seconds, self.token_seconds, self.rate) <= 0 or not 0 < self.percentile < 100:
            raise InputError(f"{self!r}: times and rate are above 0, the percentile between 0 and 100")


@dataclass(frozen=True, slots=True)
class ReplicaPool:
    """Replicas of one layout that do one thing: ``role`` is "both", "prefill" or "decode"."""

    role: str
    replicas: int
    layout: Layout
    slots: int           #: sequences at once in a replica, the most that were seen, with half as many again
    first_seconds: float
    token_seconds: float

    @property
    def gpus(self) -> int:
        return self.replicas * self.layout.gpus


@dataclass(frozen=True, slots=True)
class Fleet:
    """Pools that together keep a target."""

    device: str
    pools: tuple[ReplicaPool, ...]
    first_seconds: float          #: at the target's percentile, the transfer of the cache included
    token_seconds: float
    dollars_per_hour: float | None
    commands: dict[str, tuple[str, ...]]

    @property
    def gpus(self) -> int:
        """Of all pools."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def kind(self) -> str:
        """In a word or two."""
        return "aggregated" if len(self.pools) == 1 else "prefill and decode apart"

    def __str__(self) -> str:
        return " + ".join(f"{pool.replicas} x {pool.layout}"
                          + (f" {pool.role}" if pool.role != "both" else "") for pool in self.pools)


FORMAT = SavedFormat("analyzer.fleets", 1, "list of fleets", "search again")


@dataclass(frozen=True, slots=True)
class FleetSearch:
    """All fleets that were found, the smallest first; by dollars where prices are known."""

    name: str
    target: FleetTarget
    prompt_tokens: int
    new_tokens: int
    fleets: tuple[Fleet, ...]
    refused: tuple[str, ...]      #: layouts that cannot keep the target however many there are, and why

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as JSON text, also written to ``path`` if one is given."""
        return write_record(self, FORMAT, path)

    def __str__(self) -> str:
        target = self.target
        head = (f"{self.name}: {target.rate:g} requests a second of {self.prompt_tokens:,} + {self.new_tokens:,} "
                f"tokens, {target.percentile:g} of 100 with the first token within "
                f"{format_seconds(target.first_seconds)} and {format_seconds(target.token_seconds)} a token")
        rows = [(str(place), fleet.device, fleet.kind, str(fleet), str(fleet.gpus), format_seconds(fleet.first_seconds),
                 format_seconds(fleet.token_seconds),
                 "-" if fleet.dollars_per_hour is None else f"{fleet.dollars_per_hour:.2f}")
                for place, fleet in enumerate(self.fleets, 1)]
        lines = [fill(head, 118, subsequent_indent="  "), ""]
        if rows:
            lines.append(print_rows(("", "Device", "Kind", "Replicas", "GPUs", "TTFT", "TPOT", "Dollars/h"), rows,
                                    left=(1, 2, 3)))
        else:
            lines.append("no fleet keeps that, of any size")
        shown = {fleet.kind: (place, fleet) for place, fleet in reversed(list(enumerate(self.fleets, 1)))}
        for place, fleet in sorted(shown.values(), key=lambda item: item[0]):  # others are in the JSON
            lines += ["", f"{place}. {fleet}"]
            lines += [fill(f"{server}: {command}", 118, initial_indent="  ", subsequent_indent="      ",
                           break_on_hyphens=False).replace("\n", " \\\n")
                      for server, commands in fleet.commands.items() for command in commands]
        return escape_controls("\n".join([*lines, *([""] if self.refused else []), *(
            f"- {text}" for text in self.refused)]))


def list_layouts(deployment: Deployment) -> Iterator[Layout]:
    """Layouts of one stage that the model and the hosts allow."""
    model = deployment.model
    for tp in _DEGREES:
        candidates = [Layout(tp)]
        if model.has_experts and tp > 1:
            candidates += [Layout(tp, ep=tp), Layout(1, dp=tp, ep=tp)]
        for layout in candidates:
            try:
                layout.check(model)
            except InputError:
                continue
            if layout.tp <= deployment.cluster.devices_per_host:
                yield layout


def _size(timer: PassTimer, target: FleetTarget, prompt_tokens: int, new_tokens: int, role: str) -> ReplicaPool | None:
    """The fewest replicas of a layout that do their part of the work in time; None where no number does."""
    share = target.percentile / 100

    @cache
    def run(replicas: int) -> ReplicaPool | None:
        traffic = Traffic(prompt_tokens, 1 if role == "prefill" else new_tokens, rate=target.rate / replicas,
                          is_read=role == "decode")
        line = simulate(timer.deployment, timer, traffic, _REQUESTS)
        first, token = (line.percentile(name, share) for name in ("first_seconds", "token_seconds"))
        if not line.is_stable or role != "decode" and first > target.first_seconds or (
                role != "prefill" and token > target.token_seconds):
            return None
        slots = max(1, math.ceil(1.5 * line.running))
        return ReplicaPool(role, replicas, timer.deployment.layout, slots, first, token)

    low, high = 0, 1
    if run(_MOST_REPLICAS) is None:  # alone in a replica, a request does not keep it
        return None
    while run(high) is None:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if run(middle) is None:
            low = middle
        else:
            high = middle
    return run(high)


def find_fleets(deployments: Sequence[Deployment], target: FleetTarget, prompt_tokens: int, new_tokens: int, *,
                prices: Sequence[float | None] = (), repository: str = "MODEL") -> FleetSearch:
    """Fleets of each of ``deployments`` (one a device; their layouts are varied) that keep ``target``, and the command
    that starts each. ``prices``: dollars of a GPU and hour, by deployment.
    """
    fleets: list[Fleet] = []
    refused: list[str] = []
    for place, base in enumerate(deployments):
        price = prices[place] if place < len(prices) else None
        pools: dict[str, list[tuple[Deployment, ReplicaPool]]] = {"both": [], "prefill": [], "decode": []}
        for layout in list_layouts(base):
            deployment = replace(base, layout=layout)
            if deployment.most_sequences(prompt_tokens + new_tokens) == 0:
                refused.append(f"{base.device.name} {layout}: no room for one sequence")
                continue
            try:
                timer = PassTimer(deployment)
                for role, sized in pools.items():
                    pool = _size(timer, target, prompt_tokens, new_tokens, role)
                    if pool is not None:
                        sized.append((deployment, pool))
                    elif role == "both":
                        refused.append(f"{base.device.name} {layout}: one request alone takes longer")
            except (UnknownSpeedError, NoRoomError) as error:
                refused.append(f"{base.device.name} {layout}: {error}")
        found: list[tuple[Deployment, tuple[ReplicaPool, ...], float]] = [
            (deployment, (pool,), 0.0) for deployment, pool in pools["both"]]
        for prefill, first in pools["prefill"]:
            # the cache of a prompt goes to another replica over the network between hosts; each rank sends its own
            fabric = prefill.cluster.fabric
            sent = math.inf if fabric is None else prefill.cache_bytes(prompt_tokens) / fabric.bandwidth
            if first.first_seconds + sent <= target.first_seconds:
                found += [(deployment, (first, second), sent) for deployment, second in pools["decode"]]
        for deployment, parts, sent in found:
            dollars = None if price is None else price * sum(pool.gpus for pool in parts)
            commands = write_commands(deployment, parts, repository, prompt_tokens + new_tokens)
            fleets.append(Fleet(base.device.name, parts, parts[0].first_seconds + sent, parts[-1].token_seconds,
                                dollars, commands))
    fleets.sort(key=lambda fleet: (fleet.dollars_per_hour or 0.0, fleet.gpus, len(fleet.pools), fleet.token_seconds))
    return FleetSearch(deployments[0].model.name, target, prompt_tokens, new_tokens, tuple(fleets[:_MOST_FLEETS]),
                       tuple(refused))


#: What each server calls the formats (vLLM --quantization, SGLang --quantization); others are those of the checkpoint.
_QUANTIZATION = {"fp8": "fp8", "int8": "compressed-tensors", "int4": "awq_marlin", "mxfp4": "mxfp4",
                 "nvfp4": "modelopt_fp4", "fp8-block": "fp8"}


def write_commands(deployment: Deployment, pools: Sequence[ReplicaPool], repository: str,
                   tokens: int) -> dict[str, tuple[str, ...]]:
    """The command of each server for one replica of each pool; those of vLLM and SGLang for aggregated fleets, and of
    Dynamo, which routes between pools, for both.
    """
    found: dict[str, tuple[str, ...]] = {}
    repository = quote(repository)
    if len(pools) == 1:
        found["vLLM"] = (_vllm("vllm serve", deployment, pools[0], repository, tokens),)
        found["SGLang"] = (_sglang(deployment, pools[0], repository, tokens),)
    dynamo = ["python -m dynamo.frontend --http-port 8000"]
    for pool in pools:
        worker = _vllm("python -m dynamo.vllm --model", deployment, pool, repository, tokens)
        dynamo.append(worker + (" --is-prefill-worker" if pool.role == "prefill" else "") + f"  # x {pool.replicas}")
    found["Dynamo"] = tuple(dynamo)
    return found


def _vllm(start: str, deployment: Deployment, pool: ReplicaPool, repository: str, tokens: int) -> str:
    layout, engine = pool.layout, deployment.engine
    words = [start, repository, f"--tensor-parallel-size {layout.tp}"]
    words += [f"--data-parallel-size {layout.dp}"] * (layout.dp > 1) + ["--enable-expert-parallel"] * (layout.ep > 1)
    words += [*_formats(deployment, "fp8"), f"--max-model-len {tokens}", f"--max-num-seqs {pool.slots}",
              f"--max-num-batched-tokens {engine.chunk}", f"--gpu-memory-utilization {_share(deployment)}"]
    return " ".join(words)


def _share(deployment: Deployment) -> float:
    """VLLM's own where the fleet is another server's."""
    share = (deployment.engine if deployment.engine.name == "vllm" else ENGINES["vllm"]).memory_share
    assert share is not None
    return share


def _sglang(deployment: Deployment, pool: ReplicaPool, repository: str, tokens: int) -> str:
    layout = pool.layout
    words = [f"python -m sglang.launch_server --model-path {repository} --tp {layout.gpus}"]
    words += [f"--dp {layout.dp} --enable-dp-attention"] * (layout.dp > 1) + [f"--ep {layout.ep}"] * (layout.ep > 1)
    words += [*_formats(deployment, "fp8_e4m3"), f"--context-length {tokens}", f"--max-running-requests {pool.slots}",
              f"--chunked-prefill-size {deployment.engine.chunk}"]
    return " ".join(words)


def _formats(deployment: Deployment, byte_cache: str) -> Iterator[str]:
    """``byte_cache``: what the server calls a cache of 8 bits."""
    if deployment.weights in _QUANTIZATION:
        yield f"--quantization {_QUANTIZATION[deployment.weights]}"
    if CACHE_BYTES[deployment.cache] == 1:
        yield f"--kv-cache-dtype {byte_cache}"


def price_of(text: str | None, devices: Sequence[str]) -> list[float | None]:
    """Prices of ``--price`` for each of ``devices``. Raises InputError."""
    prices = read_prices(text, "--price ")
    return [prices.find(device) for device in devices]
