"""docs/exports.md: its code runs, and its table has every kind of file with its ending."""
from __future__ import annotations

import doctest
import re
from pathlib import Path

from analyzer.report.export_option import ENDINGS, list_kinds
from benchmarks.job_pages import BLOCK, commands_of, folder, run_command

PAGE = Path(__file__).parents[1] / "docs" / "exports.md"


def test_python_gives_what_the_page_says() -> None:
    with folder():
        failed, tried = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert failed == 0 and tried > 10


def test_commands_write_their_files() -> None:
    commands = [command for block in BLOCK.findall(PAGE.read_text()) for command in commands_of(block)]
    assert commands
    with folder():
        for command in commands:
            assert "(exit code" not in run_command(command)
        assert {path.name for path in Path().iterdir()} >= {"resnet.trace.json", "resnet.dot", "spans.parquet"}


def test_the_table_has_every_kind() -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    kinds = {kind: re.findall(r"\.[\w.]+", endings) for names, endings in rows for kind in re.findall(r"\w+", names)}
    assert set(kinds) == set(list_kinds())
    assert {ending: kind for kind, endings in kinds.items() for ending in endings} == ENDINGS
