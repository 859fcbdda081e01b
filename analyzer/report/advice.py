"""What could be changed about a step, as a table and in three lines."""
from __future__ import annotations

from analyzer.results.advice import Advice, Option
from analyzer.results.profile import Profile
from analyzer.results.view import register_view

from .column import format_quantity, print_rows

_WORDS = {True: "yes", False: "no", None: "?"}
LEFT = (0, 1, 6)  #: columns of text in the table
_COUNTED = {1: "the one change", 2: "the two cheapest changes", 3: "three cheapest changes"}


@register_view.shipped("advice_rows")
def format_rows(advice: Advice, fmt: str = "text") -> str:
    """A row for the step as it is and each option."""
    return print_rows(*list_rows(advice), fmt=fmt, left=LEFT)


def list_rows(advice: Advice) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and rows of that table."""
    base = advice.baseline
    rows: list[tuple[str, ...]] = [
        (option.name, _WORDS[option.fits], format_quantity(option.needed_bytes, "bytes"),
         _change(option.needed_bytes, base.needed_bytes), format_quantity(option.step_seconds, "seconds"),
         _ratio(option.step_seconds, base.step_seconds), "yes" if option.keeps_result else "no")
        for option in (base, *advice.options)]
    return ("Change", "Fits", "Needed", "vs now", "Step", "vs now", "Same result"), rows


@register_view.shipped("advice_summary")
def format_summary(advice: Advice) -> str:
    """The cheapest options that fit, a line each."""
    if advice.baseline.fits:
        return f"it fits on {advice.device} as it is"
    found = advice.cheapest
    if not found:
        return f"no change that was tried makes it fit on {advice.device}"
    lines = [f"{i}. {_describe(option)}" for i, option in enumerate(found, 1)]
    return "\n".join([f"{_COUNTED[len(found)]} with which it fits on {advice.device}:", *lines])


@register_view.shipped("advice_cheapest")
def format_cheapest(advice: Advice) -> str:
    """The cheapest option that fits, in two lines or three.

    >>> option = Option(("checkpointing",), fits=True, needed_bytes=2**33, step_seconds=0.5, flags="--checkpointing")
    >>> print(format_cheapest(Advice("demo", "t4", 2**34, Option((), fits=False), (option,))))
    to fit on t4: checkpointing: 8.00 GiB needed, 500.00 ms a step
       --checkpointing
    """
    found = advice.cheapest
    if advice.baseline.fits or not found:
        return format_summary(advice)
    others = "" if len(found) == 1 else f"\n   {len(found) - 1} more: `analyzer advise` with the same options"
    return f"to fit on {advice.device}: {_describe(found[0])}{others}"


@register_view.shipped("advice")
def format_advice(advice: Advice) -> str:
    """The table, what could not be tried and why, and the cheapest options."""
    parts = [f"{advice.title}\non {advice.device} ({format_quantity(advice.capacity_bytes, 'bytes')})",
             format_rows(advice)]
    if advice.skipped:
        parts.append("\n".join(["not tried:", *(f"  {name}: {why}" for name, why in advice.skipped)]))
    return "\n\n".join([*parts, format_summary(advice)])


def describe_step(profile: Profile) -> str:
    """The model and its step in a line."""
    facts = [f"{name} {tensor}" for name, tensor in profile.inputs.items()]
    facts += [f"{what} {value}" for what, value in (("optimizer", profile.optimizer), ("autocast", profile.autocast))
              if value]
    return f"{profile.name}: one {profile.mode} step" + (f" ({', '.join(facts)})" if facts else "")


def _describe(option: Option) -> str:
    result = "" if option.keeps_result else ", another result"
    seconds = "time not known" if option.step_seconds is None else (
        f"{format_quantity(option.step_seconds, 'seconds')} a step")
    return (f"{option.name}: {format_quantity(option.needed_bytes, 'bytes')} needed, {seconds}{result}"
            + (f"\n   {option.flags}" if option.flags else ""))


def _change(value: int | None, base: int | None) -> str:
    return "" if value is None or base is None or value == base else f"{(value - base) / base:+.0%}"


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or not base or value == base else f"{value / base:.2f}x"
