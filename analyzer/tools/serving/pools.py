"""Prompts read by one pool of devices, and answers written by another."""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.hardware.kernel_time.collective import find_path
from analyzer.report.export.json_format import write_record
from analyzer.report.text_table import format_quantity, print_rows
from analyzer.report.text_width import escape_controls
from analyzer.saved_format import SavedFormat
from analyzer.units import format_seconds

from .batch import Batch, Chunk
from .deployment import Deployment, Layout
from .pass_time import PassTimer
from .serve import make_deployment
from .served_model import ServedModel
from .simulation import Timeline, Traffic, simulate

_POOL = re.compile(r"(\d+)x([^:]+)(?::((?:(?:tp|pp|dp|ep)\d+)+))?")
_ROUNDS = 8        # of halving, after which a time is known within 0.4 %
_LONGEST = 3600.0  # seconds that are looked for


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Devices of one kind: ``gpus`` in all, in replicas of ``layout``."""

    gpus: int
    device: str
    layout: Layout = Layout()

    @property
    def replicas(self) -> int:
        return self.gpus // self.layout.gpus

    def __str__(self) -> str:
        return f"{self.replicas} x {self.layout} on {self.device}"


def read_pool(text: str) -> DevicePool:
    """``GPUSxDEVICE:LAYOUT``. Raises InputError.

    >>> pool = read_pool("8xh200:tp2ep2")
    >>> pool.replicas, str(pool)
    (4, '4 x tp2 ep2 on h200')
    """
    found = _POOL.fullmatch(text)
    if found is None:
        raise InputError(f"{text!r}: a pool is GPUSxDEVICE:LAYOUT, e.g. 8xh100:tp4 or 16xb200:dp8ep8")
    ranks = {name: int(count) for name, count in re.findall(r"([a-z]+)(\d+)", found[3] or "")}
    pool = DevicePool(int(found[1]), found[2], Layout(**ranks))
    if not pool.replicas or pool.gpus % pool.layout.gpus:
        raise InputError(f"{text!r}: {pool.gpus} devices are not replicas of {pool.layout}, of {pool.layout.gpus} each")
    return pool


FORMAT = SavedFormat("analyzer.pools", 1, "two pools", "predict them again")


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledProfile:
    """What clients see of two pools, seconds in the mean. A first token comes from the pool that decodes, after the
    cache of its prompt.

    - ``prefill_busy``, ``decode_busy``: of its most requests a second, the part that a pool has.
    """

    name: str
    prefill: DevicePool
    decode: DevicePool
    prompt_tokens: int
    new_tokens: int
    concurrency: int | None
    first_seconds: float
    sent_seconds: float          #: of the first token's, the transfer of the cache
    token_seconds: float
    rate: float                  #: requests a second that are answered
    prefill_busy: float
    decode_busy: float
    is_stable: bool

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as JSON text, also written to ``path`` if one is given."""
        return write_record(self, FORMAT, path)

    def __str__(self) -> str:
        asked = (f"{self.concurrency:,} in flight" if self.concurrency is not None else
                 f"{self.rate:.3g} requests a second")
        each = self.rate * self.new_tokens
        rows = [(role, str(pool), str(pool.gpus), f"{busy:.0%}") for role, pool, busy in (
            ("prefill", self.prefill, self.prefill_busy), ("decode", self.decode, self.decode_busy))]
        lines = [f"{self.name}: prompts of {self.prompt_tokens:,} tokens, {self.new_tokens:,} new ones, {asked}", "",
                 print_rows(("Pool", "Replicas", "GPUs", "Busy"), rows, left=(0, 1)), "",
                 f"time to first token {format_seconds(self.first_seconds)}, of which "
                 f"{format_seconds(self.sent_seconds)} for the cache between pools; "
                 f"{format_seconds(self.token_seconds)} a token",
                 f"{format_quantity(each, 'count')} new tokens a second, "
                 f"{format_quantity(each / (self.prefill.gpus + self.decode.gpus), 'count')} a GPU"]
        if not self.is_stable:
            lines.append("requests come faster than the pools answer them: they wait ever longer")
        return escape_controls("\n".join(lines))


def profile_pools(model: ServedModel, prompt_tokens: int, new_tokens: int, prefill: DevicePool, decode: DevicePool, *,
                  concurrency: int | None = None, rate: float | None = None, **settings: Any) -> PooledProfile:
    """Predict two pools under ``concurrency`` clients, or ``rate`` requests a second. ``settings`` are of
    `make_deployment`, but for device and layout. Raises NoRoomError where a sequence does not fit, InputError.
    """
    timers = [PassTimer(make_deployment(model, device=pool.device, layout=pool.layout, **settings))
              for pool in (prefill, decode)]
    sent = send_seconds(timers[0].deployment, prompt_tokens, prefill.gpus + decode.gpus)
    alone = timers[0].seconds(Batch(0, 1, (Chunk(prompt_tokens, prompt_tokens),)))
    copies = decode.replicas * decode.layout.dp * decode.layout.pp  # of a simulation, each with its requests

    def read(requests: float) -> Timeline:
        return simulate(timers[0].deployment, timers[0], Traffic(prompt_tokens, 1, rate=requests / prefill.replicas))

    def write(**traffic: Any) -> Timeline:
        return simulate(timers[1].deployment, timers[1], Traffic(prompt_tokens, new_tokens, is_read=True, **traffic))

    # a request enters the server once, and waits in the second pool for a place
    start = timers[1].constants[f"{timers[1].deployment.engine.name}.request_seconds"]

    def answer_seconds(line: Timeline) -> float:
        return line.mean("first_seconds") - start + (new_tokens - 1) * line.mean("token_seconds")

    if rate is not None:
        read_line, second, answered = read(rate), write(rate=rate / decode.replicas), rate
        first, is_stable = read_line.mean("first_seconds") + sent, read_line.is_stable
    else:
        assert concurrency is not None
        clients, is_stable = concurrency, True
        share = max(1, round(clients / decode.replicas))

        def waits(delay: float) -> bool:  # whether the pool of prompts takes longer, with as many as are answered
            line = read(clients / (delay + answer_seconds(write(concurrency=share, delay=delay))))
            return not line.is_stable or line.mean("first_seconds") + sent > delay

        first = _settle(waits, alone + sent)
        second = write(concurrency=share, delay=first)
        answered = clients / (first + answer_seconds(second))
    whole = timers[1].deployment.most_sequences(prompt_tokens + new_tokens) or 256
    most = write(concurrency=whole * copies // decode.replicas)
    return PooledProfile(
        name=model.name, prefill=prefill, decode=decode, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
        concurrency=concurrency, first_seconds=first + second.mean("first_seconds") - start,
        sent_seconds=sent, token_seconds=second.mean("token_seconds"), rate=answered,
        prefill_busy=min(1.0, answered * alone / (prefill.replicas * prefill.layout.dp * prefill.layout.pp)),
        decode_busy=min(1.0, answered * new_tokens / (most.tokens_per_second * copies)),
        is_stable=is_stable and second.is_stable)


def _settle(waits: Callable[[float], bool], least: float) -> float:
    """The seconds from an answer until a client's next prompt is read and sent; ``waits`` says whether they are
    too few; ``least``: of a prompt alone. Where the pool of prompts is full, clients wait until it keeps up.
    """
    low, high = least, 2 * least
    while waits(high) and high < _LONGEST:
        low, high = high, 2 * high
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if waits(middle) else (low, middle)
    return high


def send_seconds(deployment: Deployment, tokens: int, gpus: int) -> float:
    """Of the cache of a prompt from one replica to another, each rank its own part: over the network, or within one
    host where all devices are in it. Raises InputError where the link is unknown.
    """
    cluster = deployment.cluster
    path = find_path(cluster, 2, 2) if gpus <= cluster.devices_per_host else None
    bandwidth = path.bandwidth if path is not None else cluster.fabric and cluster.fabric.bandwidth
    if not bandwidth:
        raise InputError(f"{deployment.device.name}: the network between hosts is unknown, over which caches go; name "
                         "a --cluster")
    return deployment.cache_bytes(tokens) / bandwidth
