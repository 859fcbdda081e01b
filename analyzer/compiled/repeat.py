"""Joint graphs of many layers that are alike are compiled from a few of them.

A *lap* is what repeats: a stretch of operators each of which reads what lies one lap earlier than what the same
operator of the next lap reads, or the same tensor as it. Backward runs the laps in reverse. Laps are cut out of the
middle of a joint graph, the rest is compiled, and where three laps in a row or more of the program that comes of it are
equal up to names, the program of the whole graph is had by writing out the laps that are missing.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx

from .generated_kernel import name_place
from .joint_graph import JointGraph, Labels, put_writes_last
from .laps import Chains, Unlike, find_run
from .lowering import LoweredGraph
from .program_text import Layers, write_laps

KEPT = 6
"""Laps that remain: the first and the last of a program differ from the others, and `EQUAL` in a row must be equal."""
GROUP = 4
"""Of how many laps those that are left out without gradients are a multiple: there a program repeats every two or four.
Residuals are added up until a sum reads more than four buffers, which is then written (``realize_reads_threshold`` of
torch/_inductor/config.py): of two additions a layer, in every second one. What each layer makes of nothing of its own,
such as a mask, one kernel makes for all layers that are at most 64 nodes apart (``are_long_distant_nodes`` of
torch/_inductor/scheduler.py). Three groups remain, or four where layers make such things; of fewer laps that make none
`KEPT`, for a program may repeat every lap all the same.
"""


@dataclass
class _RepeatedOperators:
    """Operators from ``start`` to ``stop`` that repeat every ``period``."""

    nodes: list[fx.Node]
    start: int
    stop: int
    period: int
    place: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def laps(self) -> int:
        return (self.stop - self.start) // self.period


class Shortened:
    """A joint graph with ``removed`` laps less, as ``joint``; `extend` makes the programs of the whole of its own.

    Layers before those that are left out are early, those behind them late. Backward runs the late ones first. In the
    short graph late layers have the parameters, and the places, of those that follow the early ones.
    """

    def __init__(self, whole: JointGraph, runs: list[_RepeatedOperators], removed: int, alike: Chains) -> None:
        self.whole, self.removed = whole, removed
        self._runs, self._alike = runs, alike  # nodes, each with that of the next layer
        self._late: dict[fx.Node, bool | None] = {}  # of operators, None: it is left out
        self._kept: dict[fx.Node, fx.Node] = {}
        self._inputs: list[fx.Node] = whole.graph.find_nodes(op="placeholder")
        #: of each result, by their places in the short graph, those that layers have in its stead, and which layer's it
        #: is; of one that no layer has the place of its own
        self._results: list[tuple[list[int], int]] = []
        self.joint = self._make()

    def _make(self) -> JointGraph:
        graph, whole = fx.Graph(), self.whole
        gone = {node for chain in self._alike.chains() if chain[0].op == "placeholder"
                for node in chain[len(chain) - self.removed:]}
        self._kept = {node: graph.node_copy(node) for node in self._inputs if node not in gone}
        for run, is_forward in zip(self._runs, (True, False)):
            first = run.start + (run.laps - self.removed) // 2 * run.period
            last = first + self.removed * run.period
            self._late |= {node: None if first <= i < last else (i >= last) is is_forward
                           for i, node in enumerate(run.nodes)}
            for node in run.nodes:
                if self._late[node] is not None:
                    self._kept[node] = self._copy(graph, node)
        put_writes_last(graph)
        outputs: Any = whole.graph.output_node().args[0]
        results = self._keep_results(outputs[:whole.results])
        primals = self._inputs[:len(whole.primals)]
        gradients = dict(zip(primals, outputs[whole.results:]))
        graph.output((*results, *[self._gradient(node, gradients) for node in gradients if node not in gone]))
        given = sum(node not in gone for node in primals[:whole.given])
        return replace(whole, graph=graph, results=len(results), given=given,
                       primals=[primal for primal, node in zip(whole.primals, primals) if node not in gone])

    def _keep_results(self, given: Sequence[Any]) -> list[Any]:
        """Results of the short graph: where each layer gives one (keys and values that are kept), those of its own."""
        found: list[Any] = []
        places: dict[fx.Node, int] = {}
        chains: list[list[fx.Node] | None] = []
        for value in given:
            known = self._alike.find(value) if isinstance(value, fx.Node) and value in self._late else None
            chain = None if known is None or not set(known[0]) <= set(given) else known[0]
            chains.append(chain)
            if chain is None:
                places[value] = len(found)
                found.append(self._resolve(value, None) if isinstance(value, fx.Node) else value)
            elif self._late[value] is not None:
                places[value] = len(found)
                found.append(self._kept[value])
        for value, chain in zip(given, chains):
            self._results.append(([places[value]], 0) if chain is None else (
                [places[node] for node in chain if self._late[node] is not None], chain.index(value)))
        return found

    def _copy(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        copy = graph.node_copy(node, lambda other: self._resolve(other, node))
        if self._late[node]:
            copy.meta["place"] = self._alike.shift(node, -self.removed).meta["place"]
        return copy

    def _resolve(self, node: fx.Node, reader: fx.Node | None) -> fx.Node:
        """The kept node that stands for ``node``, which ``reader`` reads; None: the end of the forward pass."""
        is_late = True if reader is None else self._late[reader]
        found: fx.Node | None = node
        if node.op == "placeholder":
            found = self._alike.shift(node, -self.removed if is_late else 0)
        elif self._alike.find(node) is not None and self._late[node] is not is_late:
            if reader is None or self._alike.find(reader) is None:
                raise Unlike  # it reads one layer and no other alike
            found = self._alike.shift(node, -self.removed if is_late else self.removed)
        if found is None or found not in self._kept:
            raise Unlike
        return self._kept[found]

    def _gradient(self, primal: fx.Node, gradients: dict[fx.Node, Any]) -> Any:
        """That of a kept primal, made for an early layer, or for a late one."""
        if self._alike.find(primal) is None:
            found = gradients[primal]
            if found is not None and found not in self._kept:
                raise Unlike
            return None if found is None else self._kept[found]
        pair = [gradients[node] for node in (primal, self._alike.shift(primal, self.removed))]
        if pair == [None, None]:
            return None
        for found, is_late in zip(pair, (False, True)):
            if found in self._kept and self._late.get(found) is is_late:
                return self._kept[found]
        raise Unlike

    def times(self, place: int) -> int:
        """How many operators of the whole graph one of the short graph stands for: one lap has those left out."""
        found = self._names.find(name_place(place))
        return 1 + self.removed if found is not None and found[1] == (len(found[0]) - self.removed) // 2 else 1

    @cached_property
    def _names(self) -> Chains:
        """The names of operators and primals in programs, each with that of the next layer."""
        found = Chains()
        for chain in self._alike.chains():
            names = [node.name if node.op == "placeholder" else name_place(node.meta["place"]) for node in chain]
            for name, following in zip(names, names[1:]):
                found.add(name, following)
        return found

    def extend(self, halves: Sequence[LoweredGraph]) -> list[LoweredGraph] | None:
        """The programs of the whole graph, where those of the short one, given, repeat themselves; else None."""
        run = self._runs[0]
        seeds = sum(["rand" in str(node.target) for node in run.nodes[run.start:run.start + run.period]])
        names, count = [node.name for node in self._inputs], len(self.whole.primals)
        layers = Layers(self._names, self.removed, names[:count], seeds, self._results, names[count:])
        sources = write_laps(layers, self.joint.results, [half.source for half in halves])
        return None if sources is None else [replace(half, source=source) for half, source in zip(halves, sources)]


def shorten(joint: JointGraph, rows: Labels) -> Shortened | None:
    """``joint`` with fewer laps, None where it has none that are alike, or too few.

    That modules are alike (`analyzer.replay.chain`) would not do: a compiler's graph has no modules, and what stands
    between blocks, or is shared by them, is moved into one of them or out of all.
    """
    nodes = [node for node in rows if node.op == "call_function"]
    forward = [node for node in nodes if node.meta.get("partitioner_tag") != "is_backward"]
    backward = [node for node in nodes if node.meta.get("partitioner_tag") == "is_backward"]
    first = _find(forward, rows, None)
    second = _find(backward, rows, first) if first is not None and backward else None
    if first is None or backward and second is None:
        return None
    runs = [first] if second is None else [first, second]
    alike, same, makes_same = Chains(), set[fx.Node](), False
    for run, step in zip(runs, (1, -1)):
        for i in range(run.start, run.stop - run.period):
            pair = run.nodes[i], run.nodes[i + run.period]
            inputs = list(zip(*[rows[node][1] for node in pair]))
            makes_same |= all([a is b for a, b in inputs])
            same.update([a for a, b in inputs if a is b])
            for a, b in (pair, *[(a, b) for a, b in inputs if a is not b and a.op == "placeholder"]):
                if not alike.add(*(a, b)[::step]):
                    return None
    removed = (first.laps - (4 if makes_same else 3) * GROUP) // GROUP * GROUP
    if backward or removed <= 0 and not makes_same:
        removed = first.laps - KEPT
    lengths = [len(chain) for chain in alike.chains() if chain[0].op == "placeholder"] + [run.laps for run in runs]
    if removed < 2 or min(lengths) < removed + 3 or any(alike.find(node) is not None for node in same):
        return None
    try:
        return Shortened(joint, runs, removed, alike)
    except Unlike:
        return None


def _find(nodes: list[fx.Node], rows: Labels, forward: _RepeatedOperators | None) -> _RepeatedOperators | None:
    """The laps of one half; of backward, those in which what is read of ``forward`` lies one lap earlier each time."""
    place = {node: i for i, node in enumerate(nodes)}

    def agree(i: int, j: int) -> bool:
        for a, b in zip(rows[nodes[i]][1], rows[nodes[j]][1]):
            if a is b:
                continue
            if a.op == "placeholder" or b.op == "placeholder":
                if a.op != b.op or rows[a][0] != rows[b][0]:
                    return False
            elif a in place:
                if b not in place or place[b] - place[a] != j - i:
                    return False
            elif forward is None or b not in forward.place or (
                    forward.place[a] - forward.place[b] != forward.period):
                return False
        return True

    ids: dict[Hashable, int] = {}
    labels = [ids.setdefault(rows[node][0], len(ids)) for node in nodes]
    found = find_run(labels, agree, lambda period: KEPT)
    return None if found is None else _RepeatedOperators(nodes, *found, place)
