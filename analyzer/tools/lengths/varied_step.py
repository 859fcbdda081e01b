"""A step at any sizes of its inputs: profiled at a few, the columns of the others follow as exact functions."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from analyzer.hardware import DeviceSpec
from analyzer.hardware.catalogue import simulating
from analyzer.profilers.annotation import Annotation
from analyzer.profilers.latency import make_latency_profiler
from analyzer.record.log import Log
from analyzer.record.progress import progress_part

from .batching import Cell
from .columns import Columns, Numbers, Workspace, list_held
from .signature_function import SignatureFunctions
from .size_function import Function, fit_with_derived

#: Profiles of steps with the same calls, from which functions follow: three factors of each, two points that check.
PROFILES = 5
_MOST_PROFILES = 32  # where calls change again and again with the length, cells are taken at the next larger one
_TIMED = 24  # cells whose calls are timed by their shapes
_MULTIPLES = (8, 64, 16, 2, 4, 32, 128)  # by which kernels are chosen: attention's alignment, tiles


class StepTime(NamedTuple):
    """Seconds of a step, and their range."""

    seconds: float
    low: float
    high: float


def read_time(found: Annotation) -> StepTime | None:
    """What a profiler of seconds says of the last step; None where it is not known."""
    seconds = found.totals.get("step_seconds")
    if seconds is None:
        return None
    low, high = (seconds, seconds) if found.find_step_range is None else found.find_step_range()
    return StepTime(seconds, low, high)


@dataclass
class ProbedStep:
    """A profiled step: its columns and its log, which is kept of one of each kind."""

    cell: Cell
    columns: Columns
    profile: Any
    log: Log | None = None

    @property
    def point(self) -> tuple[int, ...]:
        return (self.cell.rows, *self.cell.sizes)


@dataclass
class CellColumns:
    """The columns of a step at a cell."""

    columns: Columns                     #: of a profiled step with the same calls
    nbytes: Numbers
    workspaces: tuple[Workspace, ...]
    blocks: tuple[tuple[int, ...], ...]


class Regime:
    """Cells at which a step makes the same calls: its columns there are functions of sizes, checked at each probe."""

    def __init__(self, probes: Sequence[ProbedStep], device: DeviceSpec) -> None:
        self.probes, self.device = list(probes), device
        for probe in [probe for probe in probes if probe.log is not None][1:]:
            probe.log = None
        self.points = np.array([probe.point for probe in probes], np.int64)
        derived = self._list_derived()
        self.sizes: Function
        self.sizes, self.is_exact = fit_with_derived(
            self.points, np.stack([probe.columns.nbytes for probe in probes], axis=1), derived)
        places = sorted({one for probe in probes for one in probe.columns.workspaces})
        self.workspaces = tuple(places)
        given = [dict(zip(probe.columns.workspaces, probe.columns.blocks)) for probe in probes]
        self._given = [[blocks.get(one, ()) for blocks in given] for one in places]
        alike = list(zip(*(probe.columns.signatures for probe in probes)))  # of each call
        kinds = {alike[one.call]: None for one in places if one.call < len(alike)}
        self._holding = SignatureFunctions(self.points, list(kinds), derived)
        number_of = {kind: number for number, kind in enumerate(kinds)}
        #: of each workspace the number of its signature; -1 where it is of no call
        self._kind = [number_of[alike[one.call]] if one.call < len(alike) else -1 for one in places]
        self._alike, self._derived = alike, derived
        #: whether what each workspace asks for follows from its kernel's rule, at each probe
        with simulating(device):
            self._is_ruled = [kind >= 0 and self._holding.is_exact[kind] and self._follows(one, blocks)
                              for kind, one, blocks in zip(self._kind, places, self._given)]

    def _list_derived(self) -> Numbers:
        """Sizes of results that differ between probes: an array (sizes, probes)."""
        alike = set(zip(*(probe.columns.signatures for probe in self.probes)))
        found = {sizes for each in alike for specs in zip(*(signature.outputs for signature in each))
                 if len({len(spec) for spec in specs}) == 1 for sizes in zip(*specs) if len(set(sizes)) > 1}
        return np.array(sorted(found), np.int64).reshape(len(found), len(self.probes))

    def _follows(self, one: Workspace, blocks: Sequence[tuple[int, ...]]) -> bool:
        return list(blocks) == [
            _nth(list_held(probe.columns.signatures[one.call]), one.number) for probe in self.probes]

    def at(self, cell: Cell) -> CellColumns:
        point = (cell.rows, *cell.sizes)
        known = next((probe for probe in self.probes if probe.cell == cell), None)
        if known is not None:
            own = known.columns
            return CellColumns(own, own.nbytes, own.workspaces, own.blocks)
        with simulating(self.device):
            asked = [list_held(signature) for signature in self._holding.at(point)]
        blocks = tuple([self._blocks(i, one, asked) for i, one in enumerate(self.workspaces)])
        return CellColumns(self.probes[0].columns, self.sizes(point), self.workspaces, blocks)

    def _blocks(self, index: int, one: Workspace, asked: Sequence[list[tuple[int, ...]]]) -> tuple[int, ...]:
        if self._is_ruled[index]:
            return _nth(asked[self._kind[index]], one.number)
        given = self._given[index]
        return given[0] if all(blocks == given[0] for blocks in given) else max(given, key=sum)

    def time(self, cell: Cell) -> StepTime | None:
        """Seconds of a step at a cell, of kernels of the shapes there; None where these do not follow."""
        calls = self._calls
        source = next((probe.log for probe in self.probes if probe.log is not None), None)
        if source is None or not all(calls.is_exact):
            return None
        signatures = calls.at((cell.rows, *cell.sizes))
        log = source.with_signatures([signatures[number] for number in self._call_numbers])
        return read_time(make_latency_profiler(self.device)(log))

    @cached_property
    def _call_numbers(self) -> list[int]:
        numbers: dict[Any, int] = {}
        return [numbers.setdefault(kind, len(numbers)) for kind in self._alike]

    @cached_property
    def _calls(self) -> SignatureFunctions:
        return SignatureFunctions(self.points, list(dict.fromkeys(self._alike)), self._derived)

    @property
    def inexact_bytes(self) -> int:
        """Of storages whose sizes are no function that was found, at the largest probe."""
        largest = max(self.probes, key=lambda probe: probe.cell.volume)
        return int(largest.columns.nbytes[~self.is_exact].sum())

    def agrees(self, probe: ProbedStep) -> bool:
        """Whether a further profile has the sizes and workspaces that follow from the others."""
        found = self.at(probe.cell)
        asked = {one: blocks for one, blocks in zip(found.workspaces, found.blocks) if blocks}
        own = {one: blocks for one, blocks in zip(probe.columns.workspaces, probe.columns.blocks) if blocks}
        return bool((found.nbytes == probe.columns.nbytes).all()) and asked == own


def _nth(held: Sequence[tuple[int, ...]], number: int) -> tuple[int, ...]:
    return held[number] if number < len(held) else ()


class Feature(NamedTuple):
    """What tells cells apart: whether a measure of theirs is a multiple, or above ``low``, where ``high`` is the next
    one that was profiled.
    """

    says: str
    measure: Callable[[Cell], int]
    multiple: int = 1
    low: int = -1
    high: int = 0

    def __call__(self, cell: Cell) -> bool:
        size = self.measure(cell)
        return size % self.multiple == 0 and size > self.low

    def is_open(self, cell: Cell) -> bool:
        """Whether it is not known on which side a cell is."""
        return self.multiple == 1 and self.low < self.measure(cell) < self.high


@dataclass
class Branch:
    """Where cells are told apart by which calls their steps make: a feature and both sides, or a structure."""

    structure: Any
    feature: Feature | None = None
    yes: Branch | None = None
    no: Branch | None = None

    def find(self, cell: Cell) -> Any:
        if self.feature is None:
            return self.structure
        side = self.yes if self.feature(cell) else self.no
        assert side is not None
        return side.find(cell)

    def is_open(self, cell: Cell) -> bool:
        """Whether a cell lies between two that were profiled, which are apart."""
        if self.feature is None:
            return False
        side = self.yes if self.feature(cell) else self.no
        assert side is not None
        return self.feature.is_open(cell) or side.is_open(cell)

    def rules(self) -> Iterator[str]:
        if self.feature is not None:
            yield self.feature.says
        for side in (self.yes, self.no):
            yield from () if side is None else side.rules()


class VariedStep:
    """A step at each of ``cells``, of which ``run`` profiles as few as tell the others. ``dims`` name the sizes."""

    def __init__(self, run: Callable[[Cell], ProbedStep], cells: Collection[Cell], dims: Sequence[str],
                 device: DeviceSpec) -> None:
        self.dims, self.device = tuple(dims), device
        self.cells = sorted(set(cells), key=lambda cell: (cell.volume, cell))
        self._run = run
        self.probes: dict[Cell, ProbedStep] = {}
        self.checked: list[Cell] = []  #: profiled, and found as foretold
        self._explore()

    # ---- which steps are profiled

    def _explore(self) -> None:
        for cell in self._list_first():
            self._profile(cell)
        while True:
            self._divide()
            wanted = self._find_wanted()
            if wanted is None or len(self.probes) >= _MOST_PROFILES:
                break
            self._check(wanted)

    def _list_first(self) -> list[Cell]:
        """The smallest and the largest cell, some between, and some whose sizes are multiples."""
        count = len(self.cells)
        chosen = [self.cells[round(share * (count - 1))] for share in (0, 1, 0.5, 0.25, 0.75)]
        for multiple in _MULTIPLES[:2]:
            for remainder in (True, False):
                found = [cell for cell in self.cells if all(size % multiple == 0 for size in cell.sizes) == remainder]
                chosen += found[-1:]
        return list(dict.fromkeys(chosen))

    def _profile(self, cell: Cell) -> ProbedStep:
        if cell not in self.probes:
            done = len(self.probes)
            with progress_part(1 - 0.9**done, 1 - 0.9**(done + 1), f"profiling {self.describe(cell)}"):
                self.probes[cell] = self._run(cell)
        return self.probes[cell]

    def describe(self, cell: Cell) -> str:
        sizes = ", ".join(f"{name} {size:,}" for name, size in zip(self.dims, cell.sizes))
        return f"{cell.rows} x {sizes}"

    def _divide(self) -> None:
        """Tell cells apart by the calls that profiled ones make, and fit the functions of each kind."""
        self.tree = _grow([(cell, probe.columns.structure) for cell, probe in self.probes.items()], self._features())
        self.regimes = {}
        for structure in {probe.columns.structure for probe in self.probes.values()}:
            alike = [probe for probe in self.probes.values() if probe.columns.structure == structure]
            self.regimes[structure] = Regime(sorted(alike, key=lambda probe: probe.point), self.device)

    def _features(self) -> list[Feature]:
        sizes = [(name, _size_of(at)) for at, name in enumerate(self.dims)]
        found = [Feature(f"{name} is a multiple of {multiple}", measure, multiple)
                 for name, measure in sizes for multiple in _MULTIPLES]
        for name, measure in [*sizes, ("positions", _volume), ("rows", _rows)]:
            known = sorted({measure(cell) for cell in self.probes})
            found += [Feature(f"{name} > {low:,}", measure, 1, low, high) for low, high in zip(known, known[1:])]
        return found

    def _find_wanted(self) -> Cell | None:
        """The cell whose profile tells most: of a kind that has too few, or one that checks its functions; None where
        all is told.
        """
        if between := [cell for cell in self.cells if cell not in self.probes and self.tree.is_open(cell)]:
            return between[len(between) // 2]
        by_structure: dict[Any, list[Cell]] = {}
        for cell in self.cells:
            by_structure.setdefault(self.tree.find(cell), []).append(cell)
        for structure, cells in sorted(by_structure.items(), key=lambda item: len(self.regimes[item[0]].probes)):
            left = [cell for cell in cells if cell not in self.probes]
            regime = self.regimes[structure]
            count = len(regime.probes)
            is_checked = any(self.tree.find(cell) == structure for cell in self.checked)
            if left and (count < PROFILES or count < 2 * PROFILES and not (is_checked and regime.is_exact.all())):
                return _farthest(left, [probe.cell for probe in regime.probes])
        return None

    # ---- what follows

    def confirm(self, cell: Cell) -> bool:
        """Whether a profile at a further cell has the memory that follows from the others; it is one of them then."""
        if cell in self.probes or self._check(cell):
            return True
        self._divide()
        return False

    def _check(self, cell: Cell) -> bool:
        """Profile a cell; whether its step is as the others foretell."""
        probe, regime = self._profile(cell), self.regimes[self.tree.find(cell)]
        agrees = probe.columns.structure == regime.probes[0].columns.structure and regime.agrees(probe)
        if agrees:
            self.checked.append(cell)
        return agrees

    def at(self, cell: Cell) -> CellColumns:
        probe = self.probes.get(cell)
        structure = self.tree.find(cell) if probe is None else probe.columns.structure
        return self.regimes[structure].at(cell)

    @property
    def assumptions(self) -> list[str]:
        found = []
        inexact = max((regime.inexact_bytes for regime in self.regimes.values()), default=0)
        if inexact:
            found.append(f"storages of {inexact:,} bytes at the longest are no function of the sizes that was found: "
                         "they are taken as large as at the next longer profiled step")
        unchecked = [structure for structure in self.regimes
                     if not any(self.tree.find(cell) == structure for cell in self.checked)
                     and any(self.tree.find(cell) == structure for cell in self.cells if cell not in self.probes)]
        if unchecked:
            found.append(f"of {len(self.regimes)} kinds of steps {len(unchecked)} could not be checked at a further "
                         "length")
        return found

    def time_all(self, cells: Sequence[Cell]) -> list[StepTime | None]:
        """Seconds of steps: of some over the range of sizes by the shapes of their calls, of the others between these,
        in proportion to positions.
        """
        different = sorted(set(cells), key=lambda cell: cell.volume)
        some = [different[round(i * (len(different) - 1) / (_TIMED - 1))] for i in range(_TIMED)]
        known: dict[int, StepTime] = {}
        for cell in dict.fromkeys(some):
            found = self.regimes[self.tree.find(cell)].time(cell) if cell not in self.probes else None
            if found is not None:
                known[cell.volume] = found
        for probe in self.probes.values():
            if (seconds := probe.profile.step_seconds) is not None:
                known[probe.cell.volume] = StepTime(seconds, *(probe.profile.step_seconds_range or (seconds, seconds)))
        if not known:
            return [None] * len(cells)
        volumes, times = zip(*sorted(known.items()))
        columns = [np.interp([cell.volume for cell in cells], volumes, figures) for figures in zip(*times)]
        return [StepTime(*map(float, row)) for row in zip(*columns)]


def _size_of(at: int) -> Callable[[Cell], int]:
    return lambda cell: cell.sizes[at]


def _volume(cell: Cell) -> int:
    return cell.volume


def _rows(cell: Cell) -> int:
    return cell.rows


def _farthest(cells: Iterable[Cell], profiled: Sequence[Cell]) -> Cell:
    """The cell that is farthest from all that were profiled."""
    return max(cells, key=lambda cell: (min((abs(cell.volume - other.volume) for other in profiled), default=0), cell))


def _grow(seen: Sequence[tuple[Cell, Any]], features: Sequence[Feature]) -> Branch:
    """A tree that tells the structures of the cells that were seen, by the features that leave least mixed."""
    structures = {structure for _, structure in seen}
    best: tuple[int, int] | None = None
    for at, feature in enumerate(features if len(structures) > 1 else ()):
        sides = [{structure for cell, structure in seen if feature(cell) == side} for side in (True, False)]
        if all(sides):
            mixed = sum(len(side) - 1 for side in sides), at
            best = mixed if best is None or mixed < best else best
    if best is None:
        return Branch(seen[0][1])
    chosen = features[best[1]]
    yes, no = ([pair for pair in seen if chosen(pair[0]) == side] for side in (True, False))
    return Branch(None, chosen, _grow(yes, features), _grow(no, features))
