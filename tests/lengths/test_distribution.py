"""Lengths as they are read and drawn, batches as they are made, functions of sizes."""
import json

import numpy as np
import pytest

from analyzer.errors import AnalyzerError, InputError
from analyzer.tools.lengths import Batching, Lengths
from analyzer.tools.lengths.batching import Cell
from analyzer.tools.lengths.size_function import fit_functions


def test_lengths_of_a_file(tmp_path):
    plain, records = tmp_path / "lengths.txt", tmp_path / "rows.jsonl"
    plain.write_text("3\n\n10\n7\n")
    records.write_text("".join(json.dumps(row) + "\n" for row in (
        {"tokens": [1, 2, 3], "height": 256, "width": 384}, {"tokens": [1], "height": 512, "width": 512})))
    assert Lengths.read(str(plain)).sizes.tolist() == [[3], [10], [7]]
    assert Lengths.read(f"{records}:tokens").sizes.tolist() == [[3], [1]]
    assert Lengths.read(str(records), ("height", "width")).sizes.tolist() == [[256, 384], [512, 512]]


def test_a_log_normal_distribution_has_the_figures_that_are_asked_for():
    drawn = Lengths.read("lognormal:mean=210,p99=600,max=5000,samples=200000").sizes
    assert drawn.mean() == pytest.approx(210, rel=0.01) and np.percentile(drawn, 99) == pytest.approx(600, rel=0.02)


@pytest.mark.parametrize("text, told", [
    ("lognormal:mean=210", "give mean= and p99="), ("lognormal:mean=210,p99=100", "no log-normal distribution"),
    ("lognormal:mean=a,p99=3", "'mean=a': write NAME=NUMBER"), ("none.txt", "cannot read none.txt"),
    ("{folder}/words.txt", "line 2: 'ten': must be 1 whole number"), ("{folder}/zero.txt", "holds the length 0"),
    ("{folder}/rows.jsonl:length", "has no field 'length', but text"),
    ("{folder}/rows.jsonl:text", "text is 'abc': must be a number"), ("{folder}/empty.txt", "at least one sample")])
def test_lengths_that_cannot_be_read(tmp_path, text, told):
    for name, content in (("words.txt", "3\nten\n"), ("zero.txt", "0\n"), ("rows.jsonl", '{"text": "abc"}\n'),
                          ("empty.txt", "\n")):
        (tmp_path / name).write_text(content)
    with pytest.raises(AnalyzerError, match=told):
        Lengths.read(text.format(folder=tmp_path))


LENGTHS = Lengths.of([3, 9, 4, 10, 5, 8, 2, 7, 6])


@pytest.mark.parametrize("batching, cells", [
    # sorted from the longest, in groups of a quarter of all: two batches
    (Batching(2, padding="max"), {Cell(2, (10,))}),
    (Batching(2, padding="max", multiple=8), {Cell(2, (16,))}),
    (Batching(9, padding="none"), {Cell(1, (54,))}),
    (Batching(9), {Cell(9, (10,))}),
    (Batching(9, longest=6), {Cell(9, (6,))}),
    # 10, 9 + 1 and so on: 54 positions in rows of 10
    (Batching(2, "packed"), {Cell(2, (10,))}),
    # 2 3 4 5 (4 x 5), 6 7 (2 x 7), 8 9 (2 x 9), 10
    (Batching(1, "tokens", tokens=20), {Cell(4, (5,)), Cell(2, (7,)), Cell(2, (9,)), Cell(1, (10,))}),
    # 2 3 4 5 6 (20), 7 8 (15), 9 10 (19)
    (Batching(1, "tokens", "none", tokens=20), {Cell(1, (20,)), Cell(1, (15,)), Cell(1, (19,))})])
def test_batches(batching, cells):
    assert set(batching.divide(LENGTHS).cells) == cells


def test_padding_is_what_is_not_of_a_sample():
    assert Batching(9).divide(LENGTHS).padding_share == pytest.approx(1 - 54 / 90)
    assert Batching(3, "grouped").divide(LENGTHS).cells[0].sizes == (10,)  # the longest comes first


@pytest.mark.parametrize("batching, padding, told", [
    ("sorted", "longest", "'sorted': write random, grouped"), ("tokens=", "longest", "or tokens=N"),
    ("random", "short", "not one of longest"), ("random", "longest:0", "longest:N")])
def test_batchings_that_there_are_not(batching, padding, told):
    with pytest.raises(InputError, match=told):
        Batching.parse(batching, padding, 4)


POINTS = np.array([(2, n) for n in (5, 16, 33, 70, 128, 99)])


@pytest.mark.parametrize("rule", [
    lambda b, n: 48, lambda b, n: 4 * b * n, lambda b, n: b * n * n // 1, lambda b, n: 8 * b * (n - 1),
    lambda b, n: 4 * b * -(-n // 32) * 32, lambda b, n: b * n * -(-n // 8) * 8, lambda b, n: b * n * (n + 20) * 4])
def test_functions_of_sizes_are_exact_at_other_sizes(rule):
    function, is_exact = fit_functions(POINTS, np.array([[rule(*point) for point in POINTS.tolist()]]))
    assert is_exact.all()
    for n in (1, 31, 64, 500, 4096):
        assert function((2, n)).tolist() == [rule(2, n)]


def test_of_what_is_no_function_the_next_larger_size_is_taken():
    values = np.array([[11, 5, 90, 13, 700, 41]])
    function, is_exact = fit_functions(POINTS, values)
    assert not is_exact.any() and function((2, 60)).tolist() == [13] and function((2, 1000)).tolist() == [700]
