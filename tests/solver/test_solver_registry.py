"""Solvers that are added from outside: found by name, and held to what a division is."""
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from analyzer import register_solver, symbolic_trace
from analyzer.cli import main
from analyzer.errors import DuplicateRegistrationError, InputError
from analyzer.tools.solver import InfeasibleBudgetError, Planner
from analyzer.tools.solver.chain import solve_chain
from analyzer.tools.solver.unit import Division, Unit, total_cost


@pytest.fixture(scope="module")
def planner():
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
    x = torch.empty(512, 64)
    return Planner(symbolic_trace(model, meta_args={"input": x}), (x,))


def plain(units):
    return [u for u in units if not u.is_region]


def test_a_solver_from_outside_is_asked_by_its_name(planner):
    asked = []

    def solve_mine(units, limit_bytes):
        asked.append(limit_bytes)
        units.sort(key=lambda u: u.cost)  # what it does to its list is its own
        return solve_chain(units, limit_bytes)

    with register_solver.scope():
        register_solver("mine", solve_mine)
        mine, chain = planner.solve("70%", "mine"), planner.solve("70%", "chain")
    assert asked and mine.method == "mine" and mine.regions == chain.regions and mine.bound is None
    with pytest.raises(InputError, match="method='mine': must be one of auto, chain, exact.*register_solver"):
        planner.solve("70%", "mine")


def test_a_solver_may_tell_a_bound(planner):
    with register_solver.scope():
        register_solver("mine", lambda units, limit: Division(found := solve_chain(units, limit), total_cost(found)))
        plan = planner.solve("70%", "mine")
    assert plan.bound == plan.cost > 0


@pytest.mark.parametrize("method", ["chian", None, 3, [], solve_chain])
def test_what_is_no_name_of_a_solver(planner, method):
    with pytest.raises(InputError, match=re.escape(f"method={method!r}: must be one of auto, chain, exact") +
                       ".*; register_solver adds one"):
        planner.solve("70%", method)


@pytest.mark.parametrize("name", ["auto", "chain", "exact"])
def test_names_of_the_package_are_taken(name):
    with pytest.raises(DuplicateRegistrationError, match=re.escape(f"register_solver({name!r}): already registered")):
        register_solver(name, solve_chain)


STRANGE = Unit(0, 0, False, 0.0, 0, 0)


@pytest.mark.parametrize(("solver", "said"), [
    (lambda units, limit: "x", "'x': must be a list of units that it was given, or None"),
    (lambda units, limit: Division("x"), "'x': must be a list of units"),
    (lambda units, limit: [STRANGE], "a list with Unit(first=0, last=0, is_region=False"),
    (lambda units, limit: [replace(u, held_bytes=0) for u in plain(units)], "must be of units that it was given"),
    (lambda units, limit: [], "from atom 0 to 8, and where one is to begin at 0, none follows"),
    (lambda units, limit: plain(units)[1:], "where one is to begin at 0, one that begins at 1 follows"),
    (lambda units, limit: plain(units)[:-1], "where one is to begin at 8, none follows"),
    (lambda units, limit: [plain(units)[0], *plain(units)], "where one is to begin at 1, one that begins at 0 follows"),
    (lambda units, limit: plain(units), "above the limit of"),
])
def test_what_is_no_division_within_the_limit_is_refused(planner, solver, said):
    with register_solver.scope():
        register_solver("mine", solver)
        with pytest.raises(InputError, match=f"^method='mine': its solver returned .*{re.escape(said)}") as caught:
            planner.solve("70%", "mine")
    assert not isinstance(caught.value, InfeasibleBudgetError)


def test_where_a_solver_finds_none_the_plan_of_least_memory_is_not_called_its_own(planner):
    with register_solver.scope():
        register_solver("mine", lambda units, limit: None)
        assert planner.solve("70%", "mine").method == "chain"


NET = """
import torch
from analyzer import register_solver
from analyzer.tools.solver.chain import solve_chain

register_solver("{name}", solve_chain)

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(*(m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())))
"""


def test_the_command_takes_the_solvers_of_the_targets_file(capsys, tmp_path):
    (tmp_path / "solver_net.py").write_text(NET.format(name="of_the_file"))
    target = [f"{tmp_path / 'solver_net.py'}:Net", "--input", "512x64", "--budget", "70%", "--quiet"]
    with register_solver.scope():
        assert main(["plan", *target, "--method", "of_the_file"]) == 0
        assert "by method of_the_file" in capsys.readouterr().out
        assert main(["plan", *target, "--method", "of_a_file"]) == 2
    assert capsys.readouterr().err == ("analyzer: --method of_a_file: must be one of auto, chain, exact, "
                                       "of_the_file; register_solver adds one\n")
