"""Programs that Inductor generates, read as lines with names in them, and written with more laps than they have.

Of a program three things are known by layer: parameters and the operators that a line is for (by `Chains` of the joint
graph), and, where lines repeat, the buffers in them. ``shift`` layers later all three have other names. What repeats in
a program may be several layers, as kernels are fused over layers.
"""
from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .laps import Chains, Unlike, find_run

_WORD = re.compile(r"([A-Za-z_]\w*)")
_SEEDS = re.compile(r"\[(\d+)\], out=(\w+)\)")
EQUAL = 4
"""Layers at least, of two laps or more, that are equal up to names where a program repeats."""


@dataclass
class Layers:
    """What a joint graph knows of its layers: the names of parameters and of operators, each with that of the next
    layer; how many layers a program lacks; the names of all primals; how many random numbers a layer draws; of each
    result of the whole graph the places among those of the program that layers have in its stead, and which layer's it
    is; and the names of all tangents.
    """

    names: Chains
    missing: int
    primals: list[str]
    seeds: int
    results: list[tuple[list[int], int]]
    tangents: list[str]


@dataclass
class _RepeatedLines:
    """Lines from ``start`` to ``stop`` that repeat every ``period``, ``step`` layers later or, below 0, earlier."""

    start: int
    stop: int
    period: int
    step: int

    @property
    def place(self) -> int:
        """The line before which laps are missing."""
        return self.start + (self.stop - self.start) // self.period // 2 * self.period


class _ProgramText:
    """The lines of one half of a graph, as words (at the odd places) and what is between them."""

    def __init__(self, source: str, layers: Layers) -> None:
        self.layers = layers
        self.head, _, rest = source.partition("    def call(self, args):\n")
        body, _, tail = rest.partition("\n        return (")
        returned, _, self.end = tail.partition("\n")
        lines = [line for line in body.split("\n") if line.strip() and not line.lstrip().startswith("#")]
        self.arguments = [name.strip() for name in lines[0].partition(" = args")[0].split(",") if name.strip()]
        self.returned = _split(returned.rstrip()[:-1])
        targets = {line.strip().partition(" = ")[0] for line in lines[2:] if " = " in line}
        self.known = {*self.arguments, *(t for t in targets if t.isidentifier())}
        self.lines = [_WORD.split(line.partition("  # ")[0].rstrip()) for line in lines[2:]]
        self.names = [[word for word in line[1::2] if self._is_name(word)] for line in self.lines]
        self.buffers = Chains()
        self.runs: list[_RepeatedLines] = []
        self.laps = 1                   #: layers after which the lines repeat
        self.written: set[str] = set()  #: names that are in what was written

    def _is_name(self, word: str) -> bool:
        """Whether a word may be another one in another layer."""
        return word in self.known or self.layers.names.find(word) is not None

    def find_laps(self) -> bool:
        """Whether laps in a row are equal up to names. What stands for what there is put into chains."""
        kinds: dict[tuple[str | None, ...], int] = {}
        texts = [kinds.setdefault(tuple([None if i % 2 and self._is_name(word) else word
                                         for i, word in enumerate(line)]), len(kinds)) for line in self.lines]
        parts = [(0, len(self.lines))]
        while parts:
            start, stop = parts.pop()
            run = self._find_run(texts, start, stop)
            if run is None:
                continue
            for i in range(run.start, run.stop - run.period):
                for pair in self._pair(i, i + run.period, run.step) or ():
                    self.buffers.add(*pair)
            self.runs.append(run)
            parts += [(start, run.start), (run.stop, stop)]
        self.runs.sort(key=lambda run: run.start)
        laps = {abs(run.step) for run in self.runs}
        self.laps = next(iter(laps), 1)
        return len(laps) == 1 and self.layers.missing % self.laps == 0

    def _find_run(self, texts: Sequence[int], start: int, stop: int) -> _RepeatedLines | None:
        """The longest stretch between two lines in which most of the laps are."""
        steps: dict[int, int] = {}

        def find_step(period: int) -> int:
            if period not in steps:
                steps[period] = self._find_step(start, stop, period)
            return steps[period]

        def agree(i: int, j: int) -> bool:
            return self._pair(start + i, start + j, find_step(j - i)) is not None

        def least(period: int) -> int:
            return max(2, EQUAL // max(1, abs(find_step(period))))

        found = find_run(texts[start:stop], agree, least)
        if found is None:
            return None
        first, last, period = start + found[0], start + found[1], found[2]
        chains, best, i = Chains(), _RepeatedLines(0, 0, period, find_step(period)), first
        while i < last - period:  # the longest stretch in which each name has one that stands for it
            pairs = self._pair(i, i + period, best.step)
            if pairs is not None and all([self.buffers.allows(*pair) and chains.add(*pair) for pair in pairs]):
                i += 1
                if i - first > best.stop - best.start - period or not best.stop:
                    best.start, best.stop = first, i + period
            else:
                chains, first = Chains(), first + 1
                i = first
        return best if best.stop - best.start >= least(period) * period else None

    def _find_step(self, start: int, stop: int, period: int) -> int:
        """How many layers later most of the lines are that are a ``period`` further; 0 where none is."""
        pairs = zip(self.names[start:stop - period], self.names[start + period:stop])
        found = Counter([step for names in pairs for a, b in zip(*names)
                         if (step := self.layers.names.distance(a, b))])
        return found.most_common(1)[0][0] if found else 0

    def _pair(self, i: int, j: int, step: int) -> list[tuple[str, str]] | None:
        """The buffers of two lines that stand for each other, earlier layers' first; None where they cannot, or where
        ``step`` is 0.
        """
        pairs = []
        for a, b in zip(self.names[i], self.names[j]):
            if a == b:
                continue
            known = self.layers.names.distance(a, b)
            if known is None:
                pairs.append((a, b) if step > 0 else (b, a))
            elif known != step:
                return None
        return pairs if step else None

    def rename(self, shift: int | None) -> Callable[[str], str]:
        """What names are in the whole program, in lines of layers that are there ``shift`` layers later; None: of the
        first layers or the last ones, as each name tells.
        """
        def find(name: str) -> str:
            found, is_buffer, full = self.buffers.find(name), True, name
            if found is None:
                found, is_buffer = self.layers.names.find(name), False
            if found is not None:
                (chain, place), missing = found, self.layers.missing
                later = shift
                if later is None:
                    later = missing if 2 * place >= len(chain) - (0 if is_buffer else missing) else 0
                place += later // self.laps if is_buffer else later
                if not is_buffer and not 0 <= place < len(chain):
                    raise Unlike
                full = f"{chain[0]}_{place}" if is_buffer else chain[place]
            if name in self.known:
                self.written.add(full)
            return full
        return find

    def write(self) -> list[str]:
        found: list[str] = []
        last, missing, of_ends = 0, self.layers.missing, self.rename(None)
        for run in self.runs:
            found += [self._write_line(line, of_ends) for line in self.lines[last:run.start]]
            before, last = 0 if run.step > 0 else missing, run.stop
            found += self._write_lap(run, run.start, run.place, before)
            for lap in range(1, missing // self.laps + 1):
                found += self._write_lap(run, run.place - run.period, run.place, before + lap * run.step)
            found += self._write_lap(run, run.place, run.stop, missing - before)
        return found + [self._write_line(line, of_ends) for line in self.lines[last:]]

    def _write_line(self, line: Sequence[str], rename: Callable[[str], str]) -> str:
        return "".join([rename(word) if i % 2 and self._is_name(word) else word for i, word in enumerate(line)])

    def _write_lap(self, run: _RepeatedLines, start: int, stop: int, shift: int) -> list[str]:
        """Lines of a run; what the next lap has under the same name is of no layer."""
        of_layer, of_none = self.rename(shift), self.rename(None)
        found = []
        for i in range(start, stop):
            other = i + run.period if i + run.period < run.stop else i - run.period
            same = {name for name, next_name in zip(self.names[i], self.names[other]) if name == next_name}
            found.append(self._write_line(self.lines[i], lambda name, same=same: (  # type: ignore[misc]
                of_none if name in same else of_layer)(name)))
        return found

    def write_expression(self, expression: str, shift: int | None = None) -> str:
        return self._write_line(_WORD.split(expression), self.rename(shift))

    def write_of_layer(self, expressions: Sequence[str | None], place: int, laps: int = 1) -> str:
        """What is at ``place`` among all layers, or groups of ``laps`` of them, by what is there in the first, some of
        the middle, and the last.
        """
        length, missing = len(expressions), self.layers.missing
        for at, shift in ((place, 0), (place - missing // laps, missing)):
            if 0 <= at < length and (2 * at >= length) == (shift > 0) and (found := expressions[at]) is not None:
                return self.write_expression(found, shift)
        for at, found in enumerate(expressions):
            shift = (place - at) * laps
            if found is not None and shift % self.laps == 0 and all(
                    self.buffers.find(word) or self.layers.names.find(word)
                    for word in _WORD.findall(found) if word in self.known):
                return self.write_expression(found, shift)
        raise Unlike

    def join(self, arguments: Sequence[str], lines: Sequence[str], returned: Sequence[str]) -> str:
        self._check(arguments, lines, returned)
        names = ", ".join(arguments) + ("," if len(arguments) == 1 else "")
        return "\n".join([f"{self.head}    def call(self, args):", f"        {names} = args", "        args.clear()",
                          *lines, f"        return ({''.join(f'{e}, ' for e in returned)})", self.end])

    def _check(self, arguments: Sequence[str], lines: Sequence[str], returned: Sequence[str]) -> None:
        """Raise where a name is used that nothing is bound to, or is bound twice."""
        bound = set(arguments)
        for line in (*lines, ", ".join(returned)):
            target, is_assignment, value = line.strip().partition(" = ")
            is_assignment = is_assignment if target.isidentifier() else ""
            for word in _WORD.findall(value if is_assignment else line):
                if word in self.written and word not in bound:
                    raise Unlike
            if is_assignment:
                if target in bound:
                    raise Unlike
                bound.add(target)
            for deleted in re.findall(r"\bdel (\w+)", line):
                bound.discard(deleted)


def _split(text: str) -> list[str]:
    """The expressions of a tuple's source, without its parentheses."""
    source = f"({text},)" if text.strip() and not text.rstrip().endswith(",") else f"({text})"
    tree = ast.parse(source, mode="eval").body
    return [ast.get_source_segment(source, e) or "" for e in tree.elts] if isinstance(tree, ast.Tuple) else []


def write_laps(layers: Layers, results: int, sources: Sequence[str]) -> list[str] | None:
    """The sources of the forward half, and of the backward one where there is one, with the laps that are missing; None
    where their laps are not alike.
    """
    halves = [_ProgramText(source, layers) for source in sources]
    if not all([half.find_laps() for half in halves]) or len({half.laps for half in halves}) > 1:
        return None
    first = halves[0]
    try:
        written = [_seeded(half.write(), layers) for half in halves]
        primals = [name if layers.names.find(name) else first.rename(None)(name) for name in layers.primals]
        returned = [first.write_expression(first.returned[places[0]]) if len(places) == 1 else first.write_of_layer(
            [first.returned[i] for i in places], layer) for places, layer in layers.results]
        if len(halves) == 1:
            return [first.join(primals, written[0], returned)]
        second = halves[1]
        saved = _saved(first, second, results)
        tangents = [name if layers.names.find(name) else second.rename(None)(name) for name in layers.tangents]
        arguments = [*saved, *tangents]
        return [first.join(primals, written[0], [*returned, *saved.values()]),
                second.join(arguments, written[1], _gradients(first, second))]
    except Unlike:
        return None


def _seeded(lines: list[str], layers: Layers) -> list[str]:
    """``lines`` whose one tensor of seeds, if there is one, has those of all layers."""
    found = next((match for line in lines if "aten.randint" in line and (match := _SEEDS.search(line))), None)
    if found is None:
        return lines
    count = int(found[1]) + layers.missing * layers.seeds
    size, sizes = f"{found[2]} = empty_strided_cuda(({found[1]}, )", f"{found[2]} = empty_strided_cuda(({count}, )"
    return [line.replace(found[0], f"[{count}], out={found[2]})").replace(size, sizes) for line in lines]


def _saved(first: _ProgramText, second: _ProgramText, results: int) -> dict[str, str]:
    """What forward saves: by the name that backward has for it, the expression in forward."""
    layers, laps = first.layers, first.laps
    slots = dict(zip(second.arguments, first.returned[results:]))
    found: dict[str, str] = {}
    for name, expression in slots.items():
        if (parameters := layers.names.find(name)) is not None:  # under its own name
            found.update({full: full for full in parameters[0] if full in second.written})
        elif (chain := second.buffers.find(name)) is not None:
            expressions = [slots.get(member) for member in chain[0]]
            for place in range(len(expressions) + layers.missing // laps):
                full = f"{chain[0][0]}_{place}"
                if full in second.written and full not in found and any(expressions):
                    found[full] = first.write_of_layer(expressions, place, laps)
        else:
            found[name] = first.write_expression(expression)
    return found


def _gradients(first: _ProgramText, second: _ProgramText) -> list[str]:
    """Of each primal of the whole graph the expression of its gradient in backward."""
    layers = first.layers
    made = dict(zip(first.arguments, second.returned))
    found = []
    for name in layers.primals:
        chain = layers.names.find(name)
        found.append(second.write_expression(made[name]) if chain is None else second.write_of_layer(
            [made[member] for member in chain[0][:len(chain[0]) - layers.missing]], chain[1]))
    return found
