"""Two module trees as one: each module of the first beside that of the second which takes its place."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from analyzer.report.module_comparison import list_layers
from analyzer.results.info import ModuleInfo

Pair = tuple[ModuleInfo | None, ModuleInfo | None]
_Key = Callable[[ModuleInfo], Hashable]


@dataclass(frozen=True, slots=True)
class AlignedModule:
    """A module in both profiles; None where only the other has it. Wrappers (compiled, data-parallel and checkpointed
    modules) are a part of what they wrap.
    """

    before: ModuleInfo | None
    after: ModuleInfo | None
    name: str                  #: in its parent, in the second profile where both have it; empty for the root
    former_name: str
    type: str                  #: the class of what is wrapped
    former_type: str
    children: tuple[AlignedModule, ...]

    @property
    def is_in_one(self) -> bool:
        """Whether only one profile has it."""
        return self.before is None or self.after is None


def align(before: ModuleInfo | None, after: ModuleInfo | None) -> AlignedModule:
    """The tree of both. Children are joined by name and class; those that are left by class and size, in order, as
    renamed; then by name alone, as replaced. What still is left was added or removed.

    >>> def tree(*children):
    ...     return ModuleInfo(path="", type="Net", children=tuple(
    ...         ModuleInfo(path=path, type=type, depth=1) for path, type in children))
    >>> for child in align(tree(("0", "Linear"), ("act", "ReLU")),
    ...                    tree(("0", "Norm"), ("1", "Linear"), ("act", "GELU"))).children:
    ...     print(child.former_name, child.former_type, "->", child.name, child.type, child.is_in_one)
    0 Norm -> 0 Norm True
    0 Linear -> 1 Linear False
    act ReLU -> act GELU False
    """
    found = [(module, list_layers(module)[-1]) for module in (before, after) if module is not None]
    (first, first_inner), (last, last_inner) = found[0], found[-1]
    children = [() if module is None else list_layers(module)[-1].children for module in (before, after)]
    return AlignedModule(before, after, _name(last), _name(first), last_inner.type, first_inner.type,
                         tuple([align(*pair) for pair in _pair(children[0], children[1])]))


def _name(module: ModuleInfo) -> str:
    return module.path.rpartition(".")[2]


def _type(module: ModuleInfo) -> str:
    return list_layers(module)[-1].type


def _measure(module: ModuleInfo) -> Hashable:
    """What a module that was renamed keeps."""
    inner = list_layers(module)[-1]
    return inner.type, module.params, sum(1 for _ in inner.walk())


def _pair(before: Sequence[ModuleInfo], after: Sequence[ModuleInfo]) -> Iterator[Pair]:
    """Modules that belong together, in the order of the second profile, those of the first alone last."""
    keys: tuple[_Key, ...] = (lambda module: (_name(module), _type(module)), _measure, _name)
    partner: dict[int, int] = {}  # index in ``before`` by index in ``after``
    for key in keys:
        free: dict[Hashable, list[int]] = {}
        taken = set(partner.values())
        for i, module in enumerate(before):
            if i not in taken:
                free.setdefault(key(module), []).append(i)
        for j, module in enumerate(after):
            if j not in partner and free.get(key(module)):
                partner[j] = free[key(module)].pop(0)
    for j, module in enumerate(after):
        yield (before[partner[j]] if j in partner else None, module)
    taken = set(partner.values())
    for i, module in enumerate(before):
        if i not in taken:
            yield module, None
