"""`profile_serving`: what a server gives that a command starts."""
from __future__ import annotations

from dataclasses import replace

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.tools.serving import ENGINES, Layout, ServedProfile, make_deployment, profile_served, read_served_model
from analyzer.tools.serving.simulation import NoRoomError
from analyzer.units import format_bytes
from analyzer.zoo.command_option import model_errors
from analyzer.zoo.target import load_target

from .document import Files
from .model_name import find_model
from .plan import ServingPlan

#: What requests are taken to be where nothing says it: as `analyzer generate` has them.
PROMPT, NEW = 1024, 256


def profile_serving(plan: ServingPlan, device: str | DeviceSpec = "h200", *, files: Files | None = None,
                    prompt: int | None = None, new: int | None = None, concurrency: int | None = None,
                    price: float | None = None) -> ServedProfile:
    """Predict the server of a plan. Requests have ``prompt`` tokens and ``new`` ones, by default `PROMPT` and `NEW`
    but within the longest sequence of the plan; ``concurrency`` are in flight. Raises NoRoomError where weights leave
    no room for a single one of the longest sequences, as the server would refuse to start.
    """
    found = find_model(plan.model, files or Files())
    target = load_target(found.target)
    with model_errors(plan.model):
        model = read_served_model(target.build, plan.model)
    whole = plan.length or PROMPT + NEW
    new = min(new or NEW, max(1, whole // 2))
    prompt = min(prompt or PROMPT, whole - new)
    if prompt < 1:
        raise InputError(f"the longest sequence of {whole} tokens has no room for a prompt and {new} new tokens")
    engine = ENGINES[plan.engine]
    engine = engine._replace(memory_share=plan.memory_share or engine.memory_share,
                             sequences=plan.sequences or engine.sequences, chunk=plan.chunk or engine.chunk)
    settings = {"device": device, "layout": Layout(plan.tp, plan.pp, plan.dp, plan.ep), "weights": plan.weights,
                "cache": plan.cache, "block_size": plan.block_size}
    deployment = make_deployment(model, engine=plan.engine, **settings)  # type: ignore[arg-type]
    deployment = replace(deployment, engine=engine)
    if plan.length is not None and deployment.most_sequences(plan.length) == 0:
        raise NoRoomError(f"{plan.model} on {plan.tp * plan.pp * plan.dp} x {device}: weights leave "
                          f"{format_bytes(deployment.room_bytes())} for the cache, and one sequence of {plan.length:,} "
                          f"tokens takes {format_bytes(deployment.cache_bytes(plan.length))}: {plan.engine} would not "
                          "start; shorten it, or use more devices")
    return profile_served(deployment, prompt, new, concurrency=concurrency, name=plan.model, price=price)
