"""docs/model_parallel.md gives what it says."""
from __future__ import annotations

import doctest
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "model_parallel.md"


@pytest.mark.filterwarnings("ignore")
def test_the_page_gives_what_it_says():
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert (failed, tried > 10) == (0, True)
