"""An epoch of a training job whose rows differ in length."""
from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.tools.job.document import Files
from analyzer.tools.job.plan import TrainingPlan
from analyzer.tools.job.training import prepare_step
from analyzer.zoo.target import model_errors

from .batching import Batching
from .command import print_epoch
from .distribution import Lengths
from .epoch_profile import EpochProfile
from .inputs import MASK, MASKED, MASKING
from .run import profile_epoch


def tell_epoch(plan: TrainingPlan, files: Files, arguments: argparse.Namespace) -> int:
    """``analyzer job FILE --lengths``: 0, or 3 where a step of the epoch would fail."""
    found = profile_job_epoch(plan, arguments.lengths, arguments.batching, arguments.padding, arguments.device,
                              files=files)
    return print_epoch(found, arguments.json)


def profile_job_epoch(plan: TrainingPlan, lengths: str, batching: str | None = None, padding: str | None = None,
                      device: str | DeviceSpec = "h200", *, files: Files | None = None) -> EpochProfile:
    """Predict an epoch of the plan: its rows are cut at its length, and have a mask of padding. ``lengths``,
    ``batching`` and ``padding`` are as the command line writes them. Raises InputError for images and for several
    ranks, and what `profile_training` raises.
    """
    files = files or Files()
    if plan.picture is not None or plan.pixels is not None:
        raise InputError("--lengths: rows of this job have images, whose sizes are those of its options; it is for "
                         "rows of text")
    if plan.ranks > 1 or plan.sharding is not None:
        raise InputError(f"--lengths: is told of one device, and this job has {plan.ranks}; leave out its launcher to "
                         "see one rank without the others")
    batches = Batching.parse(batching, padding, plan.sequences)
    read = Lengths.read(lengths)
    epoch = replace(batches, longest=batches.longest or plan.length).divide(read)
    said = [f"a step has one pass, of the {plan.accumulate} whose gradients add up"] if plan.accumulate > 1 else []
    plan = replace(plan, accumulate=1)

    def make(batch: int, sequence: int) -> dict[str, Any]:
        inputs = prepare_step(replace(plan, micro_batch=batch * plan.micro_batch // plan.sequences, length=sequence),
                              files).inputs
        if batches.is_padded:
            inputs[MASK] = inputs["input_ids"].clone()
        return inputs

    step = prepare_step(plan, files)
    if batches.is_padded:
        said.append(MASKED)
    with model_errors(plan.model):
        found = profile_epoch(step.model, make, epoch, device=device, assumptions=[*said, *step.assumptions],
                              **step.settings)
    return found.leaving_out(MASKING) if batches.is_padded else found
