"""A denoiser on several devices, each of which has a part of the tokens, as xDiT spreads it."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from analyzer.api.profile import profile
from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, cluster_of
from analyzer.hardware.kernel_time.collective import collective_time
from analyzer.hardware.kernel_time.estimate import BOUNDS
from analyzer.meta.spec import TensorSpec
from analyzer.profilers.annotation import Annotation
from analyzer.record.log import Log
from analyzer.results.info import bound_seconds

from .diffusion_profile import DiffusionPart


class Degrees(NamedTuple):
    """Ranks that share the tokens of each image: keys pass around a ``ring``, heads are spread by ``ulysses``."""

    ring: int = 1
    ulysses: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses


class Attended(NamedTuple):
    """An attention of which a call of the denoiser runs ``calls``; ``width``: of a head. ``keys`` are ``tokens`` where
    these look at themselves, else those of a text.
    """

    rows: int
    heads: int
    tokens: int
    keys: int
    width: int
    dtype: torch.dtype
    calls: int


def find_attentions(into: list[Attended], tokens: int) -> Callable[[Log], Annotation]:
    """A profiler that adds those of at least so many tokens."""
    def profiler(log: Log) -> Annotation:
        found = Counter[tuple[TensorSpec, int]]()
        for tally in log.tallies():
            signature = tally.call.signature
            if tally.step == log.steps - 1 and signature.op.__name__.startswith("_scaled_dot_product_"):
                query, key = signature.inputs[:2]
                if query[2] >= tokens:
                    found[query, key[2]] += tally.number
        for (query, keys), calls in found.items():
            rows, heads, length, width = query
            into.append(Attended(rows, heads, length, keys, width, query.dtype, calls))
        return Annotation()

    return profiler


class _Exchange(nn.Module):
    """The copies around the exchanges of heads for tokens, and back (yunchang/comm/all_to_all.py, all_to_all_4D)."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, query: Tensor, key: Tensor, out: Tensor) -> None:
        for x in (query, key, key):
            rows, tokens, heads, width = x.shape
            sent = x.reshape(rows, tokens, self.ranks, -1, width).transpose(0, 2).contiguous()
            sent.reshape(self.ranks * tokens, rows, -1, width).transpose(0, 1).contiguous()
        rows, tokens, heads, width = out.shape
        back = out.reshape(rows, self.ranks, -1, heads, width).transpose(0, 3).transpose(0, 1).contiguous()
        back.reshape(self.ranks * heads, -1, rows, width).transpose(0, 2).contiguous()


class _Join(nn.Module):
    """A block's output joins those of the blocks before it (yunchang/ring/utils.py, _update_out_and_lse)."""

    def forward(self, out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
        block, block_lse = block.to(torch.float32), block_lse.transpose(-2, -1).unsqueeze(-1)
        return (out - torch.sigmoid(block_lse - lse) * (out - block),
                lse - functional.logsigmoid(lse - block_lse))


@lru_cache(maxsize=1024)
def _time_module(kind: type[nn.Module], arguments: tuple[int, ...], shapes: tuple[tuple[int, ...], ...],
                 dtypes: tuple[torch.dtype, ...], device: DeviceSpec) -> Mapping[str, float]:
    """Seconds of its kernels by what bounds them."""
    with torch.device("meta"):
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)]
    found = profile(kind(*arguments), inputs, mode="infer", device=device)
    return bound_seconds(found.phases["forward"])


def share(name: str, part: DiffusionPart, attentions: tuple[Attended, ...], tokens: int | None, host_seconds: float,
          device: DeviceSpec, degrees: Degrees, constants: Mapping[str, float]) -> tuple[DiffusionPart, float]:
    """A call of the denoiser on one of the devices, and what its host takes. ``host_seconds``: on one device alone.

    Latents are cut evenly. Text that is attended to beside them is cut too where its tokens can be, else each rank has
    all of it (pipeline_stable_diffusion_3.py, _chunk_text_for_sp). A rank's kernels take the part of the time that it
    has of the tokens, but for the products that make keys and values of a text, as wide as those of latents. Ulysses
    exchanges heads for tokens and back; a ring sends keys and values on while a block is computed, and joins blocks.
    Raises InputError where that cannot be.
    """
    ranks, cluster = degrees.ranks, cluster_of(device)
    inner = [attention for attention in attentions if attention.keys == attention.tokens]
    if tokens is None or not inner or part.seconds is None or not part.flops:
        raise InputError(f"{name}: {degrees} share the tokens of a transformer on a device whose speed is known; this "
                         "denoiser is none, leave out --ring and --ulysses")
    least = min(attention.heads for attention in inner)
    if least % degrees.ulysses:
        raise InputError(f"{name}: --ulysses {degrees.ulysses} does not divide its {least} heads of attention")
    whole = max(attention.tokens for attention in inner)
    text, latents = whole - tokens, ceil(tokens / ranks)
    own = text if text % ranks else text // ranks  # tokens of text on each rank
    of_text = sum(4 * other.calls * other.rows * other.keys * (other.heads * other.width)**2
                  for other in attentions if other not in inner) / part.flops
    shares = of_text + (1 - of_text) * (latents + own) / whole
    bounds = defaultdict(float, {bound: shares * seconds for bound, seconds in part.bounds.items()})

    def add(times: int, seconds: Mapping[str, float]) -> None:
        for bound in BOUNDS:
            bounds[bound] += times * seconds[bound]

    def send(times: int, kind: Literal["all_to_all", "send"], nbytes: int, among: int) -> None:
        sent = collective_time(kind, nbytes, among, cluster)
        if sent is None:
            raise InputError(f"{name}: the links of {cluster.name} are not known; leave out --ring and --ulysses")
        bounds["communication"] += times * sent.seconds / constants["exchange_share"]

    for attention in inner:
        rows, heads, calls = attention.rows, attention.heads, attention.calls
        queries = latents + (own if attention.tokens == whole else 0)
        keys = latents if text % ranks else queries
        width, each = attention.width, rows * heads * attention.width * attention.dtype.itemsize
        if degrees.ulysses > 1:
            copies = _time_module(_Exchange, (degrees.ulysses,), (
                (rows, queries, heads, width), (rows, keys, heads, width),
                (rows, queries * degrees.ulysses, heads // degrees.ulysses, width)), (attention.dtype,) * 3, device)
            for moved in (queries, keys):
                send(2 * calls, "all_to_all", each * moved, degrees.ulysses)
            add(calls, copies)
        if degrees.ring > 1:
            shape = rows, queries, heads
            joined = _time_module(_Join, (), ((*shape, width), (*shape, 1), (*shape, width), (rows, heads, queries)), (
                torch.float32, torch.float32, attention.dtype, torch.float32), device)
            send(calls * (degrees.ring - 1), "send", 2 * each * keys, 2)
            add(degrees.ring * calls, joined)
            host_seconds += calls * degrees.ring * constants["ring_seconds"]
    return replace(part, bounds=dict(bounds), flops=round(part.flops * shares), product_seconds=(
        part.product_seconds and part.product_seconds * shares), traffic_seconds=(
        part.traffic_seconds and part.traffic_seconds * shares)), host_seconds
