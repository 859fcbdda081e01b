"""Which functions code may call, and where these find what may change: globals, closures, defaults, attributes."""
from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Set
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


def is_written_iterator(kind: type) -> bool:
    """Whether a class of iterators is the user's, written in Python: attributes tell where one of it is."""
    return not is_stateless(kind) and all(
        [isinstance(vars(base)["__next__"], FunctionType) for base in kind.__mro__ if "__next__" in vars(base)
         and base not in (Iterator, Generator)])


class CodeSearch:
    """Finds what code may reach. A method counts as called where reachable code names it. Functions of torch, numpy and
    Python's own modules keep no state that shows, and are not followed.
    """

    def __init__(self) -> None:
        self.found = Reachable()
        self.constructs = False  #: whether code makes objects of the classes that it names
        self.pending: list[Any] = []
        self.names: set[str] = set()
        self.prefixes: set[str] = set()
        #: of the classes met, those not followed yet: by name, each with whether its class is a library's
        self.methods: dict[str, list[tuple[bool, Any]]] = {}
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
                        _fits(prefix, name, in_library) for prefix in self.prefixes):
                    self.pending.append(value)
                else:
                    self.methods.setdefault(name, []).append((in_library, value))

    def _use(self, value: Any) -> None:
        """Reachable code may call an object that is neither a function nor a class, or read its attributes."""
        if isinstance(value, property):
            self.pending += [f for f in (value.fget, value.fset) if f is not None]
        elif isinstance(value, functools.partial):
            self.pending.append(value.func)
        elif isinstance(value, torch.jit.ScriptFunction):
            self.found.unreadable = "it calls a function of TorchScript, which is compiled anew as it runs"
        else:
            if isinstance(value, MethodType) and not isinstance(owner := value.__self__, nn.Module):
                self.add_class(owner if isinstance(owner, type) else type(owner))  # a custom function by its ``apply``
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
        _, named_globals, names, stored, revealing, prefixes = _names_in(function.__code__)
        found = self.found
        if revealing:
            told = revealing & _REVEALING - {function.__name__}  # a class's own way to look up attributes
            if told:
                found.unreadable = f"its code asks for {min(told)}"
            found.reads_environment |= not revealing.isdisjoint(_ENVIRONMENT)
        for name in self.methods.keys() & names:
            self.pending += [method for _, method in self.methods.pop(name)]
        for prefix in prefixes - self.prefixes:
            for name, held in list(self.methods.items()):
                self.pending += [method for in_library, method in held if _fits(prefix, name, in_library)]
                self.methods[name] = [pair for pair in held if not _fits(prefix, name, pair[0])]
        self.names |= names
        self.prefixes |= prefixes
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


def _fits(prefix: str, name: str, in_library: bool) -> bool:
    """Whether a method may be what a name that is worked out means: one without a prefix may be any of no library."""
    return name.startswith(prefix) if prefix else not in_library


class _Names(NamedTuple):
    """What code names, with functions in it: globals, all, what it sets, what reveals; prefixes of names that it works
    out.
    """

    code: CodeType
    named_globals: frozenset[str]
    names: frozenset[str]
    stored: frozenset[str]
    revealing: frozenset[str]
    prefixes: frozenset[str]


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
                       frozenset(_find_prefixes(code)))
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


def _find_prefixes(code: CodeType, around: Set[str] = frozenset()) -> Iterator[str]:
    """The texts with which names begin that code works out and asks a first parameter for, its own or of code
    ``around`` it; "" where that is no constant.
    """
    own = around & set(code.co_freevars) | set(code.co_varnames[:min(code.co_argcount, 1)])
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _find_prefixes(inner, own)
    if "getattr" not in code.co_names:
        return
    steps: list[tuple[str, Any]] = []
    for one in dis.get_instructions(code):
        if one.opname.startswith("LOAD_FAST") and type(one.argval) is tuple:  # two in one, from Python 3.13 on
            steps += [(one.opname, variable) for variable in one.argval]
        elif one.opname not in ("EXTENDED_ARG", "CACHE"):
            steps.append((one.opname, one.argval))
    for (_, function), (load, variable), (name, argument), (then, _) in zip(steps, steps[1:], steps[2:], steps[3:]):
        if function != "getattr" or variable not in own or not load.startswith(("LOAD_FAST", "LOAD_DEREF")):
            continue
        is_whole = name == "LOAD_CONST" and then in ("LOAD_CONST", "PRECALL", "CALL", "CALL_FUNCTION")
        of_held = name in ("LOAD_ATTR", "LOAD_METHOD") or then == "BINARY_SUBSCR" or type(argument) is int
        if not is_whole and not of_held:
            yield argument if name == "LOAD_CONST" and type(argument) is str else ""


def is_constant(value: Any) -> bool:
    return type(value) in CODE_CONSTANTS or type(value) is tuple and all(map(is_constant, value))
