"""The partitioner's budget for the memory of a plan."""
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import symbolic_trace
from analyzer.errors import InputError
from analyzer.tools.solver import PartitionedStep, Plan, StepInfo, find_memory_budget, solve

X = torch.empty(2048, 64)


def make():
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))


def test_the_first_budget_within_the_memory_of_a_plan():
    before = torch._functorch.config.activation_memory_budget
    plan = solve(symbolic_trace(make(), meta_args={"input": X}), 0.8, args=(X,), device="h100")
    found = find_memory_budget(plan, torch.compile(make()), X)
    least = plan.whole_step_bytes(plan.planned)
    assert found.memory_budget == found.partitioned[-1].activation_memory_budget < 1
    assert [step.peak_bytes <= least for step in found.partitioned] == [False] * (len(found.partitioned) - 1) + [True]
    assert f"torch.compile, activation_memory_budget = {found.memory_budget}: " in found.summary()
    assert Plan.from_json(found.to_json()) == found and replace(found, partitioned=()) == plan
    assert torch._functorch.config.activation_memory_budget == before
    with pytest.raises(InputError, match=r"find_memory_budget\(Sequential\): nothing is under torch.compile"):
        find_memory_budget(plan, make(), X)


def test_a_plan_that_no_budget_reaches():
    tried = PartitionedStep(1.0, 300, 5, None), PartitionedStep(0.0, 200, 50, 1e-3)
    plan = Plan("net", 100, StepInfo(400, 500), StepInfo(100, 150), device="h100", partitioned=tried)
    assert plan.memory_budget is None and "takes more than the plan, whatever" in plan.summary()
    assert "activation_memory_budget = 0.0: 200 B, 50 FLOP run again, 1.00 ms" in plan.summary()


@pytest.mark.parametrize(("plan", "text"), [
    (Plan("net", 100, StepInfo(400, 500), device="h100"), "the plan was not measured"),
    (Plan("net", 100, StepInfo(400, 500), StepInfo(100, 150)), "the plan is for no device")])
def test_plans_that_cannot_be_compared(plan, text):
    with pytest.raises(InputError, match=text):
        find_memory_budget(plan, torch.compile(make()), X)


def test_the_command_prints_the_budget(run, tmp_path):
    (tmp_path / "net.py").write_text("""
from torch import nn
def build():
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
""")
    code, out, err = run("plan", f"{tmp_path / 'net.py'}:build", "--input", "2048x64", "--device", "h100", "--compile",
                         "--budget", "80%")
    assert (code, err) == (0, "") and "\ntorch.compile, activation_memory_budget = 0." in out


def test_the_command_needs_a_device(run):
    code, _, err = run("plan", "gpt2", "--budget", "50%", "--compile")
    assert code == 2 and err.startswith("analyzer: --compile default: for what device? add --device")
