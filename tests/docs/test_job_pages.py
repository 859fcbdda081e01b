"""Each page of docs/jobs/ answers with at most three commands, on one screen each, and says what they print."""
import doctest
from pathlib import Path

import pytest

from benchmarks.job_pages import BLOCK, PAGES, PROMPT, commands_of, folder, render

WIDTH, HEIGHT = 120, 40  # of a terminal


def ids(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_print_what_the_page_says(page: Path) -> None:
    assert render(page) == page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_python_gives_what_the_page_says(page: Path) -> None:
    with folder():
        failed, _ = doctest.testfile(str(page), module_relative=False,
                                     optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_an_answer_is_on_the_first_screen(page: Path) -> None:
    text = page.read_text()
    blocks = BLOCK.findall(text)
    commands = [command for block in blocks for command in commands_of(block)]
    assert len(commands) <= 3 and (commands or ">>>" in text)
    for block in blocks:
        for printed in block.split("\n" + PROMPT):
            lines = printed.splitlines()
            assert len(lines) <= HEIGHT and max(map(len, lines)) <= WIDTH


def test_all_jobs_are_listed() -> None:
    listed = (PAGES[0].parents[1] / "jobs.md").read_text()
    assert [page.name for page in PAGES if f"(jobs/{page.name})" not in listed] == []
