"""``analyzer dryrun``, and `dry_run_ranks`: a script as several ranks of a job, each in a process of its own."""
from __future__ import annotations

import argparse
import os
import pickle  # nosec B403 # of what this program wrote to a folder of its own
import re
import subprocess  # nosec B404 # Python runs this program again
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from analyzer.api.prediction import check_world_options, read_world
from analyzer.api.result import Profile
from analyzer.distributed.world import World
from analyzer.distributed.world_state import WorldSpec, mail_kept
from analyzer.errors import InputError
from analyzer.hardware import ClusterSpec, DeviceSpec, find_device
from analyzer.meta.value.data_dependent import STAND_IN
from analyzer.output import check_output
from analyzer.parallel import RankTable
from analyzer.parallel.rank_row import describe_rank
from analyzer.profilers.collective import POINT_TO_POINT
from analyzer.record.script_frames import CAUGHT
from analyzer.report.choice import end_with_verdict, make_text, read_shown, save_profile
from analyzer.report.page.document import check_page
from analyzer.results.verdict import Advice, AdviceOption

from .change import AS_IT_IS, ScriptChange, find_least_change
from .script import check_script, dry_run
from .whole import describe_nodes

# A rank of a job in a process of its own. Libraries keep what they were told of a world for as long as a process lives
# (Accelerate's ``AcceleratorState``, Megatron's ``parallel_state``, caches of meshes), so two ranks in one process
# would not be what ``torchrun`` starts.

# Ctrl-C reaches every process of the terminal: the caller answers it, and a rank that still imports has nothing to say.
_RUN = ("import os, signal, sys; signal.signal(signal.SIGINT, lambda *_: os._exit(130)); "
        "from analyzer.tools.dryrun.job import run_job; run_job(sys.argv[1])")
_LOG_LINES = 40  # of what a rank that died printed


@dataclass(frozen=True)
class ScriptRank:
    """A script, and the rank as which it is to run, if it is one of a job."""

    script: Path
    arguments: tuple[str, ...]
    world: WorldSpec | None
    device: DeviceSpec
    steps: int | None = None
    devices: int = 1
    allow_download: bool = False
    stop_at_oom: bool = False
    change: ScriptChange = AS_IT_IS
    whole: bool = False
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

    def __init__(self, job: ScriptRank, *, shows: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="analyzer-rank-")
        self._path = Path(self._folder.name)
        (self._path / "job.pickle").write_bytes(pickle.dumps(job))
        own = str(Path(__file__).parents[3])
        path = os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self._path / "output.txt").open("wb") as kept:
            self._process = subprocess.Popen(  # nosec B603 # a list of words, which no shell reads
                [sys.executable, "-c", _RUN, str(self._path)], env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL, stdout=None if shows else kept, stderr=None if shows else kept)

    def wait(self) -> RankResult:
        code = self._process.wait()
        found = self._path / "result.pickle"
        if found.exists():
            result: RankResult = pickle.loads(found.read_bytes())  # nosec B301 # as above
            return result
        said = (self._path / "output.txt").read_text("locale", "replace").splitlines()[-_LOG_LINES:]
        return RankResult(None, 0, False, "\n".join([*said, f"the process of this rank ended with code {code}"]) + "\n")

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def run_job(folder: str) -> None:
    torch.set_num_threads(1)  # nothing is computed; the cores belong to the other ranks
    job: ScriptRank = pickle.loads((Path(folder) / "job.pickle").read_bytes())  # nosec B301 # as above
    if job.change.alloc_conf is not None:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = job.change.alloc_conf
    with mail_kept() as mail:
        mail.update(job.mail)
        run = dry_run(job.script, job.arguments, device=job.device, steps=job.steps, devices=job.devices,
                      world=None if job.world is None else World(job.world), allow_download=job.allow_download,
                      stop_at_oom=job.stop_at_oom, change=job.change, whole=job.whole)
    sent = {stage: meta for stage, meta in mail.items() if stage not in job.mail}
    sys.stdout.flush()
    whole = RankResult(run.profile, run.steps, run.is_stopped, run.format_error(), sent)
    (Path(folder) / "result.pickle").write_bytes(pickle.dumps(whole))


FIRST, LAST, USUAL, STAGE, ASKED = "first", "last", "neither first nor last", "other pipeline stage", "asked for"
_MOST_STAGES = 64


@dataclass(frozen=True)
class JobDryRun:
    """What became of each rank that was run; ``table`` has a row for each kind of those that ran."""

    table: RankTable
    results: dict[int, RankResult]

    @property
    def failed_rank(self) -> int | None:
        return next((rank for rank, result in sorted(self.results.items()) if result.error), None)


def dry_run_ranks(script: str | Path, arguments: Sequence[str] = (), *, size: int, ranks: Iterable[int] | None = None,
                  devices_per_host: int | None = None, cluster: str | ClusterSpec | None = None,
                  device: str | DeviceSpec = "h200", steps: int | None = None,
                  allow_download: bool = False, stop_at_oom: bool = False, whole: bool = False) -> JobDryRun:
    """`dry_run` of ``script`` as ``ranks`` of a job of ``size``, each in a process of its own, two or more at once.

    By default the ranks are chosen: the first, the last, one of each further pipeline stage (a rank that the first one
    sends to or receives from), and, where first and last differ, rank 1, which tells what is usual between them. What
    the first rank prints is passed through. Raises InputError for a script that is not there and ranks that are not in
    the job, UnknownDeviceError.
    """
    path = check_script(script, steps).absolute()
    spec = WorldSpec.of(size, 0, devices_per_host, cluster)
    job = ScriptRank(path, tuple(arguments), spec, find_device(device), steps, allow_download=allow_download,
                     stop_at_oom=stop_at_oom, whole=whole)
    if ranks is not None:
        reasons = dict.fromkeys([replace(spec, rank=rank).rank for rank in ranks], ASKED)
        if not reasons:
            raise InputError("ranks=[]: give at least one rank to run, or none of them for those that are chosen")
        results = _run(job, list(reasons), {}, next(iter(reasons)))
    else:
        reasons, results = _run_chosen(job)
    taken = {rank: r.profile for rank, r in sorted(results.items())
             if r.profile is not None and (not r.error or r.steps)}
    failed = tuple([f"rank {rank} failed: {(r.error.strip().splitlines() or ['took no step'])[-1].strip()}"
                    for rank, r in results.items() if r.error])
    kinds: dict[object, list[int]] = {}  # ranks of equal figures
    for rank, profile in taken.items():
        kinds.setdefault(figures(profile), []).append(rank)
    rows = tuple(describe_rank(taken[alike[0]], alike[0], tuple(alike), ", ".join(dict.fromkeys(
        [reasons[rank] for rank in alike]))) for alike in kinds.values())
    ran = f"{len(taken)} of {size} ranks were run" + (
        ", which are alike" if len(rows) == 1 and len(taken) > 1 else "")
    return JobDryRun(RankTable(size, rows, assumptions=(*failed, ran), profiles=taken), results)


def _run_chosen(job: ScriptRank) -> tuple[dict[int, str], dict[int, RankResult]]:
    assert job.world is not None
    size = job.world.size
    reasons = {0: FIRST}
    results = _run(job, [0], {}, 0)
    first = results[0].profile
    if first is None or results[0].error and not results[0].steps:
        return reasons, results  # the others would fail alike
    stages = list_peers(first)[:_MOST_STAGES]
    reasons |= dict.fromkeys(stages, STAGE)
    if size > 1 and size - 1 not in reasons:
        reasons[size - 1] = LAST
    results |= _run(job, [rank for rank in reasons if rank not in results], results[0].mail, None)
    last = results[size - 1].profile
    if size > 2 and not stages and last is not None and not results[size - 1].error and figures(last) != figures(first):
        reasons[1] = USUAL
        results |= _run(job, [1], results[0].mail, None)
    return reasons, results


def list_peers(profile: Profile) -> list[int]:
    """The ranks of groups in which a rank sends to single others, but for itself: other stages of its pipeline."""
    if profile.world is None:
        return []
    names = {row.group for row in profile.comm or () if row.kind in POINT_TO_POINT}
    groups = [group.ranks or () for group in profile.world.groups if group.name in names]
    peers = {row.peer for row in profile.comm or () if row.kind in POINT_TO_POINT and row.peer is not None}
    found = {rank for ranks in groups if len(ranks) < profile.world.size for rank in ranks} | peers
    return sorted(found - {profile.world.rank})


def figures(profile: Profile) -> object:
    """By which kinds of ranks are told apart: all that a row of the table says."""
    row = replace(describe_rank(profile, 0, (0,), ""), step_seconds=None)
    return row, profile.out_of_memory, profile.first_shortage


def _run(job: ScriptRank, ranks: Sequence[int], mail: Mapping[int, object], shown: int | None) -> dict[int, RankResult]:
    """The results of ranks, as many at once as there are cores; in turn where stages leave each other mail."""
    assert job.world is not None
    results: dict[int, RankResult] = {}
    letters, world = dict(mail), job.world
    at_once = 1 if letters else max(1, os.cpu_count() or 1)
    for begin in range(0, len(ranks), at_once):
        with ExitStack() as stack:
            running = {rank: stack.enter_context(RankProcess(replace(
                job, world=replace(world, rank=rank), mail=dict(letters)), shows=rank == shown))
                for rank in ranks[begin:begin + at_once]}
            for rank, process in running.items():
                results[rank] = process.wait()
                letters |= results[rank].mail
    return results


def run_dryrun(arguments: argparse.Namespace) -> int:
    shown = read_shown(arguments.show)
    check_world_options(arguments)
    check_output(arguments.json)
    check_page(arguments.html)
    # the script may change the directory
    outputs = [None if path is None else path.absolute() for path in (arguments.json, arguments.html)]
    if arguments.world is not None and arguments.rank is None:
        return _run_ranks(arguments, shown, *outputs)

    run = dry_run(arguments.script, arguments.arguments, device=arguments.device, steps=arguments.steps,
                  world=read_world(arguments), devices=arguments.devices or 1, allow_download=arguments.allow_download,
                  stop_at_oom=arguments.stop_at_oom, whole=arguments.whole)
    sys.stdout.flush()  # what the script printed comes before what follows on the other stream
    print(run.format_error(), end="", file=sys.stderr)
    found = run.profile
    if not (run.error or run.steps or found.params or found.timeline or found.out_of_memory):
        named = re.search(r"^(?:class|def) (\w+)", arguments.script.read_text(), re.MULTILINE)
        raise InputError(f"{arguments.script}: it ran no model and no optimizer step; for a class or function in it "
                         f"use analyzer profile {arguments.script}:{'Net' if named is None else named[1]} --input SPEC")
    if found.out_of_memory is not None:
        ended = "it ran out of memory"
    elif run.error is not None:
        ended = "the script failed"
    else:
        ended = "ended here" if run.is_stopped else "the script ended by itself"
    taken = f"{run.steps} optimizer step{'s' if run.steps > 1 else ''}" if run.steps else "no optimizer step was taken"
    has_ended_early = run.error is not None and not run.steps and found.out_of_memory is None
    if not has_ended_early:
        save_profile(found, *outputs)  # before anything is printed, for a reader that goes
    print(f"\n--- dry run of {arguments.script}: {taken}, {ended}")
    if any(line.startswith(STAND_IN) for line in found.assumptions):
        print("numbers that it read from tensors, such as a loss of 1.0, are stand-ins: there are no data")
    for line in found.assumptions:
        if line.startswith(CAUGHT):
            print(textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=False))
    if has_ended_early:
        return 1  # of what little ran there is nothing to tell
    return _print_profile(found, shown, run.error is not None, _read_job(arguments, arguments.rank))


def _print_profile(found: Profile, shown: list[str], has_failed: bool, job: ScriptRank | None) -> int:
    """Print a profile, and of one that does not fit the least change of a ``job`` with which it would."""
    print(f"\n{make_text(found, shown)}")
    code = end_with_verdict(found.verdict, is_told="screen" in shown)
    if found.out_of_memory is None and found.first_shortage is None:
        return 1 if has_failed else code
    if job is not None:
        sys.stdout.flush()  # the answer is there before what would mend it is sought
        print(_find_change(found, job))
    return 3


def _find_change(found: Profile, job: ScriptRank) -> str:
    def run(change: ScriptChange) -> Profile | None:
        with RankProcess(replace(job, change=change), shows=False) as process:
            result = process.wait()
        return None if result.error and not result.steps else result.profile

    option = find_least_change(found, run)
    if option is None:
        return (f"no change that could be tried makes it fit on {found.device}: settings of the allocator,\n"
                "  activation checkpoints, smaller batches of its loaders")
    told = Advice(found.name, str(found.device), None, AdviceOption((), False), (option,)).summary()
    return told.replace("\n1. ", " ")


def _read_job(arguments: argparse.Namespace, rank: int | None) -> ScriptRank | None:
    """What the options ask for, as that rank; None where no change is to be sought."""
    if arguments.no_advice:
        return None
    world = None if arguments.world is None else WorldSpec.of(
        arguments.world, rank or 0, arguments.devices_per_host, arguments.cluster)
    return ScriptRank(check_script(arguments.script, arguments.steps).absolute(), tuple(arguments.arguments), world,
                      find_device(arguments.device), arguments.steps, arguments.devices or 1, arguments.allow_download)


def _run_ranks(arguments: argparse.Namespace, shown: list[str], json: Path | None, html: Path | None) -> int:
    run = dry_run_ranks(arguments.script, arguments.arguments, size=arguments.world, ranks=arguments.ranks,
                        devices_per_host=arguments.devices_per_host, cluster=arguments.cluster,
                        device=arguments.device, steps=arguments.steps, allow_download=arguments.allow_download,
                        stop_at_oom=arguments.stop_at_oom, whole=arguments.whole)
    failed, rank = run.failed_rank, run.table.deciding_rank
    found = None if rank is None else run.table.profiles[rank]
    if failed is not None:
        print(f"rank {failed}:\n{run.results[failed].error}", end="", file=sys.stderr)
    if json is not None and run.table.profiles:
        run.table.to_json(json)
    if html is not None and run.table.profiles:
        run.table.to_html(html)
    print(f"\n--- dry run of {arguments.script} as {len(run.results)} of {arguments.world} ranks"
          f"{'' if failed is None else ', the script failed'}\n\n{run.table.render()}")
    if found is None:
        return 1
    world = WorldSpec.of(arguments.world, 0, arguments.devices_per_host, arguments.cluster)
    if (nodes := describe_nodes(run.table.profiles, world)) is not None:
        print(f"\n{nodes}")
    if len(run.table.profiles) > 1:
        print(f"\n--- rank {rank}")
    return _print_profile(found, shown, failed is not None, _read_job(arguments, rank))
