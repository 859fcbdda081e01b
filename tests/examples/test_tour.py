"""The notebook of examples/ runs as a reader runs it, in a kernel, and its text quotes what its cells print.

A cell that is interrupted leaves the kernel as it was.
"""
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from analyzer import Profile

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "examples" / "tour.ipynb"


class Kernel:
    """A kernel in a folder of its own, which runs cells in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notebook = nbformat.v4.new_notebook()
        self.client = NotebookClient(self.notebook, kernel_name="python3", timeout=300,
                                     resources={"metadata": {"path": str(folder)}})
        self.client.reset_execution_trackers()

    def run(self, source: str) -> nbformat.NotebookNode:
        """The cell with its outputs. Raises CellExecutionError for one that fails."""
        self.notebook.cells.append(nbformat.v4.new_code_cell(source))
        return self.client.execute_cell(self.notebook.cells[-1], len(self.notebook.cells) - 1)

    def interrupt_once(self, file: Path) -> threading.Thread:
        """Send what the stop button of a notebook sends, a moment after ``file`` is there."""
        def wait() -> None:
            while not file.exists():
                time.sleep(0.02)
            time.sleep(0.3)
            os.kill(self.client.km.provisioner.pid, signal.SIGINT)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("tour")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        made = Kernel(folder)
        with made.client.setup_kernel():
            yield made


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a reader sees below a cell."""
    shown = []
    for output in cell.outputs:
        data = output.get("data", {})
        shown += [output.get("text", ""), data.get("text/plain", ""),
                  unescape(re.sub(r"<[^>]*>", " ", data.get("text/html", "")))]
    return "\n".join(shown)


def test_it_is_stored_as_it_is_written() -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code) and len(code) == 8
    assert "eight cells" in notebook.cells[0].source


def test_every_cell_runs_and_the_text_quotes_what_they_print(kernel: Kernel) -> None:
    quoted: list[str] = []
    above = ""
    for cell in nbformat.read(TOUR, as_version=4).cells:
        if cell.cell_type == "code":
            ran = kernel.run(cell.source)
            assert not [output for output in ran.outputs if output.get("name") == "stderr"], text_of(ran)
            above = text_of(ran)
            displayed = [output.data for output in ran.outputs if "data" in output]
            assert all("text/html" in data and len(data["text/html"]) < 60_000 for data in displayed)
        else:
            figures = [figure for figure in re.findall(r"\*\*(.+?)\*\*", cell.source) if re.search(r"\d", figure)]
            assert [figure for figure in figures if figure not in above] == [], above
            quoted += figures
    assert len(quoted) >= 8
    assert Profile.from_json(kernel.folder / "step.json").name == "GPT2"
    assert (kernel.folder / "step.html").read_text().startswith("<!DOCTYPE html>")


_ENDLESS = """
import pathlib
rounds = 0
while True:
    profile(build, kwargs=batch(8), optimizer="adamw", device="t4", reuse=False)
    rounds += 1
    pathlib.Path("begun").touch()
"""
_AGAIN = """
again = profile(build, kwargs=batch(32), optimizer="adamw", device="t4")
print(rounds > 0, again == step, torch.ones(2).sum().item(), torch.cuda.is_available(), torch.empty(1).device)
"""


def test_a_cell_that_is_interrupted_leaves_the_kernel_as_it_was(kernel: Kernel) -> None:
    """After the tour, in its kernel."""
    before = text_of(kernel.run("print(torch.cuda.is_available(), torch.empty(1).device)"))
    stopper = kernel.interrupt_once(kernel.folder / "begun")
    with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
        kernel.run(_ENDLESS)
    stopper.join(10)
    assert text_of(kernel.run(_AGAIN)).strip() == f"True True 2.0 {before.strip()}"
