"""Every block of code on a page runs, or says why not.

The blocks of a page run in order, in one folder and with one namespace. `python` is executed, and where it has prompts
its results are compared; of `console` the output is compared, `...` standing for any; each command of `bash` must end
well (exit codes 3 and 4 are answers too: it does not fit, a limit does not hold). What a reader has and a page does not
show stands in a comment before: `<!-- first: code -->`, to which `shown` is the text of the last block that is no code.
A block that is not run has a comment `<!-- not run: reason -->`
on the line before. The pages of docs/jobs/ are run by tests/docs/test_job_pages.py.
"""
import contextlib
import difflib
import doctest
import io
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from analyzer import register_exporter, register_report, register_solver
from analyzer.zoo import MODELS
from benchmarks.job_pages import PROMPT, commands_of, folder, run_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md",
         *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "jobs")]
PART = re.compile(r"^<!-- (?P<kind>first|not run):(?P<told>.*?)-->\n|^```(?P<label>\w*)\n(?P<text>.*?)^```$",
                  re.MULTILINE | re.DOTALL)
RUN = {"python", "console", "bash"}
SHOWN = {"text", "json", "yaml"}
SET_UP = ("pip", "make")  # commands of which an installation consists, and this test's own
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

class Block(NamedTuple):
    """Code of a page: what kind it is of, where it begins, and why it is not run, where it is not."""

    label: str
    text: str
    line: int
    reason: str | None = None
    is_hidden: bool = False


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page in order, the code of its comments among them."""
    text = page.read_text()
    found, reason, noted_until = [], None, -1
    for part in PART.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["kind"] == "first":
            found.append(Block("python", part["told"], line, is_hidden=True))
        elif part["kind"] == "not run":
            reason, noted_until = part["told"].strip(), part.end()
        else:
            found.append(Block(part["label"], part["text"], line, reason if part.start() == noted_until else None))
    return found


def run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    """Execute a block in the namespace of its page."""
    if ">>> " not in block.text:
        exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line)
    out = io.StringIO()
    failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=out.write, clear_globs=False)
    names.update(test.globs)
    assert failed == 0, out.getvalue()


def run_console(block: Block) -> None:
    """Run the commands of a block and compare what they print."""
    begins = [match.start() for match in re.finditer(r"^\$ ", block.text, re.MULTILINE)] + [len(block.text)]
    for begin, end in zip(begins, begins[1:]):
        wanted = block.text[begin:end].rstrip() + "\n"
        got = run_command(commands_of(wanted)[0])
        if not doctest.OutputChecker().check_output(wanted, got, FLAGS):
            lines = difflib.unified_diff(wanted.splitlines(), got.splitlines(), "page", "now", n=0, lineterm="")
            raise AssertionError("\n".join(lines))


def run_bash(block: Block) -> None:
    """Run the commands of a block, comments and installations left out."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] not in SET_UP:
            code = re.search(r"\(exit code (\d+)\)$", run_command(PROMPT + shlex.join(words)).rstrip())
            assert code is None or code[1] in "34", line


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """A folder of the page's own, nothing said, and the models and tables whose names messages list as they were."""
    with (folder(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), mock.patch.dict(MODELS),
          register_exporter.scope(), register_report.scope(), register_solver.scope()):
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with surroundings():
        for block in read_blocks(page):
            if block.label not in RUN:
                names["shown"] = block.text
            if block.label not in RUN or block.reason is not None:
                continue
            try:
                if block.label == "python":
                    run_python(block, page, names)
                else:
                    (run_console if block.label == "console" else run_bash)(block)
            except BaseException as error:
                error.add_note(f"{page.relative_to(ROOT)}, line {block.line}") if hasattr(error, "add_note") else None
                raise


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        blocks = [block for block in read_blocks(page) if not block.is_hidden]
        assert len(re.findall("^ *```", page.read_text(), re.MULTILINE)) == 2 * len(blocks), page
        for block in blocks:
            at = f"{page.relative_to(ROOT)}, line {block.line}"
            assert block.label in RUN | SHOWN, f"{at}: a block is one of {sorted(RUN | SHOWN)}"
            assert block.label in RUN or not re.match(r"(\$ )?(analyzer|python|pip) ", block.text), f"{at}: is no text"


def test_few_blocks_are_not_run() -> None:
    """All of them, with the reasons that their pages give."""
    found = [(str(page.relative_to(ROOT)), block.reason) for page in PAGES for block in read_blocks(page)
             if block.reason is not None]
    assert found == [
        ("docs/compile.md", "it takes minutes"),
        ("docs/devices.md", "it measures the machine that it runs on"),
        ("docs/parallel.md", "it takes minutes"), ("docs/parallel.md", "needs DeepSpeed"),
        *[("docs/search.md", "it takes minutes")] * 2,
        ("docs/usage.md", "needs a GPU"), ("docs/usage.md", "needs diffusers")]
