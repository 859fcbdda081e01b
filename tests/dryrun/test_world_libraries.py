"""Scripts of other libraries as one rank of a job, each in a process of its own: what the rank holds and sends."""
from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from analyzer import Profile
from analyzer.tools.dryrun.job import dry_run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = 256 * 512 + 512 + 512 * 8 + 8
BLOCK = 256 * 1024 + 1024 + 1024 * 256 + 256


# by name: the script, the ranks of the job, the one that is run, and those of a host
JOBS = {"accelerate": ("accelerate_loop.py", 4, 3, 8), "accelerate fsdp": ("accelerate_fsdp.py", 8, 3, 8),
        "lightning": ("lightning_ddp.py", 8, 6, 4), "transformers": ("transformers_trainer.py", 8, 7, 8)}


@pytest.fixture(scope="module")
def profiles():
    """All that can run, two at a time."""
    jobs = {name: job for name, job in JOBS.items() if importlib.util.find_spec(name.split()[0]) is not None}
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(jobs, pool.map(run, jobs.values())))


def run(job: tuple[str, int, int, int]) -> Profile:
    script, size, rank, devices_per_host = job
    done = dry_run_ranks(EXAMPLES / script, size=size, ranks=[rank], devices_per_host=devices_per_host)
    assert done.failed_rank is None, done.results[rank].error
    return done.table.profiles[rank]


def comm(p: Profile) -> dict[tuple[str | None, str], int | None]:
    found: dict[tuple[str | None, str], int] = {}
    for row in p.comm or ():
        found[row.kind, row.phase] = found.get((row.kind, row.phase), 0) + (row.bytes or 0)
    return dict(found)


def test_accelerate_data_parallel(profiles):
    pytest.importorskip("accelerate")
    p = profiles["accelerate"]
    assert (p.param_bytes, p.optimizer_bytes) == (4 * SMALL, 8 * SMALL)
    # gradients of the second of two micro-batches are reduced; each time the losses of all ranks are gathered
    assert comm(p) == {("all_reduce", "backward"): 4 * SMALL, ("all_gather", "optimizer"): 4 * 4,
                       ("all_gather", "forward"): 4 * 4}
    assert p.batch_size == 128


def test_accelerate_fully_sharded(profiles):
    pytest.importorskip("accelerate")
    p = profiles["accelerate fsdp"]
    head = 256 * 8 + 8
    params = 3 * BLOCK + head
    assert (p.param_bytes, p.optimizer_bytes) == (4 * params // 8, 8 * params // 8)
    assert comm(p) == {("all_gather", "forward"): 4 * params, ("all_gather", "backward"): 4 * 3 * BLOCK,
                       ("reduce_scatter", "backward"): 4 * params, ("all_reduce", "optimizer"): 4 * 14}


def test_lightning_on_two_hosts(profiles):
    pytest.importorskip("lightning")
    p = profiles["lightning"]
    assert (p.param_bytes, p.optimizer_bytes) == (4 * SMALL, 8 * SMALL)
    assert comm(p)["all_reduce", "backward"] == 4 * SMALL
    assert [x.device for x in p.inputs.values()][:1] == ["cuda:2"]


def test_trainer_of_transformers(profiles):
    pytest.importorskip("transformers")
    p = profiles["transformers"]
    # embedding and head; attention with 2 of 4 heads for keys and values, a gated feed-forward, two norms; a last norm
    layer = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 688 + 2 * 256
    params = 2 * 1024 * 256 + 2 * layer + 256
    assert (p.params, p.param_bytes) == (params, 4 * params)
    assert comm(p)["all_reduce", "backward"] == 4 * params
    assert p.optimizer_bytes == 8 * params + 4 * 21  # a step count for each tensor
