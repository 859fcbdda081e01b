"""Two profiles side by side, module by module: predicted against measured, or before and after a change."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from analyzer.results.info import CostInfo, ModuleInfo
from analyzer.results.profile import Profile

from .module_tree import COLUMNS, OWN, divide, find_root, indent
from .node_table import Column, check_layout, find_columns, print_rows
from .quantity import ROOT, is_drawn, join_path, print_data
from .summary import describe_run
from .text_width import escape_controls

# Modules that only wrap another one, and under which name they hold it.
WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module",
            "FullyShardedDataParallel": "_fsdp_wrapped_module", "CheckpointWrapper": "_checkpoint_wrapped_module"}
_COLUMNS = {name: column for name, column in COLUMNS.items() if name in CostInfo.__slots__}


@dataclass(frozen=True, slots=True)
class ModulePair:
    """A module of two profiles, or what it does outside its submodules; None where only the other profile has it."""

    path: str
    name: str
    type: str
    depth: int
    predicted: CostInfo | None
    measured: CostInfo | None
    is_own: bool = False


def compare_modules(predicted: Profile, measured: Profile, columns: Sequence[str] = ("fwd_seconds", "bwd_seconds"),
                    depth: int | None = None, fmt: str = "text") -> str:
    """A table with, for each of the ``columns``, the figure of both profiles and the ratio of the first to the second.

    Modules are joined by path, wrappers (compiled, data-parallel and checkpointed modules) left out of it; those of one
    profile alone are there too. ``depth`` is that of the deepest rows, ``fmt`` a table format as of `module_tree`; in
    others than text modules stand by their paths, and in CSV figures are unrounded. Raises InputError for a profile
    without modules, an unknown column or format.

    >>> fast, slow = (Profile(name="Net", mode="infer", modules=ModuleInfo(path="", type="Net", fwd_seconds=s))
    ...               for s in (0.001, 0.004))
    >>> compare_modules(fast, slow, ["fwd_seconds"]).splitlines()[-1].split()
    ['Net', 'Net', '1.00', 'ms', '4.00', 'ms', '0.25']
    """
    check_layout(depth, 0, fmt, "compare_modules()")
    shown = find_columns(_COLUMNS, columns, "compare_modules()")
    pairs = [pair for pair in join_modules(predicted, measured) if depth is None or pair.depth <= depth]
    if not is_drawn(fmt):
        return _list_pairs(pairs, shown, fmt)
    rows = [[
        indent(pair.depth) + pair.name, pair.type, *(cell for column in shown for cell in _list_cells(pair, column))
    ] for pair in pairs]
    headers = ["Module", "Type",
               *(text for column in shown for text in (f"{column.header} (A)", f"{column.header} (B)", "A/B"))]
    table = print_rows(headers, rows, left=(0, 1), fmt=fmt)
    if fmt != "text":
        return table
    return escape_controls("\n".join([*_describe("A", predicted), *_describe("B", measured), "", table]))


def join_modules(predicted: Profile, measured: Profile) -> Iterator[ModulePair]:
    """Pairs in the order of the first profile's tree, parents first; those of the second alone after their siblings."""
    yield from _join(find_root(predicted.modules, "compare_modules()"), find_root(measured.modules,
                                                                                  "compare_modules()"), "", 0)


def _join(first: ModuleInfo | None, second: ModuleInfo | None, path: str, depth: int) -> Iterator[ModulePair]:
    inner, own = zip(*((None, None) if module is None else _unwrap(module) for module in (first, second)))
    known = inner[0] or inner[1]
    assert known is not None
    yield ModulePair(path, path.rpartition(".")[2] or known.type, known.type, depth, first, second)
    children = [{} if module is None else {child.path.rpartition(".")[2]: child for child in module.children}
                for module in inner]
    for name in dict.fromkeys([*children[0], *children[1]]):
        yield from _join(children[0].get(name), children[1].get(name), f"{path}.{name}" if path else name, depth + 1)
    if (children[0] or children[1]) and any(getattr(costs, name, 0) for costs in own for name in CostInfo.__slots__):
        yield ModulePair(path, OWN, "", depth + 1, own[0], own[1], is_own=True)


def list_layers(module: ModuleInfo) -> list[ModuleInfo]:
    """A module's wrappers, itself first, and last what they wrap; itself alone where it wraps nothing.

    >>> inner = ModuleInfo(path="module", type="Net")
    >>> [m.type for m in list_layers(ModuleInfo(path="", type="DistributedDataParallel", children=(inner,)))]
    ['DistributedDataParallel', 'Net']
    """
    held = WRAPPERS.get(module.type)
    for child in module.children:
        if child.path.rpartition(".")[2] == held:
            return [module, *list_layers(child)]
    return [module]


def _unwrap(module: ModuleInfo) -> tuple[ModuleInfo, CostInfo]:
    """What a wrapper wraps, through all its layers, and what they all do outside their submodules."""
    *wrappers, inner = list_layers(module)
    own = inner.own
    for wrapper in reversed(wrappers):
        own = wrapper.own + own
    return inner, own


def _list_pairs(pairs: Sequence[ModulePair], shown: Sequence[Column], fmt: str) -> str:
    columns = [Column("path", "Module", "text"), Column("type", "Type", "text")]
    for column in shown:
        columns += [Column(f"{column.field}_a", f"{column.header} (A)", column.unit),
                    Column(f"{column.field}_b", f"{column.header} (B)", column.unit),
                    Column(f"{column.field}_ratio", "A/B", "text")]
    rows: list[list[object]] = []
    for pair in pairs:
        row: list[object] = [join_path(pair.path, OWN) if pair.is_own else pair.path or ROOT, pair.type]
        for column in shown:
            values = _read_both(pair, column)
            ratio = divide(*values)
            row += [*values, ratio if ratio is None or fmt == "csv" else f"{ratio:.2f}"]
        rows.append(row)
    return print_data(columns, rows, fmt)


def _read_both(pair: ModulePair, column: Column) -> list[float | None]:
    return [None if costs is None else getattr(costs, column.field) for costs in (pair.predicted, pair.measured)]


def _list_cells(pair: ModulePair, column: Column) -> list[str]:
    values = _read_both(pair, column)
    ratio = divide(*values)
    return [*map(column.format, values), "-" if ratio is None else f"{ratio:.2f}"]


def _describe(letter: str, profile: Profile) -> list[str]:
    return [f"{letter}: {describe_run(profile)[0]}; seconds: {profile.seconds_method}"]
