"""What a run of many steps costs."""
from __future__ import annotations

import math
import textwrap
from collections import Counter

from analyzer.errors import InputError, UnknownDeviceError, is_count
from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.power import Work, joules_range, watts_of
from analyzer.results.info import bound_seconds
from analyzer.results.profile import ProfileData
from analyzer.results.run_cost import Range, RunCost, StepEnergy
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN, add_quantities, format_seconds

from .speed import PARTS, find_least_seconds
from .text_table import print_rows

WIDTH = 112  #: of the lines below the table, which are indented where they stand in a report
PERFECT = "every step takes as long as this one: no evaluation, checkpoints, failures or waiting for data"


def find_cost(profile: ProfileData, tokens: float | None = None, samples: float | None = None,
              price: float | None = None, gpus: int | None = None, power: float | None = None,
              carbon: float | None = None) -> RunCost:
    """What `Profile.cost_of` answers."""
    check_run(tokens, samples, price, gpus, power, carbon)
    devices = gpus or _count_profiled(profile)
    kind, amount, each = ("samples", samples, profile.batch_size) if tokens is None else (
        "tokens", tokens, profile.tokens)
    assert amount is not None
    if each is None and kind == "tokens" and profile.batch_size is not None:
        raise InputError(f"cost_of(tokens={amount:g}): {profile.name} is given no tokens (integers of batch x "
                         f"sequence); give samples= (--samples), of which a step takes {profile.batch_size:,}")
    if each is None:
        raise InputError(f"cost_of({kind}={amount:g}): how many {kind} a step of {profile.name} takes is not known")
    copies, remarks = _count_copies(profile, devices)
    watts, source = _find_power(profile, power)
    steps = None if copies is None or not each else math.ceil(amount / (each * copies))
    said = "how many copies of the model there are is not known"
    if copies is not None:
        said = f"a step takes {each * copies:,} {kind}" + (
            f": {each:,} on each of {copies:,} copies of the model" if copies > 1 else "")
    remarks = [said, *remarks, _describe_step(profile), PERFECT]
    if price is not None:
        remarks.append(f"dollars are device-hours at {price:g} each")
    return RunCost(steps=steps, devices=devices, tokens=None if tokens is None else int(tokens),
                   samples=None if samples is None else int(samples), step_seconds=profile.step_seconds,
                   step_seconds_range=profile.step_seconds_range, price=price, watts=watts,
                   carbon=carbon, assumptions=(*remarks, source))


def check_run(tokens: object, samples: object, price: object, gpus: object, power: object,
              carbon: object) -> None:
    """Raise InputError for amounts that cannot be, whatever the profile."""
    if (tokens is None) == (samples is None):
        raise InputError(f"cost_of(tokens={tokens!r}, samples={samples!r}): give one of them, how much is trained on")
    for name, value in (("tokens", tokens), ("samples", samples)):
        if value is not None and not (_is_number(value) and value >= 1 and value == int(value)):  # type: ignore
            raise InputError(f"cost_of({name}={value!r}): must be a whole number above 0, such as 2e12")
    for name, value, unit in (("price", price, "dollars for an hour of one device"), ("power", power, "watts"),
                              ("carbon", carbon, "grams of carbon dioxide of a kWh")):
        if value is not None and not (_is_number(value) and value >= 0):  # type: ignore[operator]
            raise InputError(f"cost_of({name}={value!r}): must be {unit}, not negative")
    if gpus is not None and not is_count(gpus, 1):
        raise InputError(f"cost_of(gpus={gpus!r}): must be a number of devices, 1 or more")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _count_profiled(profile: ProfileData) -> int:
    return (profile.world_size or 1) * max(1, len(profile.devices))


def _count_copies(profile: ProfileData, devices: int) -> tuple[int | None, list[str]]:
    """How many copies of the model ``devices`` hold, and what is assumed about them."""
    profiled = _count_profiled(profile)
    if devices == profiled and profile.data_parallel_size is not None:
        return profile.data_parallel_size, []
    size = profile.model_parallel_size or (1 if profiled == 1 else None)
    if size is None:
        return None, []
    if devices % size:
        raise InputError(f"cost_of(gpus={devices}): a copy of the model takes {size} devices, and {devices} is no "
                         "multiple of that")
    said = "" if devices == 1 else (f"{devices:,} devices step as fast as {profiled:,}: what they send each other "
                                    "takes no more time")
    return devices // size, [said] if said else []


def _describe_step(profile: ProfileData) -> str:
    if profile.step_seconds is None:
        return "how long a step takes is not known"
    where = f" for {profile.device}" if profile.device and profile.measured_steps is None else ""
    return f"a step takes {format_seconds(profile.step_seconds)}, {profile.how_timed}{where}"


def _find_power(profile: ProfileData, given: float | None) -> tuple[float | None, str]:
    bounds = "of the devices alone, without hosts, network and cooling"
    if given is not None:
        return float(given), f"kWh are {given:g} W for each device-hour, as given, {bounds}"
    energy = profile.energy
    if energy is not None:
        low_to_high = "" if energy.joules_range is None else " ({:.3g} to {:.3g})".format(*energy.joules_range)
        return energy.watts, (f"kWh are {energy.watts:.0f} W for each device-hour, by what kernels do on "
                              f"{profile.device}: {energy.joules:.3g} J a step{low_to_high}, {bounds}")
    spec = _find_spec(profile)
    if spec is None or spec.power_watts is None:
        return None, (f"kWh are not known: the power of {profile.device or 'the device'} is not; give it (power=, "
                      "--power WATTS)")
    return spec.power_watts, (f"kWh are {profile.device}'s power limit of {spec.power_watts:g} W for each device-hour: "
                              f"the most that it may take, {bounds}")


def _find_spec(profile: ProfileData) -> DeviceSpec | None:
    try:
        return None if profile.device is None else profile.find_device(profile.device)
    except UnknownDeviceError:
        return None


def find_step_work(profile: ProfileData, spec: DeviceSpec) -> Work | None:
    """What the device does in a step; None where its seconds, its products or its bytes are not known, and of several
    devices, each of which waits for the others.
    """
    if profile.devices:
        return None
    phases, spent = profile.step_phases.values(), Counter[str]()
    for phase in phases:
        spent.update(bound_seconds(phase))
    products = find_least_seconds(profile, PARTS["hfu"], spec, None)
    moved = add_quantities([nbytes for phase in phases for nbytes in (phase.read_bytes, phase.written_bytes)])
    if products is None or moved is None or not spec.memory_bandwidth:
        return None
    return Work(spent, products, moved / spec.memory_bandwidth)


def find_energy(profile: ProfileData) -> StepEnergy | None:
    """What `Profile.energy` answers."""
    spec, seconds, ends = _find_spec(profile), profile.step_seconds, profile.step_seconds_range
    work = None if spec is None or not seconds else find_step_work(profile, spec)
    if spec is None or not seconds or work is None:
        return None
    constants = find_constants("power", spec)
    watts = watts_of(work, spec, constants)
    return None if watts is None else StepEnergy(watts, watts * seconds, None if ends is None else joules_range(
        watts * seconds, constants, (seconds, *ends)))


def describe_cost(cost: RunCost) -> str:
    """A table of the amounts, with their ranges where these are known, and the assumptions."""
    ranged = cost.step_seconds_range is not None and cost.steps is not None
    steps = UNKNOWN if cost.steps is None else f"{cost.steps:,}"
    rows = [["steps", steps, *(["", ""] if ranged else [])]]
    amounts: tuple[tuple[str, float | None, Range | None], ...] = (
        ("hours", cost.hours, cost.hours_range), ("device-hours", cost.device_hours, cost.device_hours_range),
        *((("dollars", cost.dollars, cost.dollars_range),) if cost.price is not None else ()),
        ("kWh", cost.kwh, cost.kwh_range),
        *((("g of CO2", cost.grams, None),) if cost.carbon is not None else ()))
    for name, value, ends in amounts:
        rows.append([name, _format(value), *(map(_format, ends or (None, None)) if ranged else ())])
    table = print_rows(("", "Estimate", *(("Low", "High") if ranged else ())), rows)
    assumptions = [textwrap.fill(f"- {line}", WIDTH, subsequent_indent="  ") for line in cost.assumptions]
    return "\n".join([table, *assumptions])


def _format(value: float | None) -> str:
    """Two decimals, and more where that would say nothing."""
    if value is None:
        return UNKNOWN
    return f"{value:,.2f}" if not value or abs(value) >= 0.1 else f"{value:.3g}"


@register_report.shipped("cost")
def report_cost(profile: ProfileData, *, tokens: float | None = None, samples: float | None = None,
                price: float | None = None, gpus: int | None = None, power: float | None = None,
                carbon: float | None = None) -> str:
    """What a run costs, under its title; the options are those of `Profile.cost_of`."""
    cost = profile.cost_of(tokens=tokens, samples=samples, price=price, gpus=gpus, power=power, carbon=carbon)
    amount = f"{cost.samples:,} samples" if cost.tokens is None else f"{cost.tokens:,} tokens"
    title = f"Cost of {amount} on {cost.devices:,} device{'s' if cost.devices > 1 else ''}"
    return "\n".join([title, *(f"  {line}" for line in str(cost).splitlines())])
