"""Two module trees as one, and the parts of it: alike modules, as the blocks of a transformer, are one part."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from analyzer.report.quantity import ROOT, join_path
from analyzer.results.info import ModuleInfo

# Modules that only wrap another one, and under which name they hold it.
WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module",
            "FullyShardedDataParallel": "_fsdp_wrapped_module", "CheckpointWrapper": "_checkpoint_wrapped_module"}

Pair = tuple[ModuleInfo | None, ModuleInfo | None]


@dataclass(frozen=True, slots=True)
class AlignedModule:
    """A module in both profiles; None where only the other has it. Wrappers are a part of what they wrap."""

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
    """
    found = [(module, list_layers(module)[-1]) for module in (before, after) if module is not None]
    (first, first_inner), (last, last_inner) = found[0], found[-1]
    children = [() if module is None else list_layers(module)[-1].children for module in (before, after)]
    return AlignedModule(before, after, _name(last), _name(first), last_inner.type, first_inner.type,
                         tuple([align(*pair) for pair in _pair(children[0], children[1])]))


def list_layers(module: ModuleInfo) -> list[ModuleInfo]:
    """A module's wrappers, itself first, and last what they wrap; itself alone where it wraps nothing."""
    held = WRAPPERS.get(module.type)
    for child in module.children:
        if child.path.rpartition(".")[2] == held:
            return [module, *list_layers(child)]
    return [module]


def _name(module: ModuleInfo) -> str:
    return module.path.rpartition(".")[2]


def _measure(module: ModuleInfo) -> Hashable:
    inner = list_layers(module)[-1]
    return inner.type, module.params, sum(1 for _ in inner.walk())


def _pair(before: Sequence[ModuleInfo], after: Sequence[ModuleInfo]) -> Iterator[Pair]:
    """Modules that belong together, in the order of the second profile, those of the first alone last."""
    keys: tuple[Callable[[ModuleInfo], Hashable], ...] = (
        lambda module: (_name(module), list_layers(module)[-1].type), _measure, _name)
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
    yield from ((before[partner[j]] if j in partner else None, module) for j, module in enumerate(after))
    taken = set(partner.values())
    yield from ((module, None) for i, module in enumerate(before) if i not in taken)


ALL = "*"  # stands for numbers that differ between the modules of a part

Alike = Callable[[AlignedModule, AlignedModule], bool]
_Names = tuple[str, str]  # in the second and in the first profile


@dataclass(frozen=True, slots=True)
class AlignedPart:
    """Modules in the same place of alike modules; ``path`` is in the second profile where that has them."""

    path: str
    former_path: str
    modules: tuple[AlignedModule, ...]

    @property
    def title(self) -> str:
        """Its path, that of the root in words."""
        return self.path or ROOT

    @property
    def type(self) -> str:
        """The class of its modules."""
        return self.modules[0].type

    @property
    def is_in_one(self) -> bool:
        """Whether only one profile has any of them."""
        return all(module.before is None for module in self.modules) or all(
            module.after is None for module in self.modules)

    def split(self, alike: Alike) -> list[AlignedPart]:
        """Its children by name; numbered ones that are ``alike`` together: blocks, or layers all of one class."""
        by_name: dict[_Names, list[AlignedModule]] = {}
        for module in self.modules:
            for child in module.children:
                by_name.setdefault((child.name, child.former_name), []).append(child)
        numbers = sum(1 for name, _ in by_name if name.isdecimal())
        parts = []
        for group in _group(by_name, alike):
            paths = [join_path(path, _fold([pair[i] for pair in group], numbers))
                     for i, path in enumerate((self.path, self.former_path))]
            modules = tuple([child for names in group for child in by_name[names]])
            is_removed = all(module.after is None for module in modules)
            parts.append(AlignedPart(paths[1 if is_removed else 0], paths[1], modules))
        return parts


def _group(by_name: dict[_Names, list[AlignedModule]], alike: Alike) -> list[list[_Names]]:
    numbered = [modules[0] for (name, _), modules in by_name.items() if name.isdecimal()]
    is_uniform = len({(module.type, module.former_type) for module in numbered}) == 1
    groups: list[list[_Names]] = []
    for names, modules in by_name.items():
        may_join = _is_numbered(names) and (is_uniform or modules[0].children)
        home = next((group for group in groups if may_join and _is_numbered(group[0]) and _are_alike(
            modules, by_name[group[0]], alike)), None)
        if home is None:
            groups.append([names])
        else:
            home.append(names)
    return groups


def _is_numbered(names: _Names) -> bool:
    """Whether a module goes by the same number in both profiles; one that was renumbered stands alone."""
    return names[0].isdecimal() and names[0] == names[1]


def _are_alike(modules: Sequence[AlignedModule], others: Sequence[AlignedModule], alike: Alike) -> bool:
    first, second = modules[0], others[0]
    return (first.type, first.former_type) == (second.type, second.former_type) and (
        first.before is None, first.after is None) == (second.before is None, second.after is None) and alike(
        first, second)


def _fold(names: Sequence[str], numbers: int) -> str:
    """One name for several numbers: ``*`` where they are all that there are, else their ranges."""
    if len(names) == 1:
        return names[0]
    if len(names) == numbers:
        return ALL
    ranges: list[list[int]] = []
    for number in sorted(map(int, names)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    folded = ",".join([str(a) if a == b else f"{a}-{b}" for a, b in ranges])
    return f"{{{folded}}}"
