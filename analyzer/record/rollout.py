"""Rollouts in a script: passes without gradients, each of which reads what came of the one before it."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .evaluation import OuterRun
from .log import Log

_LASTING = ("parameter", "buffer")  # what a pass reads of itself, such as running statistics


class RolloutCalls(NamedTuple):
    """The calls of a rollout, and its passes in order."""

    calls: range
    passes: tuple[OuterRun, ...]

    def is_reread_by(self, later: OuterRun) -> bool:
        """Whether a later pass is given rows as long as the rollout made them: that of its prompts and a token a pass,
        or one less where inputs are shifted against labels.
        """
        lengths = {shape[1] + len(self.passes) for shape in self.passes[0].shapes.values() if len(shape) == 2}
        return any(len(shape) == 2 and (shape[1] in lengths or shape[1] + 1 in lengths)
                   for shape in later.shapes.values())


def find_rollouts(log: Log, passes: Sequence[OuterRun]) -> list[RolloutCalls]:
    """The calls of each rollout: from the first of passes of one module without gradients, of which each reads what the
    one before it gave, to the last, and after that what also followed the one before the last. A pass that reads what a
    rollout made, and after which something else follows, ends none: it scores. Data that go through the host are not
    followed.
    """
    return [RolloutCalls(range(chain[0].calls.start, stop), tuple([run for run in chain if run.calls.start < stop]))
            for chain in _list_chains(log, passes) if (stop := _find_end(log, chain)) is not None]


def _list_chains(log: Log, passes: Sequence[OuterRun]) -> Iterator[list[OuterRun]]:
    """Passes of one module that follow each other, without an update between, where each reads of the one before."""
    chains: dict[int, list[OuterRun]] = {}
    made: dict[int, set[int]] = {}  # by module the storages with what came of its last pass
    starts = {run.calls.start: run for run in passes if run.calls}
    running: OuterRun | None = None
    depends, own = False, set[int]()
    for index, call in enumerate(log.calls):
        if running is not None and index >= running.calls.stop:
            chain = chains.get(running.module)
            if chain and depends:
                chain.append(running)
            else:
                if chain:
                    yield chain
                chains[running.module] = [running]
            made[running.module], running = own, None
        run = starts.get(index)
        if call.phase == "backward" or run is not None and run.has_grad:
            yield from chains.values()
            chains, made, running = {}, {}, None
        elif run is not None:
            running, depends, own = run, False, set()
        if not made and running is None:
            continue
        written = [number for number in call.outputs or call.inputs
                   if (held := log.storages.get(number)) is None or held.category not in _LASTING]
        for module, storages in made.items():
            if not storages.isdisjoint(call.inputs):
                depends = depends or running is not None and module == running.module
                storages.update(written)
        if running is not None:
            own.update(written)
    if running is not None:
        chains.setdefault(running.module, []).append(running)
    yield from chains.values()


def _find_end(log: Log, chain: Sequence[OuterRun]) -> int | None:
    """One past the last call of a rollout; None where the passes are none."""
    if len(chain) < 2:
        return None
    signatures = log.call_slots.signatures
    gap = range(chain[-2].calls.stop, chain[-1].calls.start)
    stop = end = chain[-1].calls.stop
    for place in gap:
        if stop >= len(signatures) or signatures[stop].op is not signatures[place].op:
            break
        stop += 1
    if 2 * (stop - end) >= len(gap):
        return stop
    # something else follows the last pass: it reads the rollout, and is no part of it
    return _find_end(log, chain[:-1])
