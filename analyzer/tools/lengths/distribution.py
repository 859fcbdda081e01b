"""Lengths of the samples of a data set: read from a file, from a column of a data set, or drawn."""
from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from analyzer.errors import InputError, MissingExtraError

Numbers = npt.NDArray[np.int64]

#: how lengths are written on the command line
GRAMMAR = "FILE (numbers a line), FILE.jsonl[:FIELD], datasets:PATH:COLUMN, or lognormal:mean=M,p99=P[,max=N,samples=N]"
DRAWN = 10_000  #: samples that are drawn of a distribution where it is not said how many
_SEED = 0  # the same lengths are drawn each time


@dataclass(frozen=True)
class Lengths:
    """Sizes of samples along the named dimensions in which they differ: ``sizes`` has a row a sample and a column a
    dimension. ``source`` says where from.

    >>> lengths = Lengths.read("lognormal:mean=210,p99=600,max=768,samples=1000")
    >>> lengths.dims, len(lengths), int(lengths.sizes.max()) <= 768
    (('sequence',), 1000, True)
    """

    dims: tuple[str, ...]
    sizes: Numbers
    source: str

    def __post_init__(self) -> None:
        if self.sizes.ndim != 2 or self.sizes.shape[1] != len(self.dims) or not len(self.sizes):
            raise InputError(f"{self.source}: must hold at least one sample, with {len(self.dims)} numbers each "
                             f"({', '.join(self.dims)})")
        if self.sizes.min() < 1:
            raise InputError(f"{self.source}: holds the length {self.sizes.min()}; lengths are 1 or more")

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of(cls, sizes: Any, dims: Sequence[str] = ("sequence",), source: str = "the lengths given") -> Lengths:
        """Those of numbers, or of rows of numbers, one a dimension. Raises InputError for what is neither."""
        found = np.asarray(sizes)
        if found.dtype.kind not in "iu":
            raise InputError(f"{source}: lengths are whole numbers, and these are of type {found.dtype}")
        return cls(tuple(dims), found.astype(np.int64).reshape(len(found), -1), source)

    @classmethod
    def read(cls, text: str, dims: Sequence[str] = ("sequence",)) -> Lengths:
        """What `GRAMMAR` says. Raises InputError for a file that cannot be read, and for what it holds."""
        kind, _, rest = text.partition(":")
        if kind == "lognormal":
            return cls(tuple(dims), _draw(text, rest, len(dims)), text)
        if kind == "datasets":
            return _read_data_set(text, rest, dims)
        path, _, fields = text.partition(".jsonl:")
        if fields or text.endswith((".jsonl", ".json")):
            return _read_records(text, Path(f"{path}.jsonl" if fields else text), fields, dims)
        return _read_numbers(text, Path(text), dims)

    def at_most(self, longest: int) -> Lengths:
        """The same, longer samples cut off; of several dimensions each."""
        return replace(self, sizes=np.minimum(self.sizes, longest))

    def describe(self) -> str:
        """Mean, 99th percentile and the longest, of each dimension."""
        said = []
        for name, sizes in zip(self.dims, self.sizes.T):
            p99 = int(np.percentile(sizes, 99))
            said.append(f"{name} {sizes.mean():,.0f} in the mean, {p99:,} at p99, {sizes.max():,} at most")
        return "; ".join(said)


def _draw(text: str, rest: str, dims: int) -> Numbers:
    """Samples of a log-normal distribution, each longer one than the maximum drawn as that: it has the mean and the
    99th percentile that are asked for before it is cut.
    """
    known = ("mean", "p99", "max", "samples")
    given: dict[str, float] = {}
    for word in rest.split(","):
        name, equals, value = word.partition("=")
        try:
            given[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or name not in known or not given[name] > 0:
            raise InputError(f"--lengths {text}: {word!r}: write NAME=NUMBER with a name of {', '.join(known)}")
    if "mean" not in given or "p99" not in given:
        raise InputError(f"--lengths {text}: give mean= and p99=, as in lognormal:mean=210,p99=600,max=768")
    if dims > 1:
        raise InputError(f"--lengths {text}: is of one dimension, and inputs name {dims}; give a file with a column "
                         "for each")
    # mean = exp(mu + s^2 / 2) and p99 = exp(mu + z s): s^2 / 2 - z s + log(p99 / mean) = 0, of which the smaller s
    z, ratio = NormalDist().inv_cdf(0.99), given["p99"] / given["mean"]
    room = z * z - 2 * math.log(ratio)
    if ratio < 1 or room < 0:
        raise InputError(f"--lengths {text}: no log-normal distribution has a p99 of {ratio:.3g} times its mean; it is "
                         f"1 to {math.exp(z * z / 2):.3g} times")
    sigma = z - math.sqrt(room)
    mu = math.log(given["mean"]) - sigma**2 / 2
    count = int(given.get("samples", DRAWN))
    drawn = np.exp(mu + sigma * np.random.default_rng(_SEED).standard_normal(count))
    return np.clip(np.rint(drawn), 1, int(given.get("max", 2**40))).astype(np.int64).reshape(-1, 1)


def _open(text: str, path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"--lengths {text}: cannot read {path}: {error.strerror}; write {GRAMMAR}") from error
    except ValueError as error:
        raise InputError(f"--lengths {text}: {path} is no text: {error}") from error


def _read_numbers(text: str, path: Path, dims: Sequence[str]) -> Lengths:
    rows = []
    for number, line in enumerate(_open(text, path).splitlines(), 1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if not all(word.isdecimal() for word in words) or len(words) != len(dims):
            raise InputError(f"--lengths {text}: line {number}: {line.strip()!r}: must be {len(dims)} whole "
                             f"number{'s' * (len(dims) > 1)} ({', '.join(dims)})")
        rows.append([int(word) for word in words])
    return Lengths(tuple(dims), np.array(rows, np.int64).reshape(-1, len(dims)), text)


def _read_records(text: str, path: Path, fields: str, dims: Sequence[str]) -> Lengths:
    names = fields.split(",") if fields else list(dims)
    if len(names) != len(dims):
        raise InputError(f"--lengths {text}: inputs name {len(dims)} dimensions ({', '.join(dims)}); give a field for "
                         "each")
    rows = []
    for number, line in enumerate(_open(text, path).splitlines(), 1):
        if not line.strip():
            continue
        place = f"--lengths {text}: line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{place}: is no JSON: {error}") from error
        rows.append([_length_in(record, name, place) for name in names])
    return Lengths(tuple(dims), np.array(rows, np.int64).reshape(-1, len(dims)), text)


def _length_in(record: Any, name: str, place: str) -> int:
    """A number as it is, the length of a list."""
    if not isinstance(record, Mapping) or name not in record:
        has = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
        raise InputError(f"{place}: has no field {name!r}, but {has}; name it, as in --lengths FILE.jsonl:FIELD")
    value = record[name]
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, list):
        return len(value)
    raise InputError(f"{place}: {name} is {value!r:.60}: must be a number, or a list whose length counts; of texts, "
                     "give how many tokens they have")


def _read_data_set(text: str, rest: str, dims: Sequence[str]) -> Lengths:
    try:
        import datasets  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtraError(f"--lengths {text}: datasets is not installed; pip install datasets, or give a file "
                                "with the lengths") from error
    path, _, columns = rest.rpartition(":")
    names = columns.split(",") if path else []
    if len(names) != len(dims):
        raise InputError(f"--lengths {text}: write datasets:PATH:COLUMN with a column for each of {', '.join(dims)}")
    try:
        found: Any = (datasets.load_from_disk(path) if Path(path).is_dir() else
                      datasets.Dataset.from_parquet(path) if path.endswith(".parquet") else
                      datasets.Dataset.from_json(path))
    except Exception as error:  # each format has errors of its own
        raise InputError(f"--lengths {text}: datasets cannot read {path}: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        found = found["train"] if "train" in found else next(iter(found.values()))
    place = f"--lengths {text}: a row"
    rows = [[_length_in(record, name, place) for name in names] for record in found]
    return Lengths(tuple(dims), np.array(rows, np.int64).reshape(-1, len(dims)), text)
