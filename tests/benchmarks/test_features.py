"""Samples of the generators of features: what a prediction says is what a run on data says."""
import random

import pytest

from benchmarks.coverage.layers import layer_cases
from benchmarks.fuzz.operator_samples import compare, operators, samples_of
from benchmarks.fuzz.trace_features import compare as compare_traced


@pytest.mark.parametrize("seed", range(2))
def test_operators_give_what_they_give_on_data(seed):
    for operator in random.Random(seed).sample(operators(), 8):
        told = {compare(operator, sample) for sample in samples_of(operator, 2)}
        assert told <= {"equal", "other strides", "refused", "refused by the CPU", "data decides"}, operator.name


@pytest.mark.parametrize("trains", [True, False])
def test_a_graph_gives_what_the_model_gives_on_other_data(trains):
    for case in random.Random(trains).sample(layer_cases(), 12):
        told = {told.partition(":")[0] for told in compare_traced(case, trains)}
        assert "differs" not in told, case.name
