"""Lengths of answers, and the rows that they fill."""
import math
from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.tools.posttrain.answers import Answers, pack


@pytest.mark.parametrize(("mean", "longest"), [(100, 1000), (500, 1000), (900, 1000), (5700, 7972), (1, 4)])
def test_a_law_has_the_mean_and_the_maximum_that_it_is_asked_for(mean: int, longest: int) -> None:
    found = Answers.of(mean, longest)
    assert found.mean == pytest.approx(mean, rel=0.01, abs=0.5)
    assert 1 <= found.tokens[0] and found.tokens[-1] <= longest


def test_far_below_its_maximum_a_law_is_exponential() -> None:
    """The share that is longer than three means is exp(-3)."""
    tokens = Answers.of(100, 100_000).tokens
    assert sum(token > 300 for token in tokens) / len(tokens) == pytest.approx(math.exp(-3), abs=0.002)


def test_a_law_whose_mean_is_in_the_middle_is_even() -> None:
    tokens = Answers.of(500, 1000).tokens
    assert tokens[len(tokens) // 4] == pytest.approx(250, abs=2)


def test_answers_are_drawn_evenly_and_are_the_same_each_time() -> None:
    found = Answers((1, 2, 3, 4), 4, "four")
    assert sorted(found.draw(4)) == [1, 2, 3, 4] and sorted(found.draw(2)) == [2, 4]
    assert found.draw(64) == found.draw(64) != tuple(sorted(found.draw(64)))


@pytest.mark.parametrize(("text", "longest", "mean"), [("7", 7, 7.0), ("100,400", 400, 100.0), (
    "lognormal:mean=200,p99=600,max=700", 700, 200.0)])
def test_how_lengths_are_written(text: str, longest: int, mean: float) -> None:
    found = Answers.read(text)
    assert found.longest == longest and found.mean == pytest.approx(mean, rel=0.02)


def test_a_file_of_lengths(tmp_path: Path) -> None:
    (tmp_path / "answers.txt").write_text("5\n1\n9\n")
    assert Answers.read(str(tmp_path / "answers.txt")).tokens == (1, 5, 9)


@pytest.mark.parametrize(("mean", "longest"), [(0, 10), (11, 10), (5, 0)])
def test_a_mean_that_no_answers_have_is_refused(mean: int, longest: int) -> None:
    with pytest.raises(InputError, match="the mean lies between 1 and the maximum"):
        Answers.of(mean, longest)


@pytest.mark.parametrize(("lengths", "room", "rows"), [
    ([8], 8, 1), ([5, 4], 8, 2), ([5, 3, 4, 4], 8, 2), ([1] * 9, 4, 3), ([20], 8, 1)])
def test_rows_that_sequences_fill(lengths: list[int], room: int, rows: int) -> None:
    assert pack(lengths, room) == rows
