"""The report of TIDSProfiler (ruipeterpan/torch_profiler), a line a module, and Colossal-AI's node table."""
from __future__ import annotations

from dataclasses import replace

from analyzer.report.module_tree import find_root, first_shape, has_own_row, plain
from analyzer.report.node_table import TEN_COLUMNS, check_layout, print_nodes
from analyzer.report.speed import note_prediction
from analyzer.report.text_width import escape_controls
from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.results.profile import Profile
from analyzer.results.view import register_report
from analyzer.units import UNKNOWN

_INDENT = " " * 8


@register_report.shipped("tids")
def tids_report(profile: Profile, *, depth: int | None = None) -> str:
    """One line a module: class, parameters, milliseconds and share of the forward pass, shapes of its first input and
    its first output; down to ``depth``. What a module does outside its submodules is a line of its own where it takes
    time. Raises InputError for a profile without modules.

    >>> from analyzer.results.node_info import TensorInfo
    >>> leaf = ModuleInfo(path="fc", type="Linear", depth=1, params=10, fwd_seconds=0.0005,
    ...                   outputs=(TensorInfo((2, 5), "float32", "cpu"),))
    >>> tree = ModuleInfo(path="", type="Net", params=10, fwd_seconds=0.001, children=(leaf,))
    >>> print(tids_report(Profile(name="Net", mode="infer", modules=tree)).splitlines()[1].strip())
    (fc): Linear, num_params 10, 0.5ms, 50.0% latency, input shape None, output shape [2, 5]
    """
    check_layout(depth, 0, "text", "tids_report()")
    root = find_root(profile.modules, "tids_report()")
    note = note_prediction(profile)
    return escape_controls("\n".join([*_list_lines(root, root, "model", depth), *([] if note is None else [note])]))


def _list_lines(module: ModuleInfo, root: ModuleInfo, name: str, depth: int | None) -> list[str]:
    lines = [f"({name}): {module.type}, {_tell_costs(module, root)}, "
             f"input shape {first_shape(module.inputs)}, output shape {first_shape(module.outputs)}"]
    if not module.children or module.depth == depth:
        return lines
    for child in module.children:
        lines += [_INDENT + line for line in _list_lines(child, root, child.path.rpartition(".")[2], depth)]
    if has_own_row(module) and (module.own.fwd_seconds or module.own.params):
        lines.append(f"{_INDENT}(own): {_tell_costs(module.own, root)}")
    return lines


def _tell_costs(costs: CostInfo, root: ModuleInfo) -> str:
    seconds, whole = costs.fwd_seconds, root.fwd_seconds
    time = UNKNOWN if seconds is None else f"{round(seconds * 1000, 3)}ms"
    share = UNKNOWN if seconds is None or not whole else f"{round(100 * seconds / whole, 3)}%"
    return f"num_params {plain(costs.params)}, {time}, {share} latency"


# The node table as Colossal-AI's analyzer prints it: ten columns, in full, powers of 1024 called Kb, Mb, Gb.

_COLUMNS = [replace(column, unit="Mb") if column.unit == "bytes" else column for column in TEN_COLUMNS]


@register_report.shipped("colossalai")
def colossalai_table(profile: Profile, *, sort: str | None = None, depth: int | None = None,
                     fmt: str = "simple") -> str:
    """A row a node and their totals; ``sort`` and ``depth`` are as of `Profile.table`.

    >>> from analyzer.results.node_info import NodeInfo
    >>> conv = NodeInfo("call_module", "conv1", output_bytes=0, param_bytes=37632)
    >>> print(colossalai_table(Profile(name="Net", mode="infer", nodes=(conv,))).splitlines()[2].split())
    ['call_module', 'conv1', '-', '-', '0', 'b', '-', '36.75', 'Kb', '-', '-', '-']
    """
    check_layout(depth, 1, fmt, "colossalai_table()")
    return print_nodes(profile.nodes, _COLUMNS, sort, depth, fmt)
