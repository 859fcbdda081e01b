"""What every test runs under."""
import gc
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test may need a network
os.environ.pop("COLUMNS", None)  # which pytest-xdist gives its workers: a width is that of a test that sets one

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from analyzer.replay.match import why_unsupported  # noqa: E402
from analyzer.zoo.torchvision_ops import define_torchvision_ops  # noqa: E402

torch.set_num_threads(1)  # the tests run in parallel processes
define_torchvision_ops()
collect_ignore = ["dryrun/scripts"]  # which run only under a dry run
settings.register_profile("analyzer", deadline=None)  # a first call warms caches and would look slow
settings.load_profile("analyzer")


@pytest.fixture
def run(capsys):
    """Runs a command here: its exit code, what it prints and what it complains of."""
    from analyzer.cli import main

    def call(*words):
        return main(list(words)), *capsys.readouterr()

    return call


@pytest.fixture
def group():
    """A process group of four ranks that moves no data, of which this is the first; tests leave it alone."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    before = dist.group.WORLD
    yield
    assert dist.group.WORLD is before and dist.get_world_size() == 4
    dist.destroy_process_group()


@pytest.fixture
def replaying_torch():
    """Leaves a test out where nothing is replayed with this torch."""
    if reason := why_unsupported():
        pytest.skip(reason)


def pytest_addoption(parser):
    parser.addoption("--all-cases", action="store_true", help="run every case of each sweep, not a sample of them")


def pytest_collection_modifyitems(config, items):
    """Of the cases of a test that is marked ``sweep(count)``, leaves ``count``, spread evenly over their order."""
    if config.getoption("--all-cases"):
        return
    cases = {}
    for item in items:
        if (sweep := item.get_closest_marker("sweep")) is not None:
            cases.setdefault((item.path, item.cls, item.originalname, *sweep.args), []).append(item)
    left_out = set()
    for (*_, count), found in cases.items():
        kept = {place * len(found) // count for place in range(count)}
        left_out.update(item for place, item in enumerate(found) if place not in kept)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """No collection of garbage needs to look at what was imported for the tests."""
    _set_aside()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Nor at what the tests of a file imported and keep: millions of objects by the end, seconds a collection."""
    if nextitem is None or nextitem.path != item.path:
        _set_aside()


def _set_aside():
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """What coverage.py saw is written by now: pytest-xdist kills a process that takes ten seconds to end."""
    coverage = sys.modules.get("coverage")
    running = coverage and coverage.Coverage.current()
    if running is not None:
        running.save()
