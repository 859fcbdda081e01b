"""Conditions and counts that only data could give: the stated rule, its trace in the assumptions, and where there is
none.
"""
import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, profile, symbolic_trace
from analyzer.errors import DataDependentError
from analyzer.meta.state import MetaOptions
from analyzer.meta.value import contents as unknown_scalar
from analyzer.record.options import ProfileOptions

STEPS = 7


def stop_at_break(x):
    for step in range(STEPS):  # noqa: B007  # read after it
        x = x + 1
        if (x > 0).all():
            break
    return step + 1


def go_on_with_else(x):
    for step in range(STEPS):  # noqa: B007  # read after it
        if (x > 0).all():
            x = x + 1
        else:
            break
    return step + 1


def while_unfinished(x):
    step = 0
    while (x > 0).any() and step < STEPS:
        step += 1
    return step


def stop_where_nothing_changes(x):
    for step in range(STEPS):  # noqa: B007  # read after it
        before, x = x, x.clamp(min=0.5)
        if torch.equal(before, x):
            break
    return step + 1


@pytest.mark.parametrize("loop", [stop_at_break, go_on_with_else, while_unfinished, stop_where_nothing_changes])
def test_a_loop_that_data_would_end_runs_to_its_own_bound(loop):
    with MetaTensorMode(MetaOptions(unknown_condition="false")) as mode:
        assert loop(torch.rand(3)) == STEPS
        assert any("runs to its own bound" in a and "test_unknown_scalar.py" in a for a in mode.state.assumptions)


@pytest.mark.parametrize("answer", ["false", "true"])
def test_other_conditions_follow_the_option(answer):
    with MetaTensorMode(MetaOptions(unknown_condition=answer)) as mode:
        x = torch.rand(3)
        assert (1 if x.sum() > 1 else 2) == (1 if answer == "true" else 2)
        assert [text for text in mode.state.assumptions if f"unknown_condition='{answer}'" in text]


@pytest.mark.parametrize("compare", [torch.equal, torch.allclose])
def test_comparisons_of_whole_tensors_are_conditions(compare):
    with MetaTensorMode(MetaOptions(unknown_condition="true")) as mode:
        x = torch.rand(3)
        assert compare(x, x * 2)
        assert [text for text in mode.state.assumptions if "unknown_condition='true'" in text]
        assert torch.equal(torch.arange(3), torch.tensor([0, 1, 2])) and not torch.equal(torch.rand(3), torch.rand(4))
    with MetaTensorMode() as mode, pytest.raises(DataDependentError,
                                                 match=r"(?s)aten.(equal|allclose).*unknown_condition='false'"):
        compare(torch.rand(3), torch.rand(3))


def test_a_loop_without_a_bound_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(unknown_scalar, "MOST_STEPS", 20)
    with MetaTensorMode(MetaOptions(unknown_condition="false")), pytest.raises(
            DataDependentError, match=r"(?s)ran 20 times.*bound of its own"):
        while not torch.rand(3).sum() > 2:
            pass


@pytest.mark.parametrize(("policy", "length"), [("balanced", 6), (9, 9)])
def test_predicted_durations_are_lengths_that_the_policy_gives(policy, length):
    with MetaTensorMode(MetaOptions(unknown_size=policy)) as mode:
        durations = torch.clamp(torch.round(torch.rand(2, 6).exp()), min=0).long()
        assert torch.zeros(2, durations.sum(dim=1).max()).shape == (2, length)
        assert torch.repeat_interleave(torch.rand(6, 4), durations[0], dim=0).shape == (6, 4)
        assert sum("balanced" in a or "bound given" in a or "1 per element" in a for a in mode.state.assumptions) == 2


@pytest.mark.parametrize("policy", ["worst", "error"])
def test_nothing_bounds_a_duration_from_above(policy):
    with MetaTensorMode(MetaOptions(unknown_size=policy)), pytest.raises(DataDependentError):
        int(torch.ceil(torch.rand(2, 6).exp()).sum())


class Decoder(nn.Module):
    """Words until all samples have ended, at most ``steps``."""

    def __init__(self, steps):
        super().__init__()
        self.step = nn.Linear(4, 4)
        self.steps = steps

    def forward(self, x):
        for _ in range(self.steps):
            x = self.step(x)
            if (x.argmax(-1) == 3).all():
                break
        return x


def test_profile_takes_the_most_steps_and_says_so():
    few, many = (profile(Decoder(n), args=(torch.rand(2, 4),), mode="infer") for n in (2, 6))
    assert few.fwd_macs == 2 * (2 * 4 * 4)
    assert many.fwd_macs == 6 * (2 * 4 * 4)
    assert any("runs to its own bound" in text for text in many.assumptions)
    with pytest.raises(DataDependentError, match="unknown_condition"):
        profile(Decoder(2), args=(torch.rand(2, 4),), mode="infer", options=ProfileOptions(unknown_condition="error"))


def test_a_graph_takes_no_condition_for_granted():
    decoder = Decoder(3)
    with torch.no_grad():
        decoder.step.weight.zero_()
        decoder.step.bias.copy_(torch.tensor([0.0, 0, 0, 1]))  # ends after one step
    model = nn.Sequential(decoder)
    x = torch.rand(2, 4)
    gm = symbolic_trace(model, meta_args={"input": x})
    torch.testing.assert_close(gm(x), model(x))


# Conditions that only decide whether a model raises.

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


@pytest.mark.parametrize("check", [asserted, raised_where_not_all, raised_by_both, in_else,
                                   checked_whole])
def test_the_branch_that_does_not_raise_is_taken_and_noted(check):
    with MetaTensorMode() as mode:
        assert check(torch.rand(2000, 3)) == "passed"
        assert any("pass the model's own check" in a and "test_unknown_scalar.py" in a for a in mode.state.assumptions)


@pytest.mark.parametrize("check", [asserted, raised_where_not_all, raised_by_both, in_else])
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
