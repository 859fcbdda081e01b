"""A process that goes on for long holds no more than one that has begun."""
import pytest

from benchmarks.fuzz.long_use import Level, count_waiting, list_courses, run_rounds


def test_traced_models_are_freed_with_their_last_name():
    assert count_waiting(5) == 0  # torch's graphs hold their modules, and the tracer held the model


@pytest.mark.sweep(3)
@pytest.mark.parametrize("course", list(list_courses()), ids=lambda course: course[0])
def test_objects_files_and_threads_stay_level(course):
    name, one, _ = course
    if "page" in name:
        pytest.skip("too long for a test: python -m benchmarks.fuzz.run long-use")
    found = run_rounds(name, one, 20, looks=5)  # each runs the collector over all that tests hold
    assert found.last.objects - found.first.objects < 1000  # a profile that is kept each round has more in all
    assert (found.last.files, found.last.threads) == (found.first.files, found.first.threads), Level._fields
