"""The whole job: what trainers do around their steps has names, and trainers end after a few of them."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from operator import attrgetter
from typing import Any

from analyzer.api.result import Profile
from analyzer.distributed.world_state import WorldSpec
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import current
from analyzer.units import format_bytes

from .checkpoint import Everywhere

# What writes and reads checkpoints, by module: blocks of these names, as if the script had named them. A state dict of
# sharded modules is gathered within; torch.save is one itself (`saved_file`).
LOAD, SAVE, RESUME = "load", "save", "resume"
_CHECKPOINTS = "torch.distributed.checkpoint"
_BLOCKS: dict[str, dict[str, str]] = {
    "transformers.trainer": {
        "Trainer._save_checkpoint": SAVE, "Trainer.save_model": SAVE, "Trainer._load_from_checkpoint": RESUME,
        "Trainer._load_optimizer_and_scheduler": RESUME},
    "transformers.modeling_utils": {"PreTrainedModel.save_pretrained": SAVE},
    "accelerate.accelerator": {
        "Accelerator.save_state": SAVE, "Accelerator.save_model": SAVE, "Accelerator.get_state_dict": SAVE,
        "Accelerator.load_state": RESUME},
    **{f"{package}.trainer.trainer": {"Trainer.save_checkpoint": SAVE}
       for package in ("lightning.pytorch", "pytorch_lightning")},
    **{f"{package}.trainer.connectors.checkpoint_connector": {
        f"_CheckpointConnector.{name}": RESUME for name in ("resume_start", "restore_model", "restore_training_state")}
       for package in ("lightning.pytorch", "pytorch_lightning")},
    f"{_CHECKPOINTS}.state_dict_saver": {"save": SAVE, "async_save": SAVE},
    f"{_CHECKPOINTS}.state_dict_loader": {"load": RESUME},
    f"{_CHECKPOINTS}.state_dict": {
        "get_state_dict": SAVE, "get_model_state_dict": SAVE, "get_optimizer_state_dict": SAVE,
        "set_state_dict": RESUME, "set_model_state_dict": RESUME, "set_optimizer_state_dict": RESUME},
    # torchtitan 0.2.2, components/checkpoint.py: `save` and `load` are called in each step and return where it is not
    # due; the wrapper of the model keeps the state dict of before the first step.
    "torchtitan.components.checkpoint": {
        "ModelWrapper.__init__": LOAD, "CheckpointManager.dcp_save": SAVE, "CheckpointManager.dcp_load": RESUME}}


def list_blocks(whole_steps: int | None, everywhere: Everywhere) -> Mapping[str, Callable[[], Iterator[Undo]]]:
    """By module, what to replace once it is imported; trainers end after ``whole_steps``, where they are given."""
    found: dict[str, list[Callable[[], Iterator[Undo]]]] = {
        module: [partial(_name_each, everywhere, module, names)] for module, names in _BLOCKS.items()}
    if whole_steps is not None:
        found.setdefault("transformers.training_args", []).append(partial(_end_trainer, whole_steps))
        for package in ("lightning.pytorch", "pytorch_lightning"):
            found[f"{package}.trainer.trainer"].append(partial(_end_lightning, package, whole_steps))
    return {module: partial(_replace_all, parts) for module, parts in found.items()}


def _replace_all(parts: list[Callable[[], Iterator[Undo]]]) -> Iterator[Undo]:
    for part in parts:
        yield from part()


def _name_each(everywhere: Everywhere, module: str, names: Mapping[str, str]) -> Iterator[Undo]:
    functions: dict[Any, Any] = {}  # which packages import by their names
    for place, name in names.items():
        path, _, last = place.rpartition(".")
        owner = sys.modules[module]
        owner = attrgetter(path)(owner) if path else owner
        original = getattr(owner, last, None)
        if original is None:  # versions differ
            continue
        if path:
            yield answer(owner, last, partial(_run_in_block, name), passes_original=True)
        else:
            functions[original] = wraps(original)(partial(_run_in_block, name, original))
    everywhere.replace(functions)


def _run_in_block(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    recorder: Any = getattr(current(), "recorder", None)
    if not hasattr(recorder, "enter_block") or not recorder.enter_block(name):
        return original(*args, **kwargs)
    try:
        return original(*args, **kwargs)
    finally:
        recorder.leave_block()


# Trainers that end by themselves: their loops go on to what follows the steps, such as an evaluation and a checkpoint.

def _end_trainer(steps: int) -> Iterator[Undo]:
    def end(original: Any, arguments: Any) -> None:
        original(arguments)
        if arguments.max_steps <= 0 or arguments.max_steps > steps:
            arguments.max_steps = steps
        for name in ("eval_steps", "save_steps"):
            value = getattr(arguments, name, None)
            if value is not None and value > steps:  # every so many steps, or a share of all
                setattr(arguments, name, steps)

    yield answer(sys.modules["transformers.training_args"].TrainingArguments, "__post_init__", end,
                 passes_original=True)


def _end_lightning(package: str, steps: int) -> Iterator[Undo]:
    def end(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        batches = steps * (kwargs.get("accumulate_grad_batches") or 1)
        limit = kwargs.get("limit_train_batches")
        if not isinstance(limit, int) or limit > batches:
            kwargs["limit_train_batches"] = batches
        kwargs["max_epochs"] = 1
        original(trainer, *args, **kwargs)

    yield answer(sys.modules[f"{package}.trainer.trainer"].Trainer, "__init__", end, passes_original=True)


# What the ranks of a job hold in each phase of it, and those of a node together.

def describe_nodes(profiles: Mapping[int, Profile], world: WorldSpec) -> str | None:
    """A row for each phase: the most that a device and a rank's host memory hold, and the most that the ranks of a node
    hold on their host together, each at its peak in the phase. A rank that was not run is taken as rank 1, else as the
    last that was. None where no whole job was run.
    """
    courses = {rank: found.course.phases for rank, found in sorted(profiles.items()) if found.course is not None}
    names = list(dict.fromkeys([phase.name for phases in courses.values() for phase in phases]))
    if not names:
        return None
    usual = 1 if 1 in courses else max(courses)  # the first rank does what no other does
    of_rank = [rank if rank in courses else usual for rank in range(world.size)]
    rows = [("the whole job", "a device", "host, a rank", "host, a node", "fullest node")]
    for name in names:
        known = {rank: next((phase for phase in phases if phase.name == name), None)
                 for rank, phases in courses.items()}
        hosts = {rank: (phase or courses[rank][-1]) for rank, phase in known.items()}
        taken = {rank: phase.host_peak_bytes if known[rank] is not None else phase.host_allocated_bytes
                 for rank, phase in hosts.items()}
        if any(nbytes is None for nbytes in taken.values()):
            continue
        nodes = [sum([taken[of_rank[rank]] or 0 for rank in range(first, min(first + world.local_size, world.size))])
                 for first in range(0, world.size, world.local_size)]
        fullest = nodes.index(max(nodes))
        rows.append((name, format_bytes(max([phase.peak_allocated_bytes for phase in known.values() if phase])),
                     format_bytes(max([nbytes or 0 for nbytes in taken.values()])), format_bytes(nodes[fullest]),
                     str(fullest)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
             for row in rows]
    others = world.size - len(courses)
    return "\n".join([*lines, *([f"{others} ranks that were not run are taken as rank {usual}"] if others else [])])
