"""Random programs on tensors: without data the package tells what torch does with data."""
from __future__ import annotations

import random
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.tensor_programs.compare import Matching
from benchmarks.tensor_programs.draw import TensorProgram, draw_program
from benchmarks.tensor_programs.observe import observe
from benchmarks.trust_programs import (
    ALIKE,
    EQUAL,
    HOLDS,
    compare_replayed,
    compare_step,
    compare_traced,
    draw_number,
    watch,
)

SETTINGS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
RANDOM = st.randoms(use_true_random=False)


def hold(program: TensorProgram, compare) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finding = compare(program)
    assert finding.kind in HOLDS, f"{finding.kind}: {finding.differences}\n{program}"
    return finding.kind


@settings(SETTINGS, max_examples=150)
@given(RANDOM)
def test_a_step_is_that_of_a_run_with_data(draw: random.Random) -> None:
    hold(draw_program(draw), compare_step)


@settings(SETTINGS, max_examples=30)
@given(RANDOM)
def test_a_graph_computes_what_its_module_computes(draw: random.Random) -> None:
    hold(draw_program(draw), compare_traced)


@settings(SETTINGS, max_examples=20)
@given(RANDOM)
def test_replayed_steps_are_those_that_were_run(draw: random.Random) -> None:
    hold(draw_program(draw), compare_replayed)


def test_most_programs_run() -> None:
    kinds = Counter(hold(draw_number(number), compare_step) for number in range(20))
    assert kinds[EQUAL] >= 14 and kinds[EQUAL] + kinds[ALIKE] == 20


PLAIN = TensorProgram(("torch.rand(2, 4, 8).requires_grad_()",), ("self.l0 = nn.Linear(8, 8)",),
                      ("v0 = self.l0(x0)", "v1 = v0.transpose(1, 2)", "v2 = v1.exp()"), "v2")


FOUND = {
    "the ones of a causal mask die at once": ("v2 = F.scaled_dot_product_attention(x0, x0, x0, is_causal=True)",),
    "the cast of attention's weights, alive in the second product": (
        "v1 = x0.bfloat16()", "v2 = F.scaled_dot_product_attention(v1, v1, v1, is_causal=True)"),
    "a write to what a checkpoint gave": ("v1 = checkpoint(lambda t: t.exp(), x0, use_reentrant=False)",
                                          "v2 = v1.mul_(2)"),
    "a gradient that is expanded": ("v1 = x0.bfloat16().transpose(0, 1)", "v2 = F.silu(v1).mean()"),
    "a loss of a tensor that is transposed": ("v2 = F.mse_loss(x0.mT, x0.mT.detach() + 1)",),
    "a recurrent layer that is written to": ("v1 = self.l0(x0)[0]", "v2 = v1.zero_()"),
}


@pytest.mark.parametrize("forward", FOUND.values(), ids=FOUND)
def test_programs_that_were_told_wrongly(forward: tuple[str, ...]) -> None:
    program = replace(PLAIN, init=("self.l0 = nn.GRU(8, 2, batch_first=True)",), forward=forward)
    assert hold(program, compare_step) == hold(program, compare_traced) == EQUAL


GAPS = "torch.rand(2, 4, 16)[..., ::2].requires_grad_()"
FOUND_BY_INPUTS = {
    "the cast of a weight in inference has a gradient": TensorProgram(
        ("torch.rand(2, 8, 4).mT",), PLAIN.init, ("v0 = self.l0(x0).detach()",), "v0", torch.bfloat16),
    "the cast of an input that is a view is not kept": TensorProgram(
        (GAPS,), (), ("v0 = x0 @ x0.mT", "v0 = v0 @ x0"), "v0", torch.bfloat16),
    "a write to an input that is a view": TensorProgram(
        ("torch.rand(2, 4, 16)[..., ::2]",), PLAIN.init, ("v0 = x0.add_(self.l0.bias)",), "v0"),
    "the gradients of weights that are transposed": TensorProgram(
        ("torch.rand(2, 4, 8).requires_grad_()", "torch.rand(3, 5, 4).mT.requires_grad_()"), (),
        ("v0 = F.conv1d(x0, x1)",), "v0"),
    "classes that are known": TensorProgram(
        ("torch.rand(2, 4, 8)", "torch.arange(4)"), PLAIN.init,
        ("v0 = F.one_hot(x1).float() @ self.l0(x0)", "v0 = v0[F.one_hot(x1[:2], 3)[:, 0]]"), "v0"),
    "as many classes as are asked for": TensorProgram(
        ("torch.rand(2, 4, 8)",), PLAIN.init, ("v0 = self.l0(x0) * F.one_hot(x0.argmax(-1), 8)",), "v0"),
    "activations of what overlaps": TensorProgram(
        ("torch.rand(2, 4, 8).unfold(1, 2, 1).requires_grad_()",), (),
        ("v0 = F.logsigmoid(x0) + F.elu(x0.index_fill(1, x0.new_zeros(1).long(), 2))",), "v0"),
}


@pytest.mark.parametrize("program", FOUND_BY_INPUTS.values(), ids=FOUND_BY_INPUTS)
def test_inputs_that_were_told_wrongly(program: TensorProgram) -> None:
    assert hold(program, compare_step) == EQUAL


@pytest.mark.parametrize("forward", [
    ("l = nn.Linear(8, 3)", "v0 = l(x0) + l(x0.exp())"), ("v0 = nn.MultiheadAttention(8, 2)(x0, x0, x0)[0]",),
    ("v0 = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())(x0)",), ("v0 = nn.GRU(8, 2)(x0)[0]",),
    ("v0 = nn.Linear(8, 3).to(x0)(x0)",), ("v0 = nn.Linear(8, 3).to(tensor=x0.double())(x0.double())",),
])
def test_modules_that_forward_makes_are_told_and_traced(forward: tuple[str, ...]) -> None:
    program = TensorProgram(("torch.rand(2, 4, 8).requires_grad_()",), (), forward, "v0")
    assert hold(program, compare_step) == hold(program, compare_traced) == EQUAL


def test_a_program_is_alike_every_time() -> None:
    assert draw_number(7) == draw_number(7) != draw_number(8)
    (model, (x,)), (other, (y,)) = PLAIN.build(), PLAIN.build()
    assert torch.equal(x, y) and torch.equal(model.l0.weight, other.l0.weight)


@pytest.mark.parametrize(("forward", "told"), [
    (("v0 = self.l0(x0)", "v1 = v0.transpose(1, 2)", "v2 = v1.sin()"), "operators"),
    (("v0 = self.l0(x0)", "v2 = v0.exp()"), "layouts of inputs"),
    (("v0 = self.l0(x0)", "v1 = v0.transpose(1, 2)", "v0.detach().zero_()", "v2 = v1.exp()"), "operators"),
    (("v0 = self.l0(x0)", "v1 = v0.transpose(1, 2)", "v2 = v1.exp()", "self.kept = v0"), "dies before"),
    (("v0 = self.l0(x0)", "v1 = v0.transpose(1, 2) * 1", "v2 = v1.exp()"), "operators"),
    (("v0 = self.l0(x0)", "v1 = v0.transpose(1, 2)", "v2 = v0.transpose(1, 2).exp()", "v2 = v2 + 0"), "operators"),
])
def test_programs_that_differ_are_found_to(forward: tuple[str, ...], told: str) -> None:
    other = replace(PLAIN, forward=forward)
    seen = [observe(*program.build(), None, trains=True) for program in (PLAIN, other)]
    assert list(Matching(watch(PLAIN), seen[0]).differences()) == []
    assert told in next(Matching(*seen).differences())
