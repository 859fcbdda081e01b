"""`analyzer generate --engine server`: from the command line's options to an answer."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.hardware import find_device, split_devices
from analyzer.report.text_table import FORMATS
from analyzer.tools.generation.serving import ServingPoint
from analyzer.zoo.command_option import read_recipe
from analyzer.zoo.published_shape import find_alike, tell_format
from analyzer.zoo.target import load_target, model_errors

from .batch import Batch, Chunk
from .deployment import CACHE_BYTES, Layout
from .engine import ENGINES
from .fleet import FleetTarget, find_fleets, price_of
from .pass_time import PassTimer
from .pools import profile_pools, read_pool
from .read_model import read_served_model
from .serve import make_deployment, profile_served
from .served_model import ServedModel
from .served_profile import table_of_points
from .simulation import NoRoomError

_OF_SERVER = ("concurrency", "rate", "weights", "experts", "ttft", "tpot", "draft", "prices", "carbon",
              "images", "image_size", "video_frames", "server_version", "receive_interval", "stream_interval",
              "batch_wait", "burst", "prefill", "decode")
_RANKS = ("tp", "pp", "dp", "ep")
_SERVER = "vllm"  # where --server is not given
#: What ``--quantize`` of the eager model is on a server.
_WEIGHTS = {"int8": "int8", "int4": "int4", "nf4": "int4", "fp8": "fp8"}


def names_server(arguments: argparse.Namespace) -> list[str]:
    """The options that only a server has, as they were given."""
    return [f"--{'price' if name == 'prices' else name.replace('_', '-')}" for name in _OF_SERVER
            if (value := getattr(arguments, name)) is not None and (name not in ("draft", "burst") or value)] + [
        f"--{name}" for name in _RANKS if getattr(arguments, name) != 1]


def read_settings(arguments: argparse.Namespace, layout: Layout | None = None) -> dict[str, Any]:
    """The options as arguments of `make_deployment`. Raises InputError for those that no server has."""
    cache = arguments.cache_dtype or "bf16"
    if cache not in CACHE_BYTES:
        raise InputError(f"--cache-dtype {cache}: servers hold their cache in {', '.join(CACHE_BYTES)}")
    if arguments.attention is not None:
        raise InputError(f"--attention {arguments.attention}: a served cache is read by a kernel of its own; leave it "
                         "out")
    if arguments.cache not in (None, "paged"):
        raise InputError(f"--cache {arguments.cache}: a server's cache is paged; leave it out, or --engine server")
    weights = arguments.weights or _WEIGHTS.get(arguments.quantize or "", None) or _tell_format(arguments.target) or {
        "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}.get(arguments.dtype or "")
    engine, _, version = (arguments.server or _SERVER).partition(":")
    if engine not in ENGINES:
        raise InputError(f"--server {arguments.server}: must be one of {', '.join(ENGINES)}, with a version or "
                         "without, e.g. sglang:0.5.6")
    if version and arguments.server_version:
        raise InputError(f"--server {arguments.server} and --server-version {arguments.server_version}: give one "
                         "version")
    return {"cluster": arguments.cluster, "engine": engine, "version": version or arguments.server_version,
            "memory_share": arguments.memory_share, "receive_interval": arguments.receive_interval,
            "stream_interval": arguments.stream_interval, "prefill_chunk": arguments.prefill_chunk,
            "batch_wait": arguments.batch_wait, "weights": weights, "experts": arguments.experts, "cache": cache,
            "block_size": arguments.block_size, "skew": arguments.skew,
            "layout": layout or Layout(*(getattr(arguments, name) for name in _RANKS))}


def _tell_format(target: str) -> str | None:
    """What the name of a published shape says of its weights."""
    name = target.removeprefix("hf:")
    return tell_format(name) if name != target and find_alike(name) is not None else None


def read_target(arguments: argparse.Namespace) -> ServedModel:
    """The model that TARGET is, in 16 bits: formats of weights are the server's."""
    recipe = read_recipe(argparse.Namespace(**{**vars(arguments), "quantize": None, "attention": None}))
    target, given = load_target(arguments.target), arguments.target.removeprefix("hf:")
    with model_errors(arguments.target):
        found = read_served_model(partial(recipe.build, target.build), arguments.target)
    shape = find_alike(given) if given != arguments.target else None
    if shape is not None:
        name = given if "/" in given else shape.name  # another's copy, or of other weights, is served as it is named
        return replace(found, name=name, repository=name)
    return replace(found, repository=given) if Path(given).is_dir() else found


def _read_prompts(arguments: argparse.Namespace) -> tuple[ServedModel, int]:
    """The model with prompts of the command's pictures, and all tokens of such a prompt."""
    found = read_target(arguments)
    images, frames = arguments.images or 0, arguments.video_frames or 0
    if arguments.image_size is not None and not images and not frames:
        raise InputError("--image-size: there are no --images and no --video-frames; add one, or leave it out")
    found = found.with_pictures(images, arguments.image_size or (1024, 1024), frames)
    return found, arguments.prompt + found.picture_tokens


def time_points(arguments: argparse.Namespace, points: Sequence[ServingPoint]) -> tuple[list[ServingPoint], str]:
    """Points of `generation.serving` with the seconds of a server's passes, and a line that says so."""
    settings = read_settings(arguments)
    timer = PassTimer(make_deployment(read_target(arguments), device=arguments.device, **settings))
    bounds: dict[str, None] = {}
    timed = []
    for point in points:
        decode, prefill = point.decode, point.prefill
        if decode is not None and prefill is not None:
            found = timer.time(Batch(decode.sequences, decode.context_tokens))
            chunk = timer.time(Batch(0, 1, (Chunk(prefill.tokens, prefill.context_tokens),)))
            bounds.setdefault(found.bound)
            point = replace(point, decode=replace(decode, seconds=found.seconds),
                            prefill=replace(prefill, seconds=chunk.seconds))
        timed.append(point)
    said = f"times: {arguments.server or _SERVER}, a pass is one CUDA graph; decode bound by {', then '.join(bounds)}"
    return timed, said if bounds else ""


def run_server(arguments: argparse.Namespace) -> tuple[str, int]:
    """The text to print and the exit code: 0, or 3 where one sequence does not fit, or no fleet keeps the target."""
    devices = split_devices(arguments.device)
    for name in devices:  # before any work
        find_device(name)
    if arguments.prefill is not None or arguments.decode is not None:
        return _run_pools(arguments)
    if arguments.ttft is not None or arguments.tpot is not None:
        return _run_fleets(arguments, devices)
    if len(devices) > 1:
        raise InputError(f"--device {arguments.device}: only --ttft and --tpot take several devices; give one")
    if arguments.rate is not None and arguments.concurrency is not None:
        raise InputError(f"--rate {arguments.rate:g} and --concurrency: give one of them")
    settings = read_settings(arguments)
    model, _ = _read_prompts(arguments)
    numbers = arguments.concurrency or (None if arguments.rate is not None else [arguments.batch])
    price, = price_of(arguments.prices, devices)
    try:
        points = [profile_served(
            model, arguments.prompt, arguments.new_tokens, concurrency=number, rate=arguments.rate, device=devices[0],
            bursts=arguments.burst, price=price, carbon=arguments.carbon, drafted=arguments.draft,
            acceptance=arguments.acceptance, **settings) for number in (numbers or [None])]
    except NoRoomError as error:
        return f"does NOT fit: {error}", 3
    if arguments.json is not None:
        if len(points) > 1:
            raise InputError(f"--json {arguments.json}: saves one answer; give one --concurrency")
        points[0].to_json(arguments.json)
    fmt = FORMATS[arguments.format]
    if len(points) > 1 or arguments.format != "text":
        text = table_of_points(points, "text" if arguments.format == "text" else fmt)
        return (f"{text}\n\n{points[0].head()}" if arguments.format == "text" else text), 0
    return points[0].summary(), 0


def _run_pools(arguments: argparse.Namespace) -> tuple[str, int]:
    if arguments.prefill is None or arguments.decode is None:
        raise InputError("--prefill and --decode: two pools are given together, e.g. --prefill 4xh100:tp2 --decode "
                         "8xh100:tp4")
    given = [f"--{name}" for name in _RANKS if getattr(arguments, name) != 1] + [
        f"--{name}" for name in ("ttft", "tpot", "burst", "draft") if getattr(arguments, name)]
    if given:
        raise InputError(f"{', '.join(given)}: does not work with --prefill and --decode; leave it out")
    numbers = arguments.concurrency or [arguments.batch]
    if len(numbers) > 1 or arguments.concurrency and arguments.rate is not None:
        raise InputError("--prefill and --decode: give one --concurrency, or a --rate")
    settings = read_settings(arguments, Layout())
    settings.pop("layout")
    try:
        model, prompt = _read_prompts(arguments)
        found = profile_pools(model, prompt, arguments.new_tokens,
                              read_pool(arguments.prefill), read_pool(arguments.decode),
                              concurrency=None if arguments.rate is not None else numbers[0], rate=arguments.rate,
                              **settings)
    except NoRoomError as error:
        return f"does NOT fit: {error}", 3
    if arguments.json is not None:
        found.to_json(arguments.json)
    return str(found), 0


def _run_fleets(arguments: argparse.Namespace, devices: list[str]) -> tuple[str, int]:
    missing = [f"--{name}" for name in ("ttft", "tpot", "rate") if getattr(arguments, name) is None]
    if missing:
        raise InputError(f"a fleet is found for --ttft, --tpot and --rate together; add {', '.join(missing)}")
    given = [f"--{name}" for name in _RANKS if getattr(arguments, name) != 1]
    if given:
        raise InputError(f"{', '.join(given)}: the search for fleets chooses ranks itself; leave it out")
    target = FleetTarget(arguments.ttft, arguments.tpot, arguments.rate, arguments.percentile)
    model, prompt = _read_prompts(arguments)
    deployments = [make_deployment(model, device=device, **read_settings(arguments, Layout())) for device in devices]
    found = find_fleets(deployments, target, prompt, arguments.new_tokens,
                        prices=price_of(arguments.prices, devices), repository=model.repository or "MODEL")
    if arguments.json is not None:
        found.to_json(arguments.json)
    said = "" if model.repository or not found.fleets else (
        f"\n\nMODEL: the folder of the weights, or their name on the hub, which {arguments.target} does not tell")
    return f"{found}{said}", 0 if found.fleets else 3
