"""Runs one subgraph of each kind that a graph repeats, and replays its record for the others."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from analyzer.fx.module_borrow import borrow_module
from analyzer.record.log import Log
from analyzer.record.recorder import Recorder
from analyzer.replay.block_capture import BlockCapture
from analyzer.replay.block_content import Contents
from analyzer.replay.block_key import structure_key
from analyzer.replay.block_replay import FEWEST, BlockReplay
from analyzer.replay.block_site import BlockSite
from analyzer.replay.captured_block import Arguments, CapturedBlock, GradSpec
from analyzer.replay.isomorph import Isomorph

from .interpreter import RecordingInterpreter
from .run_record import ReplayedSubgraph, RunRecord
from .subgraph import Subgraph, find_subgraphs


class SubgraphReplay(BlockReplay):
    """Decides for each subgraph of a graph whether it is replayed or run; those of the paths in ``excluded`` are run,
    for the reasons there.
    """

    def __init__(self, recorder: Recorder, gm: fx.GraphModule, interpreter: RecordingInterpreter,
                 excluded: Mapping[str, str]) -> None:
        self.interpreter, self._excluded = interpreter, excluded
        self._subgraphs = {id(s.module): s for s in find_subgraphs(gm, FEWEST) if s.path not in excluded}
        super().__init__(recorder, gm, borrow_module, lambda module: False)
        self._beginning_at: defaultdict[fx.Node, list[Subgraph]] = defaultdict(list)
        for subgraph in sorted(self._subgraphs.values(), key=lambda s: -len(s.nodes)):
            if id(subgraph.module) in self.keys:
                self._beginning_at[subgraph.nodes[0]].append(subgraph)
        # of the runs of a subgraph
        self._records: defaultdict[Arguments, dict[tuple[GradSpec, ...], RunRecord]] = defaultdict(dict)

    def _list_keys(self, root: nn.Module, modules: Sequence[nn.Module], contents: dict[int, Contents],
                   is_excluded: Callable[[nn.Module], bool], isomorphs: Sequence[Isomorph]) -> dict[int, Hashable]:
        memo: dict[int, int | None] = {}
        numbers: dict[Hashable, int] = {}
        keys: dict[int, Hashable] = {}
        for i, subgraph in self._subgraphs.items():
            held = contents[id(subgraph.held)]
            contents[i] = held._replace(modules=[subgraph.module, *held.modules[1:]])
            key = structure_key(subgraph.held, memo, numbers)
            keys[i] = None if key is None else (key, subgraph.key)
        return keys

    def list_candidates(self) -> list[nn.Module]:
        """The modules whose runs the subgraphs are, outer ones first."""
        return [s.module for s in sorted(self._subgraphs.values(), key=lambda s: s.path.count("."))]

    def explain(self) -> dict[str, tuple[str, str | None]]:
        """As `BlockReplay.explain`, by the classes of the modules that were traced."""
        found = {path: reason for path, (_, reason) in super().explain().items()}
        replayed = tuple([f"{path}." for path, reason in found.items() if reason is None])
        found.update({path: reason for path, reason in self._excluded.items() if not path.startswith(replayed)})
        classes = {path: name.rpartition(".")[2] for node in self.interpreter.rows
                   for path, name in node.meta.get("module_stack", ())}
        return {path: (classes.get(path, ""), reason) for path, reason in found.items()}

    def alike(self, module: nn.Module) -> list[str]:
        """The paths of the subgraphs that do what that of ``module`` does."""
        return [self.path_of(other) for other in self.list_candidates()
                if self._all_keys[id(other)] == self._all_keys[id(module)]]

    def replay_from(self, node: fx.Node, env: dict[fx.Node, Any]) -> int:
        """How many nodes from ``node`` on were replayed; the results are in ``env`` then."""
        for subgraph in self._beginning_at.get(node, ()):  # outer ones first
            with torch._C.DisableTorchFunction():
                results = self.run(subgraph.module, tuple([env[n] for n in subgraph.inputs]), {})
            if results is not NotImplemented:
                env.update(zip(subgraph.results, results))
                return len(subgraph.nodes)
        return 0

    def path_of(self, module: nn.Module) -> str:
        """The path of the module whose run the subgraph is."""
        return self._subgraphs[id(module)].path

    def given_up(self, module: nn.Module) -> Collection[int]:
        """Positions of the inputs that nothing reads afterwards."""
        return self._subgraphs[id(module)].last_read

    def read_later(self, module: nn.Module) -> Collection[int]:
        """Positions of the inputs that later nodes read."""
        return self._subgraphs[id(module)].read_later

    def make_capture(self, module: nn.Module, arguments: Arguments,
                     grad_specs: tuple[GradSpec, ...] | None) -> BlockCapture:
        """A run of the subgraph in a sandbox."""
        return _SubgraphCapture(self, self._subgraphs[id(module)], arguments, grad_specs)

    def make_site(self, captured: CapturedBlock, module: nn.Module, numbers: Iterable[Sequence[Any]],
                   producers: dict[int, int | None]) -> BlockSite:
        """A place for a replay, in the rows of the subgraph's nodes."""
        subgraph, interpreter = self._subgraphs[id(module)], self.interpreter
        site = _SubgraphSite(captured, subgraph, numbers, producers, self.recorder,
                              [interpreter.rows[n] for n in subgraph.nodes])
        names = [n.name for n in subgraph.nodes]
        interpreter.record.replayed.append(
            ReplayedSubgraph(names, self._records[captured.arguments], site, captured.segment.slot_of))
        return site

    def learn(self, arguments: Arguments, grad_specs: tuple[GradSpec, ...], record: RunRecord) -> None:
        """What the run of a subgraph said of its nodes' values, and of their gradients for some of its results'."""
        self._records[arguments][grad_specs] = record


class _SubgraphCapture(BlockCapture):
    """One run of a subgraph in a sandbox."""

    def __init__(self, reuse: SubgraphReplay, subgraph: Subgraph, arguments: Arguments,
                 grad_specs: tuple[GradSpec, ...] | None) -> None:
        super().__init__(reuse.recorder, subgraph.module, arguments, reuse.borrow, grad_specs)
        self.reuse, self.subgraph = reuse, subgraph

    def run(self) -> CapturedBlock:
        captured = super().run()
        self.reuse.learn(self.arguments, self.grad_specs, self.interpreter.record)
        return captured

    def _run_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.interpreter = self.reuse.interpreter.like(self.recorder)
        return self.interpreter.run_subgraph(self.subgraph, args)


class _SubgraphSite(BlockSite):
    """The place of a subgraph in the log of a graph: its rows are there already."""

    def __init__(self, captured: CapturedBlock, subgraph: Subgraph, numbers: Iterable[Sequence[Any]],
                 producers: dict[int, int | None], recorder: Recorder, rows: Sequence[int]) -> None:
        super().__init__(captured, subgraph.path, numbers, producers, recorder.log, recorder.step, None, None)
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
