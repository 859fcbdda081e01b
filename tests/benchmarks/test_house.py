"""The measures of the house that one keeps who changes it: `benchmarks/house.py` counts them from the sources."""
import inspect
import subprocess
import sys

import pytest

from analyzer import Profile
from benchmarks import house

#: What was reached; a change may make it less, and more only with a reason in the change itself.
BARS = {"functions that say which modules are alike": 1, "methods of the largest live object": 30,
        "methods of Profile": 20, "registries": 10, "names with two or more meanings": 10,
        "imports of api/session.py": 20, "files behind api.profile": 115, "files behind tools/search": 160,
        "benchmarks/: lines": 17_750}  # of which 290 build prime-rl's trainer, by which post-training is judged


@pytest.mark.parametrize(("name", "most"), BARS.items())
def test_a_measure_stays_within_its_bar(name, most):
    assert house.measure()[name] <= most


def test_a_class_counts_what_it_defines_and_what_it_has_of_others():
    own, whole = house.list_methods("api.result:Profile"), house.list_methods("api.result:Profile", inherited=True)
    assert {"table", "to_json", "verdict"} <= own and "mfu" not in own
    assert {"mfu", "model_flops", "complete", "own_device"} <= whole > own


def test_two_classes_that_are_one_word_share_a_name():
    assert all(len(modules) > 1 for modules in house.list_shared_names().values())
    assert sorted(house.list_registries()) == sorted(set(house.list_registries()))
    assert {"register_device", "register_report", "register_flop_impl"} <= set(house.list_registries())


@pytest.mark.parametrize("view", [*"table summary screen module_tree comm_table report fits verdict".split(),
                                  *sorted(name for name in vars(Profile) if name.startswith("to_"))])
def test_a_view_names_the_function_that_draws_it_in_an_import_that_an_editor_follows(view):
    method = vars(Profile)[view]
    source = inspect.getsource(getattr(method, "fget", method))
    drawn = source.partition("from analyzer.report.")[2].split("\n")[0].rpartition(" import ")[2]
    assert drawn and f"return {drawn}(self" in source


def test_a_profile_knows_of_profilers_what_they_give():
    known = {name.removeprefix("analyzer.") for name in house.closure("analyzer.api.profile")}
    assert {name for name in known if name.startswith("profilers.")} == {
        "profilers.annotation", "profilers.held_memory", "profilers.schedule"}
    assert not {"distributed.world", "distributed.process_group", "tools", "report"} & known


def test_files_behind_a_profile_are_those_that_python_imports():
    code = "import sys, analyzer.api.profile; print(*[n for n, m in sys.modules.items() if hasattr(m, '__file__')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    every = set(done.stdout.split())
    assert not {"torch.distributed.tensor", "torch.distributed.fsdp"} & every  # slow: they import sympy
    loaded = every & house.FILES.keys()
    assert {name for name in loaded if house.FILES[name].stem != "__init__"} == {
        name for name in house.closure("analyzer.api.profile") if house.FILES[name].stem != "__init__"}


def test_no_method_of_a_live_recorder_is_overwritten():
    """What else hears of a run stands in the recorder's list of listeners."""
    parts = {"recorder": house.LIVE[0], "memory": house.LIVE[1], "modules": house.LIVE[2], "calls": house.LIVE[3]}
    for name, path in house.FILES.items():
        text = path.read_text()
        assert "vars(recorder)" not in text, name
        assert not [method for part, place in parts.items() for method in house.list_methods(place)
                    if f"{part}.{method} = " in text], name
