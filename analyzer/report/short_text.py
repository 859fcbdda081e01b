"""A profile in a few lines."""
from __future__ import annotations

from analyzer.results.profile import Profile
from analyzer.results.view import register_view

from .column import format_quantity
from .fused import describe_fused
from .holder_group import group_holders, print_groups
from .peak import list_peaks
from .speed import describe_speed
from .text_width import escape_controls
from .verdict import judge


def title_run(profile: Profile) -> str:
    """What was run in a line: the model, its mode and device, optimizer and autocast."""
    p = profile
    facts = ", ".join(f"{what} {value}" for what, value in (("optimizer", p.optimizer), ("autocast", p.autocast))
                      if value)
    return (f"{p.name}: one {p.mode} step" + (f" on {p.device}" if p.device else "")
            + (f" ({facts})" if facts else ""))


@register_view.shipped("repr")
def describe_shortly(profile: Profile, has_verdict: bool = True) -> str:
    """What ``repr`` and ``print`` show: name, mode, device, peak, FLOPs and the verdict, as far as they are known.

    >>> print(describe_shortly(Profile(name="demo", mode="train", optimizer="sgd", device="h200", fwd_flops=2000)))
    Profile of demo: one train step on h200 (optimizer sgd)
      FLOPs: 2.00 K forward
      cannot be told whether it fits on h200: what it needs is not known, 139.80 GiB there
    """
    p = profile
    lines = [f"Profile of {title_run(p)}"]
    figures = (("parameters", "count", ((p.params, ""),)),
               ("peak memory", "text", tuple((size, what) for what, size in list_peaks(p))),
               ("FLOPs", "count", ((p.fwd_flops, "forward"), (p.bwd_flops if p.mode == "train" else None, "backward"))))
    for what, unit, amounts in figures:
        known = [f"{format_quantity(value, unit)} {of}".rstrip() for value, of in amounts if value is not None]
        if known:
            lines.append(f"  {what}: {', '.join(known)}")
    lines += [f"  {line}" for line in (*describe_speed(p), *describe_fused(p.fused))]
    verdict = judge(p, is_brief=True) if has_verdict else None
    return escape_controls("\n".join(lines if verdict is None else [*lines, f"  {verdict}"]))


def describe_for_verdict(profile: Profile) -> str:
    """What stands before a verdict: the same without it, and what memory is taken by where that is too much."""
    text = describe_shortly(profile, has_verdict=False)
    if profile.assumptions:
        text += f"\n  assumptions: {len(profile.assumptions)}, which --show summary prints"
    verdict = judge(profile, is_brief=True)
    if verdict is None or verdict.fits is not False or not profile.holders:
        return text
    return f"{text}\n\nheld where the most is needed\n{print_groups(group_holders(profile))}"
