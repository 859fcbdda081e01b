"""`mynet.py:Net`: a class or a factory in a file as a TARGET."""
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from analyzer.cli import main
from analyzer.errors import TargetError
from analyzer.zoo.target import load_target

NET = """
import functools
from pathlib import Path
from torch import nn
from torch.nn import Linear                   # not the file's own
from own_layer import WIDTH                   # a file beside this one
class Net(nn.Linear):
    def __init__(self, width=WIDTH): super().__init__(3, width)
class Sized(nn.Linear):
    def __init__(self, width): super().__init__(3, width)
class Settings: pass                          # no module
def make_net() -> nn.Module: return Net()
def main() -> None: pass                      # returns no module, it says
def count() -> int: return 3
def _hidden(): return Net()
small = functools.partial(Sized, 2)
ready = Net()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with `mynet.py`, and Python's modules and path as they were afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mynet.py").write_text(NET)
    (tmp_path / "own_layer.py").write_text("WIDTH = 4")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def shape(text: str) -> tuple[int, ...]:
    with torch.device("meta"):
        return tuple(load_target(text).build().weight.shape)


@pytest.mark.parametrize(("name", "rows"), [("Net", 4), ("make_net", 4), ("small", 2)])
def test_a_class_a_function_or_a_partial_in_a_file(folder: Path, name: str, rows: int) -> None:
    assert shape(f"mynet.py:{name}") == (rows, 3)
    assert shape(f"{folder}/mynet.py:{name}") == (rows, 3)


def test_what_stands_beside_the_file_is_found_from_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert shape("../mynet.py:Net") == (4, 3)


def test_a_file_of_a_package_imports_relatively(folder: Path) -> None:
    (folder / "own_package" / "inner").mkdir(parents=True)
    for path in ("own_package", "own_package/inner"):
        (folder / path / "__init__.py").write_text("")
    (folder / "own_package" / "width.py").write_text("WIDTH = 7")
    (folder / "own_package" / "inner" / "net.py").write_text(
        "from torch import nn\nfrom ..width import WIDTH\nclass Net(nn.Linear):\n"
        "    def __init__(self): super().__init__(1, WIDTH)\n")
    assert shape("own_package/inner/net.py:Net") == (7, 1)
    assert "own_package.inner.net" in sys.modules


def test_files_of_one_name_are_told_apart(folder: Path) -> None:
    for name, width in (("a", 5), ("b", 6)):
        (folder / name).mkdir()
        (folder / name / "net.py").write_text(f"from torch import nn\ndef build(): return nn.Linear(1, {width})\n")
    assert [shape(f"{name}/net.py:build") for name in "aba"] == [(5, 1), (6, 1), (5, 1)]


def test_names_that_python_has_itself_or_cannot_import(folder: Path) -> None:
    import json

    for name in ("json.py", "my-net.v2.py"):
        (folder / name).write_text("from torch import nn\ndef build(): return nn.Linear(1, 9)\n")
        assert shape(f"{name}:build") == (9, 1)
    assert sys.modules["json"] is json


WOULD_DO = "; mynet.py has these: Net, make_net, small"


@pytest.mark.parametrize(("text", "message"), [
    ("mynet.py:Nett", "mynet.py has no 'Nett'; did you mean Net?" + WOULD_DO),
    ("mynet.py:Quux", "mynet.py has no 'Quux'" + WOULD_DO),
    ("mynet.py", "name a class or function of the file, as in mynet.py:Net" + WOULD_DO),
    ("mynet.py:Sized", "Sized needs width; give a callable of no arguments that returns an nn.Module" + WOULD_DO),
    ("mynet.py:ready",
     "ready is a model already built; give a callable of no arguments that returns an nn.Module" + WOULD_DO),
    ("own_layer.py:Net", "own_layer.py has no 'Net'; own_layer.py has none")])
def test_a_name_that_will_not_do(folder: Path, text: str, message: str) -> None:
    with pytest.raises(TargetError) as caught:
        load_target(text)
    assert str(caught.value) == f"{text}: {message}"


@pytest.mark.parametrize(("content", "message"), [
    (None, "no file 'broken.py' in "),
    ("import a_module_nobody_has", "broken.py itself imports 'a_module_nobody_has', which is not installed"),
    ("def (:", "importing broken.py failed: SyntaxError: "),
    ("import sys; sys.exit('usage: broken.py FILE')", "importing broken.py failed: SystemExit: usage: broken.py FILE")])
def test_a_file_that_cannot_be_imported(folder: Path, content: str | None, message: str) -> None:
    if content is not None:
        (folder / "broken.py").write_text(content)
    with pytest.raises(TargetError) as caught:
        load_target("broken.py:Net")
    assert str(caught.value).startswith(f"broken.py:Net: {message}")


@pytest.mark.parametrize(("content", "line"), [
    ("import torch\nx = 1\ny = x / 0\n", "broken.py:3"), ("import torch\nfrom beside import y\n", "beside.py:2")])
def test_what_fails_while_a_file_is_imported_names_file_and_line(folder: Path, content: str, line: str) -> None:
    (folder / "broken.py").write_text(content)
    (folder / "beside.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(TargetError) as caught:
        load_target("broken.py:Net")
    assert str(caught.value) == ("broken.py:Net: importing broken.py failed: ZeroDivisionError: division by zero, at "
                                 f"{folder / line}")


def test_a_factory_that_ends_the_process_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ends.py").write_text("import sys\ndef make():\n    sys.exit('no data folder')\n")
    assert main(["profile", "ends.py:make", "--input", "2x3"]) == 1
    error = capsys.readouterr().err
    assert "SystemExit: no data folder" in error and f"at {folder / 'ends.py'}:3" in error


def test_a_broken_file_that_is_mended_loads(folder: Path) -> None:
    path = folder / "late.py"
    path.write_text("raise ValueError('not yet')")
    with pytest.raises(TargetError, match="ValueError: not yet"):
        load_target("late.py:build")
    path.write_text("from torch import nn\ndef build(): return nn.Linear(1, 2)  # mended, and longer than before\n")
    assert shape("late.py:build") == (2, 1)
