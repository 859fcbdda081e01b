"""`Profile`: the data of a step, with the views of it, each of which imports what draws it when it is called."""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzer.hardware import DeviceSpec
from analyzer.on_use import load
from analyzer.results.profile import ProfileData
from analyzer.results.view import register_exporter

if TYPE_CHECKING:
    import networkx
    import pandas

    from analyzer.results.verdict import Advice, FitInfo, Verdict


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile(ProfileData):
    """What a step of a model costs: the fields and figures of `ProfileData`, and views of them.

    >>> Profile(name="demo", mode="infer", params=3).summary().splitlines()[0]
    'demo: one infer step'
    """

    def table(self, sort: str | None = None, depth: int | None = None, *, columns: Sequence[str] = (),
              fmt: str = "text") -> str:
        """The node table: ten columns, one row a node, and a row of totals; see `analyzer.report.node_table`. Where
        ranks communicate, the bytes of their messages follow, or ``-`` where these are unknown.
        """
        from analyzer.report.node_table import node_table

        return node_table(self.nodes, sort=sort, depth=depth, columns=columns, fmt=fmt,
                          communicates=self.communicates is not False)

    def screen(self, width: int = 120, color: bool = False) -> str:
        """All at a glance, in at most 40 lines of ``width`` (80 or more) columns: whether it fits, time, phases, memory
        at the peak by what holds it, the modules that take most, and what bounds the step. ``color`` is for a terminal.
        Raises InputError for a width that cannot be.
        """
        from analyzer.report.screen.screen import render_screen

        return render_screen(self, width=width, color=color)

    def summary(self) -> str:
        """The totals as text: parameters, work, memory by category and phase, time, what was not counted or assumed."""
        from analyzer.report.summary import summarize

        return summarize(self)

    def module_tree(self, depth: int | None = None, sort: str | None = None, *, columns: Sequence[str] = (),
                    fmt: str = "text", ignore_modules: Collection[str | type] = (), only: bool = False,
                    as_string: bool = True) -> str:
        """The modules as an indented table in which a parent is its children plus its "(own)" row."""
        from analyzer.report.module_tree import module_tree

        return module_tree(self, depth=depth, sort=sort, columns=columns, fmt=fmt, ignore_modules=ignore_modules,
                           only=only, as_string=as_string)

    def comm_table(self, by_phase: bool = True, fmt: str = "text") -> str:
        """What ranks communicate in a step, by kind, process group and phase; see `comm` for each call."""
        from analyzer.report.holder_group import communication_table

        return communication_table(self, by_phase=by_phase, fmt=fmt)

    def report(self, kind: str = "deepspeed", **options: Any) -> str:
        """The report registered under that name, with its options: ``"deepspeed"``, ``"flops-profiler"``,
        ``"torchinfo"``, ``"tids"`` or ``"colossalai"``, in the layout of that tool, ``"tree"``,
        ``"summary"``, ``"screen"``, ``"communication"``, or one of `register_report`. Raises InputError for another
        name, and for an option that the report does not know.
        """
        from analyzer.report.choice import make_report

        return make_report(self, kind, **options)

    def _repr_html_(self) -> str:
        from analyzer.report.page.notebook import to_fragment

        return to_fragment(self)

    def export(self, name: str, *args: Any, **options: Any) -> Any:
        """What the exporter of that name makes of the profile: one of ``"json"``, ``"html"``, ``"dataframe"``,
        ``"networkx"``, ``"chrome_trace"``, ``"memory_snapshot"``, ``"table"``, or one of `register_exporter`. Raises
        InputError for another name, and for options that the exporter does not know, or lacks.
        """
        return register_exporter.call("export", name, self, *args, **options)

    def to_json(self, path: str | Path | None = None) -> str:
        """The profile as JSON text, also written to ``path``. InputError for a value that could not be read back."""
        from analyzer.report.export.json_format import write_json

        return write_json(self, path)

    @classmethod
    def from_json(cls, source: str | Path) -> Profile:
        """Read what `to_json` wrote, from text or from a file. Raises ProfileFormatError for damaged text or another
        format version, InputError for a file that is not there.
        """
        from analyzer.report.export.json_format import read_json

        return read_json(source, cls)

    def to_dataframe(self, what: str = "nodes") -> pandas.DataFrame:
        """A table of ``"nodes"``, ``"modules"``, ``"comm"``, ``"spans"`` or ``"memory_events"`` with nullable columns.
        Raises MissingExtraError without pandas.
        """
        from analyzer.report.export.table_file import to_dataframe

        return to_dataframe(self, what)

    def to_networkx(self) -> networkx.DiGraph[str]:
        """The graph: every field of a node as its attributes, on each edge the ``bytes`` of what its source gives."""
        from analyzer.report.export.table_file import to_networkx

        return to_networkx(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """One HTML page that opens offline. Raises MissingExtraError without plotly."""
        from analyzer.report.page.profile_page import to_html

        return to_html(self, path)

    def to_chrome_trace(self, path: str | Path | None = None) -> dict[str, Any]:
        """The predicted step as Chrome trace events, for Perfetto or chrome://tracing."""
        from analyzer.report.export.viewer import to_chrome_trace

        return to_chrome_trace(self, path)

    def to_memory_snapshot(self, path: str | Path | None = None) -> dict[str, Any]:
        """The memory events as a dictionary that pytorch.org/memory_viz reads, pickled to ``path`` if one is given."""
        from analyzer.report.export.viewer import to_memory_snapshot

        return to_memory_snapshot(self, path)

    def fits(self, device: str | DeviceSpec | None = None, world_size: int | None = None) -> FitInfo:
        """Whether the step fits on ``device`` among ``world_size`` processes (by default its own), line by line."""
        from analyzer.report.fits import check_fit

        return check_fit(self, device, world_size)

    @property
    def verdict(self) -> Verdict | None:
        """Whether the step fits on its device, where its peak is, and on which devices it would fit; None without a
        device. As `fits` says.

        >>> p = Profile(name="demo", mode="infer", device="t4", peak_reserved_bytes=20 * 2**30)
        >>> p.verdict.fits, p.verdict.devices
        (False, ('l4', 'a10g', 'a10'))
        """
        from analyzer.report.verdict import judge

        return judge(self)

    def advise(self, device: str | DeviceSpec | None = None) -> Advice:
        """What to change so that the step fits on ``device`` (by default the profile's own), or takes less there: the
        step is profiled again with each change and with combinations. See `analyzer.advise`. Raises InputError for a
        profile that was read, copied or measured, for it does not know its model.
        """
        found: Advice = load("analyzer.tools.advice.search:advise_on")(self, device)
        return found

    def as_eager(self) -> Profile:
        """The same step with nothing under ``torch.compile``: it is profiled when this is called, with the arguments of
        the call of `analyzer.profile` that made this one. Raises InputError where they are not known in this process.
        """
        found: Profile = load("analyzer.api.profile:profile_eagerly")(self)
        return found
