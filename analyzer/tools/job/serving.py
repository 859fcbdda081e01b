"""Servers: whether one starts that a command asks for, what it has room for, and what it then gives."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.tools.serving import (
    Deployment,
    Engine,
    Layout,
    ServedModel,
    ServedProfile,
    make_deployment,
    profile_served,
    read_served_model,
    static_share,
    stored_format,
)
from analyzer.tools.serving.simulation import NoRoomError
from analyzer.zoo.target import load_target, model_errors

from .document import Files
from .model_name import find_model
from .plan import ServingPlan

#: What requests are taken to be where nothing says it: as `analyzer generate` has them.
PROMPT, NEW = 1024, 256
_UNSAID = 2048  # vLLM's config/model.py: the longest sequence of a model whose config does not tell it


@dataclass(frozen=True)
class ServerStart:
    """What lies on a device of a server when it starts. ``longest``: tokens of the longest sequence that it answers."""

    plan: ServingPlan
    deployment: Deployment
    longest: int
    most_positions: int | None               #: that the model's config tells
    assumptions: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return self.deployment.layout.gpus

    @property
    def room_bytes(self) -> int | None:
        """For the cache, of the fullest device; below 0 where not even weights have room."""
        return self.deployment.room_bytes()

    @property
    def longest_bytes(self) -> int:
        """Of the cache of one longest sequence."""
        return self.deployment.cache_bytes(self.longest)

    @property
    def sequences(self) -> float | None:
        """Of the longest that the cache has room for; servers log it as their most concurrency."""
        room = self.room_bytes
        return None if room is None else max(0.0, room / max(1, self.longest_bytes))

    @property
    def most_tokens(self) -> int | None:
        """Of one sequence that has the cache for itself, at most as many as the model has positions."""
        room = self.room_bytes
        if room is None:
            return None
        low, high = 0, self.most_positions or self.longest
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.deployment.cache_bytes(middle) <= room else (low, middle - 1)
        return low

    @property
    def refusal(self) -> str:
        """Why the server does not start, as its engine says it; empty where it does, or nothing is known of memory."""
        room, memory = self.room_bytes, self.deployment.device.memory_bytes
        if room is None or memory is None:
            return ""
        if self.deployment.weight_bytes() > memory:
            return "torch.OutOfMemoryError: CUDA out of memory, while weights are loaded"
        return (_refuse_vllm if self.plan.engine == "vllm" else _refuse_other)(self, room)


# vLLM 0.33: v1/core/kv_cache_utils.py, `_check_enough_kv_cache_memory`; config/model.py, `_get_and_verify_max_len`.

def _refuse_vllm(start: ServerStart, room: int) -> str:
    most = start.most_positions
    if most is not None and start.longest > most and not start.plan.is_stretched:
        return (f"User-specified max_model_len ({start.longest}) is greater than the derived max_model_len "
                f"(max_position_embeddings={most})")
    if room <= 0:
        return ("No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
                "the engine.")
    if start.longest_bytes <= room:
        return ""
    return (f"To serve at least one request with the model's max seq len ({start.longest}), "
            f"({start.longest_bytes / 2**30:.2f} GiB KV cache is needed, which is larger than the available KV cache "
            f"memory ({room / 2**30:.2f} GiB). Based on the available memory, the estimated maximum model length is "
            f"{start.most_tokens}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
            "initializing the engine.")


def _refuse_other(start: ServerStart, room: int) -> str:
    """SGLang 0.5, srt/model_executor: sequences longer than the cache are refused one by one, the server starts."""
    return "Not enough memory. Please try to increase --mem-fraction-static." if room <= 0 else ""


def start_server(plan: ServingPlan, device: str | DeviceSpec = "h200", *, files: Files | None = None,
                 models: dict[str, ServedModel] | None = None) -> ServerStart:
    """What lies on a device of a server of a plan. ``models`` are those that were read, by name. Raises JobError for a
    model that is not found, InputError for a layout that cannot be.
    """
    found = find_model(plan.model, files or Files())
    target = load_target(found.target)
    known = {} if models is None else models
    if plan.model not in known:
        with model_errors(plan.model):
            known[plan.model] = read_served_model(target.build, plan.model)
    config = _find_config(target.build)
    said = [found.assumed] if found.assumed else []
    weights, experts = plan.weights, plan.experts
    if weights is None:
        weights, experts = stored_format(getattr(config, "quantization_config", None))
    model = known[plan.model] if plan.has_tower else replace(known[plan.model], tower=None)
    deployment = make_deployment(
        model, engine=plan.engine, device=device, layout=Layout(plan.tp, plan.pp, plan.dp, plan.ep),
        weights=weights, experts=experts, block_size=plan.block_size,
        cache=plan.cache or ("fp16" if weights == "fp16" else "bf16"))
    engine = _at_device(deployment.engine, deployment.device, plan)
    engine = engine._replace(memory_share=plan.memory_share or engine.memory_share,
                             sequences=plan.sequences or engine.sequences, chunk=plan.chunk or engine.chunk)
    most = _count_positions(config)
    if plan.length is None and most is None:
        said.append(f"the longest sequence has {_UNSAID:,} tokens, for the model's config does not tell it")
    start = ServerStart(plan, replace(deployment, engine=engine), plan.length or most or _UNSAID, most, tuple(said))
    if plan.fits_length and start.most_tokens:
        start = replace(start, longest=min(start.longest, start.most_tokens))
    return start


def _find_config(build: Any) -> Any:
    """Of a model of transformers that is built of a config; None for others."""
    written = getattr(build, "args", None)
    return written[1] if written and len(written) > 1 else getattr(build, "config", None)


def _count_positions(config: Any) -> int | None:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(inner, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _at_device(engine: Engine, device: DeviceSpec, plan: ServingPlan) -> Engine:
    """An engine's own limits on a device: vLLM 0.33, engine/arg_utils.py, `get_batch_defaults`; SGLang 0.5.23,
    srt/arg_groups/memory_hook.py, `handle_gpu_memory_settings`.
    """
    memory = device.memory_bytes
    if memory is None:
        return engine
    size = memory / 2**30
    if engine.name == "vllm" and (size < 70 or "a100" in device.name):
        return engine._replace(chunk=2048, sequences=256)
    if engine.name == "vllm" and size >= 160:
        return engine._replace(chunk=16384)
    if engine.name == "sglang":
        chunk = 2048 if size < 20 else 4096 if size < 60 else 8192 if size < 160 else 16384
        return engine._replace(chunk=chunk, memory_share=static_share(
            memory, plan.chunk or chunk, plan.tp * plan.dp, plan.pp, plan.dp, plan.sequences))
    return engine


def profile_serving(plan: ServingPlan, device: str | DeviceSpec = "h200", *, files: Files | None = None,
                    prompt: int | None = None, new: int | None = None, concurrency: int | None = None,
                    price: float | None = None, start: ServerStart | None = None) -> ServedProfile:
    """Predict the server of a plan. Requests have ``prompt`` tokens and ``new`` ones, by default `PROMPT` and `NEW`
    but within the longest sequence; ``concurrency`` are in flight. ``start`` is what `start_server` found. Raises
    NoRoomError where the server would refuse to start.
    """
    start = start or start_server(plan, device, files=files)
    if start.refusal:
        raise NoRoomError(f"{plan.model} on {start.devices} x {start.deployment.device.name}: {plan.engine} does not "
                          f"start: {start.refusal}")
    whole = start.longest if start.most_tokens is None else min(start.longest, start.most_tokens)
    new = min(new or NEW, max(1, whole // 2))
    prompt = min(prompt or PROMPT, whole - new)
    if prompt < 1:
        raise InputError(f"the longest sequence of {whole} tokens has no room for a prompt and {new} new tokens")
    return profile_served(start.deployment, prompt, new, concurrency=concurrency, name=plan.model, price=price,
                          drafted=plan.drafted)


