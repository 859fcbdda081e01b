"""What ranks communicate in a step: a record for each call, and sums of them."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from analyzer.units import add_quantities

from .moment import Moment

_Key = tuple[str | None, str | None, int | None, str | None]


@dataclass(frozen=True, slots=True)
class CommInfo:
    """One call that communicates, of the steady step. None is unknown.

    >>> CommInfo("all_gather", "fsdp", 8, 4096, 3584).wire_bytes
    3584
    """

    #: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, recv, send_recv (a
    #: batch of both) or barrier
    kind: str | None
    group: str | None                     #: the name of its process group, as in `WorldInfo.groups`
    ranks: int | None                     #: how many the group has
    #: whole: the gathered output, the unscattered input, what is reduced, broadcast or sent
    bytes: int | None
    wire_bytes: int | None                #: what this rank sends
    phase: str = "forward"                #: forward, backward, optimizer or zero_grad
    module_path: str = ""
    node: str | None = None               #: None outside the nodes, as in the optimizer's step
    operator: str = ""                    #: "c10d.allreduce_.default"
    peer: int | None = None               #: the global rank of the other end, or of the root
    #: from the beginning of the step until it begins, where the program uses several streams
    start_seconds: Moment | None = None
    seconds: float | None = None
    exposed_seconds: float | None = None  #: of these, those in which nothing is computed


@dataclass(frozen=True, slots=True)
class CommTotal:
    """The calls of one kind in one group and phase together; what is unknown of one is unknown of all."""

    kind: str | None
    group: str | None
    ranks: int | None
    phase: str | None                     #: None of all phases
    calls: int
    bytes: int | None
    wire_bytes: int | None
    seconds: float | None
    exposed_seconds: float | None


def sum_communication(rows: Iterable[CommInfo], *, by_phase: bool = True) -> tuple[CommTotal, ...]:
    """Totals by kind and group, and by phase or over all, in the order in which the first of each ran.

    >>> row = CommInfo("all_gather", "fsdp", 8, 4096, 3584)
    >>> total, = sum_communication([row, row])
    >>> total.calls, total.bytes, total.wire_bytes, total.seconds
    (2, 8192, 7168, None)
    """
    found: dict[_Key, list[CommInfo]] = {}
    for row in rows:
        found.setdefault((row.kind, row.group, row.ranks, row.phase if by_phase else None), []).append(row)
    return tuple([_add(key, same) for key, same in found.items()])


def _add(key: _Key, rows: Sequence[CommInfo]) -> CommTotal:
    return CommTotal(*key, len(rows), add_quantities([row.bytes for row in rows]),
                     add_quantities([row.wire_bytes for row in rows]), add_quantities([row.seconds for row in rows]),
                     add_quantities([row.exposed_seconds for row in rows]))
