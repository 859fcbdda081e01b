"""Runs one stretch of each kind that a graph repeats, and plays its record for the others."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from analyzer.fx.module_borrow import borrow_module
from analyzer.record.log import Log
from analyzer.record.recorder import Recorder
from analyzer.replay.block_key import structure_key
from analyzer.replay.block_place import BlockPlace
from analyzer.replay.block_reuse import FEWEST, BlockReuse, Contents
from analyzer.replay.block_trial import Arguments, GradSpec, Segment, Trial
from analyzer.replay.twin import Twin

from .run_record import Played, RunRecord
from .stretch import Stretch, find_stretches

if TYPE_CHECKING:
    from .interpreter import RecordingInterpreter


class StretchReuse(BlockReuse):
    """Decides for each stretch of a graph whether it is played or run."""

    def __init__(self, recorder: Recorder, gm: fx.GraphModule, interpreter: RecordingInterpreter) -> None:
        self.interpreter = interpreter
        self._stretches = {id(s.module): s for s in find_stretches(gm, FEWEST)}
        super().__init__(recorder, gm, borrow_module, lambda module: False)
        self._beginning_at: defaultdict[fx.Node, list[Stretch]] = defaultdict(list)
        for stretch in sorted(self._stretches.values(), key=lambda s: -len(s.nodes)):
            if id(stretch.module) in self.keys:
                self._beginning_at[stretch.nodes[0]].append(stretch)
        # of the runs of a stretch
        self._records: defaultdict[Arguments, dict[tuple[GradSpec, ...], RunRecord]] = defaultdict(dict)

    def _list_keys(self, root: nn.Module, modules: Sequence[nn.Module], contents: dict[int, Contents],
                   is_excluded: Callable[[nn.Module], bool], twins: Sequence[Twin]) -> dict[int, Hashable]:
        memo: dict[int, int | None] = {}
        numbers: dict[Hashable, int] = {}
        keys: dict[int, Hashable] = {}
        for i, stretch in self._stretches.items():
            held = contents[id(stretch.held)]
            contents[i] = held._replace(modules=[stretch.module, *held.modules[1:]])
            key = structure_key(stretch.held, memo, numbers)
            keys[i] = None if key is None else (key, stretch.key)
        return keys

    def play_from(self, node: fx.Node, env: dict[fx.Node, Any]) -> int:
        """How many nodes from ``node`` on were played; the results are in ``env`` then."""
        for stretch in self._beginning_at.get(node, ()):  # outer ones first
            with torch._C.DisableTorchFunction():
                results = self.run(stretch.module, tuple([env[n] for n in stretch.inputs]), {})
            if results is not NotImplemented:
                env.update(zip(stretch.results, results))
                return len(stretch.nodes)
        return 0

    def path_of(self, module: nn.Module) -> str:
        return self._stretches[id(module)].path

    def given_up(self, module: nn.Module) -> Collection[int]:
        return self._stretches[id(module)].last_read

    def read_later(self, module: nn.Module) -> Collection[int]:
        return self._stretches[id(module)].read_later

    def make_trial(self, module: nn.Module, arguments: Arguments, grad_specs: tuple[GradSpec, ...] | None) -> Trial:
        return _StretchTrial(self, self._stretches[id(module)], arguments, grad_specs)

    def make_place(self, segment: Segment, module: nn.Module, numbers: Iterable[Sequence[Any]],
                   producers: dict[int, int | None]) -> BlockPlace:
        stretch, interpreter = self._stretches[id(module)], self.interpreter
        place = _StretchPlace(segment, stretch, numbers, producers, self.recorder,
                              [interpreter.rows[n] for n in stretch.nodes])
        names = [n.name for n in stretch.nodes]
        interpreter.record.played.append(Played(names, self._records[segment.arguments], place, segment.reel.slot_of))
        return place

    def learn(self, arguments: Arguments, grad_specs: tuple[GradSpec, ...], record: RunRecord) -> None:
        """What the run of a stretch said of its nodes' values, and of their gradients for some of its results'."""
        self._records[arguments][grad_specs] = record


class _StretchTrial(Trial):
    """One run of a stretch in a sandbox."""

    def __init__(self, reuse: StretchReuse, stretch: Stretch, arguments: Arguments,
                 grad_specs: tuple[GradSpec, ...] | None) -> None:
        super().__init__(reuse.recorder, stretch.module, arguments, reuse.borrow, grad_specs)
        self.reuse, self.stretch = reuse, stretch

    def run(self) -> Segment:
        segment = super().run()
        self.reuse.learn(self.arguments, self.grad_specs, self.interpreter.record)
        return segment

    def _run_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.interpreter = self.reuse.interpreter.like(self.recorder)
        return self.interpreter.run_stretch(self.stretch, args)


class _StretchPlace(BlockPlace):
    """The place of a stretch in the log of a graph: its rows are there already."""

    def __init__(self, segment: Segment, stretch: Stretch, numbers: Iterable[Sequence[Any]],
                 producers: dict[int, int | None], recorder: Recorder, rows: Sequence[int]) -> None:
        super().__init__(segment, stretch.path, numbers, producers, recorder.log, recorder.step, None)
        self.places_of_rows = rows

    def reserve(self, log: Log) -> None:
        pass

    def _write_rows(self, log: Log) -> None:
        slot_of, rows, numbers = self.slot_of, self.rows, self.numbers
        for row in self.own_rows:
            theirs, mine = self.source.node_slots[row], log.node_slots[rows[row]]
            assert theirs is not None and mine is not None
            producers = [self.producers[j] if j in self.producers else rows[j] for j in theirs.inputs]
            mine.inputs = tuple(dict.fromkeys([*mine.inputs, *(p for p in producers if p is not None)]))
            mine.outputs = tuple([(numbers[slot_of[n]], spec) for n, spec in theirs.outputs])
            mine.reads = tuple(dict.fromkeys(numbers[slot_of[n]] for n in theirs.reads))
