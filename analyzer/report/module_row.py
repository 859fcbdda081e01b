"""Rows of a module report: the tree in order, with what each module does outside its submodules as a row of its own."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from analyzer.errors import InputError
from analyzer.results.info import CostInfo, ModuleInfo, OperatorInfo
from analyzer.results.node_info import TensorInfo
from analyzer.units import UNKNOWN

from .column import sort_by

OWN = "(own)"
Ignored = Collection[str | type]
SortKey = Callable[[ModuleInfo], float | None]


class ModuleRow(NamedTuple):
    """One row: a module, or (``module`` is then None) what its parent does itself."""

    name: str
    type: str
    depth: int
    costs: CostInfo
    module: ModuleInfo | None


def list_rows(module: ModuleInfo, depth: int | None = None, key: SortKey | None = None) -> Iterator[ModuleRow]:
    """The tree below ``module``, parents first, down to ``depth``; a module that has children ends with its own row,
    unless that is nothing. ``key`` orders siblings, largest first and unknown last.
    """
    yield ModuleRow(name_module(module), describe_type(module), module.depth, module, module)
    if not module.children or (depth is not None and module.depth >= depth):
        return
    for child in module.children if key is None else sort_by(module.children, key):
        yield from list_rows(child, depth, key)
    if has_own_row(module):
        yield ModuleRow(OWN, "", module.depth + 1, module.own, None)


def leave_out(root: ModuleInfo, ignored: Ignored) -> ModuleInfo:
    """The tree without the modules of these classes (or class names, or paths): what they do counts as their parent's
    own. Raises InputError for the root and for a name that no module has.

    >>> leaf = ModuleInfo(path="drop", type="Dropout", depth=1, fwd_flops=5, own=CostInfo(fwd_flops=5))
    >>> tree = ModuleInfo(path="", type="Net", fwd_flops=7, own=CostInfo(fwd_flops=2), children=(leaf,))
    >>> kept = leave_out(tree, ["Dropout"])
    >>> kept.children, kept.own.fwd_flops
    ((), 7)
    """
    names = {item if isinstance(item, str) else item.__name__ for item in ignored}
    there = {name for m in root.walk() for name in (m.type, m.path)}
    for name in sorted(names):
        if name not in there or name in (root.type, root.path):
            raise InputError(f"ignore_modules: {name!r} is no class or path of a module below {root.type}")
    return _leave_out(root, names)


def _leave_out(module: ModuleInfo, names: set[str]) -> ModuleInfo:
    own: CostInfo = module.own
    operators: tuple[OperatorInfo, ...] = module.operators
    children = []
    for child in module.children:
        if child.type in names or child.path in names:
            own = own + child
            operators += tuple(row for m in child.walk() for row in m.operators)
        else:
            children.append(_leave_out(child, names))
    return replace(module, own=own, operators=operators, children=tuple(children))


def find_root(root: ModuleInfo | None, caller: str) -> ModuleInfo:
    """The root, or InputError for a profile without modules."""
    if root is None:
        raise InputError(f"{caller}: this profile has no module tree (its `modules` is None)")
    return root


def has_own_row(module: ModuleInfo) -> bool:
    """Whether it does something outside its submodules, or what it does is all that is unknown of a quantity."""
    for name in CostInfo.__slots__:
        own = getattr(module.own, name)
        if own or (own is None and all(getattr(child, name) is not None for child in module.children)):
            return True
    return False


def name_module(module: ModuleInfo) -> str:
    """Its name within its parent; the root has none and goes by its type."""
    return module.path.rpartition(".")[2] or module.type


def describe_type(module: ModuleInfo) -> str:
    """Its class, and where the same module was counted if not here."""
    return module.type if module.shared_with is None else f"{module.type} (same as {module.shared_with})"


def format_shapes(tensors: Sequence[TensorInfo]) -> str:
    """The shapes of some tensors; that of several are separated by commas, and unknown ones are unknown.

    >>> format_shapes((TensorInfo((2, 3), "float32", "cpu"), TensorInfo((), "int64", "cpu"))), format_shapes(())
    ('[2, 3], []', '-')
    """
    return ", ".join(str(list(tensor.shape)) for tensor in tensors) or UNKNOWN


def first_shape(tensors: Sequence[TensorInfo]) -> list[int] | None:
    """The shape of the first of some tensors, None where there is none."""
    return list(tensors[0].shape) if tensors else None


def divide(amount: float | None, by: float | None) -> float | None:
    """None where either is unknown or there is nothing to divide by."""
    return None if amount is None or not by else amount / by


def plain(value: object) -> str:
    """A number as it is."""
    return UNKNOWN if value is None else str(value)
