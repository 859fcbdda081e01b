"""A step on several devices: how much memory it needs there, and whether it fits."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analyzer.errors import UnknownDeviceError
from analyzer.hardware import find_device

from .verdict import Verdict
from .view import register_view


@dataclass(frozen=True, slots=True, repr=False)
class FitTable:
    """What `analyzer.fits` finds: the verdict on each device, the smallest memory first, unknown ones last.

    >>> table = FitTable("demo", (Verdict(device="t4", fits=False), Verdict(device="l4", fits=True)))
    >>> len(table), table["L4"].fits, table.fitting
    (2, True, ('l4',))
    """

    title: str                    #: what was profiled
    rows: tuple[Verdict, ...]

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, device: str) -> Verdict:
        """The verdict on the device of that name, or alias. Raises UnknownDeviceError for one that was not tried."""
        names = {row.device: row for row in self.rows}
        found = names.get(device) or names.get(find_device(device).name)
        if found is None:
            raise UnknownDeviceError(f"{device!r} was not tried, only {', '.join(names)}; name it in devices=")
        return found

    @property
    def fitting(self) -> tuple[str, ...]:
        """The devices on which the step is known to fit, the smallest first."""
        return tuple([row.device for row in self.rows if row.fits])

    @property
    def said(self) -> str:
        """The devices that it fits on, in words."""
        return f"fits on {', '.join(self.fitting)}" if self.fitting else "no device of these is known to hold it"

    def table(self, fmt: str = "text") -> str:
        """A row for each device; ``fmt`` is ``"text"``, ``"markdown"``, ``"csv"``, ``"latex"``, ``"html"`` or a format
        of tabulate.
        """
        return str(register_view.look_up("fit_rows", "table")(self, fmt))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from html import escape  # which is imported when it is used, as few need it

        return f"<div><b>{escape(self.title)}</b>{self.table('html')}{escape(self.said)}</div>"

    def __repr__(self) -> str:
        return f"FitTable({self.title}: {len(self)} devices, {self.said})"

    def __str__(self) -> str:
        return str(register_view.look_up("fit_table", "FitTable")(self))
