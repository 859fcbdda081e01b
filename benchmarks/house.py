"""Measures of the house itself: of how many things one keeps track who changes the package.

Run ``python -m benchmarks.house``. Each row is counted from the sources, which are read and not imported. With
``--names`` the classes that share a name are listed, with their files. `tests/benchmarks/test_house.py` holds the bars.
"""
from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "analyzer"
FILES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
         for path in sorted(PACKAGE.rglob("*.py"))}
#: Functions that compare modules of a model to say which are alike, file and function; one that asks another of these
#: is no further one. Which modules are of one class (`list_blocks`), which operators of a graph repeat (`shorten`) and
#: which rows of a table are one (`_fold`) are other questions, as their docstrings say.
ALIKE = {"replay/chain.py": "compare_blocks", "tools/search/stage.py": "_describe"}


@cache
def parse(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """Every class of the package, with the module that it is in."""
    return [(name, node) for name in FILES for node in ast.walk(parse(name)) if isinstance(node, ast.ClassDef)]


@cache
def imports_of(name: str, at_once: bool = False) -> frozenset[str]:
    """The modules of the package that a module imports: anywhere in it, or those that are imported ``at_once``."""
    package = name.split(".")[:None if FILES[name].name == "__init__.py" else -1]
    found: set[str] = set()
    for node in parse(name).body if at_once else ast.walk(parse(name)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[:len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            found.update(whole if (whole := f"{base}.{alias.name}") in FILES else base for alias in node.names)
    return frozenset(other for other in found if other in FILES and other not in (name, "analyzer"))


def closure(*names: str) -> set[str]:
    """The modules of the package that are imported where these are."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += imports_of(name, at_once=True)
    return seen


def find_class(place: str) -> tuple[str, ast.ClassDef]:
    """The class at a place such as ``record.recorder:Recorder``."""
    module, _, name = place.partition(":")
    return next((found, node) for found, node in classes() if found == f"analyzer.{module}" and node.name == name)


def list_methods(place: str, *, inherited: bool = False) -> set[str]:
    """The methods and properties that a class defines, or has of classes of the package too."""
    module, node = find_class(place)
    found = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    for base in node.bases if inherited else ():
        for other, parent in classes():
            if isinstance(base, ast.Name) and parent.name == base.id and other in {module, *imports_of(module)}:
                found |= list_methods(f"{other.removeprefix('analyzer.')}:{parent.name}", inherited=True)
    return found


def list_registries() -> list[str]:
    """Tables of implementations that are filled by registration: values of `Registry` and of what derives from it."""
    kinds = {"Registry"}
    for _ in range(2):
        kinds |= {node.name for _, node in classes() for base in node.bases
                  if getattr(getattr(base, "value", base), "id", None) in kinds}
    kinds.add("SpecCatalogue")  # which holds one
    found = []
    for name in FILES:
        for node in parse(name).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call) and getattr(
                    node.value.func, "id", None) in kinds:
                found.append(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
    return found


def list_shared_names() -> dict[str, list[str]]:
    """Names of classes that mean several things, with the modules that define them; ``_Run`` and ``Run`` are one."""
    found: dict[str, list[str]] = {}
    for module, node in classes():
        found.setdefault(node.name.lstrip("_"), []).append(module)
    return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}


def list_alike() -> list[str]:
    """Those of `ALIKE` that are there and ask none of the others."""
    found = {f"{file}:{node.name}": {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
             for file, function in ALIKE.items() if (PACKAGE / file).exists()
             for node in ast.parse((PACKAGE / file).read_text()).body
             if isinstance(node, ast.FunctionDef) and node.name == function}
    return [place for place, names in found.items() if not names.intersection(ALIKE.values())]


def count_room(room: str) -> tuple[int, int]:
    """Lines and files of a room; ``__init__.py`` is no file that one opens."""
    paths = [path for name, path in FILES.items() if name.startswith(f"analyzer.{room}.") and path.stem != "__init__"]
    return sum(len(path.read_text().splitlines()) for path in paths), len(paths)


#: the objects that write down a run, which most code holds: recorders, of any run, of a script's and of a real one's,
#: and the parts that these hold
LIVE = ("record.recorder:Recorder", "record.memory_recorder:MemoryRecorder", "record.module_recorder:ModuleRecorder",
        "record.call_recorder:CallRecorder", "record.script_recorder:ScriptRecorder",
        "record.script_holdings:ScriptHoldings", "record.script_passes:ScriptPasses",
        "tools.runtime.recorder:RuntimeRecorder", "tools.runtime.recorder:TimedMemory",
        "tools.runtime.recorder:TimedModules")
PROFILE = "api.result:Profile"


@cache
def measure() -> Mapping[str, int]:
    """Every measure by its name."""
    lines, files = count_room("replay")
    search = [name for name in FILES if name.startswith("analyzer.tools.search")]
    benchmarks = PACKAGE.with_name("benchmarks").rglob("*.py")
    return {
        "functions that say which modules are alike": len(list_alike()),
        "replay/: lines": lines, "replay/: files": files, "state/: lines": count_room("state")[0],
        "record/: files": count_room("record")[1],
        "methods of the largest live object": max(len(list_methods(place, inherited=True)) for place in LIVE),
        "methods of Profile": len(list_methods(PROFILE)),
        "methods of Profile, inherited ones too": len(list_methods(PROFILE, inherited=True)),
        "registries": len(list_registries()), "names with two or more meanings": len(list_shared_names()),
        "files behind api.profile": len(closure("analyzer.api.profile")),
        "files behind tools/search": len(closure(*search)),
        "imports of api/session.py": len(imports_of("analyzer.api.session")),
        "benchmarks/: lines": sum(len(path.read_text().splitlines()) for path in benchmarks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="list the names that several classes have")
    arguments = parser.parse_args()
    for name, value in measure().items():
        print(f"{name:45} {value:6,}")
    for name, modules in list_shared_names().items() if arguments.names else ():
        print(f"{name}: {', '.join(modules)}")


if __name__ == "__main__":
    main()
