"""Random programs on tensors: without data the package tells what torch does with data."""
import random
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz.programs import (
    ALIKE,
    EQUAL,
    HOLDS,
    compare_replayed,
    compare_step,
    compare_traced,
    draw_number,
    watch,
)
from benchmarks.fuzz.tensor_programs.compare import Matching
from benchmarks.fuzz.tensor_programs.draw import TensorProgram, draw_program
from benchmarks.fuzz.tensor_programs.observe import observe

SETTINGS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
RANDOM = st.randoms(use_true_random=False)


def hold(program: TensorProgram, compare) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finding = compare(program)
    assert finding.kind in HOLDS, f"{finding.kind}: {finding.differences}\n{program}"
    return finding.kind


@settings(SETTINGS, max_examples=60)
@given(RANDOM)
def test_a_step_is_that_of_a_run_with_data(draw: random.Random) -> None:
    hold(draw_program(draw), compare_step)


@settings(SETTINGS, max_examples=20)
@given(RANDOM)
def test_a_graph_computes_what_its_module_computes(draw: random.Random) -> None:
    hold(draw_program(draw), compare_traced)


@settings(SETTINGS, max_examples=12)
@given(RANDOM)
def test_replayed_steps_are_those_that_were_run(draw: random.Random) -> None:
    hold(draw_program(draw), compare_replayed)


def test_most_programs_run() -> None:
    kinds = Counter(hold(draw_number(number), compare_step) for number in range(8))
    assert kinds[EQUAL] >= 5 and kinds[EQUAL] + kinds[ALIKE] == 8


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


#: What once had other storages than on a CPU: forward, input, and modules where there are more than a linear layer.
STORAGES = {
    "the bias of a product that is not contiguous": ("v0 = self.l0(x0.transpose(0, 1))",),
    "attention with a mask, by plain products": (
        "v1 = self.l0(x0).unsqueeze(0)",
        "v0 = F.scaled_dot_product_attention(v1, v1, v1, torch.ones(4, 4), dropout_p=0.5)"),
    "attention to what is earlier": (
        "v1 = self.l0(x0).unsqueeze(0)",
        "v0 = F.scaled_dot_product_attention(v1, v1, v1, dropout_p=0.5, is_causal=True)"),
    "gather": ("v0 = self.l0(x0).gather(1, torch.zeros(2, 1, 8, dtype=torch.long)) + "
               "x0.index_select(1, torch.tensor([1]))",),
    "normalize": ("v0 = F.normalize(self.l0(x0), dim=-1) @ F.normalize(x0, dim=-1).transpose(1, 2)",),
    "a size that is divided": ("half = torch.div(x0.shape[1], 2, rounding_mode='trunc')",
                               "v0 = self.l0(x0).view(2, half, -1)"),
    "the largest": ("v0 = self.l0(x0).max(1)[0] + x0.sort(1)[0][:, 0]",),
    "fold": ("v0 = F.fold(self.l0(x0), (7, 8), (2, 3)) * 2", "torch.rand(2, 24, 36)", "self.l0 = nn.Linear(36, 36)"),
    "fold to more": ("v0 = F.fold(self.l0(x0)[0].mT, (10, 12), (2, 3), stride=(8, 3)) * 2", "torch.rand(1, 8, 24)",
                     "self.l0 = nn.Linear(24, 24)"),
    "unfold": ("v0 = F.unfold(self.l0(x0).unsqueeze(1), 2) * 2 + F.unfold(x0.unsqueeze(1).mT.contiguous(), 2)",
               "torch.rand(4, 6, 8)"),
    "unfold to less": ("v0 = F.unfold(self.l0(x0), 1, stride=2) * 2",),
    **{name: (f"v1 = self.l1(self.l0(x0.to(memory_format=torch.{layout})))",
              "v0 = self.l3(self.l2(F.silu(v1)) + v1)", "torch.rand(2, 3, 9, 9)",
              "self.l0, self.l1 = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)",
              "self.l2, self.l3 = nn.Conv2d(8, 8, 1, groups=2), nn.BatchNorm2d(8)")
       for name, layout in (("images", "contiguous_format"), ("images, channels last", "channels_last"))},
    "volumes": ("v0 = self.l1(self.l0(x0))", "torch.rand(2, 3, 4, 4, 4)",
                "self.l0, self.l1 = nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)"),
    "images in float64": ("v0 = self.l1(self.l0(x0))", "torch.rand(2, 3, 9, 9).double()",
                          "self.l0, self.l1 = nn.Conv2d(3, 4, 2).double(), nn.BatchNorm2d(4).double()"),
}


@pytest.mark.parametrize("statements", STORAGES.values(), ids=STORAGES)
def test_storages_are_born_and_die_as_on_a_cpu(statements: tuple[str, ...]) -> None:
    given = [s for s in statements if s.startswith("torch.")] or ["torch.rand(2, 4, 8)"]
    init = [s for s in statements if s.startswith("self.")] or PLAIN.init
    forward = tuple(s for s in statements if not s.startswith(("torch.", "self.")))
    for needs in ("", ".requires_grad_()"):
        assert hold(TensorProgram((given[0] + needs,), tuple(init), forward, "v0"), compare_step) == EQUAL


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
