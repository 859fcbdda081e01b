"""The pages of docs/jobs/: what their commands print stands below each of them.

    python -m benchmarks.job_pages            # runs every command and writes the pages again

A block marked `console` holds commands after `$ ` and their output; one that exits with another code than 0 is followed
by a line `(exit code N)`. They run in an empty folder in which `examples/` is the project's, one after the other.
Predictions are the same on any machine; `tests/docs/test_job_pages.py` runs the commands of each page and compares.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "jobs").glob("*.md"))
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
PROMPT = "$ "


@contextlib.contextmanager
def folder() -> Iterator[None]:
    """The working directory for the commands of a page; they print without colours wherever it is."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as path, mock.patch.dict(os.environ, {"NO_COLOR": "1"}):
        os.symlink(ROOT / "examples", Path(path, "examples"))
        os.chdir(path)
        try:
            yield
        finally:
            os.chdir(before)


def commands_of(block: str) -> list[str]:  # the commands of a block, each on its lines as they stand
    found: list[str] = []
    continues = False
    for line in block.splitlines():
        if line.startswith(PROMPT):
            found.append(line)
        elif continues:
            found[-1] += "\n" + line
        continues = line.endswith("\\") and (continues or line.startswith(PROMPT))
    return found


def run_command(command: str) -> str:  # the command, its output and its exit code where that is not 0
    words = shlex.split(command.removeprefix(PROMPT).replace("\\\n", " "))
    assert words[0] == "analyzer", command
    printed, code = (run_apart if words[1] == "dryrun" else run_here)(words[1:])
    text = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
    return command + "\n" + (text + "\n" if text else "") + (f"(exit code {code})\n" if code else "")


def run_here(words: list[str]) -> tuple[str, int]:
    from analyzer.cli import main

    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(words)
    if code == 1:  # a fault of analyzer, which no page shows
        raise RuntimeError(f"analyzer {shlex.join(words)}\n{told.getvalue()}")
    return out.getvalue(), code


def run_apart(words: list[str]) -> tuple[str, int]:
    """The same in a process of its own: what a script imports would keep what it was told of a GPU."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-m", "analyzer", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True, env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"})
    return done.stdout, done.returncode


def render(page: Path) -> str:  # the page with what its commands print now
    def fill(match: re.Match[str]) -> str:
        return "```console\n" + "\n".join(map(run_command, commands_of(match[1]))) + "```"

    with folder():
        return BLOCK.sub(fill, page.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the pages of docs/jobs/ again.")
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    for page in parser.parse_args().pages:
        path = page.resolve()
        path.write_text(render(path))
        print(path.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
