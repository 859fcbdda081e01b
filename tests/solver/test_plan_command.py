"""``analyzer plan`` as its users run it."""
from __future__ import annotations

import pytest

from analyzer.cli import main
from analyzer.solver import Plan


def run(capsys, *argv):
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_prints_saves_and_draws(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = run(capsys, "plan", "resnet18", "--input", "4x3x64x64", "--budget", "80%", "--device", "a100",
                         "--frontier", "100%,80%", "--plot", str(tmp_path / "frontier.png"), "--json",
                         str(tmp_path / "plan.json"))
    assert (code, err) == (0, "")
    plan = Plan.from_json(tmp_path / "plan.json")
    assert plan.planned.peak_activation_bytes <= 0.8 * plan.unplanned.peak_activation_bytes
    assert plan.objective == "seconds"
    assert "budget for activations" in out and "Products kept" in out and "Peak reached" in out
    assert [p.overhead for p in plan.frontier] == [0.0, plan.overhead]
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_budgets_of_the_step_count_optimizer_states(capsys):
    code, out, _ = run(capsys, "plan", "resnet18", "--input", "4x3x64x64", "--budget", "300 MB", "--optimizer", "adamw",
                       "--granularity", "module")
    assert code == 0 and "budget for the whole step" in out


@pytest.mark.parametrize(("argv", "code", "said"), [
    (("--budget", "1%"), 3, "the smallest budget that one was found for is"),
    (("--budget", "half"), 2, "budget='half': write bytes of the whole step as '24GiB', or a share"),
    (("--budget", "50%", "--json", "/nowhere/plan.json"), 2, "the folder /nowhere does not exist"),
    (("--budget", "50%", "--device", "abacus"), 2, "abacus"),
])
def test_what_cannot_be(capsys, argv, code, said):
    found, _, err = run(capsys, "plan", "resnet18", "--input", "2x3x64x64", *argv)
    assert found == code and said in err
