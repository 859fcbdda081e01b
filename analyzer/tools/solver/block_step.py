"""A recorded step by blocks: what each saves, what its results cost, and what else is held while it runs backward."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from analyzer.hardware import DeviceSpec
from analyzer.meta.state import current
from analyzer.profilers.annotation import Annotation
from analyzer.profilers.kernel_time import is_view
from analyzer.profilers.latency import call_seconds
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log
from analyzer.record.process_group import communicates
from analyzer.record.storage_lifetime import StorageLifetime

from .block_copy import can_wait_on_host
from .call_memory import alive_bytes, watched, written
from .kept_result import digest_names, take_name

_CAST = "aten._to_copy.default"
_LEAST_BYTES = 2**20  # of a result that may wait on the host: less takes the host as long, and spares next to nothing


class BlockResult(NamedTuple):
    """A result that a block may keep in place of computing it again. ``name`` is as of `KeepResults`."""

    name: str
    bytes: int
    seconds: float
    can_wait: bool = True  #: on the host
    #: place among the results of the only one that is computed from it, where no gradient reads it: it need not be
    #: there where that one is kept; -1 where others need it
    reader: int = -1


@dataclass(frozen=True)
class BlockInfo:
    """What one block takes, in bytes and seconds of kernels on the device."""

    path: str
    inner_bytes: int              #: that it makes and saves where nothing runs again
    saved_input_bytes: int        #: that it saves then of what others made for it alone
    input_bytes: int              #: of all that others made for it alone: a checkpoint saves these
    input_can_wait: bool          #: on the host: nothing else reads it in the backward pass
    again_seconds: float          #: of running all of it again, up to where nothing more is saved
    results: tuple[BlockResult, ...]
    fwd_seconds: float
    bwd_seconds: float
    extra_bytes: int              #: most of what others hold while its backward pass runs, earlier blocks left out
    operators: int | None = None  #: `digest_names` of its results; None where they are not known

    @property
    def saved_bytes(self) -> int:
        return self.inner_bytes + self.saved_input_bytes

    @property
    def whole_bytes(self) -> int:
        """All of it that is there while its backward pass runs, whether it was kept or computed again."""
        return self.inner_bytes + max(self.input_bytes, self.saved_input_bytes)


@dataclass(frozen=True)
class BlockStep:
    """The blocks of a step in the order of their forward passes."""

    blocks: tuple[BlockInfo, ...]
    extra_bytes: int              #: most that is held elsewhere in the step besides what blocks save: at the loss
    checkpoint_seconds: float = 0.0  #: that a checkpoint around a block takes besides: the host's that is waited for


class _Note(NamedTuple):
    name: str
    first: int                    #: index of its first call in the log
    end: int
    can_wait: bool


class _Noting(TorchDispatchMode):
    """Notes which calls of the log each operator of a block is: what the contexts of a checkpoint will see."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met: Counter[str] = Counter()
        self.notes: list[_Note] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = current()
        recorder = None if state is None else state.recorder
        first = 0 if recorder is None else recorder.calls.count()
        result = func(*args, **(kwargs or {}))
        if recorder is not None:
            can_wait = isinstance(result, torch.Tensor) and can_wait_on_host(result)
            self.notes.append(_Note(take_name(func, self.met), first, recorder.calls.count(), can_wait))
        return result


class StepReader:
    """Notes the blocks at ``paths`` of a model while it is profiled, and reads the log then."""

    def __init__(self, device: DeviceSpec) -> None:
        self.paths: tuple[str, ...] = ()
        self.device = device
        self.notes: dict[str, list[_Note]] = {}
        self.step: BlockStep | None = None

    @contextmanager
    def noting(self, path: str) -> Iterator[None]:
        """The block's forward runs; the last of a run counts."""
        with (mode := _Noting()):
            yield
        self.notes[path] = mode.notes

    def __call__(self, log: Log) -> Annotation:
        """As one of the profilers of `analyzer.profile`."""
        with log.reading():
            self.step = _Reading(log, self).read()
        return Annotation()


class _Reading:
    def __init__(self, log: Log, reader: StepReader) -> None:
        self.log, self.reader, self.last = log, reader, log.steps - 1
        self.calls: Sequence[OpCall] = log.calls
        numbers = {path: i for i, path in enumerate(reader.paths)}
        #: the block of each module, -1 for none
        self.block_of = [next((numbers[p] for p in _prefixes(module.path) if p in numbers), -1)
                         for module in log.modules]
        in_last = [i for i, call in enumerate(self.calls) if call.step == self.last]
        self.forward = [i for i in in_last if self.calls[i].phase == "forward"]
        self.backward = [i for i in in_last if self.calls[i].phase == "backward"]
        self.begin = in_last[0]

    def read(self) -> BlockStep:
        owned, inputs, held_elsewhere = self._find_owners()
        inner, saved_inputs = Counter[int](), Counter[int]()
        for lifetime, owner, is_input in owned:
            (saved_inputs if is_input else inner)[owner] += lifetime.block_bytes
        total = len(self.calls)
        others = alive_bytes(watched(self.log), total) - alive_bytes([s for s, *_ in owned], total)
        spans: dict[int, tuple[int, int]] = {}
        for i in self.backward:
            if (block := self.block_of[self.calls[i].module]) >= 0:
                spans[block] = spans.get(block, (i, i))[0], i
        outside = np.ones(total, dtype=bool)
        outside[:self.begin] = False
        seconds = self._sum_seconds()
        called = {self.block_of[self.calls[i].module]: i for i in reversed(self.forward)}  # the first call of each
        blocks: list[BlockInfo] = []
        for b in sorted(range(len(self.reader.paths)), key=lambda b: called.get(b, self.forward[0])):
            path = self.reader.paths[b]
            first, end = spans.get(b, (total - 1, total - 1))
            outside[first:end + 1] = False
            extra = int(others[first:end + 1].max(initial=0))
            again, results = self._read_results(path)
            blocks.append(BlockInfo(path, inner[b], saved_inputs[b], inputs[b], b not in held_elsewhere, again, results,
                                    seconds["forward", b], seconds["backward", b], extra,
                                    digest_names(n.name for n in self.reader.notes[path])
                                    if path in self.reader.notes else None))
        return BlockStep(tuple(self._fill(blocks)), int(others[outside].max(initial=0)))

    def _find_owners(self) -> tuple[list[tuple[StorageLifetime, int, bool]], Counter[int], set[int]]:
        """The activations that are alive when the backward pass begins, with the block that each is saved for and
        whether it is its input; bytes of each block's inputs, saved or not; the blocks whose input another part of the
        step reads backward.

        What one block made and only the next reads is the next one's; what more of them read counts for none.
        """
        start = self.backward[0]
        readers: dict[int, set[int]] = defaultdict(set)
        backward_readers: dict[int, set[int]] = defaultdict(set)
        for found, indices in ((readers, self.forward), (backward_readers, self.backward)):
            for i in indices:
                for number in self.calls[i].inputs:
                    found[number].add(self.block_of[self.calls[i].module])
        owned: list[tuple[StorageLifetime, int, bool]] = []
        inputs: Counter[int] = Counter()
        held_elsewhere: set[int] = set()
        for lifetime in watched(self.log):
            if (lifetime.step != self.last or lifetime.phase != "forward" or lifetime.born_call > start
                    or lifetime.category not in ("", "cast copy")):
                continue
            is_saved = lifetime.died_call is None or lifetime.died_call > start
            maker = self.block_of[lifetime.module]
            others = readers[lifetime.number] - {maker}
            if not others and maker >= 0 and is_saved:
                owned.append((lifetime, maker, False))
            elif len(others) == 1 and (owner := min(others)) >= 0:
                inputs[owner] += lifetime.block_bytes
                if is_saved:
                    owned.append((lifetime, owner, True))
                if backward_readers[lifetime.number] - {owner}:
                    held_elsewhere.add(owner)
        return owned, inputs, held_elsewhere

    def _sum_seconds(self) -> dict[tuple[str, int], float]:
        """Of each pass of each block, by the names of passes and the numbers of blocks."""
        seconds: dict[tuple[str, int], float] = defaultdict(float)
        for i in (*self.forward, *self.backward):
            call = self.calls[i]
            # collectives run beside it, and take no time of its kernels
            if (block := self.block_of[call.module]) >= 0 and not communicates(call.signature):
                seconds[call.phase, block] += self._time([call])
        return seconds

    def _time(self, calls: Iterable[OpCall]) -> float:
        """Seconds of calls; what is not known counts for none."""
        return sum(call_seconds(call, self.reader.device) or 0.0 for call in calls)

    def _read_results(self, path: str) -> tuple[float, tuple[BlockResult, ...]]:
        """Seconds of running the block again, and the results that it may keep; none of a block that was not noted."""
        notes = self.reader.notes.get(path, [])
        if not notes:
            return 0.0, ()
        span = range(notes[0].first, notes[-1].end)
        saves: dict[int, set[int]] = defaultdict(set)
        step = self.calls[notes[0].first].step
        for call in self.calls[notes[-1].end:]:
            if call.phase == "backward" and call.step == step and call.forward is not None and call.forward in span:
                saves[call.forward].update(number for number in call.inputs
                                           if self.log.storages[number].born_call < notes[-1].end)
        seconds = [self._time(self.calls[n.first:n.end]) for n in notes]
        stop = max((i for i, n in enumerate(notes) if any(saves[k] for k in range(n.first, n.end))), default=-1)
        if stop < 0:
            return 0.0, ()
        made = {number for k in range(notes[stop].first, notes[stop].end) for number in self.calls[k].outputs
                if self.log.storages[number].born_call == k}
        executed = stop + any(made & saves[k] for k in range(notes[stop].first, notes[stop].end))
        casts = any(s.category == "cast copy" for s in watched(self.log) if s.born_call in span)
        readers, writers = self._find_users(notes[0].first, step)
        results: list[BlockResult] = []
        storages: list[list[int]] = []      # that each is in
        places: dict[int, int] = {}         # of results, by their calls
        for note, cost in zip(notes[:executed], seconds):
            fresh = {number: self.log.storages[number] for k in range(note.first, note.end)
                     for number in self.calls[k].outputs
                     if number in self.log.storages and self.log.storages[number].born_call == k}
            fresh = {n: s for n, s in fresh.items() if s.died_call is None or s.died_call >= note.end}
            # what autocast may find in its cache is another call when it runs again
            if not fresh or not cost or any(s.category for s in fresh.values()) or (
                    casts and note.name.startswith(_CAST)):
                continue
            later = {n: [k for k in writers[n] if k >= note.end] for n in fresh}
            if any(later[n] and later[n][-1] > min(readers[n], default=note.end) for n in fresh):
                continue  # what is left of it in the end is not what was read
            cost += self._time(self.calls[k] for k in set().union(*later.values()))
            nbytes = sum(s.block_bytes for s in fresh.values())
            places.update(dict.fromkeys(range(note.first, note.end), len(results)))
            storages.append([*fresh])
            results.append(BlockResult(note.name, nbytes, cost, note.can_wait and nbytes >= _LEAST_BYTES))
        needed = set().union(*saves.values())
        for i, numbers in enumerate(storages):
            only = readers[numbers[0]]
            if len(numbers) == 1 == len(only) and numbers[0] not in needed:
                results[i] = results[i]._replace(reader=places.get(only[0], -1))
        return sum(seconds[:executed]), tuple(results)

    def _find_users(self, first: int, step: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """The forward calls of a step from ``first`` on that read each storage, views left out, and that write it."""
        readers: dict[int, list[int]] = defaultdict(list)
        writers: dict[int, list[int]] = defaultdict(list)
        for k in range(first, len(self.calls)):
            call = self.calls[k]
            if call.step == step and call.phase == "forward" and not is_view(call):
                changed = written(call)
                for found, numbers in ((writers, changed), (readers, set(call.inputs) - set(changed))):
                    for number in numbers:
                        found[number].append(k)
        return readers, writers

    def _fill(self, blocks: list[BlockInfo]) -> Iterator[BlockInfo]:
        """Blocks that a replay stands for have the results of one that saves as much."""
        alike = {block.inner_bytes: block for block in blocks if block.results}
        for block in blocks:
            same = None if block.results else alike.get(block.inner_bytes)
            yield block if same is None else replace(block, results=same.results, again_seconds=same.again_seconds,
                                                          operators=same.operators)


def _prefixes(path: str) -> Iterator[str]:
    """The path and those of the modules around it, innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
