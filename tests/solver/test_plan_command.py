"""``analyzer plan`` as its users run it."""
import pytest
import torch

from analyzer import profile
from analyzer.tools.solver import BlockPlan, Plan
from analyzer.units import format_bytes
from analyzer.zoo import MODELS


def test_plan_prints_and_saves(run, tmp_path):
    code, out, err = run("plan", "resnet18", "--input", "4x3x64x64", "--budget", "80%", "--device", "a100",
                         "--frontier", "100%,80%", "--json", str(tmp_path / "plan.json"))
    assert (code, err) == (0, "")
    plan = Plan.from_json(tmp_path / "plan.json")
    assert plan.planned.peak_activation_bytes <= 0.8 * plan.unplanned.peak_activation_bytes
    assert plan.objective == "seconds"
    assert "budget for activations" in out and "Products kept" in out and "Peak reached" in out
    assert [p.overhead for p in plan.frontier] == [0.0, plan.overhead]


def test_budgets_of_the_step_count_optimizer_states(run):
    code, out, _ = run("plan", "resnet18", "--input", "4x3x64x64", "--budget", "300 MB", "--optimizer", "adamw")
    assert code == 0 and "budget for the whole step" in out and "\nto apply it: --json FILE, then " in out


@pytest.mark.parametrize(("argv", "code", "said"), [
    (("--budget", "1%"), 3, "the smallest budget that one was found for is"),
    (("--budget", "14"), 3, "stays within 14 B; the smallest"),
    (("--budget", "14"), 3, "; did you mean '14GiB'?"),
    (("--budget", "half"), 2, "budget='half': write bytes of the whole step as '24GiB', or a share"),
])
def test_what_cannot_be(run, argv, code, said):
    found, _, err = run("plan", "resnet18", "--input", "2x3x64x64", *argv)
    assert found == code and said in err


def test_the_whole_step_has_the_optimizers_states_and_update(run, tmp_path):
    code, out, _ = run("plan", "resnet18", "--input", "4x3x64x64", "--budget", "80%", "--optimizer", "adamw",
                       "--device", "a100", "--granularity", "operator", "--json", str(tmp_path / "plan.json"))
    plan = Plan.from_json(tmp_path / "plan.json")
    model = MODELS["resnet18"].factory()
    args = (torch.empty(4, 3, 64, 64),)
    step = profile(model, args, optimizer="adamw", device="a100")
    assert code == 0 and plan.held_bytes == step.optimizer_bytes == 2 * step.param_bytes
    whole = plan.whole_step_bytes(plan.unplanned)
    assert whole == pytest.approx(step.peak_allocated_bytes, rel=0.01)
    assert f"the whole step: {format_bytes(whole)}, {format_bytes(plan.whole_step_bytes(plan.planned))} " \
           f"(optimizer states: {format_bytes(step.optimizer_bytes)})" in out
    # parameters, gradients, two states, and the square roots of one that the update makes
    assert plan.update_bytes > 5 * step.param_bytes and plan.whole_step_bytes(plan.planned) >= plan.update_bytes


def test_a_budget_below_the_optimizers_update_cannot_be_met(run):
    code, _, err = run("plan", "resnet18", "--input", "4x3x64x64", "--budget", "250 MB", "--optimizer", "adamw",
                       "--device", "a100", "--granularity", "operator")
    step = profile(MODELS["resnet18"].factory(), (torch.empty(4, 3, 64, 64),), optimizer="adamw", device="a100")
    least = max(phases["optimizer"].peak_allocated_bytes for phases in (step.first_step, step.phases))
    assert code == 3 and f"the smallest budget that one was found for is {least:,} bytes" in err


def test_without_an_optimizer_the_whole_step_says_so(run):
    _, out, _ = run("plan", "resnet18", "--input", "2x3x64x64", "--budget", "80%")
    line = next(line for line in out.splitlines() if line.startswith("the whole step"))
    assert line.endswith("(without an optimizer)")


STACK = """
from torch import nn

class Stack(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(6)))
"""


def test_for_a_device_the_faster_of_two_plans_is_printed(run, tmp_path):
    (tmp_path / "stack.py").write_text(STACK)
    target = [f"{tmp_path / 'stack.py'}:Stack", "--quiet", "--input", "64x256x512", "--budget", "50%"]
    code, out, err = run("plan", *target, "--device", "h100", "--json", str(tmp_path / "plan.json"))
    plan = BlockPlan.from_json(tmp_path / "plan.json")
    assert (code, err) == (0, "") and plan.offloaded_bytes > 0
    assert "Stack on h100_sxm: 6 blocks within " in out and "On the host" in out
    line = next(line for line in out.splitlines() if line.startswith("--granularity operator: "))
    assert " more than without a plan; this one: " in line
    code, _, err = run("plan", *target, "--granularity", "block")
    assert code == 2 and "--granularity block: for what device? add --device, e.g. --device h200" in err
    code, _, err = run("plan", *target[:-1], "1%", "--granularity", "block", "--device", "h100")
    assert code == 3 and "no plan of Stack stays within" in err
