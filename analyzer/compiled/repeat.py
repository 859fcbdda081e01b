"""Joint graphs of many layers that are alike are compiled from a few of them.

A *lap* is what repeats: a stretch of operators each of which reads what lies one lap earlier than what the same
operator of the next lap reads, or the same tensor as it. Backward runs the laps in reverse. Laps are cut out of the
middle of a joint graph, the rest is compiled, and where three laps in a row or more of the program that comes of it are
equal up to names, the program of the whole graph is had by writing out the laps that are missing.
"""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from analyzer.meta.spec import TensorSpec

from .functional import put_writes_last
from .joint_graph import JointGraph
from .laps import Chains, find_run
from .lowering import LoweredGraph
from .program_text import Layers, write_laps

KEPT = 6
"""Laps that remain: the first and the last of a program differ from the others, and three in a row must be equal."""


@dataclass
class _Run:
    """Operators from ``start`` to ``stop`` that repeat every ``period``."""

    nodes: list[fx.Node]
    start: int
    stop: int
    period: int
    place: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def laps(self) -> int:
        return (self.stop - self.start) // self.period


Rows = dict[fx.Node, tuple[Hashable, list[fx.Node]]]


def label_of(node: fx.Node) -> tuple[Hashable, list[fx.Node]]:
    """What an operator is without the nodes that it reads, and those in order."""
    inputs: list[fx.Node] = []

    def flat(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            inputs.append(value)
            return fx.Node
        if isinstance(value, (list, tuple)):
            return tuple([flat(v) for v in value])
        if isinstance(value, dict):
            return tuple([(k, flat(v)) for k, v in value.items()])
        return value if value is None or isinstance(value, (str, torch.dtype)) else (type(value), repr(value))

    return (node.op == "call_function" and node.target, flat(node.args), flat(node.kwargs) if node.kwargs else (),
            _flat_specs(node.meta.get("spec")), str(node.meta.get("recompute"))), inputs


def _flat_specs(specs: Any) -> Hashable:
    """What there is to tell one result of an operator from another."""
    if isinstance(specs, TensorSpec):  # equal ones are one object, whose own equality is that of shapes
        return id(specs)
    return tuple([_flat_specs(one) for one in specs]) if isinstance(specs, (list, tuple)) else None


class Shortened:
    """A joint graph with ``removed`` laps less, as ``joint``; `extend` makes the programs of the whole of its own.

    Layers before those that are left out are early, those behind them late. Backward runs the late ones first.
    """

    def __init__(self, whole: JointGraph, rows: Rows, forward: _Run, backward: _Run | None, primals: Chains,
                 marks: Chains) -> None:
        self.whole, self.removed = whole, forward.laps - KEPT
        self._rows, self._forward, self._backward = rows, forward, backward
        self._primals, self._marks = primals, marks
        self._inputs: list[fx.Node] = whole.graph.find_nodes(op="placeholder")
        self._kept: dict[fx.Node, fx.Node] = {}
        self.joint = self._make()

    def _cut(self, run: _Run) -> tuple[int, int]:
        """Which operators of a run are left out: laps of its middle."""
        first = run.start + (run.laps - self.removed) // 2 * run.period
        return first, first + self.removed * run.period

    def _make(self) -> JointGraph:
        graph, whole = fx.Graph(), self.whole
        gone = {member for chain in self._primals.chains() for member in chain[len(chain) - self.removed:]}
        for node in self._inputs:
            if node not in gone:
                self._kept[node] = graph.node_copy(node)
        for run in (self._forward, self._backward):
            if run is not None:
                first, last = self._cut(run)
                for i in (*range(first), *range(last, len(run.nodes))):
                    self._kept[run.nodes[i]] = self._copy(graph, run, i)
        put_writes_last(graph)
        outputs: Any = whole.graph.output_node().args[0]
        results = [self._kept[self._resolve(value, self._forward, len(self._forward.nodes))]
                   if isinstance(value, fx.Node) else value for value in outputs[:whole.results]]
        primals = self._inputs[:len(whole.primals)]
        gradients = dict(zip(primals, outputs[whole.results:]))
        graph.output((*results, *[self._gradient(node, gradients) for node in primals
                                  if node in gradients and node not in gone]))
        short = replace(whole, graph=graph,
                        primals=[primal for primal, node in zip(whole.primals, primals) if node not in gone])
        if hasattr(whole, "given"):
            short.given = sum(node not in gone for node in primals[:whole.given])
        return short

    def _copy(self, graph: fx.Graph, run: _Run, i: int) -> fx.Node:
        node = run.nodes[i]
        copy = graph.node_copy(node, lambda other: self._kept[self._resolve(other, run, i)])
        if self._is_late(run, i):
            copy.meta["place"] = self._marks.shift(node.meta["place"], -self.removed)
            if copy.meta["place"] is None:
                raise _Unlike
        return copy

    def _is_late(self, run: _Run, i: int) -> bool:
        first, last = self._cut(run)
        return i >= last if run is self._forward else i < first

    def _resolve(self, node: fx.Node, run: _Run, i: int) -> fx.Node:
        """The kept node that stands for ``node``, which the operator at ``i`` of a run, or its end, reads."""
        is_late, in_laps = self._is_late(run, i), run.start <= i < run.stop
        found: fx.Node | None
        if in_laps and self._is_the_same(node, run, i):
            found = node
        elif node.op == "placeholder":
            found = self._primals.shift(node, -self.removed if is_late else 0)
        else:
            home = self._forward if node in self._forward.place else self._backward
            assert home is not None
            k, (first, last) = home.place[node], self._cut(home)
            if not in_laps and home.start <= k < home.stop and (
                    k < last if is_late or home is self._backward else k >= first):
                raise _Unlike  # it reads one layer and no other alike
            length = self.removed * home.period
            if home is self._backward or is_late:
                is_behind = home is self._forward or i >= self._cut(run)[1]
                k -= length if is_behind and in_laps and k < last else 0
            elif in_laps and k >= first:
                k += length
            found = home.nodes[k] if 0 <= k < len(home.nodes) else None
        if found is None or found not in self._kept:
            raise _Unlike
        return found

    def _is_the_same(self, node: fx.Node, run: _Run, i: int) -> bool:
        """Whether every lap reads ``node``."""
        other = run.nodes[i + run.period if i + run.period < run.stop else i - run.period]
        return any(a is node and b is node for a, b in zip(self._rows[run.nodes[i]][1], self._rows[other][1]))

    def _gradient(self, primal: fx.Node, gradients: dict[fx.Node, Any]) -> Any:
        """That of a kept primal, made for an early layer, or for a late one."""
        if self._primals.find(primal) is None:
            found = gradients[primal]
            if found is not None and found not in self._kept:
                raise _Unlike
            return None if found is None else self._kept[found]
        pair = [gradients[node] for node in (primal, self._primals.shift(primal, self.removed))]
        if pair == [None, None]:
            return None
        for found, late in zip(pair, (False, True)):
            if found in self._kept and self._backward is not None and (
                    late == self._is_late(self._backward, self._backward.place.get(found, len(self._backward.nodes)))):
                return self._kept[found]
        raise _Unlike

    def times(self, place: int) -> int:
        """How many operators of the whole graph one of the short graph stands for: one lap has those left out."""
        found = self._marks.find(place)
        return 1 + self.removed if found is not None and found[1] == (len(found[0]) - self.removed) // 2 else 1

    def extend(self, forward: LoweredGraph, backward: LoweredGraph | None
               ) -> tuple[LoweredGraph, LoweredGraph | None] | None:
        """The programs of the whole graph, where those of the short one, given, repeat themselves; else None."""
        names = Chains()
        for chain in self._primals.chains():
            for node, following in zip(chain, chain[1:]):
                names.add(node.name, following.name)
        run = self._forward
        seeds = sum(["rand" in str(node.target) for node in run.nodes[run.start:run.start + run.period]])
        primals = [node.name for node in self._inputs[:len(self.whole.primals)]]
        layers = Layers(names, self._marks, self.removed, KEPT, primals, seeds)
        sources = write_laps(layers, self.whole.results, forward, backward)
        if sources is None:
            return None
        return replace(forward, source=sources[0]), None if backward is None else replace(backward, source=sources[1])


class _Unlike(Exception):
    """Something reads a lap that is left out."""


def shorten(joint: JointGraph) -> Shortened | None:
    """``joint`` with fewer laps, None where it has none that are alike, or too few."""
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    rows = {node: label_of(node) for node in joint.graph.nodes}
    forward = [node for node in nodes if node.meta.get("partitioner_tag") != "is_backward"]
    backward = [node for node in nodes if node.meta.get("partitioner_tag") == "is_backward"]
    first = _find(forward, rows, None)
    if first is None:
        return None
    if not backward and first.laps >= 2 * (KEPT + 2):
        # without gradients residuals are added up until a sum reads more than four buffers, which is then written
        # (``realize_reads_threshold`` of torch/_inductor/config.py): the program of two additions a layer repeats
        # every two layers
        first.period *= 2
    second = _find(backward, rows, first) if backward else None
    if backward and (second is None or second.laps - (first.laps - KEPT) < 3):
        return None
    primals, marks = Chains(), Chains()
    for run, forwards in ((first, True), (second, False)):
        if run is None:
            continue
        for i in range(run.start, run.stop - run.period):
            pair = run.nodes[i], run.nodes[i + run.period]
            for a, b in zip(rows[pair[0]][1], rows[pair[1]][1]):
                if a is not b and a.op == "placeholder" and not (primals.add(a, b) if forwards else primals.add(b, a)):
                    return None
            a, b = [node.meta["place"] for node in pair]
            if not (marks.add(a, b) if forwards else marks.add(b, a)):
                return None
    for chain in primals.chains():
        for a, b in zip(chain, chain[1:]):
            marks.add(a.meta["place"], b.meta["place"])
    if min(map(len, primals.chains()), default=first.laps) < first.laps - KEPT + 3:
        return None
    try:
        return Shortened(joint, rows, first, second, primals, marks)
    except _Unlike:
        return None


def _find(nodes: list[fx.Node], rows: Rows, forward: _Run | None) -> _Run | None:
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
    found = find_run(labels, agree, KEPT + 2)
    return None if found is None else _Run(nodes, *found, place)
