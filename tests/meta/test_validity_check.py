"""Conditions on unknown data that only decide whether a model raises."""
from __future__ import annotations

import pytest
import torch

from analyzer import MetaTensorMode
from analyzer.errors import DataDependentError

# Compiled here, because pytest rewrites the assertions of test files.
_source = """
def asserted(x):
    assert (x <= 1).all(), f"bad values in {x.shape}"
    return "passed"
"""
_names = {}
exec(compile(_source, __file__, "exec"), _names)
asserted = _names["asserted"]


def raised_where_not_all(x):
    if not (x <= 1).all():
        raise ValueError
    return "passed"


def raised_by_item(x):
    if (x > 1).any().item():
        raise ValueError("too large")
    return "passed"


def raised_by_both(x, strict=True):
    if strict and bool((x > 1).any()):
        raise ValueError("too large")
    return "passed"


def in_else(x):
    if (x <= 1).all():
        result = "passed"
    else:
        raise ValueError("too large")
    return result


def checked_whole(x):
    torch._check_tensor_all(x <= 1, lambda: "too large")
    return "passed"


@pytest.mark.parametrize("check", [asserted, raised_where_not_all, raised_by_item, raised_by_both, in_else,
                                   checked_whole])
def test_the_branch_that_does_not_raise_is_taken_and_noted(check):
    with MetaTensorMode() as mode:
        assert check(torch.rand(2000, 3)) == "passed"
        assert any("pass the model's own check" in a and "test_validity_check.py" in a for a in mode.state.assumptions)


@pytest.mark.parametrize("check", [asserted, raised_where_not_all, raised_by_item, raised_by_both, in_else])
def test_known_data_still_fails_its_check(check):
    with MetaTensorMode(), pytest.raises((AssertionError, ValueError)):
        check(torch.full((2, 2), float("inf")))


def chosen(x):
    if (x > 1).any():
        return "large"
    return "small"


def both_raise(x):
    if (x > 1).any():
        raise ValueError("large")
    else:
        raise ValueError("small")


def compared(x):
    if x.max().item() > 1:
        raise ValueError("large")


@pytest.mark.parametrize("choice", [chosen, both_raise, compared])
def test_other_conditions_on_unknown_data_are_errors(choice):
    with MetaTensorMode(), pytest.raises(DataDependentError):
        choice(torch.rand(2000, 3))
