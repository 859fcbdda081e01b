"""The pages of a view: that of a profile with a panel to change its settings, and a list of several."""
from __future__ import annotations

from html import escape
from typing import Any

from analyzer.report.column import format_quantity
from analyzer.report.page.document import Part, build_page
from analyzer.report.page.profile_page import list_parts
from analyzer.report.summary import describe_run
from analyzer.results.profile import Profile

from .setting import CHOICES, SIZES, TITLES, Setting, list_choices, read_settings
from .viewed import Run, Viewed, ViewedProfile

#: A page may ask the server that it is from, and no other.
_POLICY = "; connect-src 'self'; base-uri 'none'; form-action 'none'"
_QUANTITIES = (("Peak allocated", "peak_allocated_bytes", "bytes"), ("Peak reserved", "peak_reserved_bytes", "bytes"),
               ("Step time", "step_seconds", "seconds"))


def write_list(viewed: Viewed, root: str) -> str:
    """The page that lists what is viewed, each with a link below ``root``."""
    rows = [_row([f'<a href="{root}{i}/">{escape(one.name)}</a>', escape(describe_run(one.saved)[0])], one.saved)
            for i, one in enumerate(viewed.profiles)]
    links = "".join([f'<li><a href="{root}pages/{i}">{escape(page.name)}</a></li>'
                     for i, page in enumerate(viewed.pages)])
    return build_page("Saved profiles", [
        *([Part("text", "Together", lead=f"<ul>{links}</ul>", has_chart=False)] if links else []),
        *([Part("text", "Profiles", lead=_table(("File", "Step"), rows), has_chart=False)] if rows else [])],
        policy=_POLICY)


def write_run(one: ViewedProfile, number: int, run: Run, root: str) -> str:
    """The page of a run of a profile, whose panel posts to ``root``."""
    verdict, *others = list_parts(run.profile)
    return build_page(f"{one.name}: {describe_run(run.profile)[0]}", [verdict, _make_panel(one, number, run, root),
                                                                      *others], policy=_POLICY)


def _make_panel(one: ViewedProfile, number: int, run: Run, root: str) -> Part:
    if run.command is None:
        lead = f'<p class="note">{escape(one.origin.refusal)}</p>'
        return Part("text", "What if", lead=lead, has_chart=False)
    said = f'<p class="note">{escape(one.origin.note)}: ' if one.origin.note else '<p class="note">'
    lead = f"{said}<code>{escape(str(run.command))}</code></p>"
    if number:
        link = f'<a href="{root}{number}/change">what changed, by module</a>'
        lead = f'<p class="change">{escape(tell_change(one.saved, run.profile))} ({link})</p>{lead}'
    if one.runs:
        lead += _list_runs(one, number, root)
    fields = [_describe_field(name, value) for name, value in read_settings(run.command).items()]
    return Part("what_if", "What if", {"fields": fields, "run": f"{root}run", "stop": f"{root}stop"}, lead,
                has_chart=False)


def tell_change(before: Profile, after: Profile) -> str:
    """What the other settings make of the peak, the time, and whether it fits.

    >>> one, other = (Profile(name="Net", mode="infer", device="t4", peak_allocated_bytes=n, peak_reserved_bytes=n)
    ...               for n in (2**30, 2**35))
    >>> tell_change(one, other)
    'Peak allocated 1.00 GiB → 32.00 GiB, peak reserved 1.00 GiB → 32.00 GiB, fits on t4 → does not fit on t4'
    """
    said = []
    for title, name, unit in _QUANTITIES:
        old, new = getattr(before, name), getattr(after, name)
        if old is not None or new is not None:
            said.append(f"{title.lower()} {format_quantity(old, unit)} → {format_quantity(new, unit)}")
    said.append(f"{_tell_fit(before)} → {_tell_fit(after)}")
    text = ", ".join(said)
    return text[:1].upper() + text[1:]


def _tell_fit(profile: Profile) -> str:
    verdict = profile.verdict
    if verdict is None:
        return "no device"
    words = {True: "fits", False: "does not fit", None: "not known to fit"}
    return f"{words[verdict.fits]} on {verdict.device}"


def _list_runs(one: ViewedProfile, number: int, root: str) -> str:
    rows = []
    for n, run in {0: one.as_saved, **one.runs}.items():
        name = f"run {n}" if n else "saved"
        link = f"<strong>{name}</strong>" if n == number else f'<a href="{root}{n or ""}">{name}</a>'
        rows.append(_row([link, escape(run.change)], run.profile))
    return _table(("Run", "Changed"), rows)


def _row(cells: list[str], profile: Profile) -> str:
    figures = [escape(format_quantity(getattr(profile, name), unit)) for _, name, unit in _QUANTITIES]
    first, *rest = [*cells, *figures, escape(_tell_fit(profile))]
    return f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"


def _table(titles: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f'<th scope="col">{title}</th>' for title in (*titles, *(t for t, _, _ in _QUANTITIES), "Fits"))
    return (f'<div class="scroll"><table class="plain runs"><thead><tr>{head}</tr></thead>'
            f'<tbody>{"".join(rows)}</tbody></table></div>')


def _describe_field(name: str, value: Setting) -> dict[str, Any]:
    """A setting as the panel's script draws it."""
    kind = "number" if name in SIZES else "choice" if name in CHOICES else "switch"
    field = {"name": name, "title": TITLES[name], "value": value, "kind": kind}
    return {**field, "choices": list_choices(name, value)} if kind == "choice" else field
