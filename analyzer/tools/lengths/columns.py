"""What a step asks of the allocator, in columns: births and deaths of storages, and workspaces between them."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.hardware.catalogue import simulating
from analyzer.memory.allocator import Block, CachingAllocator
from analyzer.memory.allocator_options import MIN_BLOCK_BYTES
from analyzer.memory.allocator_segment import Instruction, Opcode, Placements, hold
from analyzer.meta.operator_info import kernel_memory
from analyzer.meta.spec import Signature
from analyzer.record.log import Log
from analyzer.record.storage_lifetime import StorageLifetime

Numbers = npt.NDArray[np.int64]


class Workspace(NamedTuple):
    """Where a kernel holds blocks beside its results: so many births and deaths came before, in a call, and the how
    manieth of this call it is.
    """

    place: int
    call: int
    number: int


@dataclass(frozen=True)
class Columns:
    """Two steps, the first of which makes gradients and states. Storages are rows in the order in which the log has
    them. ``events`` are rows that are born or, as -1 - row, die; ``ends`` how many events there are up to the end of
    each step. ``blocks`` are bytes that each workspace asks for.
    """

    events: Numbers
    ends: tuple[int, int]
    nbytes: Numbers
    existing: tuple[int, ...]           #: rows of what is there before: parameters and buffers
    inputs: tuple[int, ...]             #: rows of the tensors that the model is given, born before all others
    workspaces: tuple[Workspace, ...]
    blocks: tuple[tuple[int, ...], ...]
    signatures: tuple[Signature, ...]   #: of all calls

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """What is alike of steps that differ in sizes alone."""
        operators = np.array([id(signature.op) for signature in self.signatures]).tobytes()
        return operators, self.events.tobytes(), self.ends, self.existing, self.inputs

    @cached_property
    def _requests(self) -> tuple[tuple[list[Opcode], Numbers], tuple[list[Opcode], Numbers]]:
        """What each event of both steps asks for, and the row that it is about."""
        rows = np.where(self.events < 0, -1 - self.events, self.events)
        opcodes = [Opcode.FREE if event < 0 else Opcode.ALLOCATE for event in self.events.tolist()]
        first = self.ends[0]
        return (opcodes[:first], rows[:first]), (opcodes[first:], rows[first:])

    @cached_property
    def carried(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rows of what each step leaves that dies in the next one: of the last one, what is left of it. Raises
        InputError where the steps leave different things.
        """
        first, last = self.ends
        born = [{row for row in part.tolist() if row >= 0} for part in (self.events[:first], self.events[first:last])]
        died = {-1 - row for row in self.events[first:last].tolist() if row < 0}
        older, left = sorted(born[0] & died), sorted(born[1] - died)
        if len(older) != len(left) or died - born[0] - born[1]:
            raise InputError("lengths: what a step leaves behind is not what the step before it left, so that an epoch "
                             "cannot be told")
        return tuple(older), tuple(left)

    def instructions(self, allocator: CachingAllocator, nbytes: Numbers, workspaces: Sequence[Workspace],
                     blocks: Sequence[tuple[int, ...]], step: int) -> list[Instruction]:
        """What the allocator is asked for in a step, with these sizes; a block's slot is the row of its storage."""
        opcodes, rows = self._requests[step]
        asked: list[Instruction] = list(zip(opcodes, rows.tolist(), round_all(allocator, nbytes)[rows].tolist(),
                                            nbytes[rows].tolist()))
        found: list[Instruction] = []
        begin, end, done = self.ends[0] * step, self.ends[step], 0
        for one, sizes in zip(workspaces, blocks):
            if sizes and (begin <= one.place < end or step == 1 and one.place == end):  # between steps: the second's
                found += asked[done:one.place - begin]
                found.append(hold(sizes, tuple(map(allocator.rounded_bytes, sizes))))
                done = one.place - begin
        return found + asked[done:]


def round_all(allocator: CachingAllocator, nbytes: Numbers) -> Numbers:
    """Sizes as the allocator rounds them."""
    if allocator.options.divisions_by_interval is None:
        return -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    sizes, inverse = np.unique(nbytes, return_inverse=True)
    found: Numbers = np.array([allocator.rounded_bytes(size) for size in sizes.tolist()], np.int64)[inverse]
    return found


def read_columns(log: Log, device: DeviceSpec) -> Columns:
    """The columns of a log of two steps that keeps the allocator's events. Raises InputError where it has none, and for
    what the columns do not tell: several devices or streams, cached memory given back by the step itself.
    """
    if log.others or log.streams or log.memory_at_start is None or log.journal is not None:
        raise InputError(f"lengths: {log.modules[0].type}: a step on several devices or streams, or on the host, "
                         "is not told at other lengths")
    last = max(record.end_event for record in log.phases)
    at_first_end = max(record.end_event for record in log.phases if record.step == 0)
    lives = _list_lives(log, last)
    existing = _find_existing(log, lives)
    born = {life.born: row for row, life in enumerate(lives) if row not in existing}
    died = {life.died: row for row, life in enumerate(lives) if life.died is not None and life.died <= last}
    others = {moment for life in log.storages.values() if life.device != log.device or not life.block_bytes
              for moment in (life.born, life.died)} | {lives[row].born for row in existing}
    events: list[int] = []
    gaps: list[int] = []  # how many events came before each workspace
    first_end = 0
    for moment in range(1, last + 1):
        if moment in born:
            events.append(born[moment])
        elif moment in died:
            events.append(-1 - died[moment])
        elif moment not in others:
            gaps.append(len(events))
        if moment == at_first_end:
            first_end = len(events)
    nbytes = np.array([life.nbytes for life in lives], np.int64)
    held = _read_workspaces(log, events, gaps)
    signatures = tuple(log.call_slots.signatures)
    with simulating(device):
        blocks = _ask_blocks(signatures, held)
    workspaces, numbers = [], dict[int, int]()
    for place, call, _ in held:
        numbers[call] = number = numbers.get(call, -1) + 1
        workspaces.append(Workspace(place, call, number))
    inputs = tuple([row for row in events[:len(lives)] if row >= 0 and lives[row].category == "input"])
    found = Columns(np.array(events, np.int64), (first_end, len(events)), nbytes, tuple(existing), inputs,
                    tuple(workspaces), tuple(blocks), signatures)
    _check(found, log)
    return found


def _list_lives(log: Log, last: int) -> list[StorageLifetime]:
    """The storages of the device that ever are, up to an event."""
    return sorted([life for life in log.storages.values() if life.device == log.device and life.block_bytes
                   and life.born <= last], key=lambda life: life.born)


def _find_existing(log: Log, lives: Sequence[StorageLifetime]) -> dict[int, Block]:
    """The rows of what is in memory before the first event, and their blocks in a copy of that memory."""
    assert log.memory_at_start is not None
    _, blocks = log.memory_at_start.copy()
    return {row: blocks.pop(life.address) for row, life in enumerate(lives) if life.address in blocks}


def _read_workspaces(log: Log, events: Sequence[int], gaps: Sequence[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Of each workspace how many events came before it, its call, and the sizes of the blocks that it was given."""
    found = []
    changes = [(action, nbytes, call) for action, _, nbytes, call in log.allocator_events[log.events_at_start:]
               if action in ("alloc", "free")]
    at = done = 0
    for place in gaps:
        at, done = at + place - done, place
        blocks = []
        while at < len(changes) and changes[at][0] == "alloc":
            blocks.append(changes[at][1])
            at += 1
        call = changes[at - 1][2]
        at += len(blocks)
        found.append((place, call, tuple(blocks)))
    return found


def _ask_blocks(signatures: Sequence[Signature], held: Sequence[tuple[int, int, tuple[int, ...]]]
                ) -> list[tuple[int, ...]]:
    """What each workspace asked for, as its kernel's rule tells; what it was given, where none tells."""
    left: dict[int, list[tuple[int, ...]]] = {}
    found = []
    for _, call, given in held:
        if call not in left:
            left[call] = list_held(signatures[call]) if call < len(signatures) else []
        asked = left[call].pop(0) if left[call] else ()
        fits = len(asked) == len(given) and all(a <= g for a, g in zip(asked, given))
        found.append(asked if fits else given)
    return found


def list_held(signature: Signature) -> list[tuple[int, ...]]:
    """The blocks of each workspace of a call, in order, on the device that is simulated."""
    stages = [stage for stage in kernel_memory(signature)[0] if not stage.kept and any(stage.blocks)]
    stages.sort(key=lambda stage: (stage.before is None, stage.before or 0))
    return [tuple([nbytes for nbytes in stage.blocks if nbytes]) for stage in stages]


def _check(columns: Columns, log: Log) -> None:
    """Raise InputError unless the columns, replayed, give every address of the log."""
    assert log.memory_at_start is not None
    allocator, blocks = log.memory_at_start.copy()
    slots: list[Any] = [None] * len(columns.nbytes)
    for row, block in _find_existing(log, _list_lives(log, max(record.end_event for record in log.phases))).items():
        slots[row] = allocator.place_of(blocks[block.address])
    placements = Placements(0)
    for step in range(2):
        allocator.replay(columns.instructions(allocator, columns.nbytes, columns.workspaces, columns.blocks, step),
                         slots, placements)
    there = [address for action, address, *_ in log.allocator_events[log.events_at_start:] if action == "alloc"]
    if placements.addresses != there[:len(placements.addresses)]:
        raise InputError(f"lengths: {log.modules[0].type}: its step does more with memory than its storages and "
                         "workspaces tell, so that other lengths cannot be told")
