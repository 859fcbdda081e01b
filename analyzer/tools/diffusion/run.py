"""`profile_diffusion`: a batch through a pipeline of diffusers, on one device or on several that share its tokens."""
from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from analyzer.api.profile import profile
from analyzer.errors import InputError, is_count
from analyzer.hardware import DeviceSpec, cluster_of, find_device
from analyzer.hardware.device_spec import PeakRates
from analyzer.hardware.kernel_time.collective import collective_time
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.kernel_time.pointwise import stream_time
from analyzer.hardware.power import JOULES_OF_KWH, joules_range, watts_of
from analyzer.report.node_table import FORMATS, format_quantity
from analyzer.results.info import OperatorInfo, bound_seconds
from analyzer.results.profile import Profile
from analyzer.tools.serving.fleet import price_of
from analyzer.tools.serving.run import names_server
from analyzer.zoo.command_option import model_errors, read_recipe

from .diffusion_profile import DiffusionPart, DiffusionProfile
from .pipeline import Component, Pipeline, read_pipeline

_FASTER = 1e4  # than the device: its kernels then end before the host has launched the next one
_ATTENTION = "aten._scaled_dot_product_"
#: Of an element of a block's output, which joins those before it in float32: ring_flash_attn/utils.py (out - sigmoid(
#: lse of the block - lse) * (out - block)), each operator a kernel of its own; and how many these are.
_JOIN_BYTES, _JOIN_KERNELS = 42, 12


class Degrees(NamedTuple):
    """Ranks that share the tokens of each image: keys pass around a ``ring``, heads are spread by ``ulysses``."""

    ring: int = 1
    ulysses: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses


ONE_DEVICE = Degrees()


def profile_diffusion(pipeline: str | Path | Mapping[str, Any] | Pipeline, batch: int = 1, *,
                      device: str | DeviceSpec = "h200", degrees: Degrees = ONE_DEVICE,
                      attention: Literal["flash", "sdpa"] = "flash", carbon: float | None = None,
                      **sizes: Any) -> DiffusionProfile:
    """Predict seconds, memory, watts and joules of a batch of images or videos, without weights or data.

    ``pipeline`` and ``sizes`` are those of `read_pipeline`, or a `Pipeline` of any modules. Text encoders run once for
    each of the texts, the denoiser once a step (twice where guidance does not double the batch), the decoder once.
    ``attention`` is FlashAttention 2, which servers of pipelines (xDiT) call where a mask does not forbid it, or
    ``"sdpa"``, which leaves the choice to PyTorch as plain diffusers does. ``degrees`` spread the tokens of the
    denoiser over ranks of one host; text and decoder run on each. ``carbon``: grams of carbon dioxide of a kWh.
    Raises InputError for what cannot be, and what `read_pipeline` raises.
    """
    if attention not in ("flash", "sdpa"):
        raise InputError(f"profile_diffusion(attention={attention!r}): must be flash or sdpa")
    if not all(is_count(degree, 1) for degree in degrees):
        raise InputError(f"profile_diffusion(degrees={degrees!r}): each must be 1 or more")
    spec = find_device(device)
    found = pipeline if isinstance(pipeline, Pipeline) else read_pipeline(pipeline, batch, **sizes)
    return compose(found, run_components(found, spec, attention, degrees.ranks > 1), spec, degrees, carbon)


class Runs(NamedTuple):
    """One call of each of a pipeline's components on one device. ``attention`` and ``host_seconds`` are of the
    denoiser: its longest attention operator, and the time of a call if nothing but the host took any; None where
    devices are not to share its tokens.
    """

    parts: tuple[DiffusionPart, ...]
    chosen: str
    attention: OperatorInfo | None = None
    host_seconds: float | None = None


def run_components(pipeline: Pipeline, device: DeviceSpec, attention: str, shares: bool) -> Runs:
    """``shares``: whether several devices will share the denoiser's tokens."""
    parts, rows = [], []
    with _attending(attention):
        for component in pipeline.components:
            found = _run(component, device)
            parts.append(DiffusionPart(
                name=component.name, calls=component.calls, seconds=found.step_seconds,
                seconds_range=found.step_seconds_range, bounds=bound_seconds(found.phases["forward"]),
                param_bytes=found.param_bytes, peak_allocated_bytes=found.peak_allocated_bytes,
                flops=found.fwd_flops))
            if component is pipeline.denoiser:
                rows = [row for row in found.operators if row.operator.startswith(_ATTENTION)]
        host = _find_host_seconds(pipeline.denoiser, device) if shares else None
    return Runs(tuple(parts), attention, max(rows, key=lambda row: row.seconds or 0.0, default=None), host)


def compose(pipeline: Pipeline, runs: Runs, device: DeviceSpec, degrees: Degrees, carbon: float | None = None,
            constants: Mapping[str, float] | None = None) -> DiffusionProfile:
    """The pipeline's calls one after the other. ``constants`` stand in the place of those that are fitted to all
    measurements. Raises InputError for a denoiser whose tokens cannot be shared.
    """
    known = {**find_constants("diffusion", device), **find_constants("power", device), **(constants or {})}
    parts = tuple(part if part.seconds is None else _pace(part, known["host_share"] * part.seconds)
                  for part in runs.parts)
    if degrees.ranks > 1:
        place = len(pipeline.text)
        shared = _share(pipeline, runs, parts[place], device, degrees, known)
        parts = (*parts[:place], shared, *parts[place + 1:])
    said = {"flash": "attention by FlashAttention 2, as xDiT calls it; attention='sdpa' leaves it to PyTorch",
            "sdpa": "attention as PyTorch chooses it"}[runs.chosen]
    result = DiffusionProfile(
        name=pipeline.name, device=device.name, batch_size=pipeline.batch, height=pipeline.height,
        width=pipeline.width, frames=pipeline.frames, steps=pipeline.steps, ring=degrees.ring, ulysses=degrees.ulysses,
        parts=parts, peak_allocated_bytes=_find_peak(parts), assumptions=(said, *pipeline.assumptions))
    return _add_power(result, device, carbon, known)


@contextmanager
def _attending(attention: str) -> Iterator[None]:
    if attention == "sdpa":
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield


def _run(component: Component, device: DeviceSpec) -> Profile:
    return profile(component.module, component.args, dict(component.kwargs), mode="infer", device=device, eval=True)


def _pace(part: DiffusionPart, host_seconds: float) -> DiffusionPart:
    """The call where the host takes so long to launch it; kernels wait only where it is behind them."""
    kernels = sum(seconds for bound, seconds in part.bounds.items() if bound != "launch")
    waits = max(0.0, host_seconds - kernels)
    low, high = (end / (part.seconds or 1.0) for end in part.seconds_range or (1.0, 1.0))
    seconds = kernels + waits
    return replace(part, seconds=seconds, bounds={**part.bounds, "launch": waits},
                   seconds_range=(seconds * low, seconds * high))


def _find_peak(parts: tuple[DiffusionPart, ...]) -> int | None:
    """All weights are there at once; modules run one after the other."""
    pairs = [(part.param_bytes, part.peak_allocated_bytes) for part in parts]
    known = [(weights, peak) for weights, peak in pairs if weights is not None and peak is not None]
    return None if len(known) < len(pairs) else (
        sum(weights for weights, _ in known) + max(peak - weights for weights, peak in known))


def _share(pipeline: Pipeline, runs: Runs, part: DiffusionPart, device: DeviceSpec, degrees: Degrees,
           constants: Mapping[str, float]) -> DiffusionPart:
    """The denoiser where each rank has an even part of the tokens: its kernels take that part of their time, the host
    as long as before. Of attention, whose products are most of ``flops``, q, k, v and the output have
    ``2 * flops / tokens`` bytes in 16 bits. Ulysses exchanges heads for tokens and back (yunchang/comm/all_to_all.py:
    each exchange between two copies), a ring sends keys and values on while a block is computed, and joins blocks.
    """
    main, cluster, ranks = runs.attention, cluster_of(device), degrees.ranks
    if pipeline.tokens is None or main is None or not main.flops or main.seconds is None or part.seconds is None:
        raise InputError(f"{pipeline.name}: {degrees} share the tokens of a transformer on a device whose speed is "
                         "known; this denoiser is none, leave out --ring and --ulysses")
    layers, host = main.calls, constants["host_share"] * (runs.host_seconds or 0.0)
    each = round(2 * main.flops / pipeline.tokens / ranks / layers / 4)  # bytes of q, k, v or the output, on one rank
    exchange = collective_time("all_to_all", each, degrees.ulysses, cluster)
    copies, send = stream_time(4 * each, device, kernels=2), collective_time("send", 2 * each, 2, cluster)
    join = stream_time(_JOIN_BYTES * each / 2, device, kernels=_JOIN_KERNELS)
    if exchange is None or copies is None or send is None or join is None:
        raise InputError(f"{pipeline.name}: the links of {cluster.name} are not known; leave out --ring and --ulysses")
    sent = moved = 0.0
    if degrees.ulysses > 1:
        sent, moved = 4 * layers * exchange.seconds, 4 * layers * copies.seconds
    if degrees.ring > 1:
        sent += layers * (degrees.ring - 1) * send.seconds
        moved += layers * degrees.ring * join.seconds
        host += layers * degrees.ring * constants["ring_seconds"]
    bounds = {bound: seconds / ranks for bound, seconds in part.bounds.items() if bound != "launch"}
    bounds["communication"] += sent / constants["exchange_share"]
    bounds["memory"] += moved / constants["exchange_share"]
    return _pace(replace(part, bounds=bounds), host)


def _find_host_seconds(component: Component, device: DeviceSpec) -> float:
    """Of launching all kernels of a call: its time on a device that is far too fast for them."""
    rates = {name: None if rate is None else rate * _FASTER for name, rate in vars(device.flops_per_second).items()}
    known = {name: value * _FASTER for name in ("memory_bandwidth", "clock_hertz")
             if (value := getattr(device, name)) is not None}
    return _run(component, replace(device, flops_per_second=PeakRates(**rates), **known)).step_seconds or 0.0


def sum_bounds(parts: Iterable[DiffusionPart]) -> dict[str, float]:
    """Seconds of all calls by what bounds them."""
    spent: dict[str, float] = defaultdict(float)
    for part in parts:
        for bound, seconds in part.bounds.items():
            spent[bound] += part.calls * seconds
    return spent


def _add_power(found: DiffusionProfile, device: DeviceSpec, carbon: float | None,
               constants: Mapping[str, float]) -> DiffusionProfile:
    spent = sum_bounds(found.parts)
    watts = watts_of(spent, device, constants)
    if watts is None or found.seconds is None:
        return found
    joules, ends = watts * found.gpus * found.seconds / found.batch_size, found.seconds_range or (found.seconds,) * 2
    return replace(found, watts=watts * found.gpus, joules=joules,
                   joules_range=joules_range(joules, constants, (found.seconds, *ends)),
                   grams=None if carbon is None else joules / JOULES_OF_KWH * carbon)


#: Options of `analyzer generate` that pipelines do not have.
_OF_TEXT = ("cache", "cache_dtype", "max_sequences", "batches", "engine", "quantize", "lora", "compile", "autocast")


def run_diffusion(arguments: argparse.Namespace) -> tuple[str, int]:
    """The text to print and the exit code: 0, or 3 where the batch does not fit on the device."""
    given = [flag for flag in names_server(arguments) if flag not in ("--price", "--carbon")] + [
        f"--{name.replace('_', '-')}" for name in _OF_TEXT if getattr(arguments, name, None)]
    if given:
        raise InputError(f"{', '.join(given)}: of models that generate text, which {arguments.target} does not")
    spec = find_device(arguments.device)
    sizes = {name: getattr(arguments, name) for name in ("height", "width", "frames", "guidance")}
    with model_errors(arguments.target):
        found = profile_diffusion(
            arguments.target, arguments.batch, device=spec, degrees=Degrees(arguments.ring, arguments.ulysses),
            attention=arguments.attention or "flash", carbon=arguments.carbon, steps=arguments.denoising_steps,
            dtype=read_recipe(arguments).dtype or torch.bfloat16, **sizes)
    if arguments.json is not None:
        found.to_json(arguments.json)
    if arguments.format != "text":
        return found.table(FORMATS[arguments.format]), 0
    text, need, room = found.summary(), found.peak_allocated_bytes, spec.memory_bytes
    price, = price_of(arguments.prices, [arguments.device])
    if price is not None and found.seconds is not None:
        text += f"\n{price * found.gpus * found.seconds / 3600 / found.batch_size:.3g} dollars each"
    if need is not None and room is not None and need > room:
        return f"{text}\ndoes NOT fit: {format_quantity(need, 'bytes')} on {spec.name}, which has " \
               f"{format_quantity(room, 'bytes')}", 3
    return text, 0
