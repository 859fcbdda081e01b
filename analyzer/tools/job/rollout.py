"""Rollouts: what an engine that samples answers takes on the devices of the model that learns of them, and how long."""
from __future__ import annotations

from dataclasses import dataclass, replace

from analyzer.errors import UnknownSpeedError
from analyzer.hardware import DeviceSpec, find_device
from analyzer.results.verdict import Verdict
from analyzer.tools.serving import ServedModel, SharedEngine, share_device
from analyzer.tools.serving.simulation import NoRoomError
from analyzer.units import format_bytes, format_seconds

from .document import Files
from .plan import RolloutPlan, TrainingPlan
from .serving import ServerStart, profile_serving, start_server

_MOST_DEVICES = 8  # that share a layer: those of one host


@dataclass(frozen=True)
class Rollout:
    """The answers of a step. ``seconds``: what a step waits for them, None where the device's speed is unknown."""

    plan: RolloutPlan
    start: ServerStart
    prompt: int
    seconds: float | None

    @property
    def engine(self) -> SharedEngine | None:
        """What is on each device of the trained model; None where the engine has devices of its own."""
        return None if self.plan.is_apart else share_device(self.start.deployment, level=2 if self.plan.sleeps else 0)

    def judge(self, own: Verdict, model_bytes: int, optimizer_bytes: int) -> Verdict:
        """The verdict of update and rollout together, of that of the update; the bytes are those that a device holds
        of the trained model between its steps (ms-swift 4.6, rlhf_trainers/rollout_mixin.py, `_fast_infer`: weights of
        the engine come first, then the trained model leaves, then the cache comes). Where the device's memory is not
        known, neither is whether both fit.
        """
        engine = self.engine
        if own.needed_bytes is None or engine is None:
            return own
        plan = self.plan
        stays = (0 if plan.offloads_model else model_bytes) + (0 if plan.offloads_optimizer else optimizer_bytes)
        peaks = engine.peaks(held_bytes=model_bytes + optimizer_bytes, update_bytes=own.needed_bytes,
                             sampling_held_bytes=stays)
        updating, sampling, copying = peaks["update"], peaks["rollout"], peaks["sync"]
        if updating is None or sampling is None or copying is None:
            return replace(own, needed_bytes=None, free_bytes=None, fits=None)
        sampling = max(sampling, copying)
        needed = max(sampling, updating)
        if needed == own.needed_bytes:
            return own
        capacity = own.capacity_bytes
        found = replace(own, needed_bytes=needed, free_bytes=None if capacity is None else capacity - needed,
                        fits=None if capacity is None else needed <= capacity, devices=())
        return found if updating >= sampling else replace(
            found, phase="rollout", operator=None, forward_operator=None, node=None, module_path=None)

    def __str__(self) -> str:
        devices = f"{self.start.deployment.layout.gpus} x {self.start.deployment.device.name}"
        engine = self.engine
        where = f"a server that is taken to have {devices}" if engine is None else (
            f"each engine on {devices} that train too, {format_bytes(engine.sampling_bytes)} of each")
        took = "" if self.seconds is None else f"; {format_seconds(self.seconds)} of a step"
        return (f"rollout: {self.plan.sequences:,} answers of {self.plan.new:,} tokens to prompts of {self.prompt:,}, "
                f"at once, by {where}{took}")


def wait(rollout: Rollout | None, update: float | None) -> float | None:
    """The seconds of a step whose update takes so many."""
    if rollout is None or update is None:
        return update
    if rollout.seconds is None:
        return None
    return max(update, rollout.seconds) if rollout.plan.overlaps else update + rollout.seconds


def sample_rollout(plan: TrainingPlan, device: str | DeviceSpec, files: Files | None) -> Rollout | None:
    """The rollout of a plan; None where it has none. Raises NoRoomError where its engine does not start."""
    rollout = plan.rollout
    if rollout is None:
        return None
    server, models = rollout.server, dict[str, ServedModel]()
    start = start_server(server, device, files=files, models=models)
    while rollout.is_apart and start.refusal and server.tp < _MOST_DEVICES:
        server = replace(server, tp=2 * server.tp)
        start = start_server(server, device, files=files, models=models)
    if start.refusal:
        raise NoRoomError(f"rollout of {plan.model} on {find_device(device).name}: {server.engine} does not start: "
                          f"{start.refusal}")
    prompt = max(1, plan.length - rollout.new)
    try:
        found = profile_serving(server, device, start=start, prompt=prompt, new=rollout.new,
                                concurrency=rollout.sequences)
    except UnknownSpeedError:
        return Rollout(rollout, start, prompt, None)
    seconds = rollout.sequences * rollout.new / found.tokens_per_second / rollout.steps
    return Rollout(rollout, start, prompt, seconds)
