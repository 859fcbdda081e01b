"""A rank of a job in a process of its own. Libraries keep what they were told of a world for as long as a process lives
(Accelerate's ``AcceleratorState``, Megatron's ``parallel_state``, caches of meshes), so two ranks in one process would
not be what ``torchrun`` starts.
"""
from __future__ import annotations

import os
import pickle  # nosec B403 # of what this program wrote to a folder of its own
import subprocess  # nosec B404 # Python runs this program again
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from analyzer.distributed.world_spec import WorldSpec
from analyzer.hardware import DeviceSpec
from analyzer.record.options import ProfileOptions
from analyzer.results.profile import Profile

_RUN = "from analyzer.dryrun.rank_process import run_job; run_job(sys.argv[1])"
_LOG_LINES = 40  # of what a rank that died printed


@dataclass(frozen=True)
class RankJob:
    """A script, and the rank as which it is to run."""

    script: Path
    arguments: tuple[str, ...]
    world: WorldSpec
    device: DeviceSpec
    steps: int = 3
    options: ProfileOptions | None = None
    mail: dict[int, Any] = field(default_factory=dict)  #: what pipeline stages before this rank's were sent


@dataclass(frozen=True)
class RankResult:
    """What became of a rank: a profile, or ``error``, the traceback as text."""

    profile: Profile | None
    steps: int
    is_stopped: bool
    error: str = ""
    mail: Mapping[int, Any] = field(default_factory=dict)


class RankProcess:
    """A process that runs a job; ``shows`` its output, which else is kept for the case that it dies."""

    def __init__(self, job: RankJob, *, shows: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="analyzer-rank-")
        self._path = Path(self._folder.name)
        (self._path / "job.pickle").write_bytes(pickle.dumps(job))
        own = str(Path(__file__).parents[2])
        path = os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self._path / "output.txt").open("wb") as kept:
            self._process = subprocess.Popen(  # nosec B603 # a list of words, which no shell reads
                [sys.executable, "-c", f"import sys; {_RUN}", str(self._path)], env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL, stdout=None if shows else kept, stderr=None if shows else kept)

    def wait(self) -> RankResult:
        """Its result, when it has ended."""
        code = self._process.wait()
        found = self._path / "result.pickle"
        if found.exists():
            result: RankResult = pickle.loads(found.read_bytes())  # nosec B301 # as above
            return result
        said = (self._path / "output.txt").read_text("locale", "replace").splitlines()[-_LOG_LINES:]
        return RankResult(None, 0, False, "\n".join([*said, f"the process of this rank ended with code {code}"]) + "\n")

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def run_job(folder: str) -> None:
    """Run the job that lies in a folder, and leave its result there."""
    import torch

    from analyzer.distributed.world import World
    from analyzer.distributed.world_state import mail_kept

    from .script import dry_run

    torch.set_num_threads(1)  # nothing is computed; the cores belong to the other ranks
    job: RankJob = pickle.loads((Path(folder) / "job.pickle").read_bytes())  # nosec B301 # as above
    result = Path(folder) / "result.pickle"
    with mail_kept() as mail:
        mail.update(job.mail)
        run = dry_run(job.script, job.arguments, device=job.device, steps=job.steps, options=job.options,
                      world=World(job.world))
    sent = {stage: meta for stage, meta in mail.items() if stage not in job.mail}
    sys.stdout.flush()
    whole = RankResult(run.profile, run.steps, run.is_stopped, run.format_error(), sent)
    result.write_bytes(pickle.dumps(whole))
