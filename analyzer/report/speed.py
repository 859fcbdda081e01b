"""How fast a step is: its time with its range, and the rates that it reaches."""
from __future__ import annotations

from collections.abc import Iterator

from analyzer.errors import AnalyzerError
from analyzer.results.profile import Profile
from analyzer.units import format_count, format_percent, format_rate, format_seconds

RATES = ("samples_per_second", "tokens_per_second", "model_flops_per_second", "mfu", "hfu")
_OWN_WORDS = ("predicted", "measured", "not timed")  # with which a method says so itself


def read_rate(profile: Profile, name: str) -> float | None:
    """One of `RATES`; None where it is unknown, or the profile's device is.

    >>> p = Profile(name="demo", mode="infer", device="h100", autocast="bfloat16", fwd_macs=10**12, step_seconds=0.01)
    >>> round(read_rate(p, "mfu"), 3), read_rate(p, "tokens_per_second")
    (0.202, None)
    """
    if name not in ("mfu", "hfu"):
        rate: float | None = getattr(profile, name)
        return rate
    try:
        return profile.mfu() if name == "mfu" else profile.hfu()
    except AnalyzerError:  # no device, or one that the catalogue does not have
        return None


def list_rates(profile: Profile) -> Iterator[tuple[str, str]]:
    """Name and figure of each rate that is known; hardware utilization where something runs twice."""
    mfu, hfu = (read_rate(profile, name) for name in ("mfu", "hfu"))
    figures = (("samples a second", profile.samples_per_second, format_count),
               ("tokens a second", profile.tokens_per_second, format_count),
               ("model FLOPs a second", profile.model_flops_per_second, lambda rate: format_rate(rate, "FLOP")),
               ("model FLOPs utilization (MFU)", mfu, format_percent),
               ("hardware FLOPs utilization (HFU)", None if hfu == mfu else hfu, format_percent))
    for name, value, form in figures:
        if value is not None:
            yield name, form(value)


def describe_seconds(profile: Profile) -> str:
    """What the seconds of a profile are: predicted, for which device and how, or measured.

    >>> describe_seconds(Profile(name="demo", mode="infer", device="h200", seconds_method="roofline"))
    'predicted for h200: roofline'
    """
    method = profile.seconds_method
    if profile.measured_steps is not None or method.startswith(_OWN_WORDS):
        return method
    return "predicted" + (f" for {profile.device}" if profile.device else "") + f": {method}"


def note_prediction(profile: Profile) -> str | None:
    """A line for the layouts of tools that only measure, where the profile's times were not; None where they were, or
    there are none.

    >>> note_prediction(Profile(name="demo", mode="infer", device="t4", fwd_seconds=1.0, seconds_method="roofline"))
    'latencies are predicted for t4, not measured'
    """
    if profile.measured_steps is not None or profile.fwd_seconds is None:
        return None
    said = describe_seconds(profile).partition(":")[0]
    return f"latencies are {said}, not measured" if said.startswith("predicted") else None


def format_step(profile: Profile) -> str:
    """The wall time of the step, with its range where one is known.

    >>> format_step(Profile(name="demo", mode="train", step_seconds=0.052, step_seconds_range=(0.047, 0.058)))
    '52.00 ms (47.00 to 58.00)'
    """
    text = format_seconds(profile.step_seconds)
    if profile.step_seconds is None or profile.step_seconds_range is None:
        return text
    unit = text.partition(" ")[2]
    low, high = (end.removesuffix(f" {unit}") if end.endswith(f" {unit}") else end
                 for end in map(format_seconds, profile.step_seconds_range))
    return f"{text} ({low} to {high})"


def describe_speed(profile: Profile) -> list[str]:
    r"""The same in two lines: time, and rates as far as they are known.

    >>> p = Profile(name="demo", mode="train", device="h100", autocast="bfloat16", fwd_macs=10**12, bwd_macs=2 * 10**12,
    ...             step_seconds=0.02, kernel_seconds=0.018, tokens=4096, data_parallel_size=1)
    >>> print("\n".join(describe_speed(p)))
    time: 20.00 ms predicted, 18.00 ms of kernels
    speed: 204.80 K tokens a second, 30.3 % MFU
    """
    if profile.step_seconds is None:
        return []
    time, _, ends = format_step(profile).partition(" (")
    kernels = "" if profile.kernel_seconds is None else f", {format_seconds(profile.kernel_seconds)} of kernels"
    lines = [f"time: {time} {profile.how_timed}" + (f" ({ends}" if ends else "") + kernels]
    mfu = read_rate(profile, "mfu")
    rate, what = (profile.samples_per_second, "samples") if profile.tokens is None else (profile.tokens_per_second,
                                                                                         "tokens")
    known = [*([] if rate is None else [f"{format_count(rate)} {what} a second"]),
             *([] if mfu is None else [f"{format_percent(mfu)} MFU"])]
    return [*lines, f"speed: {', '.join(known)}"] if known else lines
