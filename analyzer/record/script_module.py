"""What a script calls from outside of any module, without holding it: its modules, and its optimizers."""
from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch

from .log import Log, LogModule
from .tensor_walk import walk_modules

Walked = list[tuple[str, torch.nn.Module]]


class ObjectNumbers:
    """A number for each object, which no other gets after its death; ``forget`` is told the id of one that died.

    >>> numbers = ObjectNumbers(lambda dead: None)
    >>> kept = torch.nn.ReLU()
    >>> [numbers(kept), numbers(torch.nn.ReLU()), numbers(torch.nn.ReLU()), numbers(kept)]
    [0, 1, 2, 0]
    """

    def __init__(self, forget: Callable[[int], None]) -> None:
        self._forget = forget
        self._next = count()
        self._of: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __call__(self, thing: Any) -> int:
        known = self._of.get(id(thing))
        if known is None or known[1]() is not thing:
            known = self._of[id(thing)] = next(self._next), weakref.ref(thing, self._bury(id(thing)))
        return known[0]

    def new(self, thing: object = None) -> int:
        """A number that is of no object."""
        return next(self._next)

    def _bury(self, key: int) -> Callable[[weakref.ref[Any]], None]:
        def died(ref: weakref.ref[Any]) -> None:
            if key in self._of and self._of[key][1] is ref:
                del self._of[key]
                self._forget(key)
        return died


@dataclass(eq=False)
class ScriptRoot:
    """A module, or a parameter of no module, that the script holds itself."""

    name: str
    layout: tuple[tuple[str, str], ...]  #: paths and classes of the module and of all below it
    find: Callable[[], Any]              #: the module, or None once it is gone
    is_class: bool = False               #: of modules without state, which one of their class stands for
    shape: Any = None                    #: what the driver wrote down of it while it was there
    died_in: int | None = None           #: the step
    has_given: bool = False              #: modules of it stand in another since it died

    def is_of(self, step: int) -> bool:
        """Whether it was there in this step."""
        return self.died_in is None or self.died_in >= step


class ScriptRoots:
    """The modules that a script calls, and which record of ``log`` stands for which module below them.

    A module stands where it was first met; one that was met by itself moves into the module that holds it, once that
    is called. A module that is built like one that is gone takes over its records and its name, as each attempt of a
    search for the batch size does. ``index_of`` has the record's index by a module's id.
    """

    def __init__(self, log: Log, index_of: dict[int, int], numbers: ObjectNumbers) -> None:
        self.log, self.index_of, self.numbers = log, index_of, numbers
        self.roots: list[ScriptRoot] = []
        self._home: dict[int, ScriptRoot] = {}  # by index of a record
        self._vacant: dict[tuple[tuple[str, str], ...], list[ScriptRoot]] = {}
        self._names: set[str] = set()
        self._stateless: dict[type, int] = {}

    def knows(self, module: torch.nn.Module) -> bool:
        """Whether the module has a record below a module that is still there."""
        index = self.index_of.get(id(module))
        return index is not None and (index not in self._home or not self._is_gone(self._home[index]))

    def take(self, module: torch.nn.Module, step: Callable[[], int]) -> tuple[ScriptRoot, Walked]:
        """The root that a module becomes, and all that stands below it now; ``step`` is asked when it dies."""
        kind = type(module)
        is_class = not module._modules and not module._parameters and not module._buffers
        if is_class and kind in self._stateless:
            self._let_stand(module, self._stateless[kind])
            return self._home[self._stateless[kind]], []
        walked = walk_modules(module)
        layout = tuple([(path, f"{type(m).__module__}.{type(m).__qualname__}") for path, m in walked])
        is_known = any(id(m) in self.index_of and not self._stands_for_class(m) for _, m in walked)
        vacant = self._vacant.get(layout)
        root = vacant.pop() if vacant and not is_known else None
        if root is None:
            root = ScriptRoot(self._find_name(kind.__name__), layout, lambda: None, is_class)
            self.roots.append(root)
        root.died_in = None
        if not is_class:
            root.find = weakref.ref(module, lambda _: self._bury(root, step()))
        else:
            self._stateless[kind] = len(self.log.modules)
        return root, self.settle(root, walked, self._is_gone)

    def settle(self, root: ScriptRoot, walked: Walked, may_leave: Callable[[ScriptRoot], bool]) -> Walked:
        """Give the modules of a root records; those that stand in a root that ``may_leave`` them move here."""
        settled: Walked = []
        absorbed: set[int] = set()
        for below, module in walked:
            path = f"{root.name}.{below}" if below else root.name
            index = None if self._stands_for_class(module) else self.index_of.get(id(module))
            home = None if index is None else self._home.get(index)
            if home is not None and home is not root:
                if home.find() is module:
                    absorbed.add(id(home))
                    self.roots.remove(home)
                elif id(home) not in absorbed and not may_leave(home):
                    continue
                home.has_given = True
            elif home is root and self.log.modules[index or 0].path == path:
                continue
            if index is None:
                index = self.log.index_of_path.get(path, len(self.log.modules))
            self._place(index, path, type(module).__name__)
            self._home[index] = root
            self._let_stand(module, index)
            settled.append((path, module))
        return settled

    def _place(self, index: int, path: str, kind: str) -> None:
        log, above = self.log, self.log.index_of_path[path.rpartition(".")[0]]
        if index == len(log.modules):
            log.modules.append(LogModule(path, kind, above))
        else:
            log.index_of_path.pop(log.modules[index].path, None)
            log.modules[index].path, log.modules[index].parent = path, above
        log.index_of_path[path] = index

    def keep(self, parameter: torch.Tensor, step: Callable[[], int]) -> ScriptRoot:
        """A root that is a parameter of the script's own."""
        root = ScriptRoot(f"parameter_{sum(not known.layout for known in self.roots)}", (), lambda: None)
        root.find = weakref.ref(parameter, lambda _: self._bury(root, step()))
        self.roots.append(root)
        return root

    def live(self) -> Iterator[tuple[ScriptRoot, Any]]:
        for root in self.roots:
            if (found := root.find()) is not None:
                yield root, found

    def gather(self, step: int) -> list[ScriptRoot]:
        """The roots that were there in this step, and no more of others; what moved is told after where it is now."""
        for root, module in self.live():
            if isinstance(module, torch.nn.Module):
                self.settle(root, walk_modules(module), lambda home: not home.is_of(step))
        return sorted([root for root in self.roots if root.is_of(step)], key=lambda root: root.has_given)

    def _find_name(self, kind: str) -> str:
        name, number = kind, 1
        while name in self._names:
            number += 1
            name = f"{kind}_{number}"
        self._names.add(name)
        return name

    def _let_stand(self, module: torch.nn.Module, index: int) -> None:
        self.numbers(module)  # which tells of its death
        self.index_of[id(module)] = index

    def _stands_for_class(self, module: torch.nn.Module) -> bool:
        index = self.index_of.get(id(module))
        return index is not None and index in self._home and self._home[index].is_class

    @staticmethod
    def _is_gone(root: ScriptRoot) -> bool:
        return root.find() is None and not root.is_class

    def _bury(self, root: ScriptRoot, step: int) -> None:
        root.died_in = step
        if root.layout and not root.has_given:
            self._vacant.setdefault(root.layout, []).append(root)


class _Counted(NamedTuple):
    name: str
    ref: weakref.ref[torch.optim.Optimizer]


class StepCounts:
    """How often each optimizer of a script has stepped, by name: its class and its place among those that are there.

    An optimizer takes over the name and the steps of one of its class that is gone; one that is gone holds no other
    back. A step of the script is whole when every optimizer has stepped; those that have not yet are ``expected``.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.stepped_in: dict[str, int] = {}  #: the step of the script in which each stepped last
        self._times: defaultdict[int, Counter[str]] = defaultdict(Counter)  # how often each did, by step of the script
        self._known: dict[int, _Counted] = {}
        self._gone: dict[str, list[str]] = {}  # names by class
        self._floor = 0
        self._expected: list[weakref.ref[torch.optim.Optimizer]] = []
        self._stepped: set[int] = set()  # ids of parameters

    def expect(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """These were there when the first of all stepped."""
        self._expected = [weakref.ref(optimizer) for optimizer in optimizers]

    def list_expected(self) -> list[torch.optim.Optimizer]:
        """Of those that are expected the ones with parameters to train that no optimizer has stepped."""
        alive = [optimizer for ref in self._expected if (optimizer := ref()) is not None]
        found = [one for one in alive if any([p.requires_grad and id(p) not in self._stepped
                                              for group in one.param_groups for p in group["params"]])]
        self._expected = [weakref.ref(optimizer) for optimizer in found]
        return found

    def meet(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer steps; the result is whether it was expected."""
        if not self._expected:
            return False
        is_expected = any(ref() is optimizer for ref in self._expected)
        self._stepped.update([id(p) for group in optimizer.param_groups for p in group["params"]])
        self.list_expected()
        return is_expected

    @property
    def whole(self) -> int:
        """Whole steps: every optimizer that is there has stepped as often."""
        return min(self._live().values(), default=self._floor)

    def name(self, optimizer: torch.optim.Optimizer) -> str:
        known = self._known.get(id(optimizer))
        if known is not None and known.ref() is optimizer:
            return known.name
        kind = type(optimizer).__name__
        if gone := self._gone.get(kind):
            whole, name = self.whole, gone.pop(0)
            self.counts[name] = max(self.counts[name], whole)
        else:
            used = {known.name for known in self._known.values()}
            name = next(name for n in count(1) if (name := f"{kind} {n}" if n > 1 else kind) not in used)
        self._known[id(optimizer)] = _Counted(name, weakref.ref(optimizer, self._bury(id(optimizer))))
        return name

    def add(self, name: str, step: int) -> None:
        self.counts[name] = self.counts.get(name, 0 if self._live() else self._floor) + 1
        self.stepped_in[name] = step
        self._times[step][name] += 1

    def join(self) -> None:
        """What were taken for steps are parts of the first."""
        self.stepped_in = dict.fromkeys(self.stepped_in, 0)
        self._times = defaultdict(Counter, {0: sum(self._times.values(), Counter())})

    def of_step(self, step: int) -> list[str]:
        """The names of those that stepped in this step or later, all where none did; with how often each did in it,
        where one did more than once.
        """
        names = [name for name, last in self.stepped_in.items() if last >= step] or list(self.counts)
        times = self._times[step]
        if len(names) < 2 or max(times.values(), default=1) == 1:
            return names
        return [f"{name} ({n} step{'s' if n > 1 else ''})" if (n := times[name]) else name for name in names]

    def _live(self) -> dict[str, int]:
        gone = {name for names in self._gone.values() for name in names}
        return {name: times for name, times in self.counts.items() if name not in gone}

    def _bury(self, key: int) -> Callable[[weakref.ref[Any]], None]:
        def died(ref: weakref.ref[Any]) -> None:
            known = self._known.get(key)
            if known is None or known.ref is not ref:
                return
            del self._known[key]
            self._floor = self.whole
            if known.name not in self.counts:  # it never stepped
                return
            self._gone.setdefault(known.name.partition(" ")[0], []).append(known.name)
            live = self._live()
            ahead = min(live.values(), default=self._floor) - self._floor
            for name in live:  # go on from where the script is
                self.counts[name] -= ahead
        return died
