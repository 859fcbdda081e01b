"""Imports point one way: each room sees only the rooms before it, and no file is in a circle. Every import counts,
those in functions and under `TYPE_CHECKING` too.
"""
import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx

ROOT = Path(__file__).parents[2] / "analyzer"
# The order of the rooms; a file may import from its own and earlier ones. What stands side by side does not know of the
# other.
ORDER = [{"units", "errors", "registry", "output", "on_use", "saved_format", "hardware", "memory"}, {"meta"}, {"cuda"},
         {"distributed"}, {"record"}, {"state"}, {"replay", "compiled"}, {"fx"}, {"profilers"}, {"recipe"}, {"results"},
         {"report", "zoo"}, {"api"},
         {"parallel", "search", "solver", "generation", "serving", "diffusion", "sweep", "dryrun", "runtime",
          "calibration"},
         {"dropins", "advice", "job", "explain"}, {"lengths"}, {"posttrain"}, {"show"}, {"facts"}, {"option"},
         {"options"}, {"command"}, {"commands"}, {"cli"},
         {"__main__", "__init__"}]
RANK = {room: i for i, rooms in enumerate(ORDER) for room in rooms}
FILES = {
    ".".join(p.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in ROOT.rglob("*.py")}


def imports_of(name: str) -> Iterator[str]:
    """The files of the package that a file imports anywhere in it."""
    path = FILES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[:len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            found = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names]
        else:
            continue
        yield from (other for other in found if other in FILES and other not in (name, "analyzer"))


def room_of(name: str) -> str:
    return (name.replace("analyzer.tools", "analyzer", 1).split(".") + ["__init__"])[1]


@functools.cache
def graph() -> "networkx.DiGraph[str]":
    """Which file imports which; read once, and not where tests are only collected."""
    return networkx.DiGraph((name, other) for name in FILES for other in imports_of(name))


def test_every_file_imports_only_from_its_own_and_earlier_rooms() -> None:
    wrong = sorted(f"{a} imports {b}" for a, b in graph().edges if RANK[room_of(b)] > RANK[room_of(a)])
    assert wrong == []


def test_no_file_is_in_a_circle() -> None:
    circles = sorted((len(c) for c in networkx.strongly_connected_components(graph()) if len(c) > 1), reverse=True)
    assert circles == []


def test_every_room_has_a_place_in_the_order() -> None:
    assert {room_of(name) for name in FILES} <= set(RANK)


_LATE = """
import contextlib, io, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import analyzer
late = ("analyzer.profilers.operator.matmul", "analyzer.profilers.fus", "torch.distributed.optim", "analyzer.report.",
        "analyzer.tools.solver", "analyzer.tools.dryrun", "analyzer.tools.generation")
print([path for path in opened if "fitted" in path], [name for name in sys.modules if name.startswith(late)])
from analyzer.cli import main
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
    main(["--help"])
assert "print reports of a saved profile" in " ".join(out.getvalue().split())
late = "show advice report solver generation sweep dryrun runtime calibration".split()
print([name for name in sys.modules if name.startswith("analyzer.") and name.split(".")[1] in late])
analyzer.register_report("summary", lambda profile: "mine", override=True)
p = analyzer.Profile(name="Net", mode="infer")
print(len(p.to_json()) > 100, p.report("summary"), analyzer.register_report.takes("deepspeed", "module_depth"))
from analyzer import *
assert analyzer.dry_run is dry_run and callable(max_batch_size)
import analyzer.tools.solver
print({"scipy", "matplotlib"} & set(sys.modules))
"""


def test_what_is_imported_late() -> None:
    """Constants and rules for time, reports, tools and their libraries, and the files of each command."""
    done = subprocess.run([sys.executable, "-c", _LATE], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[] []", "[]", "True mine True", "set()"]


_AT_ONCE = """
import contextlib, io, sys
import analyzer
from analyzer.cli import main
from analyzer.commands import COMMANDS
for words in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), [], ["profle"], ["profile"],
              ["profile", "gpt2", "--quantize", "int5"], ["fit", "gpt2", "--quick"], ["devices"], ["devices", "h100"],
              ["models", "llama"], ["models", "nobody"], ["fits"]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out), \
            contextlib.suppress(SystemExit):
        main(words)
    assert len(out.getvalue()) > 10, words
print([name for name in ("torch", "numpy", "networkx") if name in sys.modules])
"""


def test_help_and_wrong_options_are_told_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _AT_ONCE], cwd=ROOT.parent, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


_WITHIN_MODES = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
seen = []
class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))
import analyzer
with torch.device("meta"), Seen():
    for name in analyzer.__all__:
        getattr(analyzer, name)
    from analyzer import zoo, parallel
    from analyzer.cuda.kernel_registry import load_kernels
    load_kernels()
print(seen)
"""


def test_what_is_imported_late_makes_no_tensors_in_the_modes_of_its_user() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHIN_MODES], cwd=ROOT.parent, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
