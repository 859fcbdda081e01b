"""The fastest step that fits: layouts of the trainer by the bounds of a search, engines beside it or apart."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from analyzer.errors import InputError
from analyzer.tools.search import Layout, list_best

from .plan import PosttrainPlan
from .planner import Planner
from .result import PosttrainProfile

Progress = Callable[[float, str], None]
_LAYOUTS = 3                  # of the trainer that are looked at with each number of devices
_SHARES = (0.6, 0.8)          # of a shared device that engines take
_PARTS = ((1, 4), (1, 2), (3, 4))  # of all devices that engines have for themselves


def choose(planner: Planner, plan: PosttrainPlan, price: float | None = None,
           progress: Progress | None = None) -> PosttrainProfile:
    """The profile of the fastest plan that fits, of the same answers on as many devices; where none fits, of that which
    lacks the least memory. The update decides which layouts are looked at: the fastest by a search whose rows each have
    the longest sequence. Raises InputError where no layout can be.
    """
    chooser = _Chooser(planner, price, progress)
    splits = list(_list_splits(plan))
    try:
        for place, split in enumerate(splits):
            chooser.look(split, place / len(splits), (place + 1) / len(splits))
    except KeyboardInterrupt:
        raise ChoiceInterrupted(chooser.best, chooser.tried) from None
    if chooser.best is None:
        raise InputError(f"posttrain --choose: no way of {plan.model} on {plan.devices} devices: {chooser.failed}")
    said = f"the fastest of {chooser.tried} ways that were planned"
    return replace(chooser.best, assumptions=(*chooser.best.assumptions, said))


class ChoiceInterrupted(KeyboardInterrupt):
    """Ctrl-C while ways are looked for; `result` is the best until then, None where there was none."""

    def __init__(self, result: PosttrainProfile | None, tried: int) -> None:
        super().__init__(f"{tried} ways were planned")
        self.result = result


class _Chooser:
    """What was planned, the best of it, and why others could not be."""

    def __init__(self, planner: Planner, price: float | None, progress: Progress | None) -> None:
        self.planner, self.price, self.progress = planner, price, progress
        self.best: PosttrainProfile | None = None
        self.tried, self.failed = 0, ""

    def look(self, split: PosttrainPlan, start: float, stop: float) -> None:
        """Plan the fastest layouts with so many devices for engines; of all work it is the part from start to stop."""
        def tell(share: float, text: str) -> None:
            if self.progress is not None:
                best = self.best
                self.progress(start + share * (stop - start), f"{split.trainer_devices} devices of a trainer: {text}"
                              if best is None else f"best so far: {best.step_seconds:.4g} s a step, {best.trainer}")

        try:
            layouts = _find_layouts(self.planner, split, tell)
        except InputError as error:
            self.failed = self.failed or str(error)
            return
        for other in _list_plans(split, layouts):
            try:
                found = self.planner.plan(other, self.price)
            except InputError as error:
                self.failed = self.failed or str(error)
                continue
            self.tried += 1
            if self.best is None or _rank(found) < _rank(self.best):
                self.best = found
            tell(1.0, "planned")


def _rank(found: PosttrainProfile) -> tuple[bool, float]:
    """Orders profiles: what fits, the fastest first, then what lacks least."""
    lacks = found.fits is False
    return lacks, float(found.needed_bytes or 0) if lacks else found.step_seconds


def _list_splits(plan: PosttrainPlan) -> Iterator[PosttrainPlan]:
    """Plans by the devices that engines have."""
    if plan.engine is None:
        yield plan
        return
    yield replace(plan, engine=replace(plan.engine, devices=0), lag=0, in_flight=False)
    for part, whole in _PARTS:
        devices = plan.devices * part // whole
        if plan.devices * part % whole == 0 and 0 < devices < plan.devices:
            engine = replace(plan.engine, devices=devices, layout=None, memory_share=None)
            # checked with the layout that is found
            yield replace(plan, engine=engine, lag=max(1, plan.lag), in_flight=True)


def _find_layouts(planner: Planner, plan: PosttrainPlan, progress: Progress) -> list[Layout]:
    """The fastest layouts of the trainer, in the order of their updates."""
    trainer, devices = planner.trainer(plan), plan.trainer_devices
    tokens = sum(plan.draw()) / plan.updates
    rows = max(1, round(tokens / plan.longest / devices)) * devices
    return list_best(trainer.target, plan.cluster, devices, rows, plan.longest, _LAYOUTS, loss=trainer.loss,
                     progress=progress)


def _list_plans(plan: PosttrainPlan, layouts: list[Layout]) -> Iterator[PosttrainPlan]:
    for layout in layouts:
        tokens = plan.longest * layout.micro_batch
        other = replace(plan, layout=replace(layout, micro_batch=1, micro_batches=1), tokens=tokens,
                        score_tokens=tokens)
        if other.engine is None or not other.shares:
            yield other
            continue
        for share in _SHARES if other.engine.memory_share is None else (other.engine.memory_share,):
            yield replace(other, engine=replace(other.engine, memory_share=share))
