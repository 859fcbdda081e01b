"""Whether a step fits on its device, in one record."""
from __future__ import annotations

from dataclasses import dataclass

from .view import register_view


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict:
    """Whether a step fits on a device, where its peak is, and which devices would hold it. True in a boolean context
    only if it is known to fit. Unknown is None.

    >>> print(Verdict(device="t4", fits=False, needed_bytes=20 * 2**30, capacity_bytes=15 * 2**30,
    ...               free_bytes=-5 * 2**30, phase="backward", operator="aten.mm.default", devices=("l4",)))
    does NOT fit on t4: 20.00 GiB needed, 15.00 GiB there, 5.00 GiB short
    peak in backward, at aten.mm.default
    would fit on l4
    """

    device: str
    #: as `Profile.fits` says
    fits: bool | None = None
    #: with what is known to be taken outside the allocator; at least so much where `is_least`
    needed_bytes: int | None = None
    capacity_bytes: int | None = None
    #: negative where memory is short, None where `fits` is
    free_bytes: int | None = None
    #: where the peak of the allocated bytes is, or where memory ran out: forward, backward, optimizer, zero_grad, setup
    phase: str | None = None
    #: the ATen operator, or the class of the leaf module, that ran then
    operator: str | None = None
    node: str | None = None
    module_path: str | None = None
    #: the smallest devices of the catalogue on which the step as profiled would fit, at most three, by memory
    devices: tuple[str, ...] = ()
    #: whether it ended because memory ran out
    is_out_of_memory: bool = False
    #: whether more is needed than is known
    is_least: bool = False

    def __bool__(self) -> bool:
        return self.fits is True

    def __str__(self) -> str:
        return str(register_view.look_up("verdict_text", "Verdict")(self))

    def __repr__(self) -> str:
        return f"Verdict({str(self).partition(chr(10))[0]})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from html import escape  # which is imported when it is used, as few need it

        return f"<pre>{escape(str(self))}</pre>"
