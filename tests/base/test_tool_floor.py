"""What tools import of the core: the floor, and how many modules beyond it each still reaches."""
import pytest

from benchmarks.house import FILES, imports_of

#: What any code of the package may use, and packages of which tools take what they export.
BASE = "errors units output on_use registry saved_format hardware parallel recipe".split()
#: The inner modules that tools share.
INNER = ("api.argument api.build_profile api.profile api.result api.run api.session record.failure record.log "
         "record.options profilers.annotation results.info results.verdict zoo.command_option zoo.input_spec "
         "zoo.published_shape zoo.target").split()
#: The floor on which tools stand, as CONTRIBUTING.md says it.
FLOOR = {f"analyzer.{name}" for name in (*BASE, *INNER)}
#: Modules beyond the floor that a tool imports. A change may make one less, none more.
BEYOND = {"advice": 9, "calibration": 7, "diffusion": 10, "dryrun": 28, "explain": 10, "generation": 17, "job": 12,
          "lengths": 13, "posttrain": 25, "runtime": 26, "search": 29, "serving": 18, "solver": 28, "sweep": 10}


def list_beyond(tool: str) -> set[str]:
    """The modules of the package, outside of a tool and of the floor, that a tool imports."""
    own = f"analyzer.tools.{tool}"
    return {other for name in FILES if f"{name}.".startswith(f"{own}.") for other in imports_of(name)
            if not f"{other}.".startswith(f"{own}.")} - FLOOR


TOOLS = sorted({name.split(".")[2] for name in FILES if name.startswith("analyzer.tools.")})


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_reaches_no_further_below_the_floor_than_it_does(tool: str) -> None:
    found = list_beyond(tool)
    assert len(found) <= BEYOND[tool], sorted(found)


def test_the_floor_is_there_and_knows_no_tool() -> None:
    assert FLOOR <= set(FILES)
    assert [(name, other) for name in FLOOR for other in imports_of(name) if other.startswith("analyzer.tools")] == []


@pytest.mark.parametrize("name", INNER)
def test_three_tools_or_more_share_an_inner_module_of_the_floor(name: str) -> None:
    users = {found.split(".")[2] for found in FILES if found.startswith("analyzer.tools.")
             and f"analyzer.{name}" in imports_of(found)}
    assert len(users) >= 3, f"{name}: only {sorted(users)} import it, of whom it is counted in BEYOND"
