"""What a notebook shows of a profile: a few lines, the figures of the model, and its modules, folded."""
from __future__ import annotations

from collections import Counter
from html import escape

from analyzer.report.module_row import OWN, describe_type, has_own_row, name_module
from analyzer.report.module_tree import DEFAULT_COLUMNS as MODULE_COLUMNS
from analyzer.report.notation import list_notations
from analyzer.report.short_text import describe_shortly
from analyzer.report.summary import describe_run
from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_view

_MOST_MODULES = 300  # in a notebook, which keeps what it shows


@register_view.shipped("notebook")
def to_fragment(profile: Profile) -> str:
    """What a notebook shows: the profile in a few lines, the figures of the model, and its modules, folded below the
    second level. Of a large model the modules are shown down to the depth at which there are some hundreds.
    """
    _, *run = describe_run(profile)
    title, *lines = describe_shortly(profile).splitlines()
    figures = "".join(f"<tr><td style=\"text-align:left\">{escape(name)}</td><td>{escape(value)}</td></tr>"
                      for name, value in list_notations(profile))
    tree = [] if profile.modules is None else [_fold(profile.modules, _find_depth(profile.modules))]
    return "\n".join([f"<div><b>{escape(title)}</b>", f"<pre>{escape(chr(10).join(lines))}</pre>",
                      "<br>".join(map(escape, run)), f"<table>{figures}</table>", *tree, "</div>"])


def _find_depth(root: ModuleInfo) -> int:
    """The deepest level down to which there are not too many modules to be shown."""
    at_depth = Counter(module.depth for module in root.walk())
    total = 0
    for depth in sorted(at_depth):
        total += at_depth[depth]
        if total > _MOST_MODULES and depth > root.depth + 1:
            return depth - 1
    return max(at_depth)


def _fold(module: ModuleInfo, deepest: int) -> str:
    """One module as a line, and those below it folded behind it; a notebook has no style of ours."""
    def tell(costs: CostInfo) -> str:
        told = (f"{column.header} {column.format(getattr(costs, column.field))}" for column in MODULE_COLUMNS)
        return f"<small>{escape(', '.join(told))}</small>"

    line = f"<b>{escape(name_module(module))}</b> {escape(describe_type(module))}: {tell(module)}"
    if not module.children or module.depth >= deepest:
        more = f" <small>({len(module.children)} below)</small>" if module.children else ""
        return f"<div style=\"margin-left:1.2em\">{line}{more}</div>"
    below = "".join([_fold(child, deepest) for child in module.children])
    if has_own_row(module):
        below += f"<div style=\"margin-left:1.2em\">{OWN}: {tell(module.own)}</div>"
    start = f"<details{' open' if module.depth == 0 else ''} style=\"margin-left:1.2em\">"
    return f"{start}<summary>{line}</summary>{below}</details>"
