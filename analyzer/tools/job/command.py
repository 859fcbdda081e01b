"""`analyzer job`."""
from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.hardware.price import read_prices
from analyzer.on_use import load
from analyzer.output import check_output, write_output
from analyzer.report.choice import end_with_verdict, make_text, read_shown, save_profile
from analyzer.report.page.document import check_page

from .change import Changes, JobChange, list_smaller
from .document import JobError
from .layout import LaidOutJob
from .plan import ServingPlan
from .read import COMMAND, Job, read_command, read_job
from .screen import describe_change, describe_job, describe_training
from .training import TrainedJob

_TELL_EPOCH = "analyzer.tools.lengths.job:tell_epoch"  # which imports from here


def run_job(arguments: argparse.Namespace) -> int:
    """The exit code: 0, or 3 where the job does not fit as it is."""
    if (arguments.file is None) == (not arguments.words):
        raise InputError("job: give a FILE, or a command after --, as in analyzer job -- vllm serve "
                         "Qwen/Qwen3-8B")
    shown = [] if arguments.show is None else read_shown(arguments.show)
    check_output(arguments.json)
    check_page(arguments.html)
    if arguments.write is not None:
        _check_copy(arguments.write, arguments.file)
    find_device(arguments.device)
    if arguments.lengths is None and (given := arguments.batching or arguments.padding) is not None:
        raise InputError(f"--batching, --padding {given}: is of an epoch of batches; add --lengths")
    price = read_prices(arguments.prices, "--price ").find(arguments.device)
    job = read_command(arguments.words, ranks=arguments.world) if arguments.file is None else read_job(
        arguments.file, ranks=arguments.world)
    if arguments.model is not None:
        job = job.with_model(arguments.model)
    print(f"{describe_job(job)}\n")
    sys.stdout.flush()  # what was understood is there before what takes seconds
    if isinstance(job.plan, ServingPlan):
        if arguments.lengths is not None:
            raise InputError(f"--lengths {arguments.lengths}: is of a job that trains, and this one serves")
        return _serve(job, arguments, price)
    if arguments.lengths is not None:
        code: int = load(_TELL_EPOCH)(job.plan, job.files, arguments)
        return code
    return _train(job, arguments, shown, price)


def _serve(job: Job, arguments: argparse.Namespace, price: float | None) -> int:
    from analyzer.tools.serving import ServedModel

    from .server_change import ServerChanges
    from .server_screen import describe_server_changes, describe_start
    from .serving import profile_serving, start_server

    assert isinstance(job.plan, ServingPlan)
    models: dict[str, ServedModel] = {}
    start = start_server(job.plan, arguments.device, files=job.files, models=models)
    print(describe_start(start))
    sys.stdout.flush()
    if not start.refusal:
        found = profile_serving(job.plan, arguments.device, start=start, price=price)
        if arguments.json is not None:
            found.to_json(arguments.json)
        print(f"\n{found.summary()}")
        return 0
    changes = [] if arguments.no_advice else ServerChanges(job, start, arguments.device, models, price).find()
    if not arguments.no_advice:
        print(f"\n{describe_server_changes(job, changes)}")
    if arguments.write is not None:
        if not changes:
            raise JobError(f"--write {arguments.write}: nothing was written, for no change that was tried makes it "
                           "start")
        write_output(arguments.write, job.change_text(changes[0].edits))
        print(f"written: {arguments.write}")
    return 3


def _train(job: Job, arguments: argparse.Namespace, shown: list[str], price: float | None) -> int:
    profile = partial(_profile, arguments.device, arguments.cluster)
    found = profile(job)
    if isinstance(found, LaidOutJob):
        if shown:
            raise InputError(f"--show {arguments.show}: is of a step of one whole rank; ranks divide the model here")
        if arguments.json is not None:
            found.result.to_json(arguments.json)
        if arguments.html is not None:
            found.result.to_html(arguments.html)
    else:
        save_profile(found.profile, arguments.json, arguments.html)
        if shown:
            print(f"{make_text(found.profile, shown)}\n")
    print(describe_training(found, price))
    phase = None if found.verdict is None else found.verdict.phase
    code = end_with_verdict(found.verdict, "screen" in shown, way=" or ".join(list_smaller(job, phase)))
    sys.stdout.flush()
    if not code:
        return 0
    change = None
    if not arguments.no_advice:
        changes = Changes(job, profile, found)
        change = changes.find()
        print(f"\n{describe_change(job, change, changes.tried)}")
    if arguments.write is not None:
        _write(job, change, arguments.write)
    return 3


def _profile(device: str, cluster: str | None, job: Job) -> TrainedJob | LaidOutJob:
    found: TrainedJob | LaidOutJob = job.profile(device, cluster=cluster)
    return found


def _check_copy(path: Path, source: str | None) -> None:
    """Raise InputError where the changed copy would be written over a file, or there is nothing to be copied."""
    if path.exists():
        raise InputError(f"--write {path}: exists; give the name of a new file")
    if source is None:
        raise InputError(f"--write {path}: writes a changed copy of a file, and this is {COMMAND}")
    check_output(path)


def _write(job: Job, change: JobChange | None, path: Path) -> None:
    if change is None:
        raise JobError(f"--write {path}: nothing was written, for no change that was tried makes it fit")
    write_output(path, job.change_text(change.edits))
    print(f"written: {path}")
