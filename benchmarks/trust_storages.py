"""Predicted births and deaths of memory on this host against those that the CPU's own allocator reports.

    python -m benchmarks.trust --only storages                                   # all models, for docs/reliability.md
    python -m benchmarks.trust_storages timm:vit_tiny_patch16_224 torch.nn:LSTM  # these, with what differs
"""
from __future__ import annotations

import difflib
import gc
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from analyzer import profile
from analyzer.profilers.annotation import Annotation
from analyzer.record.eager import default_loss
from analyzer.record.log import Log
from analyzer.record.tensor_walk import tensors_in

from .coverage import list_cases
from .coverage_case import Candidate, Case, Inputs
from .storage_events import Block, Trail, predicted_trail, running_bytes, storages_of, watch_memory
from .storage_models import MODELS
from .trust_section import Section

MODES = ("infer", "train")
STEPS = 2  # the first makes gradients and states of the optimizer
SEED = 0
EQUAL, DEATHS, DIFFERENT = "equal", "equal but for deaths in a row", "different"


@dataclass
class Comparison:
    """One step of one model, predicted and measured."""

    model: str
    mode: str
    predicted: Trail  #: storages alone, as `measured`
    measured: Trail
    predicted_peak_bytes: int  #: with what operators hold while they run, as `measured_peak_bytes`
    measured_peak_bytes: int
    temporaries: Counter[str] = field(default_factory=Counter)  #: measured bytes alive at that peak, by operator

    @property
    def verdict(self) -> str:
        """Whether the same storages are born and die in the same order."""
        one, other = (name_events(trail) for trail in (self.predicted, self.measured))
        if one == other:
            return EQUAL
        return DEATHS if sort_deaths(one) == sort_deaths(other) else DIFFERENT

    @property
    def storage_peaks(self) -> tuple[int, int]:
        """The predicted and the measured peak of storages alone."""
        return max(running_bytes(self.predicted)), max(running_bytes(self.measured))

    @property
    def has_equal_ends(self) -> bool:
        """Whether as many bytes are allocated at the end of every phase of both steps."""
        return self.predicted.bytes_at_ends() == self.measured.bytes_at_ends()

    def tell(self) -> str:
        """One line."""
        births = [len(trail.births()) for trail in (self.predicted, self.measured)]
        return (f"{self.verdict}: births {births[0]:,} predicted, {births[1]:,} measured; peak of storages "
                f"{self.storage_peaks[0]:,} and {self.storage_peaks[1]:,} bytes; with temporaries "
                f"{self.predicted_peak_bytes:,} and {self.measured_peak_bytes:,}; ends of phases "
                f"{'equal' if self.has_equal_ends else 'differ'}")


Named = tuple[str, int, int]  # what happens, to which birth, how many bytes


def name_events(trail: Trail) -> list[Named]:
    """The events of a trail, each storage named by the number of its birth."""
    numbers: dict[int, int] = {}
    named = []
    for is_birth, block in trail.events:
        if is_birth:
            numbers[id(block)] = len(numbers)
        named.append(("born" if is_birth else "died", numbers.get(id(block), -1), block.nbytes))
    return named


def sort_deaths(events: Iterable[Named]) -> list[Named]:
    """The same with deaths that follow each other directly in the order of their births, for none can be told from
    another by its effect.
    """
    found: list[Named] = []
    row: list[Named] = []
    for event in events:
        if event[0] == "born":
            found += sorted(row)
            row = []
            found.append(event)
        else:
            row.append(event)
    return found + sorted(row)


def compare_step(name: str, candidate: Candidate, mode: str) -> Comparison:
    """Profile a step, run it on data, and put both side by side."""
    torch.manual_seed(SEED)
    trains = mode == "train"
    model = candidate.build().train(trains)
    args, kwargs = candidate.make_inputs(model, trains)
    logs: list[Log] = []

    def keep_log(log: Log) -> Annotation:
        logs.append(log)
        return Annotation()

    found = profile(model, args, kwargs, mode=mode, optimizer="adamw" if trains else None,  # type: ignore[arg-type]
                    loss_fn=candidate.loss_fn, device="cpu", profilers={"log": keep_log})
    assert found.param_bytes == sum(p.numel() * p.itemsize for p in model.parameters()), "parameters"
    predicted = predicted_trail(logs[-1])
    measured = run_watched(model, (args, kwargs), trains, candidate.loss_fn or default_loss)
    return Comparison(name, mode, storages_of(predicted), storages_of(measured), max(running_bytes(predicted)),
                      max(running_bytes(measured)), temporaries_at_peak(measured))


def run_watched(model: torch.nn.Module, inputs: Inputs, trains: bool, loss_fn: Callable[[Any], torch.Tensor]) -> Trail:
    """The steps that `profile` says it predicts, written out, on data and with nothing between them and PyTorch but its
    own profiler.
    """
    args, kwargs = inputs
    optimizer = torch.optim.AdamW(model.parameters()) if trains else None

    def infer(phase: Callable[[int, str], Any], step: int) -> None:
        with phase(step, "forward"), torch.no_grad():
            output = model(*args, **kwargs)
        del output

    def train(phase: Callable[[int, str], Any], step: int) -> None:
        with phase(step, "forward"):
            loss = loss_fn(model(*args, **kwargs))
        with phase(step, "backward"):
            loss.backward()
        del loss
        assert optimizer is not None
        with phase(step, "optimizer"):
            optimizer.step()
        with phase(step, "zero_grad"):
            optimizer.zero_grad()

    def run(phase: Callable[[int, str], Any]) -> None:
        for step in range(STEPS):
            (train if trains else infer)(phase, step)

    there = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
             for t in (*model.parameters(), *model.buffers(), *tensors_in(inputs)) if t.layout is torch.strided}
    return watch_memory(run, sum(there.values()))


def temporaries_at_peak(trail: Trail) -> Counter[str]:
    """Bytes of temporaries alive when a trail is highest, by the operator that they are of."""
    totals = list(running_bytes(trail))
    place = totals.index(max(totals)) - 1
    found: Counter[str] = Counter()
    for block in trail.births():
        if block.is_temporary and block.born <= place < (block.died or 0):
            found[block.operator] += block.nbytes
    return found


def choose_candidate(case: Case) -> Candidate:
    """The first way to build and call a model in which PyTorch itself can run it."""
    for candidate in case.candidates():
        try:
            torch.manual_seed(SEED)
            model = candidate.build().eval()
            args, kwargs = candidate.make_inputs(model, False)
            with torch.no_grad():
                model(*args, **kwargs)
        except Exception:
            continue
        return candidate
    raise RuntimeError(f"{case.name}: PyTorch cannot run it here")


def compare_models(names: Sequence[str], told: Callable[[Comparison], None]) -> dict[str, str]:
    """Compare both steps of each model; what each failed with, of those that did."""
    warnings.simplefilter("ignore")
    cases = {case.name: case for case in list_cases(sorted({name.partition(":")[0] for name in names}))}
    threads, failed = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    try:
        for name in names:
            candidate = choose_candidate(cases[name])
            for mode in MODES:
                try:
                    told(compare_step(name, candidate, mode))
                except Exception as error:
                    failed[f"{name} ({mode})"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                gc.collect()
    finally:
        torch.set_num_threads(threads)
    return failed


def list_differences(found: Comparison, limit: int = 12) -> list[str]:
    """Where both trails differ, in a shortest list of insertions and deletions."""
    one, other = ([(is_birth, block.nbytes) for is_birth, block in trail.events]
                  for trail in (found.predicted, found.measured))
    lines: list[str] = []
    for kind, start, end, first, last in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind != "equal":
            lines += [_describe("predicted alone", *event) for event in found.predicted.events[start:end]]
            lines += [_describe("measured alone", *event) for event in found.measured.events[first:last]]
    return [*lines[:limit], *([f"... and {len(lines) - limit} more"] if len(lines) > limit else [])]


def _describe(side: str, is_birth: bool, block: Block) -> str:
    return (f"{side}: {'birth' if is_birth else 'death'} of {block.nbytes:,} bytes of {block.operator}"
            + ("" if is_birth else f" in {block.died_operator}"))


@dataclass
class _Totals:
    """Sums over the steps of a family."""

    models: set[str] = field(default_factory=set)
    steps: int = 0
    births: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    equal_ends: int = 0
    equal_peaks: int = 0
    over: list[float] = field(default_factory=list)  #: measured peak with temporaries over the predicted one, less 1

    def add(self, found: Comparison) -> None:
        self.models.add(found.model)
        self.steps += 1
        self.births += len(found.measured.births())
        self.verdicts[found.verdict] += 1
        self.equal_ends += found.has_equal_ends
        self.equal_peaks += found.storage_peaks[0] == found.storage_peaks[1]
        self.over.append(found.measured_peak_bytes / found.predicted_peak_bytes - 1)


def measure(count: int | None = None) -> Section:
    """The oracle for docs/reliability.md: ``count`` models, evenly from the list, or all of it."""
    names = MODELS if count is None else MODELS[::max(1, len(MODELS) // count)][:count]
    totals: defaultdict[str, _Totals] = defaultdict(_Totals)
    lost, holders = [], Counter[str]()

    def told(found: Comparison) -> None:
        for family in (found.model.partition(":")[0], "all"):
            totals[family].add(found)
        for operator, nbytes in found.temporaries.items():
            holders[operator] += nbytes / found.measured_peak_bytes > 0.01
        if found.verdict == DIFFERENT:
            lost.append(f"`{found.model}` ({found.mode}): {found.tell().partition(': ')[2]}; first: "
                        f"{list_differences(found)[0]}")
        print(f"{found.model} ({found.mode}): {found.tell()}", flush=True)

    lost += [f"`{step}`: {error}" for step, error in compare_models(names, told).items()]
    families = [*(family for family in totals if family != "all"), "all"]
    rows = "\n".join(_row(family, totals[family]) for family in families)
    over = sorted(totals["all"].over)
    most = ", ".join(f"`{operator}` ({times})" for operator, times in holders.most_common(8) if times)
    return Section("storages", "An oracle on the CPU", f"""
What is predicted of memory on a CPU is compared with what the CPU's own allocator does. {len(totals["all"].models)}
models with random weights run two steps of inference and two of training (forward, loss, backward, AdamW, `zero_grad`)
on small inputs, on one thread; `torch.profiler` lists every allocation and every release with its address, those inside
operators too. No mode, hook or subclass is in between, and no code of this package: what it does not see, or holds too
long, shows. `profile(..., device="cpu")` predicts the same steps before. Compared are all births and deaths of storages
in order, each death with its own birth (*deaths in a row*: between two births storages die in another order, which
nothing shows); bytes allocated at the end of each phase; and peaks.

| models | steps | births | equal | but for deaths in a row | different | ends of phases equal | peaks equal |
|---|---:|---:|---:|---:|---:|---:|---:|
{rows}

What one operator allocates and releases itself is left out above, as are numbers that become tensors of up to 16 bytes
(`x + 1`). The first are *temporaries* of the CPU's kernels. With them, the measured peak is above the predicted one by
{over[len(over) // 2]:.2%} in the median, {over[len(over) * 9 // 10]:.1%} or less in nine of ten steps, and
{over[-1]:.1%} at most. Operators whose temporaries are more than 1 % of a step's peak, and in how many steps: {most}.
Those of convolutions and of recurrent layers are oneDNN's copies in blocked order, which it chooses by the processor;
no rule here predicts them.
""", {"models": len(totals["all"].models), "steps": totals["all"].steps, "births": totals["all"].births}, lost)


def _row(family: str, found: _Totals) -> str:
    counts = " | ".join(str(found.verdicts[verdict]) for verdict in (EQUAL, DEATHS, DIFFERENT))
    return (f"| {len(found.models)} {'in all' if family == 'all' else f'of {family}'} | {found.steps} | "
            f"{found.births:,} | {counts} | {found.equal_ends} | {found.equal_peaks} |")


def main(names: Sequence[str]) -> int:
    """Compare models by name, and print what differs."""
    different = 0

    def told(found: Comparison) -> None:
        nonlocal different
        different += found.verdict == DIFFERENT
        print(f"{found.model} ({found.mode}): {found.tell()}", flush=True)
        if found.verdict == DIFFERENT:
            print("".join(f"    {line}\n" for line in list_differences(found)), end="", flush=True)

    failed = compare_models(names or MODELS, told)
    print("".join(f"{step}: {error}\n" for step, error in failed.items()), end="")
    return int(bool(different or failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
