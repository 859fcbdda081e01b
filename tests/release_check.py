"""`make release-check`: what a release would publish is built, looked into, and installed where there is nothing else.

    python tests/release_check.py [FOLDER]      # build/release; needs the packages `build` and `twine`, and a network

The wheel is installed beside PyTorch alone, without extras: what needs none works, and what needs one names it.
"""
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
MADE = re.compile(r"PKG-INFO|setup\.cfg|symbolic_analyzer\.egg-info/.*")  #: by the build

# Run beside PyTorch alone. Each file of the package is imported: what it lacks is told by the extra's name.
_IMPORTS = """
import importlib, importlib.metadata, pkgutil, sys
import analyzer
assert importlib.metadata.version("symbolic-analyzer") == analyzer.__version__
names = [module.name for module in pkgutil.walk_packages(analyzer.__path__, "analyzer.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
heavy = {"torchvision", "timm", "transformers", "pandas", "plotly", "matplotlib", "scipy", "pyarrow", "dask"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
print(len(names), "files imported")
"""

_NET = """
import torch
class Net(torch.nn.Sequential):
    def __init__(self):
        blocks = [torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU()) for _ in range(4)]
        super().__init__(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), *blocks, torch.nn.Flatten())
"""

#: Words after ``analyzer``, the exit code, and what is printed.
COMMANDS = [
    (["profile", "net.py:Net", "--input", "2x3x16x16", "--json", "net.json", "--device", "h100"], 0, "one train step"),
    (["check", "net.json", "--max", "params 0"], 4, "params"),
    (["profile", "vit_b_16", "--input", "1x3x224x224", "--show", "table"], 0, "conv_proj"),
    (["profile", "net.py:Net", "--input", "2x3x16x16", "--html", "net.html"], 2, ".[report]"),
    (["profile", "torchvision:alexnet", "--input", "2x3x64x64"], 2, ".[zoo]"),
    (["profile", "timm:resnet18", "--input", "2x3x64x64"], 2, ".[zoo]"),
    (["profile", "hf:GPT2Config"], 2, ".[zoo]"),
    (["sweep", "vit_b_16", "--batch", "1", "--dask", "tcp://127.0.0.1:1"], 2, ".[sweep]"),
]


def main() -> None:
    """Build, look, install, run; the first thing that is wrong ends it."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "release").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    tree, dist = folder / "tree", folder / "dist"
    tracked = copy_tracked(tree)
    run([sys.executable, "-m", "build", "--outdir", dist, tree])  # the wheel from the source distribution
    run([sys.executable, "-m", "build", "--wheel", "--outdir", folder / "direct", tree])
    run([sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()])
    (sdist,), (wheel,), (direct,) = dist.glob("*.tar.gz"), dist.glob("*.whl"), (folder / "direct").glob("*.whl")
    version = look_into(sdist, wheel, direct, tracked)
    python = install(folder / "venv", wheel)
    try_out(python, folder / "away", version)
    print(f"{sdist.name} and {wheel.name} are fit to be published")


def copy_tracked(tree: Path) -> list[str]:
    """A copy of what is under version control, and the names of its files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    return names


def look_into(sdist: Path, wheel: Path, direct: Path, tracked: list[str]) -> str:
    """The version that both say, after all that they should hold was found in them."""
    with tarfile.open(sdist) as tar:
        source = {member.name.partition("/")[2] for member in tar if member.isfile()}
    published = {name for name in tracked if not name.startswith(".") or name.startswith((".github/", ".pre-commit"))}
    expect("the source distribution", published,
           {name for name in source if name in tracked or not MADE.fullmatch(name)})
    held, made = read_wheel(wheel), read_wheel(direct)
    expect("the wheel", {name for name in tracked if name.startswith("analyzer/")},
           {name for name in held if ".dist-info/" not in name})
    differs = [name for name in held.keys() | made.keys() if held.get(name) != made.get(name)]
    assert not differs, f"the wheel of the tree is another than that of the source distribution: {differs}"
    (metadata,) = (content for name, content in held.items() if name.endswith(".dist-info/METADATA"))
    version = message_from_bytes(metadata)["Version"]
    heading = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert heading in ("Unreleased", version), f"CHANGELOG.md is of {heading}, the package of {version}"
    if heading == "Unreleased":
        print(f"CHANGELOG.md: to publish, its first heading becomes ## {version}")
    return str(version)


def read_wheel(path: Path) -> dict[str, bytes]:
    """The files of a wheel by name."""
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def expect(what: str, wanted: set[str], held: set[str]) -> None:
    """Raise unless both are the same."""
    assert wanted == held, f"{what} lacks {sorted(wanted - held)} and has {sorted(held - wanted)} more"
    print(f"{what}: {len(held)} files")


def install(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment that holds PyTorch and the wheel."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    run([*pip, torch[0]])
    run([*pip, wheel])
    return python


def try_out(python: Path, away: Path, version: str) -> None:
    """Run commands far from the source tree, then the README's example."""
    away.mkdir()
    (away / "net.py").write_text(_NET)
    analyzer = python.with_name("analyzer")
    assert run([analyzer, "--version"], away).strip() == f"analyzer {version}"
    print(run([python, "-c", _IMPORTS], away).strip())
    for words, code, said in COMMANDS:
        assert said in run([analyzer, *words], away, code), f"analyzer {' '.join(words)}: does not say {said!r}"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"## In Python\n\n```python\n(.*?)```", readme, re.DOTALL)
    assert example is not None, "README.md has no example in Python"
    (away / "readme.py").write_text(example[1])
    run([python, "readme.py"], away)


def run(command: list[str | Path], folder: Path | None = None, code: int = 0) -> str:
    """What a command prints. Raises AssertionError where it ends with another exit code."""
    words = list(map(str, command))
    print("$", *(word if len(word) < 100 else "..." for word in words), flush=True)
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == code, f"ended with {done.returncode}, not {code}:\n{done.stdout}"
    return done.stdout


if __name__ == "__main__":
    main()
