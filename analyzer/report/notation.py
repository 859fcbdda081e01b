"""The figures of one device and of the whole model under the names of DeepSpeed's FLOPs profiler."""
from __future__ import annotations

from collections.abc import Iterator

from analyzer.results.profile import Profile
from analyzer.units import format_bytes, format_figure, format_latency

from .module_row import divide, plain

NOTATIONS = """\
data parallel size (dp_size), model parallel size (mp_size),
number of parameters (params), number of multiply-accumulate operations (MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (latency of a whole step: fwd, bwd, step and zeroing gradients)"""
# What DeepSpeed takes the backward pass for: its profiler counts the forward one alone.
_BACKWARD_FACTOR = 2


def list_notations(profile: Profile, as_string: bool = True,
                   recompute_fwd_factor: float = 0.0) -> Iterator[tuple[str, str]]:
    """Name and figure of each line; backward and step only of a training step. Raw numbers without ``as_string``;
    unknown is ``-``. ``recompute_fwd_factor`` is DeepSpeed's: how much of the forward pass runs again in backward,
    where the backward pass is not counted.
    """
    def count(value: float | None, unit: str = "", kilo: str = "K") -> str:
        return format_figure(value, unit, kilo) if as_string else plain(value)

    def latency(value: float | None) -> str:
        return format_latency(value) if as_string else plain(value)

    models = profile.model_parallel_size
    fwd_flops, fwd_macs = profile.fwd_flops, profile.fwd_macs
    yield "world size", plain(profile.world_size)
    yield "data parallel size", plain(profile.data_parallel_size)
    yield "model parallel size", plain(models)
    yield "batch size per device", plain(profile.batch_size)
    yield "params per device", count(profile.params, kilo="k")
    if profile.whole_params is None:
        yield "params of model = params per device * mp_size", count(_times(profile.params, models), kilo="k")
    else:  # ranks share parameters: how many copies there are does not count
        yield "params of model", count(profile.whole_params, kilo="k")
    yield "fwd MACs per device", count(fwd_macs, "MACs")
    yield "fwd flops per device", count(fwd_flops)
    yield "fwd flops of model = fwd flops per device * mp_size", count(_times(fwd_flops, models))
    activations = None if profile.modules is None else profile.modules.activation_bytes
    yield "fwd activations per device", format_bytes(activations) if as_string else plain(activations)
    yield "fwd latency", latency(profile.fwd_seconds)
    yield "fwd FLOPS per device = fwd flops per device / fwd latency", count(divide(fwd_flops, profile.fwd_seconds),
                                                                             "FLOPS")
    if profile.mode == "infer":
        yield "iter latency", latency(profile.step_seconds)
        yield "samples/second", count(profile.samples_per_second)
        return
    bwd_flops, name = profile.bwd_flops, "bwd flops per device"
    if bwd_flops is None and fwd_flops is not None and profile.flop_convention == "deepspeed":
        factor = _BACKWARD_FACTOR + recompute_fwd_factor
        bwd_flops, name = round(factor * fwd_flops), f"{factor:g} * fwd flops per device"
    both = None if fwd_flops is None or bwd_flops is None else fwd_flops + bwd_flops
    seconds = profile.fwd_seconds, profile.bwd_seconds
    passes = None if seconds[0] is None or seconds[1] is None else seconds[0] + seconds[1]
    yield "bwd MACs per device", count(profile.bwd_macs, "MACs")
    yield "bwd flops per device", count(profile.bwd_flops)
    yield "bwd latency", latency(profile.bwd_seconds)
    yield f"bwd FLOPS per device = {name} / bwd latency", count(divide(bwd_flops, profile.bwd_seconds), "FLOPS")
    yield "fwd+bwd FLOPS per device = fwd+bwd flops per device / (fwd+bwd latency)", count(
        divide(both, passes), "FLOPS")
    yield "step latency", latency(profile.optimizer_seconds)
    yield "iter latency", latency(profile.step_seconds)
    yield "FLOPS per device = fwd+bwd flops per device / iter latency", count(divide(both, profile.step_seconds),
                                                                              "FLOPS")
    yield "samples/second", count(profile.samples_per_second)


def _times(value: int | None, factor: int | None) -> int | None:
    return None if value is None or factor is None else value * factor
