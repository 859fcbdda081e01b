"""`profile_diffusion`: a batch through a pipeline of diffusers, on one device or on several that share its tokens."""
from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from analyzer.api.profile import profile
from analyzer.api.result import Profile
from analyzer.errors import InputError, is_count
from analyzer.hardware import DeviceSpec, PeakRates, find_device
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.power import JOULES_OF_KWH, Work, add_work, joules_range, watts_of
from analyzer.profilers.annotation import Profiler
from analyzer.report.run_cost import find_step_work
from analyzer.report.text_table import FORMATS, format_quantity
from analyzer.results.info import bound_seconds
from analyzer.tools.serving.fleet import price_of
from analyzer.tools.serving.run import names_server
from analyzer.zoo.command_option import read_recipe
from analyzer.zoo.target import model_errors

from .components import Component, Pipeline
from .diffusion_profile import DiffusionPart, DiffusionProfile
from .pipeline import read_pipeline, telling
from .sharing import Attended, Degrees, find_attentions, share

_FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_FASTER = 1e4  # than the device: its kernels then end before the host has launched the next one
ONE_DEVICE = Degrees()
_SHARED = ("a call of the denoiser and its FLOPs are those of one of the devices, memory is that of a device with all "
           "tokens, which is more; texts are encoded on each, one of them decodes")


def profile_diffusion(pipeline: str | Path | Mapping[str, Any] | Pipeline, batch: int = 1, *,
                      device: str | DeviceSpec = "h200", degrees: Degrees = ONE_DEVICE,
                      attention: Literal["flash", "sdpa"] = "flash", carbon: float | None = None,
                      **sizes: Any) -> DiffusionProfile:
    """Predict seconds, memory, watts and joules of a batch of images or videos, without weights or data.

    ``pipeline`` and ``sizes`` are those of `read_pipeline`, or a `Pipeline` of any modules. Text encoders run once for
    each of the texts, the denoiser once a step (twice where guidance does not double the batch), the decoder once.
    ``attention`` is FlashAttention 2, which servers of pipelines (xDiT) call, without masks among all tokens, or
    ``"sdpa"``, which leaves the choice to PyTorch as plain diffusers does. ``degrees`` spread the tokens of the
    denoiser over ranks of one host; texts are encoded on each, images decoded on one. ``carbon``: grams of carbon
    dioxide of a kWh.
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
    """One call of each of a pipeline's components on one device. ``attentions`` and ``host_seconds`` are of the
    denoiser: its attentions among all tokens, and the time of a call if nothing but the host took any; None where
    devices are not to share its tokens.
    """

    parts: tuple[DiffusionPart, ...]
    chosen: str
    attentions: tuple[Attended, ...] = ()
    host_seconds: float | None = None


class _Unmasked(TorchFunctionMode):
    """Attention among all tokens of latents has no mask: xDiT leaves out the tokens that pad a text, for FlashAttention
    takes none (its examples/hunyuan_video_usp_example.py). Attention to texts alone keeps its mask.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention and kwargs.get("attn_mask") is not None:
            query, key = (*args, kwargs.get("query"), kwargs.get("key"))[:2] if len(args) != 1 else (
                args[0], kwargs["key"])
            if min(query.shape[-2], key.shape[-2]) >= self.tokens:
                kwargs["attn_mask"] = None
        return func(*args, **kwargs)


def run_components(pipeline: Pipeline, device: DeviceSpec, attention: str, shares: bool) -> Runs:
    """``shares``: whether several devices will share the denoiser's tokens."""
    parts: list[DiffusionPart] = []
    attentions: list[Attended] = []
    with nullcontext() if attention == "sdpa" else sdpa_kernel(_FLASH, set_priority=True):
        for component in pipeline.components:
            is_denoiser = component is pipeline.denoiser and pipeline.tokens is not None
            with _Unmasked(pipeline.tokens or 0) if is_denoiser and attention == "flash" else nullcontext():
                found = _run(component, device, {"attentions": find_attentions(attentions, pipeline.tokens or 0)}
                             if shares and is_denoiser else {})
            work = find_step_work(found, device)
            parts.append(DiffusionPart(
                name=component.name, calls=component.calls, seconds=found.step_seconds,
                seconds_range=found.step_seconds_range, bounds=bound_seconds(found.phases["forward"]),
                product_seconds=work and work.product_seconds, traffic_seconds=work and work.traffic_seconds,
                param_bytes=found.param_bytes, peak_allocated_bytes=found.peak_allocated_bytes,
                flops=found.fwd_flops))
        host = _find_host_seconds(pipeline.denoiser, device) if shares else None
    return Runs(tuple(parts), attention, tuple(attentions), host)


def compose(pipeline: Pipeline, runs: Runs, device: DeviceSpec, degrees: Degrees, carbon: float | None = None,
            constants: Mapping[str, float] | None = None) -> DiffusionProfile:
    """The pipeline's calls one after the other. ``constants`` stand in the place of those that are fitted to all
    measurements. Raises InputError for a denoiser whose tokens cannot be shared.
    """
    known = {**find_constants("diffusion", device), **find_constants("power", device), **(constants or {})}
    parts = tuple(part if part.seconds is None else _pace(part, known["host_share"] * part.seconds)
                  for part in runs.parts)
    place = len(pipeline.text)
    if degrees.ranks > 1:
        shared = share(pipeline.name, parts[place], runs.attentions, pipeline.tokens, known["host_share"] * (
            runs.host_seconds or 0.0), device, degrees, known)
        parts = (*parts[:place], _pace(*shared), *parts[place + 1:])
    said = {"flash": "attention by FlashAttention 2, as xDiT calls it; attention='sdpa' leaves it to PyTorch",
            "sdpa": "attention as PyTorch chooses it"}[runs.chosen]
    result = DiffusionProfile(
        name=pipeline.name, device=device.name, batch_size=pipeline.batch, height=pipeline.height,
        width=pipeline.width, frames=pipeline.frames, steps=pipeline.steps, ring=degrees.ring, ulysses=degrees.ulysses,
        parts=parts, peak_allocated_bytes=_find_peak(parts), assumptions=(
            said, *([] if degrees.ranks == 1 else [_SHARED]), *pipeline.assumptions))
    work = find_mean_work(parts, place + 1, degrees.ranks)
    watts = None if work is None else watts_of(work, device, known)
    if watts is None or result.seconds is None:
        return result
    ends = result.seconds_range or (result.seconds,) * 2
    joules = watts * result.gpus * result.seconds / result.batch_size
    return replace(result, watts=watts * result.gpus, joules=joules,
                   joules_range=joules_range(joules, known, (result.seconds, *ends)),
                   grams=None if carbon is None else joules / JOULES_OF_KWH * carbon)


def _run(component: Component, device: DeviceSpec, profilers: Mapping[str, Profiler]) -> Profile:
    with telling(f"the {component.name}, {type(component.module).__name__}, as it is called here"):
        return profile(component.module, component.args, dict(component.kwargs), mode="infer", device=device, eval=True,
                       profilers=profilers)


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


def _find_host_seconds(component: Component, device: DeviceSpec) -> float:
    """Of launching all kernels of a call: its time on a device that is far too fast for them."""
    rates = {name: None if rate is None else rate * _FASTER for name, rate in vars(device.flops_per_second).items()}
    known = {name: value * _FASTER for name in ("memory_bandwidth", "clock_hertz")
             if (value := getattr(device, name)) is not None}
    return _run(component, replace(device, flops_per_second=PeakRates(**rates), **known), {}).step_seconds or 0.0


def find_mean_work(parts: Sequence[DiffusionPart], decoder: int, ranks: int) -> Work | None:
    """What a device does in the mean, None where that is not known. Parts from the ``decoder`` on run on one of the
    ranks, while the others wait (xDiT: is_dp_last_group in its pipelines).
    """
    found = []
    for place, part in enumerate(parts):
        if part.product_seconds is None or part.traffic_seconds is None:
            return None
        busy = part.calls / ranks if place >= decoder else part.calls
        work = Work(part.bounds, part.product_seconds, part.traffic_seconds)
        found += [(busy, work), (part.calls - busy, Work({"host": sum(part.bounds.values())}, 0.0, 0.0))]
    return add_work(found)


#: Options of `analyzer generate` that pipelines do not have.
_OF_TEXT = ("cache", "cache_dtype", "max_sequences", "batches", "engine", "server", "memory_share", "quantize", "lora",
            "compile", "autocast")


def run_diffusion(arguments: argparse.Namespace) -> tuple[str, int]:
    """The text to print and the exit code: 0, or 3 where the batch does not fit on the device."""
    given = [flag for flag in names_server(arguments) if flag not in ("--price", "--carbon")] + [
        f"--{name.replace('_', '-')}" for name in _OF_TEXT if
        (value := getattr(arguments, name, None)) is not None and value is not False]
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
