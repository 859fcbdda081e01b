"""The verdict on a profile, and what could be changed, as text."""
from __future__ import annotations

import textwrap
from typing import NamedTuple

from analyzer.errors import UnknownDeviceError
from analyzer.hardware import DeviceSpec, register_device
from analyzer.results.node_info import PeakNode
from analyzer.results.profile import ProfileData
from analyzer.results.verdict import Advice, AdviceOption, Verdict

from .fits import check_fit
from .text_table import format_quantity, print_rows
from .text_width import escape_controls

_DEVICES_NAMED = 3
_WIDTH = 120  # of a terminal


class PeakPlace(NamedTuple):
    """Where in a step something happens, as far as it is known."""

    phase: str | None = None
    operator: str | None = None
    node: str | None = None
    module_path: str | None = None
    forward_operator: str | None = None  #: the operator of the forward pass of which a gradient is computed


def judge(profile: ProfileData, device: str | DeviceSpec | None = None, world_size: int | None = None, *,
          is_brief: bool = False) -> Verdict | None:
    """The verdict on a device, else on the profile's own. ``is_brief`` leaves out the peak and other devices."""
    device = profile.device if device is None else device
    if device is None:
        return None
    spec = _find_spec(profile, device)
    info = check_fit(profile, spec, world_size)
    oom = profile.out_of_memory
    is_known = oom is not None or profile.peak_reserved_bytes is not None or profile.peak_allocated_bytes is not None
    place = PeakPlace() if is_brief else find_peak(profile, info.place)
    return Verdict(
        device=spec.name, fits=info.fits, needed_bytes=info.needed_bytes if is_known else None,
        capacity_bytes=info.capacity.bytes, free_bytes=info.free_bytes, phase=place.phase, operator=place.operator,
        node=place.node, module_path=place.module_path, forward_operator=place.forward_operator,
        devices=() if is_brief or not is_known else _name_smallest(profile, world_size),
        is_out_of_memory=oom is not None, is_least=oom is not None or any(line.bytes is None for line in info.needs),
        place=info.place, count=max(1, len(profile.devices)))


def _find_spec(profile: ProfileData, device: str | DeviceSpec) -> DeviceSpec:
    """The spec of that device. Of one that was never registered a profile knows no more than where memory ran out."""
    try:
        return profile.find_device(device)
    except UnknownDeviceError:
        if device != profile.device:
            raise
        oom = profile.out_of_memory
        return DeviceSpec(profile.device, memory_bytes=None if oom is None else oom.capacity_bytes)


def _name_smallest(profile: ProfileData, world_size: int | None = None) -> tuple[str, ...]:
    if profile.out_of_memory is not None:
        return ()  # it ended before its peak
    held = [spec for spec in register_device if check_fit(profile, spec, world_size).fits]
    return tuple([spec.name for spec in sorted(held, key=lambda spec: spec.memory_bytes or 0)][:_DEVICES_NAMED])


def find_peak(profile: ProfileData, device: str | None = None) -> PeakPlace:
    """Where memory ran out, else where the most is allocated, of several devices on the fullest or the one named."""
    oom = profile.out_of_memory
    if oom is None and device not in (None, profile.fullest_device):
        return PeakPlace(next(row.peak_phase for row in profile.devices if row.name == device))
    if oom is not None:
        return PeakPlace(oom.phase, oom.operator, oom.node, oom.module_path)
    peak, found = profile.peak_allocated_bytes, profile.find_peak_node() or _read_peak(profile)
    if found is None or found.allocated_bytes != peak:  # the phase alone, a later step's before the first one's
        return PeakPlace(next((name for name, phase in (*profile.phases.items(), *profile.first_step.items())
                               if peak is not None and phase.peak_allocated_bytes == peak), None))
    if found.op is None:
        return PeakPlace(found.phase, found.operator or str(found.name))
    forward = None if found.op == "call_module" else found.target
    operator, path = found.operator, found.module_path or None
    if found.phase == "forward":
        return PeakPlace(found.phase, operator or forward, found.name, path)
    return PeakPlace(found.phase, operator, found.name, path, forward if forward != operator else None)  # it runs again


def _read_peak(profile: ProfileData) -> PeakNode | None:
    """The peak in the rows of a profile."""
    point = max(profile.timeline, key=lambda point: point.allocated_bytes, default=None)
    if point is None:
        return None
    found = PeakNode(point.allocated_bytes, str(point.phase), point.operator or "", name=str(point.label))
    node = next((node for node in profile.nodes if node.name == point.label), None)
    return found if node is None else found._replace(op=node.op, target=node.target, module_path=node.module_path)


def format_verdict(verdict: Verdict, way: str | None = None) -> str:
    """Whether it fits, where the peak is, and where it would fit, in as many lines as these take; ``way`` is that of
    `describe_air`.
    """
    v = verdict
    lines = [describe_fit(v)]
    if v.phase is not None:
        place = ("memory ran out in " if v.is_out_of_memory else "peak in ") + describe_place(v)
        lines += [place] if len(place) <= _WIDTH else _break_place(place)
    air = describe_air(v, way)
    lines += textwrap.wrap(air, _WIDTH, subsequent_indent="  ") if air is not None else []
    where = describe_devices(v)
    return escape_controls("\n".join(lines if where is None else [*lines, where]))


def _break_place(place: str) -> list[str]:
    """In lines that fit, as far as names do: the names of generated kernels are long."""
    return [line for part in place.replace(" (", "\n  (", 1).splitlines()
            for line in textwrap.wrap(part, _WIDTH, subsequent_indent="  ", break_long_words=False,
                                      break_on_hyphens=False)]


#: what takes memory and is in no figure
NOT_COUNTED = "a desktop, the driver, NCCL, fragmentation and growth over time"


def describe_fit(verdict: Verdict) -> str:
    """Whether it fits, with the sizes."""
    v, least = verdict, "at least " if verdict.is_least else ""
    said = {True: "fits, but barely," if v.is_tight else "fits",
            False: "does NOT fit", None: "not known whether it fits"}[v.fits]
    sizes = ["what it needs is not known" if v.needed_bytes is None else
             f"{least}{format_quantity(v.needed_bytes, 'bytes')} needed" + (f" on {v.place}" if v.place else ""),
             "the device's memory is not known" if v.capacity_bytes is None else
             f"{format_quantity(v.capacity_bytes, 'bytes')} there"]
    if v.free_bytes is not None:
        word = "left" if v.free_bytes >= 0 else "short"
        sizes.append(f"{least if word == 'short' else ''}{format_quantity(abs(v.free_bytes), 'bytes')} {word}")
    return f"{said} on {f'{v.count} x ' if v.count > 1 else ''}{v.device}: {', '.join(sizes)}"


def describe_air(verdict: Verdict, way: str | None = None) -> str | None:
    """What would leave more of the memory, where a step barely fits; ``way`` says how, where that is known better."""
    if not verdict.is_tight or verdict.phase is None:
        return None
    ways = {"optimizer": "an optimizer of smaller states, such as adamw8bit, or a smaller batch",
            "backward": "activation checkpoints or a smaller batch"}
    way = way or ways.get(verdict.phase, "a smaller batch")
    return f"what is left must hold {NOT_COUNTED}; to leave more: {way}"


def describe_devices(verdict: Verdict) -> str | None:
    """Where it fits or would, as far as there is something to say."""
    v = verdict
    if v.devices and (v.fits is not True or v.devices != (v.device, )):
        many = f", {v.count} of one" if v.count > 1 else ""
        return f"smallest devices with enough memory{many}: {', '.join(v.devices)}"
    if v.phase is not None and v.fits is False:
        return ("where it would fit is not known: it ended before its peak" if v.is_out_of_memory else
                "no device of the catalogue is known to hold it")
    return None


def describe_place(place: Verdict | PeakPlace) -> str:
    """The phase and what runs in it."""
    inside = ", ".join(f"{what} {name}" for what, name in (
        ("gradient of", place.forward_operator), ("node", place.node), ("module", place.module_path)) if name)
    return str(place.phase) + (f", at {place.operator}" if place.operator else "") + (f" ({inside})" if inside else "")


_WORDS = {True: "yes", False: "no", None: "?"}
LEFT = (0, 1, 6)  #: columns of text in the table
_COUNTED = {1: "the one change", 2: "the two cheapest changes", 3: "three cheapest changes"}


def format_rows(advice: Advice, fmt: str = "text") -> str:
    """A row for the step as it is and each option."""
    return print_rows(*list_rows(advice), fmt=fmt, left=LEFT)


def list_rows(advice: Advice) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and rows of that table."""
    base = advice.baseline
    rows: list[tuple[str, ...]] = [
        (option.name, _WORDS[option.fits], format_quantity(option.needed_bytes, "bytes"),
         _compare(option.needed_bytes, base.needed_bytes, "+.0f"), format_quantity(option.step_seconds, "seconds"),
         _compare(option.step_seconds, base.step_seconds), "yes" if option.keeps_result else "no")
        for option in (base, *advice.options)]
    return ("Change", "Fits", "Needed", "vs now", "Step", "vs now", "Same result"), rows


def format_summary(advice: Advice) -> str:
    """The cheapest options that fit, a line each."""
    if advice.baseline.fits:
        return f"it fits on {advice.device} as it is"
    found = advice.cheapest
    if not found:
        return f"no change that was tried makes it fit on {advice.device}"
    lines = [f"{i}. {describe_option(option)}" for i, option in enumerate(found, 1)]
    return "\n".join([f"{_COUNTED[len(found)]} with which it fits on {advice.device}:", *lines])


def format_cheapest(advice: Advice) -> str:
    """The first option that fits, in two lines or three."""
    found = advice.cheapest
    if advice.baseline.fits or not found:
        return format_summary(advice)
    return f"to fit on {advice.device}: {describe_option(found[0])}\n   others: `analyzer advise` with the same options"


def format_advice(advice: Advice) -> str:
    """The table, what could not be tried and why, and the cheapest options."""
    parts = [f"{advice.title}\non {advice.device} ({format_quantity(advice.capacity_bytes, 'bytes')})",
             format_rows(advice)]
    if advice.skipped:
        parts.append("\n".join(["not tried:", *(f"  {name}: {why}" for name, why in advice.skipped)]))
    return "\n\n".join([*parts, format_summary(advice)])


def describe_step(profile: ProfileData) -> str:
    """The model and its step in a line."""
    facts = [f"{name} {tensor}" for name, tensor in profile.inputs.items()]
    facts += [f"{what} {value}" for what, value in (("optimizer", profile.optimizer), ("autocast", profile.autocast))
              if value]
    return f"{profile.name}: one {profile.mode} step" + (f" ({', '.join(facts)})" if facts else "")


def describe_option(option: AdviceOption) -> str:
    """A change and the step with it, in a line or two."""
    result = "" if option.keeps_result else ", another result"
    seconds = "time not known" if option.step_seconds is None else (
        f"{format_quantity(option.step_seconds, 'seconds')} a step")
    return (f"{option.name}: {format_quantity(option.needed_bytes, 'bytes')} needed, {seconds}{result}"
            + (f"\n   {option.flags}" if option.flags else ""))


def _compare(value: float | None, base: float | None, form: str = "") -> str:
    """The difference in percent where its ``form`` is given, else the ratio; nothing where they are equal."""
    if value is None or not base or value == base:
        return ""
    return f"{100 * (value - base) / base:{form}} %" if form else f"{value / base:.2f}x"
