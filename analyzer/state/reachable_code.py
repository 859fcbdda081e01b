"""Which functions code may call, and where these find what may change: globals, closures, defaults, attributes."""
from __future__ import annotations

import dis
import functools
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer.meta.spec import CODE_CONSTANTS

_METHODS = (FunctionType, staticmethod, classmethod, property, functools.partial)
_STATELESS = frozenset({"torch", "numpy", *sys.stdlib_module_names} - {"__main__"})
#: rooms that hold the run itself, and what was found by earlier ones, which graphs keep: neither is the model's state,
#: and put back, the run's books would be those of before
_OF_THE_RUN = ("analyzer.meta.", "analyzer.record.", "analyzer.memory.", "analyzer.state.", "analyzer.replay.",
               "analyzer.results.", "analyzer.api.")
#: attributes that tell of a tensor's or an object's past, or by which code evades that its reads are seen
_REVEALING = frozenset((
    "__getattribute__ getattr_static data_ptr _version grad_fn _base _is_view retains_grad _getframe "
    "currentframe get_referrers memory_allocated memory_reserved max_memory_allocated mem_get_info memory_stats Stream "
    "MemPool use_mem_pool ExternalStream set_per_process_memory_fraction _snapshot "
    "saved_tensors_hooks save_on_cpu").split())
_PACKAGES = f"-packages{os.sep}"  #: in the paths of installed libraries
_ENVIRONMENT = frozenset(("environ", "getenv", "putenv", "environb"))
_LOAD_GLOBAL, _LOAD_NAME = dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_NAME"]
_STORE_GLOBAL, _STORE_ATTR = dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_ATTR"]
_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0  # the lowest bit is then for a call that follows


@dataclass
class Reachable:
    """The places that reachable functions read: a dictionary or cell, and the name in it ("" of a cell); why state is
    ``unreadable``; the classes whose methods may run, and be replaced: all of their attributes may be read.
    """

    places: list[tuple[Any, str]] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)
    reads_environment: bool = False
    unreadable: str | None = None


def is_stateless(value: Any) -> bool:
    """Whether a class, function or module comes from where nothing is kept that shows in what a module does."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return type(module) is str and _is_stateless_name(module)


@functools.lru_cache(4096)
def _is_stateless_name(module: str) -> bool:
    return module.partition(".")[0] in _STATELESS or module.startswith(_OF_THE_RUN)


def is_standard(cls: type) -> bool:
    """Whether the attributes of objects of a class of the standard library are state."""
    return cls.__module__.partition(".")[0] in sys.stdlib_module_names and cls.__module__ != "logging"


class CodeSearch:
    """Finds what code may reach. A method counts as called where reachable code names it. Functions of torch, numpy and
    Python's own modules keep no state that shows, and are not followed.
    """

    def __init__(self) -> None:
        self.found = Reachable()
        self.constructs = False  #: whether code makes objects of the classes that it names
        self.pending: list[Any] = []
        self.names: set[str] = set()
        self.patterns: set[str] = set()
        # of the classes met, those not followed yet: by name, and whether their class is a library's
        self.methods: dict[tuple[str, bool], list[Any]] = {}
        self.seen: set[Any] = set()  #: classes and functions that were met
        self._namespaces: set[tuple[int, str, frozenset[str] | None]] = set()

    def find(self, classes: Iterable[type], functions: Iterable[Any]) -> Reachable:
        """What the forward passes of modules of ``classes``, and ``functions``, may reach that was not found before."""
        found = self.found = Reachable()
        for cls in classes:
            self.add_class(cls)
        self.pending += functions
        while self.pending:
            value = self.pending.pop()
            if type(value) is FunctionType:
                self._call(value, value)
            elif isinstance(value, type):
                if not is_stateless(value):
                    self.add_class(value)
            elif type(value) not in CODE_CONSTANTS:
                self._use(value)
        return found

    def add_class(self, cls: type) -> None:
        """Its methods may be called: ``forward`` and those of Python's protocols, others where they are named."""
        if cls in self.seen:  # and so are its bases
            return
        is_module = issubclass(cls, nn.Module)
        has_forward = is_module and any(["forward" in vars(base) for base in cls.__mro__ if base is not nn.Module])
        for base in cls.__mro__:
            if base in self.seen or is_stateless(base):
                continue
            self.seen.add(base)
            self.found.classes.append(base)
            all_run = is_module and not has_forward or issubclass(base, torch.autograd.Function)
            in_library = _PACKAGES in (getattr(sys.modules.get(base.__module__), "__file__", None) or "")
            for name, value in vars(base).items():
                if name == "__init__" and not self.constructs or not _is_method(value):
                    continue
                if all_run or name == "forward" and is_module or name in self.names or name[:2] == "__" or any(
                        _fits(pattern, name, in_library) for pattern in self.patterns):
                    self.pending.append(value)
                else:
                    self.methods.setdefault((name, in_library), []).append(value)

    def _use(self, value: Any) -> None:
        """Reachable code may call an object that is neither a function nor a class, or read its attributes."""
        if isinstance(value, property):
            self.pending += [f for f in (value.fget, value.fset) if f is not None]
        elif isinstance(value, functools.partial):
            self.pending.append(value.func)
        elif isinstance(value, torch.jit.ScriptFunction):
            self.found.unreadable = "it calls a function of TorchScript, which is compiled anew as it runs"
        else:
            if isinstance(value, MethodType) and not isinstance(value.__self__, (nn.Module, type)):
                self.add_class(type(value.__self__))
            self._call(value, getattr(value, "__func__", value))

    def _call(self, value: Any, function: Any) -> None:
        """Reachable code may call ``value``, and with it ``function``."""
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            self.pending.append(wrapped)
        if isinstance(function, FunctionType):
            if function not in self.seen and not is_stateless(function):
                self.seen.add(function)
                self._follow(function)
        elif not is_stateless(type(value)) and not isinstance(value, (nn.Module, torch.Tensor)):
            self.add_class(type(value))

    def _follow(self, function: FunctionType) -> None:
        _, named_globals, names, stored, revealing, patterns = _names_in(function.__code__)
        found = self.found
        if revealing:
            told = revealing & _REVEALING - {function.__name__}  # a class's own way to look up attributes
            if told:
                found.unreadable = f"its code asks for {min(told)}"
            found.reads_environment |= not revealing.isdisjoint(_ENVIRONMENT)
        for name, in_library in itertools.product(names - self.names, (False, True)):
            self.pending += self.methods.pop((name, in_library), ())
        for pattern in patterns - self.patterns:
            for key in [key for key in self.methods if _fits(pattern, *key)]:
                self.pending += self.methods.pop(key)
        self.names |= names
        self.patterns |= patterns
        for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if cell_name == "__class__":  # which Python keeps for ``super()``
                continue
            found.places.append((cell, ""))
            try:
                self.pending.append(cell.cell_contents)
            except ValueError:  # not set yet
                pass
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not is_constant(default):
                found.places.append(({"": default}, ""))
        self._look_into(function.__globals__, named_globals, names, stored)

    def _look_into(self, namespace: dict[str, Any], named: frozenset[str], attributes: frozenset[str],
                   stored: frozenset[str]) -> None:
        """Follow what names mean in a module, and in modules that it holds; those ``stored`` may be added."""
        for name in (named & namespace.keys()) | (named & stored):
            value = namespace.get(name)
            is_module = isinstance(value, ModuleType)  # in which other code names other attributes
            place = id(namespace), name, attributes if is_module else None
            if place in self._namespaces or name[:2] == "__":
                continue
            self._namespaces.add(place)
            if is_module:
                if not is_stateless(value):
                    self._look_into(vars(value), attributes - {name}, attributes - {name}, stored)
                continue
            if not isinstance(value, type):
                self.found.places.append((namespace, name))
            self.pending.append(value)


def _is_method(value: Any) -> bool:
    return type(value) not in CODE_CONSTANTS and (isinstance(value, _METHODS) or hasattr(value, "__wrapped__"))


@functools.lru_cache(1 << 14)
def _fits(pattern: str, name: str, in_library: bool) -> bool:
    """Whether a method may be what a name that is worked out means: with no part known, it may be any of no library."""
    return re.fullmatch(pattern, name) is not None and not (in_library and not pattern.strip(".*"))


class _Names(NamedTuple):
    """What code names, with functions in it: globals, all, what it sets, what reveals, patterns that it works out."""

    code: CodeType
    named_globals: frozenset[str]
    names: frozenset[str]
    stored: frozenset[str]
    revealing: frozenset[str]
    patterns: frozenset[str]


_names: dict[int, _Names] = {}  # by id(code), which never changes and is kept alive here; hashing code reads all of it
_MOST_NAMES = 4096


def _names_in(code: CodeType) -> _Names:
    found = _names.get(id(code))
    if found is None:
        inner = [_names_in(c) for c in code.co_consts if isinstance(c, CodeType)]
        named_globals, stored = find_globals(code)
        named_globals = named_globals.union(*(n.named_globals for n in inner))
        names = frozenset(code.co_names).union(*(n.names for n in inner))
        if "getattr" in named_globals:
            names = names.union([c for c in code.co_consts if type(c) is str and c.isidentifier()])
        stored = stored.union(*(n.stored for n in inner))
        found = _Names(code, named_globals, names, stored,
                       names & (_REVEALING | _ENVIRONMENT),
                       frozenset(_find_patterns(code)))
        if len(_names) >= _MOST_NAMES:
            _names.clear()
        _names[id(code)] = found
    return found


def find_globals(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that code names, and what it sets, as `dis.get_instructions` tells, which describes each step."""
    found, stored, extended = set(), set(), 0
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2]):
        argument |= extended
        extended = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation == _LOAD_GLOBAL:
            found.add(code.co_names[argument >> _GLOBAL_SHIFT])
        elif operation == _LOAD_NAME or operation == _STORE_GLOBAL:
            found.add(code.co_names[argument])
        if operation == _STORE_GLOBAL or operation == _STORE_ATTR:
            stored.add(code.co_names[argument])
    return frozenset(found), frozenset(stored)


class _Step(NamedTuple):
    """One instruction: its name and argument, and what it adds to the stack."""

    name: str
    argument: Any
    effect: int


def _find_patterns(code: CodeType, around: Set[str] = frozenset()) -> Iterator[str]:
    """What names may be that code works out and asks a first parameter for, its own or of code ``around`` it."""
    own = around & set(code.co_freevars) | set(code.co_varnames[:min(code.co_argcount, 1)])
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _find_patterns(inner, own)
    if "getattr" not in code.co_names:
        return
    steps: list[_Step] = []
    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD_FAST") and type(one.argval) is tuple:  # two in one, from Python 3.13 on
            steps += [_Step(one.opname, variable, 1) for variable in one.argval]
        elif one.opname not in ("EXTENDED_ARG", "CACHE"):
            steps.append(_Step(one.opname, one.argval, dis.stack_effect(one.opcode, one.arg, jump=False)))
    for place, (first, second, third) in enumerate(zip(steps, steps[1:], steps[2:])):
        if first.argument == "getattr" and first.name in ("LOAD_GLOBAL", "LOAD_NAME") and second.argument in own and (
                second.name.startswith(("LOAD_FAST", "LOAD_DEREF"))) and third.name not in ("LOAD_ATTR", "LOAD_METHOD"):
            argument = _second_argument(steps[place + 2:])
            if argument is not None and [step.name for step in argument] != ["LOAD_CONST"]:
                yield _pattern(argument)


def _second_argument(steps: Sequence[_Step]) -> Sequence[_Step] | None:
    """The steps of a call's second argument; none where code branches, None where the first is not whole."""
    depth, starts = 1, dict[int, int]()  # where what is on the stack at each depth begins
    for place, step in enumerate(steps):
        if depth < 1 or "JUMP" in step.name or "ITER" in step.name:
            return ()
        if step.name in ("PRECALL", "CALL", "CALL_FUNCTION") and step.argument == depth:
            return None if starts.get(1) != 0 else steps[:place if depth == 2 else starts[2]]
        starts[depth] = place
        depth += step.effect
    return ()


def _pattern(steps: Sequence[_Step]) -> str:
    """A regular expression of what such steps give: a text, of which the parts that are constants are known."""
    if len(steps) == 1 and steps[0].name == "LOAD_CONST" and type(steps[0].argument) is str:
        return re.escape(steps[0].argument)
    name, argument, _ = steps[-1] if steps else _Step("", None, 0)
    is_sum = name == "BINARY_ADD" or name == "BINARY_OP" and argument == 0
    parts = argument if name == "BUILD_STRING" else 2 if is_sum else 0
    if not parts:
        return ".*"
    depth, starts = 0, dict[int, int]()
    for place, step in enumerate(steps[:-1]):
        starts[depth] = place
        depth += step.effect
    bounds = [*(starts[part] for part in range(parts)), len(steps) - 1]
    return "".join([_pattern(steps[start:stop]) for start, stop in itertools.pairwise(bounds)])


def is_constant(value: Any) -> bool:
    return type(value) in CODE_CONSTANTS or type(value) is tuple and all(map(is_constant, value))
