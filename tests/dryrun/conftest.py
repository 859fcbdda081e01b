"""Scripts of `scripts/` run dry in a process of their own: what they import would keep what it was told of a GPU."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from analyzer import Profile

HERE = Path(__file__).parent
collect_ignore = ["scripts"]  # which run only under a dry run


def run_scripts(folder: Path, *jobs: tuple[str, str, Sequence[str]]) -> dict[str, Profile]:
    """The profiles of jobs (a name, a script, its arguments), by name."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, str(HERE / "run_scripts.py"), str(folder)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    found = {}
    for name, script, _ in jobs:
        profile = folder / f"{name}.json"
        assert profile.exists(), f"{script}:\n{(folder / f'{name}.txt').read_text()[-4000:]}\n{done.stderr[-2000:]}"
        found[name] = Profile.from_json(profile)
    return found


@pytest.fixture(scope="module")
def run_dry(tmp_path_factory):
    """`run_scripts` in a new folder."""
    return lambda *jobs: run_scripts(tmp_path_factory.mktemp("dry"), *jobs)
