"""Programs that Inductor generates, read as lines with names in them, and written with more laps than they have.

Of a program three things are known by layer: parameters (their names, by `Chains` of the joint graph), the operators
that a line is for, and, where lines repeat, the buffers in them. ``shift`` layers later all three have other names.
"""
from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .laps import Chains, find_run
from .lowering import LoweredGraph

_WORD = re.compile(r"([A-Za-z_]\w*)")
_CALL = re.compile(r"(launch\()(\d+)(, )(\([^()]*\)|\d+)(.*)|(at\()(.*)(\))$")
_SEEDS = re.compile(r"\[(\d+)\], out=(\w+)\)")


@dataclass
class Layers:
    """What a joint graph knows of its layers: the names of parameters and the marks of operators, each with that of the
    next layer; how many layers a program lacks, how many it has at least; and the names of all primals.
    """

    names: Chains
    marks: Chains
    missing: int
    kept: int
    primals: list[str]
    seeds: int  #: random numbers that a layer draws


Hole = Any  # a name, or the mark of an operator: an int


@dataclass
class _Run:
    """Lines from ``start`` to ``stop`` that repeat every ``period``, and go from early layers to late ones where
    ``step`` is 1, else back; before the line at ``place`` laps are missing.
    """

    start: int
    stop: int
    period: int
    step: int
    place: int = 0


@dataclass
class _Line:
    indent: str
    text: tuple[Any, ...]  #: without its holes
    holes: list[Hole]
    order: list[int | str]  #: pieces of text, and indices of holes

    def write(self, rename: Callable[[Hole], Hole]) -> str:
        return self.indent + "".join(p if isinstance(p, str) else str(rename(self.holes[p])) for p in self.order)


class _Program:
    """The lines of one half of a graph."""

    def __init__(self, lowered: LoweredGraph, layers: Layers) -> None:
        self.layers = layers
        self.head, _, rest = lowered.source.partition("    def call(self, args):\n")
        body, _, tail = rest.partition("\n        return (")
        returned, _, self.end = tail.partition("\n")
        lines = [line for line in body.split("\n") if line.strip() and not line.lstrip().startswith("#")]
        self.arguments = [name.strip() for name in lines[0].partition(" = args")[0].split(",") if name.strip()]
        self.returned = _split(returned.rstrip()[:-1])
        targets = {line.strip().partition(" = ")[0] for line in lines[2:] if " = " in line}
        self.known = {*self.arguments, *(t for t in targets if t.isidentifier())}
        kinds: dict[Any, int] = {}
        self._kinds = [kinds.setdefault(kernel, len(kinds)) for kernel in lowered.kernels]
        self.lines = [self._read(line.partition("  # ")[0].rstrip()) for line in lines[2:]]
        self.buffers = Chains()
        self.runs: list[_Run] = []
        self.written: set[Hole] = set()  #: names that are in what was written

    def _read(self, line: str) -> _Line:
        body = line.lstrip()
        holes: list[Hole] = []
        order: list[int | str] = []

        def add(text: str, marks: bool = False) -> None:
            for i, piece in enumerate(re.split(r"(\d+)" if marks else _WORD, text)):
                if i % 2 and (marks or piece in self.known):
                    order.append(len(holes))
                    holes.append(int(piece) if marks else piece)
                elif piece:
                    order.append(piece)

        found, kind = _CALL.fullmatch(body), None
        if found is None:
            add(body)
        elif found[1]:
            order.append(found[1] + found[2] + found[3])
            kind = self._kinds[int(found[2])]
            add(found[4], marks=True)
            add(found[5])
        else:
            order.append(found[6])
            add(found[7], marks=True)
            order.append(found[8])
        text = tuple(p if isinstance(p, str) else None for p in order)
        return _Line(line[:len(line) - len(body)], text if kind is None else (kind, *text[1:]), holes, order)

    def find_laps(self) -> bool:
        """Whether three laps or more in a row are equal up to names. What stands for what there is put into chains."""
        kinds: dict[Any, int] = {}
        texts = [kinds.setdefault(line.text, len(kinds)) for line in self.lines]
        parts = [(0, len(self.lines))]
        while parts:
            start, stop = parts.pop()
            found = [run for step in (1, -1) if (run := self._find_run(texts, start, stop, step)) is not None]
            if not found:
                continue
            run = max(found, key=lambda run: run.stop - run.start)
            for i in range(run.start, run.stop - run.period):
                for a, b in self._pair(i, i + run.period, run.step) or ():
                    self.buffers.add(*((a, b) if run.step > 0 else (b, a)))
            run.place = run.start + (run.stop - run.start) // run.period // 2 * run.period
            self.runs.append(run)
            parts += [(start, run.start), (run.stop, stop)]
        self.runs.sort(key=lambda run: run.start)
        return bool(self.runs)

    def _find_run(self, texts: Sequence[int], start: int, stop: int, step: int) -> _Run | None:
        """The longest stretch between two lines in which most of the laps are."""
        def agree(i: int, j: int) -> bool:
            return self._pair(start + i, start + j, step) is not None

        least = self.layers.kept // 2 + 1
        found = find_run(texts[start:stop], agree, least)
        if found is None:
            return None
        first, last, period = start + found[0], start + found[1], found[2]
        chains, best, i = Chains(), _Run(0, 0, period, step), first
        while i < last - period:  # the longest stretch in which each name has one that stands for it
            pairs = self._pair(i, i + period, step)
            if pairs is not None and all([chains.add(a, b) for a, b in pairs]):
                i += 1
                if i - first > best.stop - best.start - period or not best.stop:
                    best.start, best.stop = first, i + period
            else:
                chains, first = Chains(), first + 1
                i = first
        if best.stop - best.start < least * period or not any(
                self._steps(i, i + period, step) for i in range(best.start, best.start + period)):
            return None
        return best

    def _steps(self, i: int, j: int, step: int) -> bool:
        """Whether two lines are of one layer and of the next."""
        return any((self.layers.names if isinstance(a, str) else self.layers.marks).follows(a, b, step)
                   or self.buffers.follows(a, b, step) for a, b in zip(self.lines[i].holes, self.lines[j].holes))

    def _is_of_layer(self, hole: Hole) -> bool:
        chains = (self.layers.names, self.buffers) if isinstance(hole, str) else (self.layers.marks,)
        return any(c.find(hole) is not None for c in chains)

    def _pair(self, i: int, j: int, step: int) -> list[tuple[Hole, Hole]] | None:
        """The names of two lines that stand for each other, None where they cannot."""
        pairs = []
        for a, b in zip(self.lines[i].holes, self.lines[j].holes):
            if a == b:
                continue
            chains = self.layers.names if isinstance(a, str) else self.layers.marks
            if (known := chains.follows(a, b, step)) is None and isinstance(a, str):
                known = self.buffers.follows(a, b, step)
                pairs.append((a, b))
            if known is False or known is None and not isinstance(a, str):
                return None
        return pairs

    def rename(self, shift: int | None) -> Callable[[Hole], Hole]:
        """What names are in the whole program, in lines of layers that are there ``shift`` layers later; None: of the
        first layers or the last ones, as each name tells.
        """
        def find(hole: Hole) -> Hole:
            is_buffer = isinstance(hole, str) and self.buffers.find(hole) is not None
            chains = self.buffers if is_buffer else self.layers.names if isinstance(hole, str) else self.layers.marks
            found = chains.find(hole)
            if found is not None:
                chain, place = found
                length = len(chain) - (0 if is_buffer else self.layers.missing)
                place += (self.layers.missing if 2 * place >= length else 0) if shift is None else shift
                if not is_buffer and not 0 <= place < len(chain):
                    raise _Unlike
                hole = f"{chain[0]}_{place}" if is_buffer else chain[place]
            self.written.add(hole)
            return hole
        return find

    def write(self) -> list[str]:
        found: list[str] = []
        last, missing, of_ends = 0, self.layers.missing, self.rename(None)
        for run in self.runs:
            found += [line.write(of_ends) for line in self.lines[last:run.start]]
            before, last = 0 if run.step > 0 else missing, run.stop
            found += self._write_lap(run, run.start, run.place, before)
            for lap in range(1, missing + 1):
                found += self._write_lap(run, run.place - run.period, run.place, before + lap * run.step)
            found += self._write_lap(run, run.place, run.stop, missing - before)
        return found + [line.write(of_ends) for line in self.lines[last:]]

    def _write_lap(self, run: _Run, start: int, stop: int, shift: int) -> list[str]:
        """Lines of a run; what the next lap has under the same name is of no layer."""
        of_layer, of_none = self.rename(shift), self.rename(None)
        found = []
        for i in range(start, stop):
            other = self.lines[i + run.period if i + run.period < run.stop else i - run.period].holes
            same = {hole for hole, next_hole in zip(self.lines[i].holes, other) if hole == next_hole}
            found.append(self.lines[i].write(lambda hole, same=same: (  # type: ignore[misc]
                of_none if hole in same else of_layer)(hole)))
        return found

    def names_in(self, expression: str) -> list[str]:
        return [word for word in _WORD.findall(expression) if word in self.known]

    def write_expression(self, expression: str, shift: int | None = None) -> str:
        rename = self.rename(shift)
        return _WORD.sub(lambda m: rename(m[0]) if m[0] in self.known else m[0], expression)

    def write_of_layer(self, expressions: Sequence[str | None], place: int) -> str:
        """What is at ``place`` among all layers, by what is there in the first, some of the middle, and the last."""
        length = len(expressions)
        for at, shift in ((place, 0), (place - self.layers.missing, self.layers.missing)):
            if 0 <= at < length and (2 * at >= length) == (shift > 0) and (found := expressions[at]) is not None:
                return self.write_expression(found, shift)
        for at, found in enumerate(expressions):
            if found is not None and all(map(self._is_of_layer, self.names_in(found))):
                return self.write_expression(found, place - at)
        raise _Unlike

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
                    raise _Unlike
            if is_assignment:
                if target in bound:
                    raise _Unlike
                bound.add(target)
            for deleted in re.findall(r"\bdel (\w+)", line):
                bound.discard(deleted)


class _Unlike(Exception):
    """Names do not go on as the layers do."""


def _split(text: str) -> list[str]:
    """The expressions of a tuple's source, without its parentheses."""
    source = f"({text},)" if text.strip() and not text.rstrip().endswith(",") else f"({text})"
    tree = ast.parse(source, mode="eval").body
    return [ast.get_source_segment(source, e) or "" for e in tree.elts] if isinstance(tree, ast.Tuple) else []


def write_laps(layers: Layers, results: int, forward: LoweredGraph, backward: LoweredGraph | None) -> list[str] | None:
    """The sources of both halves with the laps that are missing, None where their laps are not alike."""
    halves = [_Program(half, layers) for half in (forward, backward) if half is not None]
    if not all([half.find_laps() for half in halves]):
        return None
    first = halves[0]
    try:
        written = [_seeded(half.write(), layers) for half in halves]
        primals = [name if layers.names.find(name) else first.rename(None)(name) for name in layers.primals]
        returned = [first.write_expression(e) for e in first.returned[:results]]
        if backward is None:
            others = [first.write_expression(e) for e in first.returned[results:]]
            return [first.join(primals, written[0], [*returned, *others])]
        second = halves[1]
        saved = _saved(first, second, results)
        arguments = [*saved, *map(second.rename(None), second.arguments[len(first.returned) - results:])]
        return [first.join(primals, written[0], [*returned, *saved.values()]),
                second.join(arguments, written[1], _gradients(first, second))]
    except _Unlike:
        return None


def _seeded(lines: list[str], layers: Layers) -> list[str]:
    """``lines`` whose one tensor of seeds, if there is one, has those of all layers."""
    found = next((match for line in lines if "aten.randint" in line and (match := _SEEDS.search(line))), None)
    if found is None:
        return lines
    count = int(found[1]) + layers.missing * layers.seeds
    size, sizes = f"{found[2]} = empty_strided_cuda(({found[1]}, )", f"{found[2]} = empty_strided_cuda(({count}, )"
    return [line.replace(found[0], f"[{count}], out={found[2]})").replace(size, sizes) for line in lines]


def _saved(first: _Program, second: _Program, results: int) -> dict[str, str]:
    """What forward saves: by the name that backward has for it, the expression in forward."""
    layers = first.layers
    slots = dict(zip(second.arguments, first.returned[results:]))
    found: dict[str, str] = {}
    for name, expression in slots.items():
        if (parameters := layers.names.find(name)) is not None:  # under its own name
            found.update({full: full for full in parameters[0] if full in second.written})
        elif (chain := second.buffers.find(name)) is not None:
            expressions = [slots.get(member) for member in chain[0]]
            for place in range(len(expressions) + layers.missing):
                full = f"{chain[0][0]}_{place}"
                if full in second.written and full not in found and any(expressions):
                    found[full] = first.write_of_layer(expressions, place)
        else:
            found[name] = first.write_expression(expression)
    return found


def _gradients(first: _Program, second: _Program) -> list[str]:
    """Of each primal of the whole graph the expression of its gradient in backward."""
    layers = first.layers
    made = dict(zip(first.arguments, second.returned))
    found = []
    for name in layers.primals:
        chain = layers.names.find(name)
        found.append(second.write_expression(made[name]) if chain is None else second.write_of_layer(
            [made[member] for member in chain[0][:len(chain[0]) - layers.missing]], chain[1]))
    return found
