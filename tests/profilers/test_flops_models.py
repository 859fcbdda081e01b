"""Whole models beside FlopCounterMode, on real tensors and inside the recorder's own run; the zero list beside
PyTorch's own operator tests.

A sample: `pytest --all-cases` runs all 51 models.
"""
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from analyzer import MetaTensorMode
from tests.profilers.flop_reference import (
    CASES,
    GROUPED_BACKWARD,
    NO_FORMULA,
    TRANSPOSED_BACKWARD,
    Case,
    SignatureLog,
    ZeroCheck,
    compare,
    count_meta_run,
    count_real_run,
    sweep,
)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_models(name):
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers")
    real, flops, _ = count_real_run(CASES[name])
    meta, _ = count_meta_run(CASES[name])
    for found in (real, meta):
        assert found.unexplained == [] and found.uncounted == {}
        assert found.products > 10 and found.equal_flops > 0
        assert {reason for _, reason in found.differences} <= {NO_FORMULA, GROUPED_BACKWARD}


@pytest.mark.parametrize("name", ["resnet18", "t5"])
def test_a_claimed_cpu_runs_what_a_cpu_runs(name):
    """Equal to the integer over the whole run, pointwise operators included."""
    _, flops, macs = count_real_run(CASES[name])
    _, p = count_meta_run(CASES[name], device="cpu")
    assert (sum(i.flops for i in p.phases.values()), sum(i.macs for i in p.phases.values())) == (flops, macs)


def test_a_counter_within_a_mode_takes_apart_what_an_operator_is_made_of():
    """Of an inference step it gets `upsample_nearest2d.vec` as it is, and asks PyTorch for its parts."""
    with MetaTensorMode(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        grown = nn.functional.interpolate(nn.Conv2d(3, 4, 3)(torch.rand(1, 3, 10, 10)), size=(20, 20))
    assert grown.shape == (1, 4, 20, 20) and counter.get_total_flops() == 2 * 4 * 8 * 8 * 3 * 3 * 3


def test_a_wrong_count_does_not_pass():
    """The comparison itself: a kernel that the reference counts otherwise is named, and so is one that only one of them
    saw.
    """
    model = nn.Linear(4, 3)
    with FlopCounterMode(display=False) as reference, SignatureLog() as log:
        model(torch.ones(2, 4)).sum().backward()
    assert compare(log.signatures, reference).unexplained == []
    without = [s for s in log.signatures if s.op is not torch.ops.aten.addmm.default]
    (missing,) = compare(without, reference).unexplained
    assert missing.startswith("not the same calls")


@pytest.mark.parametrize("model, shape, reasons", [
    (nn.ConvTranspose1d(4, 4, 3, groups=2), (2, 4, 9), {TRANSPOSED_BACKWARD}),
    (nn.Conv1d(4, 4, 3, groups=2), (2, 4, 9), {GROUPED_BACKWARD}),
    (nn.Conv1d(4, 4, 3), (2, 4, 9), set()),
    (nn.LSTM(4, 3), (5, 2, 4), {NO_FORMULA}),
])
def test_differences_have_reasons(model, shape, reasons):
    case = Case("one layer", lambda: model, lambda: ((torch.ones(*shape, requires_grad=True),), {}))
    meta, _ = count_meta_run(case)
    assert meta.unexplained == [] and {reason for _, reason in meta.differences} == reasons
    if not isinstance(model, nn.LSTM):  # a real CPU runs it as single operators
        real, _, _ = count_real_run(case)
        assert real.unexplained == [] and {reason for _, reason in real.differences} == reasons


def test_operators_on_the_zero_list_do_no_arithmetic():
    check = sweep(700 if torch.__version__ >= (2, 13) else 2_000)  # older tests take longer to get to 30 operators
    assert check.calls >= 500 and len(check.names) > 30
    assert check.guilty == {}


def test_the_check_would_see_arithmetic():
    for name in ("aten::mul", "aten::exp", "aten::sum", "aten::mm"):
        with (check := ZeroCheck(lambda op, name=name: op._schema.name == name)):
            a = torch.tensor([[1.5, 2.5], [3.5, 4.5]])
            a * 3.0, a.exp(), a.sum(), a @ a
        assert check.calls == 1 and len(check.guilty) == 1, name
