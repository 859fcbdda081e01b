"""A server as text: whether it starts, what it has room for, what to change."""
from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from analyzer.report.text_table import print_rows
from analyzer.units import format_bytes, format_count, format_seconds

from .read import Job
from .screen import diff_of
from .server_change import ServerJobChange
from .serving import ServerStart


def describe_start(start: ServerStart) -> str:
    """The verdict, and where the memory of a device goes."""
    device = start.deployment.device
    where = f"{start.devices} x {device.name}"
    if device.memory_bytes is None:
        return f"memory of {device.name} is not known: nothing says whether it starts"
    if start.refusal:
        head = f"does NOT start on {where}; {start.plan.engine} says: {start.refusal}"
    else:
        head = (f"starts on {where}: room for {start.sequences:.2f} sequences of {start.longest:,} tokens, the longest "
                "that it answers")
    share = start.deployment.engine.memory_share
    room = start.room_bytes or 0
    said = (f"memory of a device: {format_bytes(device.memory_bytes)}, of which {start.plan.engine} takes {share:.0%}: "
            f"weights {format_bytes(start.deployment.weight_bytes())}, a pass of {start.deployment.chunk:,} "
            f"tokens {format_bytes(start.deployment.activation_bytes())}, ")
    said += f"{format_bytes(room)} left for the cache" if room > 0 else f"{format_bytes(-room)} too much"
    said += f"; one sequence of {start.longest:,} tokens takes {format_bytes(start.longest_bytes)} of it"
    lines = [head, said]
    most = start.most_tokens
    if not start.refusal and most is not None and most < start.longest:
        lines.append(f"requests of more than {most:,} tokens are refused: the cache has no room for them")
    lines += [f"assumed: {sentence}" for sentence in start.assumptions]
    return "\n".join(fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def describe_server_changes(job: Job, changes: Sequence[ServerJobChange]) -> str:
    """The difference of the command with the least change, and all that make it start."""
    if not changes:
        return "no change that was tried makes it start: give a device with more memory, or a smaller model"
    lines = ["with this it starts:", "", diff_of(job, changes[0].edits), ""]
    rows = []
    for change in changes:
        assert change.start is not None and change.profile is not None
        start, profile = change.start, change.profile
        rows.append((", ".join(f"--{edit.keys[0]} {edit.after}".replace("_", "-") for edit in change.edits),
                     str(start.devices), f"{start.longest:,}", f"{start.sequences:.2f}",
                     format_seconds(profile.first_token.mean), format_seconds(profile.each_token.mean),
                     format_count(profile.tokens_per_second)))
    prompt, new = changes[0].profile.prompt_tokens, changes[0].profile.new_tokens  # type: ignore[union-attr]
    lines.append(print_rows(("Change", "Devices", "Longest", "At once", "First token", "Each token", "Tokens/s"), rows))
    lines.append(f"times of one request of {prompt:,} + {new:,} tokens; at once: sequences of the longest length")
    return "\n".join(lines)
