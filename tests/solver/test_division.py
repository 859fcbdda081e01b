"""Solvers against every division there is; the account of a plan's memory against the checker's."""
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analyzer.errors import MissingExtraError
from analyzer.tools.solver.chain import UnitGraph, find_prices, least_limit, solve_chain, units_left
from analyzer.tools.solver.solver_registry import solve_exact
from analyzer.tools.solver.unit import Unit, peak_bytes, total_cost


@st.composite
def unit_lists(draw):
    """All plain units of a program of up to six atoms, and some checkpoints over them."""
    count = draw(st.integers(1, 6))
    small = st.integers(0, 40)
    units = [Unit(i, i, False, 0.0, draw(small), draw(small)) for i in range(count)]
    for first in range(count):
        for last in range(first, count):
            for _ in range(draw(st.integers(0, 2))):
                units.append(Unit(first, last, True, float(draw(st.integers(1, 30))), draw(small), draw(small)))
    return units


def divisions(units, place=0):
    """Every division, by trying all."""
    if place == max(u.last for u in units) + 1:
        yield []
    for u in units:
        if u.first == place:
            for rest in divisions(units, u.last + 1):
                yield [u, *rest]


@settings(max_examples=30)
@given(unit_lists(), st.integers(0, 120))
def test_dynamic_program_finds_the_cheapest_division(units, limit):
    fitting = [total_cost(d) for d in divisions(units) if peak_bytes(d) <= limit]
    found = solve_chain(units, limit)
    assert (found is None) == (not fitting)
    if found is not None:
        assert peak_bytes(found) <= limit and total_cost(found) == min(fitting)
        assert [u.first for u in found] == [0, *(u.last + 1 for u in found[:-1])]


@settings(max_examples=30)
@given(unit_lists(), st.integers(0, 120))
@example([Unit(0, 0, False, 0.0, 0, 0), Unit(1, 1, False, 0.0, 0, 1)], 0)  # the last one alone is above the limit
def test_exact_divisions_are_proven(units, limit):
    fitting = [total_cost(d) for d in divisions(units) if peak_bytes(d) <= limit]
    found = solve_exact(units, limit)
    assert (found is None) == (not fitting)
    if found is not None:
        assert peak_bytes(found.units) <= limit
        assert total_cost(found.units) == found.bound == pytest.approx(min(fitting), rel=1e-4)


# 6 bytes are to be spared, and each checkpoint spares 4: prices alone prove a cost of 2 + 3 / 2, and it takes 2 + 3
KNAPSACK = [unit for i in range(3) for unit in (Unit(i, i, False, 0.0, 5, 5), Unit(i, i, True, 2.0 + i, 1, 1))]


@settings(max_examples=10)
@given(unit_lists(), st.integers(0, 120))
@example(KNAPSACK, 9)
def test_mixed_integer_program_agrees(units, limit):
    pytest.importorskip("scipy")
    expected, found = solve_exact(units, limit), solve_exact(units, limit, label_seconds=-1.0)
    assert (found is None) == (expected is None)
    if found is not None:
        assert peak_bytes(found.units) <= limit
        assert total_cost(found.units) == pytest.approx(total_cost(expected.units), rel=1e-4)
        assert found.bound == pytest.approx(total_cost(found.units), rel=1e-4)


@settings(max_examples=30)
@given(unit_lists(), st.integers(1, 120))
def test_prices_bound_every_division_from_below(units, limit):
    fitting = [d for d in divisions(units) if peak_bytes(d) <= limit]
    if fitting:
        best = min(fitting, key=total_cost)
        graph = UnitGraph(units, limit)
        bound, prices = find_prices(graph, 1.5 * total_cost(best))
        assert bound <= total_cost(best) * (1 + 1e-9)
        left = [graph.units[i] for i in np.flatnonzero(units_left(graph, prices, total_cost(best) * (1 + 1e-9) + 1e-9))]
        assert all(any(u is v for v in left) for u in best)


@settings(max_examples=30)
@given(unit_lists())
def test_the_least_limit_is_the_lowest_peak(units):
    assert least_limit(units) == min(peak_bytes(d) for d in divisions(units))


@settings(max_examples=30)
@given(unit_lists(), st.integers(0, 120))
def test_few_states_give_a_plan_that_is_valid_and_a_bound_below_it(units, limit):
    found = solve_chain(units, limit, most_states=2)
    best = solve_chain(units, limit)
    if found is not None:
        assert peak_bytes(found) <= limit and total_cost(found) >= total_cost(best)


def test_without_scipy_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert total_cost(solve_exact(KNAPSACK, 9).units) == 5.0
    with pytest.raises(MissingExtraError, match=r"pip install -e '.\[solver\]' in .*, or take method='chain'"):
        solve_exact(KNAPSACK, 9, label_seconds=-1.0)
