"""How fvcore prints its counts: tables, and the model's own text."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import tabulate
from torch import nn

#: figures by path, and the paths of modules in which nothing ran
Column = tuple[Mapping[str, int], set[str]]
_UNITS = ((1e14, 1e15, "P"), (1e11, 1e12, "T"), (1e8, 1e9, "G"), (1e5, 1e6, "M"), (1e2, 1e3, "K"))


def format_count(count: float, digits: int = 3) -> str:
    """With the unit that leaves at least a tenth before it."""
    for least, size, unit in _UNITS:
        if abs(count) > least:
            return f"{count / size:.{digits}f}".rstrip("0").rstrip(".") + unit
    return str(count)


def print_table(model: nn.Module, parameters: Mapping[str, int], columns: Sequence[Column], max_depth: int,
                shows_shapes: bool) -> str:
    """Rows of modules and, where it ``shows_shapes``, of parameters."""
    shapes = {name: str(tuple(p.shape)) for name, p in model.named_parameters()}
    rows: dict[str, list[str | None]] = {}
    for path in _list_rows(parameters, columns):
        if path in shapes and not shows_shapes:
            continue
        first = shapes.get(path) or _write(parameters, path)
        rows[path] = [first, *("" if path in uncalled else _write(counts, path) for counts, uncalled in columns)]
    headers = ["#parameters or shape" if shows_shapes else "#parameters", "#flops", "#activations"]
    return _draw(["module", *headers[:len(columns) + 1]], _TableRows(rows).nest(max_depth))


def _write(counts: Mapping[str, int], path: str) -> str | None:
    return format_count(counts[path]) if path in counts else None


def _list_rows(parameters: Mapping[str, int], columns: Sequence[Column]) -> list[str]:
    """Paths in the order in which they are shown, children first: those with a figure, or with such a path below."""
    everything = list(dict.fromkeys([*parameters, *(path for counts, _ in columns for path in counts)]))
    children = _list_children(everything)
    shown: list[str] = []

    def visit(path: str) -> bool:
        below = [visit(child) for child in children.get(path, ())]
        counts = (parameters, *(counts for counts, _ in columns))
        if path == "" or any(below) or any(c.get(path) for c in counts):
            shown.append(path)
            return True
        return False

    visit("")
    return shown


def _list_children(paths: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        if path:
            found.setdefault(path.rpartition(".")[0], []).append(path)
    return found


class _TableRows:
    """Rows by path, the cells of which an only child may share with its parent. A parameter has no counts (None), which
    is drawn as nothing; those of a module that was not called are "", indented as figures are, so that tabulate takes
    no column with one for numbers.
    """

    def __init__(self, cells: dict[str, list[str | None]]) -> None:
        self.cells, self.children = cells, _list_children(cells)

    def nest(self, max_depth: int) -> Iterator[list[str]]:
        """The rows to print, each cell indented as deep as its row."""
        root = self._skip("")
        yield [root or "model", *(text or "" for text in self.cells[root])]
        yield from self._nest_below(root, root + "." if root else "", 1, max_depth)

    def _nest_below(self, path: str, prefix: str, level: int, max_depth: int) -> Iterator[list[str]]:
        if level > max_depth:
            return
        for child in self.children.get(path, ()):
            last = self._skip(child)
            yield [" " * level + last.removeprefix(prefix), *("" if text is None else " " * level + text
                                                              for text in self.cells[last])]
            yield from self._nest_below(last, prefix, level + 1, max_depth)

    def _skip(self, path: str) -> str:
        """The last of a chain of only children with the same figures, which gets those that it lacks."""
        children = self.children.get(path, ())
        if len(children) != 1:
            return path
        above, below = self.cells[path], self.cells[children[0]]
        if any((a is None) != (b is None) or (a != b and a and b) for a, b in zip(above, below)):
            return path
        self.cells[children[0]] = [a or b for a, b in zip(above, below)]
        return self._skip(children[0])


def print_parameters(model: nn.Module, parameters: Mapping[str, int], max_depth: int) -> str:
    """Rows of modules, with sums, and of parameters, with shapes."""
    shapes = {name: str(tuple(p.shape)) for name, p in model.named_parameters()}
    children = _list_children(parameters)
    rows = [["model", _round(parameters[""])]]

    def visit(path: str, level: int) -> None:
        for child in children.get(path, ()) if level <= max_depth else ():
            rows.append([" " * level + child, " " * level + (shapes.get(child) or _round(parameters[child]))])
            visit(child, level + 1)

    visit("", 1)
    return _draw(["name", "#elements or shape"], rows)


def _round(count: int) -> str:
    return next((f"{count / size:.1f}{unit}" for least, size, unit in _UNITS[2:] if count > least), str(count))


def _draw(headers: list[str], rows: Iterable[list[str]]) -> str:
    before, tabulate.PRESERVE_WHITESPACE = tabulate.PRESERVE_WHITESPACE, True
    try:
        return str(tabulate.tabulate(list(rows), headers=headers, tablefmt="pipe"))
    finally:
        tabulate.PRESERVE_WHITESPACE = before


def print_model(model: nn.Module, parameters: Mapping[str, int], columns: Sequence[Column]) -> str:
    """The text of the model, with figures of two digits below what each module says of itself."""
    names = ("#flops", "#acts")
    uncalled = set().union(*(paths for _, paths in columns))

    def tell(path: str) -> list[str]:
        counts = (parameters, *(counts for counts, _ in columns))
        if path and path not in uncalled and not any(c.get(path) for c in counts):
            return []
        told = [f"#params: {format_count(parameters.get(path, 0), 2)}"]
        for name, (of_path, without) in zip(names, columns):
            told.append(f"{name}: {'N/A' if path in without else format_count(of_path.get(path, 0), 2)}")
        return [", ".join(told)]

    def write(module: nn.Module, path: str) -> list[str]:
        lines = [*(module.extra_repr().split("\n") if module.extra_repr() else ()), *tell(path)]
        of_module = len(lines)
        for name, child in module._modules.items():
            if child is None:
                lines.append(f"({name}): None")
                continue
            first, *rest = write(child, f"{path}.{name}" if path else name)
            lines += [f"({name}): {first}", *rest]
        if not lines:
            return [f"{module._get_name()}()"]
        if of_module == len(lines) == 1:
            return [f"{module._get_name()}({lines[0]})"]
        return [f"{module._get_name()}(", *(f"  {line}" for line in lines), ")"]

    note = ("N/A indicates a possibly missing statistic due to how the module was called. Missing values are still "
            "included in the parent's total.\n") if uncalled else ""
    return note + "\n".join(write(model, ""))
