"""Random training scripts, run dry and on data: what a step costs must be what rules and the optimizers' states say.

    python -m benchmarks.dryrun_features                   # docs/reliability.md: 300 scripts
    python -m benchmarks.dryrun_features --only 17         # the script of a number, and what differs

Scripts have up to three top modules, one optimizer of `torch.optim` for all of them or one each, with random flags
(amsgrad, maximize, nesterov, foreach, fused, capturable), micro-batches, schedulers, clipping, averages of weights, a
teacher, and evaluation each k steps. Multiply-adds are counted by hand from the widths of layers; bytes of states are
those of the same optimizer after as many steps on data on the CPU; a step costs the same seconds without evaluation.
Left out: LBFGS with a line search, whose number of evaluations depends on data.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from analyzer import Profile
from analyzer.record.tensor_walk import tensors_in
from analyzer.tools.dryrun.script import dry_run

_DECAY = {"weight_decay": (0.0, 0.1), "maximize": (False, True)}
CLASSES: dict[str, dict[str, tuple[Any, ...]]] = {
    "SGD": {"momentum": (0.0, 0.9), "nesterov": (False, True), **_DECAY},
    "Adam": {"amsgrad": (False, True), **_DECAY}, "AdamW": {"amsgrad": (False, True), **_DECAY},
    "Adagrad": {"lr_decay": (0.0, 0.1), "initial_accumulator_value": (0.0, 0.1), **_DECAY}, "Adadelta": _DECAY,
    "Adamax": _DECAY, "NAdam": {"decoupled_weight_decay": (False, True), **_DECAY}, "RAdam": _DECAY,
    "RMSprop": {"centered": (False, True), "momentum": (0.0, 0.9), **_DECAY}, "Rprop": {"maximize": (False, True)},
    "ASGD": _DECAY, "Adafactor": _DECAY, "LBFGS": {"history_size": (2, 5, 30), "max_iter": (3, 6, 20)}}
FUSED = ("SGD", "Adam", "AdamW")
CAPTURABLE = ("Adam", "AdamW", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
#: Whose scalars are on the device of the parameters in any case: ``_init_group`` of torch/optim/asgd.py, and what
#: torch/optim/lbfgs.py computes of gradients. Those of others are there if the optimizer is fused or capturable.
ON_DEVICE = ("ASGD", "LBFGS")
NO_GRAD = ("with torch.no_grad():", "with torch.inference_mode():", "with torch.set_grad_enabled(False):", "if True:")

_TEXT = """
import copy, torch
from torch import nn
def make(*widths):
    layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(DEVICE)
def run(x, nets):
    for net in nets:
        x = net(x)
    return x
kept = {}
def batch(rows):
    if not CLOSURE or rows not in kept:
        kept[rows] = torch.randn(rows, WIDTHS[0][0]).to(DEVICE)
    return kept[rows]
nets = [make(*widths) for widths in WIDTHS]
teacher = make(WIDTHS[0][0], WIDTHS[-1][-1]).requires_grad_(False)
averages = copy.deepcopy(nets)
groups = [[p for net in nets for p in net.parameters()]] if len(OPTIMIZERS) == 1 else [net.parameters() for net in nets]
optimizers = [getattr(torch.optim, name)(group, **flags) for (name, flags), group in zip(OPTIMIZERS, groups)]
schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers] if SCHEDULES else []
def evaluate():
    total = torch.zeros((), device=DEVICE)
    GRAD
        for _ in range(2):
            total += run(batch(EVALUATED), averages if AVERAGES else nets).square().mean()
    return total.item()
def compute():
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=TO_NONE)
    for rows in ROWS:
        x = batch(rows)
        out = run(x, nets)
        if TEACHES:
            with torch.no_grad():
                target = teacher(x)
            out = out - target
        loss = out.square().mean() / len(ROWS)
        loss.backward()
    return loss
if BEFORE:
    evaluate()
for step in range(1, STEPS + 1):
    if CLOSURE:
        optimizers[0].step(compute)
    else:
        compute()
        if CLIPS:
            nn.utils.clip_grad_norm_([p for net in nets for p in net.parameters()], 1.0)
        for optimizer in optimizers:
            optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    if AVERAGES:
        with torch.no_grad():
            for mine, theirs in zip(averages, nets):
                for a, b in zip(mine.parameters(), theirs.parameters()):
                    a.lerp_(b, 0.1)
    if EVERY and step % EVERY == 0:
        evaluate()
"""


@dataclass(frozen=True)
class TrainingScript:
    """A script by what it has: widths of the layers of each module, and one optimizer or one for each of them."""

    widths: tuple[tuple[int, ...], ...]
    optimizers: tuple[tuple[str, dict[str, Any]], ...]
    rows: tuple[int, ...]         #: of each micro-batch
    evaluated: int                #: rows of a batch of an evaluation, which has two
    grad: str                     #: how it is done without gradients, or with
    every: int = 0                #: steps from one evaluation to the next
    before: bool = False
    schedules: bool = False
    clips: bool = False
    averages: bool = False
    teaches: bool = False
    to_none: bool = True
    steps: int = 3

    @property
    def has_closure(self) -> bool:
        """Whether the optimizer runs the model itself."""
        return self.optimizers[0][0] == "LBFGS"

    def write(self, device: str) -> str:
        """Its text."""
        optimizers = [(name, {k: v for k, v in flags.items() if device != "cpu" or k != "capturable"})
                      for name, flags in self.optimizers]  # which torch refuses for parameters on the CPU
        values = dict(DEVICE=device, WIDTHS=self.widths, OPTIMIZERS=optimizers, ROWS=self.rows, TEACHES=self.teaches,
                      EVALUATED=self.evaluated, EVERY=self.every, BEFORE=self.before, SCHEDULES=self.schedules,
                      CLIPS=self.clips, AVERAGES=self.averages, TO_NONE=self.to_none, STEPS=self.steps,
                      CLOSURE=self.has_closure)
        return "\n".join(f"{name} = {value!r}" for name, value in values.items()) + _TEXT.replace("GRAD", self.grad)


def draw_script(number: int) -> TrainingScript:
    """The script of a number."""
    rng = random.Random(number)
    ends = [rng.choice((4, 8, 12)) for _ in range(rng.randint(1, 3) + 1)]
    widths = tuple((a, *(rng.choice((8, 16, 24)) for _ in range(rng.randint(0, 2))), b) for a, b in zip(ends, ends[1:]))
    first = _draw_optimizer(rng, tuple(CLASSES))
    is_alone = first[0] == "LBFGS" or rng.random() < 0.5
    others = [_draw_optimizer(rng, [name for name in CLASSES if name != "LBFGS"]) for _ in widths[1:]]
    rows = tuple(rng.choice((4, 8)) for _ in range(rng.choice((1, 1, 2, 4))))
    return TrainingScript(widths, (first,) if is_alone else (first, *others), rows, rng.choice((4, 16)),
                          rng.choice(NO_GRAD), rng.choice((0, 1, 2)), *(rng.random() < 0.5 for _ in range(6)))


def _draw_optimizer(rng: random.Random, names: Any) -> tuple[str, dict[str, Any]]:
    name = rng.choice(list(names))
    if name == "LBFGS":  # tolerances that are never met: a run on data goes on as the dry one
        flags = {"lr": 0.01, "tolerance_grad": 0.0, "tolerance_change": 0.0}
    else:
        flags = {"lr": 1e-3}
    flags |= {flag: rng.choice(values) for flag, values in CLASSES[name].items()}
    if flags.get("nesterov"):
        flags["momentum"] = 0.9
    if name in CAPTURABLE and rng.random() < 0.3:
        flags["capturable"] = True
    kind = rng.choice(("default", "foreach", "single", *(("fused", ) if name in FUSED else ())))
    if name != "LBFGS" and kind != "default":
        flags |= {"fused": True} if kind == "fused" else {"foreach": kind == "foreach"}
    return name, flags


def find_differences(script: TrainingScript) -> list[str]:
    """What a dry run of a script says that is not so; none where all is."""
    found, plain = _run_dry(script), _run_dry(replace(script, every=0, before=False))
    if isinstance(found, str) or isinstance(plain, str):
        return [f"fails: {found if isinstance(found, str) else plain}"]
    macs = [a * b for widths in script.widths for a, b in zip(widths, widths[1:])]
    evaluations = script.optimizers[0][1]["max_iter"] if script.has_closure else 1  # of the model in a step
    rows = sum(script.rows) * evaluations
    taught = script.widths[0][0] * script.widths[-1][-1] * rows if script.teaches else 0
    parameters = sum(a * b + b for widths in script.widths for a, b in zip(widths, widths[1:]))
    times = int(script.before) + len([k for k in range(1, script.steps) if script.every and k % script.every == 0])
    evaluation = found.phases.get("evaluation")
    told = {
        "fwd_macs": (found.fwd_macs, sum(macs) * rows + taught),
        "bwd_macs": (found.bwd_macs, (2 * sum(macs) - macs[0]) * rows),  # the first layer's input has no gradient
        "evaluation": (0 if evaluation is None else evaluation.macs, times * 2 * script.evaluated * sum(macs)),
        "param_bytes": (found.param_bytes, 4 * parameters + (4 * (taught // rows) + 4 * script.widths[-1][-1]
                                                             if script.teaches else 0)
                        + 4 * parameters * (script.averages and times > 0)),
        "optimizer_bytes": (found.optimizer_bytes, count_state_bytes(script)),
        "batch_size": (found.batch_size, rows),
        "step_seconds": (found.step_seconds, plain.step_seconds), "fwd_flops": (found.fwd_flops, plain.fwd_flops),
        "saved_bytes": (found.modules and found.modules.saved_bytes, plain.modules and plain.modules.saved_bytes),
        "categories": (sum(found.peak_by_category.values()), found.peak_allocated_bytes)}
    return [f"{name}: {mine}, not {theirs}" for name, (mine, theirs) in told.items() if mine != theirs]


def count_state_bytes(script: TrainingScript) -> int:
    """Bytes of the states that are on the device, of the optimizers after the same steps on data."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(script.write("cpu"), "train.py", "exec"), names)  # nosec B102 # text written here
    total = 0
    for (name, flags), optimizer in zip(script.optimizers, names["optimizers"]):
        has_scalars = name in ON_DEVICE or flags.get("fused") or flags.get("capturable")
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                    for t in tensors_in(list(optimizer.state.values())) if t.dim() or has_scalars}
        total += sum(storages.values())
    return total


def _run_dry(script: TrainingScript) -> Profile | str:
    """The profile of a script, or how it failed."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        path = Path(folder, "train.py")
        path.write_text(script.write("cuda"))
        run = dry_run(path, steps=script.steps)
    return run.format_error() or (run.profile if run.steps == script.steps else f"{run.steps} steps")


def list_features(script: TrainingScript) -> Iterator[str]:
    """What it has, for counts."""
    yield from (f"{name}{' ' if on else ''}{' '.join(on)}" for name, flags in script.optimizers
                if (on := sorted(flag for flag in ("fused", "capturable", "foreach") if flags.get(flag))) or True)
    yield from (name for name in ("every", "before", "schedules", "clips", "averages", "teaches")
                if getattr(script, name))
    yield f"{len(script.rows)} micro-batches"
    yield f"{len(script.widths)} modules"


def main() -> None:
    """Run scripts, and print how many there were of each feature, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", type=int, metavar="NUMBER")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.only is not None:
        print(draw_script(arguments.only).write("cuda"))
    features: Counter[str] = Counter()
    differing = 0
    for number in range(arguments.count) if arguments.only is None else (arguments.only,):
        script = draw_script(number)
        features.update(list_features(script))
        if differences := find_differences(script):
            differing += 1
            print(f"script {number}: {'; '.join(differences)}", file=sys.stderr)
    print(f"{arguments.count if arguments.only is None else 1} scripts, {differing} differ; torch {torch.__version__}")
    print(", ".join(f"{name} {count}" for name, count in sorted(features.items())))


if __name__ == "__main__":
    main()
