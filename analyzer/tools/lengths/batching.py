"""Batches of an epoch: which samples are in each, and the sizes to which they are padded."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from analyzer.errors import InputError

from .distribution import Lengths, Numbers

BATCHINGS = ("random", "grouped", "packed")
_NUMBERS = ("batch", "tokens", "longest")
#: how batches are made, as the command line says it
GRAMMAR = "random, grouped or packed, with batch=N samples, or tokens=N; longest=N cuts samples"
_PADDED = {"longest": "padded to the longest", "max": "padded to the longest of all", "none": "not padded"}
PADDINGS = tuple(_PADDED)
BATCH = "batch"  #: the dimension of samples
_SEED = 0  # batches are the same each time


class Cell(NamedTuple):
    """Sizes of the inputs of a step: how many rows, and the other dimensions in the order of their names."""

    rows: int
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Positions of all rows, padding counted."""
        found = self.rows
        for size in self.sizes:
            found *= size
        return found


@dataclass(frozen=True)
class Epoch:
    """The steps of an epoch in order: the cell of each, and how many positions of it are no padding. ``lengths`` and
    ``batching`` say in words what they come from.

    >>> Epoch.of([[300, 280], [12, 9]]).cells
    (Cell(rows=2, sizes=(300,)), Cell(rows=2, sizes=(12,)))
    """

    dims: tuple[str, ...]
    cells: tuple[Cell, ...]
    used: tuple[int, ...]
    samples: int
    lengths: str
    batching: str
    assumptions: tuple[str, ...] = ()

    @classmethod
    def of(cls, batches: Sequence[Sequence[int]], dim: str = "sequence", padding: str = "longest") -> Epoch:
        """Steps of a sampler of one's own: the lengths of the samples of each batch, padded to the longest, or with the
        padding ``"none"`` one after another in a row. Raises InputError for no batch, and an empty one.
        """
        if not len(batches) or not all(map(len, batches)):
            raise InputError(f"Epoch.of({list(batches)!r:.60}): give at least one batch, and no empty one")
        cells = [Cell(1, (sum(batch),)) if padding == "none" else Cell(len(batch), (max(batch),)) for batch in batches]
        lengths = Lengths.of([length for batch in batches for length in batch], (dim,))
        return cls((dim,), tuple(cells), tuple(map(sum, batches)), len(lengths), lengths.describe(),
                   f"batches as given, {_PADDED[padding]}")

    @property
    def padding_share(self) -> float:
        """Of all positions of the epoch, those that are padding."""
        whole = sum(cell.volume for cell in self.cells)
        return 1 - sum(self.used) / whole


@dataclass(frozen=True)
class Batching:
    """How batches are made of samples. ``order`` is ``"random"``; ``"grouped"`` by length, as transformers does;
    ``"packed"``: sequences are put one after another into rows of ``longest``. With ``tokens`` a batch has as many
    samples of about one length as it has room for. Batches are padded to their ``"longest"`` sample, to the ``"max"``
    of all, or not at all, ``"none"``: their samples are one row. Sizes are rounded up to a ``multiple``.

    >>> lengths = Lengths.of([3, 9, 4, 10, 5])
    >>> epoch = Batching(rows=2, order="grouped").divide(lengths)
    >>> epoch.cells
    (Cell(rows=2, sizes=(10,)), Cell(rows=2, sizes=(5,)))
    """

    rows: int
    order: str = "random"
    padding: str = "longest"
    tokens: int | None = None
    multiple: int = 1
    longest: int | None = None

    @classmethod
    def parse(cls, batching: str | None, padding: str | None, rows: int | None) -> Batching:
        """Of texts as `GRAMMAR` has them, and ``longest|max|none``, ``longest:8`` for multiples of 8; ``rows`` are
        those of a batch where it is not said. Raises InputError.
        """
        order, given = "random", dict[str, int]()
        for word in (batching or order).split(","):
            name, equals, value = word.partition("=")
            if name in _NUMBERS and value.isdecimal() and int(value):
                given[name] = int(value)
            elif name in BATCHINGS and not equals:
                order = name
            else:
                raise InputError(f"--batching {batching}: {word!r}: write {GRAMMAR}")
        kind, colon, multiple = (padding or PADDINGS[0]).partition(":")
        if kind not in PADDINGS or colon and not (multiple.isdecimal() and int(multiple)):
            raise InputError(f"--padding {padding}: not one of {', '.join(PADDINGS)}, longest:N for multiples of N")
        rows = given.get("batch", rows)
        if rows is None:
            raise InputError("the inputs do not say how many samples a batch has; give --batching batch=N")
        return cls(rows, "tokens" if "tokens" in given else order, kind, given.get("tokens"),
                   int(multiple) if colon else 1, given.get("longest"))

    def describe(self) -> str:
        """In words."""
        size = f"batches of up to {self.tokens:,} positions" if self.tokens else f"batches of {self.rows}"
        order = {"random": ", in random order", "grouped": ", grouped by length", "packed": ", packed"}
        several = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"{size}{order.get(self.order, '')}, {_PADDED[self.padding]}{several}"

    @property
    def is_padded(self) -> bool:
        """Whether rows of a batch may be of different lengths."""
        return self.padding == "longest" and self.order != "packed" and (self.rows > 1 or self.tokens is not None)

    def divide(self, lengths: Lengths) -> Epoch:
        """The steps of one epoch. The last batch, where it would be smaller than the others, is left out. Raises
        InputError where no batch is full, and for packing along several dimensions.
        """
        lengths = lengths if self.longest is None else lengths.at_most(self.longest)
        if (self.order == "packed" or self.padding == "none") and len(lengths.dims) > 1:
            raise InputError(f"samples with {len(lengths.dims)} dimensions ({', '.join(lengths.dims)}) cannot be put "
                             "one after another; take --padding longest and another --batching")
        if self.order == "packed":
            return self._pack(lengths)
        rng = np.random.default_rng(_SEED)
        order = rng.permutation(len(lengths))
        if self.order == "tokens":
            batches = self._fill(lengths, rng)
        else:
            if self.order == "grouped":
                order = _group(lengths.sizes.prod(axis=1), order, self.rows)
            batches = [order[i:i + self.rows] for i in range(0, len(order) - self.rows + 1, self.rows)]
        if not batches:
            raise InputError(f"{lengths.source}: has {len(lengths)} samples, fewer than a batch of {self.rows}")
        cells, used = [], []
        largest = self._round(lengths.sizes.max(axis=0))
        for batch in batches:
            own = lengths.sizes[batch]
            positions = int(own.prod(axis=1).sum())
            used.append(positions)
            if self.padding == "none":
                cells.append(Cell(1, (int(self._round(np.array([positions]))[0]),)))
            else:
                sizes = largest if self.padding == "max" else self._round(own.max(axis=0))
                cells.append(Cell(len(batch), tuple(map(int, sizes))))
        left = len(lengths) - sum(map(len, batches))
        return Epoch(lengths.dims, tuple(cells), tuple(used), len(lengths), lengths.describe(), self.describe(), (
            f"the last {left} samples, which do not fill a batch, are left out",) if left else ())

    def _round(self, sizes: Numbers) -> Numbers:
        return -(-sizes // self.multiple) * self.multiple

    def _pack(self, lengths: Lengths) -> Epoch:
        """Best fit, the longest first: each sequence goes into the fullest row that has room for it (TRL 1.16,
        data_utils.py, `_pack_bfd`).
        """
        longest = int(lengths.sizes.max()) if self.longest is None else self.longest
        count = np.zeros(longest + 1, np.int64)  # of rows, by the room that is left
        for size in np.sort(lengths.sizes[:, 0])[::-1].tolist():
            open_rows = np.nonzero(count[size:])[0]
            room = size + int(open_rows[0]) if len(open_rows) else longest
            count[room] -= bool(len(open_rows))
            count[room - size] += 1
        rows = int(count.sum())
        steps = rows // self.rows
        if not steps:
            raise InputError(f"{lengths.source}: fills {rows} rows of {longest:,}, fewer than a batch of {self.rows}")
        cell = Cell(1, (longest * self.rows,)) if self.padding == "none" else Cell(self.rows, (longest,))
        used = int(lengths.sizes.sum() * steps * self.rows / rows) // steps
        mean = lengths.sizes.sum() / rows
        return Epoch(lengths.dims, (cell,) * steps, (used,) * steps, len(lengths), lengths.describe(), self.describe(),
                     (f"samples are packed into rows of {longest:,}, which hold {mean:,.0f} in the mean",))

    def _fill(self, lengths: Lengths, rng: np.random.Generator) -> list[Numbers]:
        """Samples by length into batches of at most so many positions, in random order (fairseq 0.12, data/
        data_utils_fast.pyx, `batch_by_size_vec`).
        """
        assert self.tokens is not None
        volume = lengths.sizes.prod(axis=1)
        if volume.max() > self.tokens:
            raise InputError(f"--batching tokens={self.tokens}: the longest sample has {volume.max():,}; give at "
                             "least so many, or cut samples with longest=N")
        batches: list[list[int]] = [[]]
        most = np.zeros(len(lengths.dims), np.int64)
        whole = 0
        for index in np.argsort(volume, kind="stable").tolist():
            grown = np.maximum(most, lengths.sizes[index])
            size = whole + int(volume[index]) if self.padding == "none" else int(
                self._round(grown).prod()) * (len(batches[-1]) + 1)
            if batches[-1] and size > self.tokens:
                batches.append([])
                grown, whole = lengths.sizes[index], 0
            most, whole = grown, whole + int(volume[index])
            batches[-1].append(index)
        return [np.array(batches[i]) for i in rng.permutation(len(batches))]


def _group(volume: Numbers, order: Numbers, rows: int) -> Numbers:
    """Samples of about one length together: within groups of 50 batches, or of a quarter of all, by length, the longest
    sample of all in the first batch (transformers 5.17, trainer_pt_utils.py, `get_length_grouped_indices`).
    """
    several = max(1, min(len(order) // (rows * 4), 50)) * rows
    groups = [part[np.argsort(-volume[part], kind="stable")] for part in
              [order[i:i + several] for i in range(0, len(order), several)]]
    first = int(np.argmax([volume[group[0]] for group in groups]))
    groups[0][0], groups[first][0] = groups[first][0], groups[0][0]
    return np.concatenate(groups)
