"""Lets the simulated allocator take all events of a finished log in one pass: addresses, phases, peaks, its own events.

The device's capacity is a rule of this pass: where PyTorch would give cached blocks back and try again, the allocator
does; where memory runs out it raises DeviceOutOfMemoryError.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from analyzer.memory.allocator import CachingAllocator
from analyzer.memory.allocator_segment import Opcode, Placements, hold
from analyzer.memory.host_memory import HostMemory, HostRegion
from analyzer.meta.address_space import check_address
from analyzer.meta.state import StreamAction, StreamMark
from analyzer.record.device_log import PhaseRecord
from analyzer.record.log import Log
from analyzer.record.recorder import Recorder
from analyzer.record.storage_lifetime import ADDRESS, BEGAN, BLOCK_BYTES, BORN, DEVICE, DIED, ENDED, HELD, NBYTES

from .short_run import KEPT, ORDERED, STEP

Numbers = npt.NDArray[np.int64]
_NO_REQUEST, _HELD = 9, 4  # beside births (0) and deaths (1), which are 2 more where they are on another device


class Before(NamedTuple):
    """The memory and the log before the first step."""

    memory: CachingAllocator | HostMemory  #: that is watched
    host: HostMemory
    blocks: Mapping[int, Any]  #: address -> block, of what is in the memory
    events: int
    peak_bytes: int
    peak_event: int
    allocator_events: int
    stream: int  #: the current one
    stream_marks: list[StreamMark]

    @classmethod
    def of(cls, recorder: Recorder) -> Before:
        log, memory, space = recorder.log, recorder.memory.allocator, recorder.memory.space
        blocks = {} if isinstance(memory, CachingAllocator) else {
            life.address: HostRegion(life.address, life.block_bytes) for life in log.storages.values()}
        return cls(memory, space.host, blocks, log.events, log.peak_bytes, log.peak_event, len(log.allocator_events),
                   space.stream, list(log.streams.marks)).copy()

    def copy(self, capacity_bytes: int | None = None) -> Before:
        """The same for another pass, which changes it; an allocator has that capacity, where one is given."""
        host = self.host.copy()
        if not isinstance(self.memory, CachingAllocator):
            host.begin_lap()
            return self._replace(memory=host, host=host)
        memory, blocks = self.memory.copy(is_limited=True)
        if capacity_bytes is not None:
            memory.capacity_bytes = capacity_bytes
        memory.begin_lap()
        return self._replace(memory=memory, host=host, blocks=blocks)

    def takes_capacity(self) -> bool:
        """Whether a capacity does nothing before memory runs short: it is the range of expandable segments too."""
        return isinstance(self.memory, CachingAllocator) and not self.memory.options.expandable_segments


class Events(NamedTuple):
    """The events of a log in columns. ``rows`` are the lifetimes that births, deaths and kept workspaces are about (-1:
    none), ``numbers`` and ``calls`` how many events and calls there were up to each; ``what`` of phases, steps and held
    workspaces is an index of ``payloads``.
    """

    kinds: Numbers
    what: Numbers
    rows: Numbers
    numbers: Numbers
    calls: Numbers
    payloads: list[Any]

    def payload(self, at: int) -> Any:
        return self.payloads[self.what[at]]

    def places(self, *kinds: int) -> list[int]:
        found: list[int] = np.nonzero(self.are(*kinds))[0].tolist()
        return found

    def are(self, *kinds: int) -> npt.NDArray[np.bool_]:
        """Whether each is of one of some kinds; for two or three this takes less than `numpy.isin`."""
        found: npt.NDArray[np.bool_] = np.logical_or.reduce([self.kinds == kind for kind in kinds])
        return found


def place_events(events: Events, lives: Numbers, first: int, before: Before, source: Log, log: Log) -> None:
    """Place all storages of ``log``, whose ``lives`` get their addresses; those before row ``first`` may be there
    already. ``source`` is the log of the short run. Raises DeviceOutOfMemoryError, and InputError where no addresses
    are left.
    """
    _Placing(events, lives, first, before, source, log).run()


class _Placing:
    def __init__(self, events: Events, lives: Numbers, first: int, before: Before, source: Log, log: Log) -> None:
        self.events, self.lives, self.before, self.source, self.log = events, lives, before, source, log
        self.memory = before.memory
        self.watched = source.lifetime_table.code_of[source.device]
        self.is_here = (lives[:, DEVICE] == self.watched) & (lives[:, NBYTES] > 0)
        sizes, inverse = np.unique(lives[:, NBYTES], return_inverse=True)
        self.rounded = np.array([self.memory.rounded_bytes(n) for n in sizes.tolist()], np.int64)[inverse]
        self.slots: list[Any] = [None] * len(lives)
        for row in np.nonzero(self.is_here[:first])[0].tolist():
            block = before.blocks.get(int(lives[row, ADDRESS]))
            if block is not None:
                self.slots[row] = self.memory.place_of(block)
        self.placements = Placements(before.peak_bytes)
        self.ends: list[tuple[PhaseRecord, int]] = []

    def run(self) -> None:
        log, before = self.log, self.before
        log.peak_bytes, log.peak_event, log.peak_workspace_bytes = before.peak_bytes, before.peak_event, 0
        log.events = int(self.events.numbers[-1]) if len(self.events.numbers) else before.events
        self._place()
        blocks = self._count_blocks()
        given = self._write_lives(blocks)
        log.keeps_allocator_events = self.source.keeps_allocator_events
        if log.keeps_allocator_events:
            self._write_allocator_events(blocks, given)

    # ---- the pass

    def _place(self) -> None:
        events, log, memory = self.events, self.log, self.memory
        instructions, asked = self._list_instructions()
        done = 0
        step, at, stream = 0, 0, self.before.stream
        switches = self._write_requests()
        for mark in (*sorted([*events.places(BEGAN, ENDED, STEP), *switches]), len(events.kinds)):
            if mark > at:
                self.placements.top_at = -1
                stop = int(np.searchsorted(asked, mark))
                memory.replay(islice(instructions, stop - done), self.slots, self.placements, self._place_elsewhere,
                              stream)
                done = stop
                if self.placements.top_at >= 0:
                    log.peak_bytes = self.placements.top_bytes
                    log.peak_workspace_bytes = self.placements.top_workspace_bytes
                    log.peak_event = int(events.numbers[at - 1] if at else self.before.events) + (
                        self.placements.top_at + 1)
            at = mark + 1
            if mark == len(events.kinds):
                break
            if events.kinds[mark] == STEP:
                step = events.payload(mark)
            elif mark in switches:
                stream = switches[mark]
            elif events.kinds[mark] == BEGAN:
                for each in (memory, self.before.host):
                    each.begin_lap()
                log.phases.append(PhaseRecord(step, events.payload(mark), int(events.calls[mark]), last_call=-1))
            else:
                self._end_phase(log.phases[-1], mark)

    def _write_requests(self) -> dict[int, int]:
        """Write what was asked of streams; the result are the events after which another is the current one."""
        events, streams = self.events, self.log.streams
        for request in self.before.stream_marks:
            streams.write(*request)
        switches: dict[int, int] = {}
        for at in events.places(ORDERED):
            action, stream, event = events.payload(at)
            streams.write(int(events.calls[at]), action, stream, event)
            if action is StreamAction.SWITCH:
                switches[at] = stream
        return switches

    def _list_instructions(self) -> tuple[Iterator[Any], Numbers]:
        """What the allocator is asked for, in turn, and by which events."""
        events, lives = self.events, self.lives
        codes = np.full(len(events.kinds), _NO_REQUEST, np.int8)
        codes[events.rows >= 0] = 0
        codes[events.kinds == DIED] = 1
        codes[(events.rows >= 0) & ~self.is_here[events.rows]] += 2
        codes[events.kinds == HELD] = _HELD
        asked = np.nonzero(codes != _NO_REQUEST)[0]
        codes, rows = codes[asked], events.rows[asked]
        opcodes = np.array([Opcode.ALLOCATE, Opcode.FREE, None, None, None])[codes]
        # in columns: a tuple for each would be an object more for the garbage collector
        columns: list[list[Any]] = [opcodes.tolist(), rows.tolist(), self.rounded[rows].tolist(),
                                    lives[rows, NBYTES].tolist()]
        names = self.source.lifetime_table.code_of.keys_at
        for i in np.nonzero(codes > 1)[0].tolist():
            if codes[i] == _HELD:
                instruction = self._hold(*events.payload(asked[i]))
            else:
                row = int(rows[i])
                claim = torch.device(names[int(lives[row, DEVICE])])
                instruction = (Opcode.ALLOCATE_ELSEWHERE, row, claim, int(lives[row, NBYTES])) if codes[i] == 2 else (
                    Opcode.FREE_ELSEWHERE, row, claim, None)
            for column, value in zip(columns, instruction):
                column[i] = value
        return zip(*columns), asked

    def _hold(self, claim: torch.device, blocks: tuple[int, ...]) -> Any:
        if str(claim) != self.source.device:
            return Opcode.HOLD_ELSEWHERE, -1, claim, blocks
        return hold(blocks, tuple(map(self.memory.rounded_bytes, blocks)))

    def _place_elsewhere(self, opcode: Opcode, slot: int, claim: torch.device, nbytes: Any) -> None:
        memory: Any = self.before.host if claim.type in ("cpu", "meta") else self.memory
        if opcode is Opcode.FREE_ELSEWHERE:
            if self.slots[slot] is not None:
                memory.free(self.slots[slot])
            return
        regions = [memory.allocate(n) for n in (nbytes if opcode is Opcode.HOLD_ELSEWHERE else (nbytes,))]
        for region in regions:
            self.placements.add(region.address, region.bytes)
        if opcode is Opcode.ALLOCATE_ELSEWHERE:
            self.slots[slot] = regions[0]

    def _end_phase(self, record: PhaseRecord, mark: int) -> None:
        memory, events = self.memory, self.events
        record.last_call, record.end_event = int(events.calls[mark]), int(events.numbers[mark])
        record.allocated_bytes, record.requested_bytes = memory.allocated_bytes, memory.requested_bytes
        record.reserved_bytes = memory.reserved_bytes
        record.peak_allocated_bytes, record.peak_requested_bytes, record.peak_reserved_bytes = memory.lap_peaks()
        host = self.before.host
        record.host_allocated_bytes, record.host_peak_bytes = host.allocated_bytes, host.lap_peaks()[0]
        self.ends.append((record, mark))

    # ---- what the allocator gave

    def _count_blocks(self) -> Numbers:
        """How many blocks the allocator gave for each event: one for a birth, some for a workspace."""
        blocks = self.events.are(BORN, KEPT).astype(np.int64)
        for at in self.events.places(HELD):
            blocks[at] = len(self.events.payload(at)[1])
        return blocks

    def _write_lives(self, blocks: Numbers) -> Numbers:
        """Write addresses and sizes of blocks into lifetimes; the result are the sizes of all blocks."""
        lives, placements = self.lives, self.placements
        first = np.cumsum(blocks) - blocks
        begins = self.events.places(BORN, KEPT)
        rows, places = self.events.rows[begins], first[begins]
        given = np.zeros(len(placements.addresses), np.int64)
        given[places] = np.where(self.is_here[rows], self.rounded[rows], lives[rows, NBYTES])
        for place, nbytes in placements.odd.items():
            given[place] = nbytes
        lives[rows, ADDRESS] = np.array(placements.addresses, np.int64)[places]
        lives[rows, BLOCK_BYTES] = given[places]
        if len(here := rows[self.is_here[rows]]):
            lowest = lives[here[np.argmin(lives[here, ADDRESS])]]
            check_address(int(lowest[ADDRESS]), torch.device(self.source.device).index or 0, int(lowest[NBYTES]))
        return given

    def _write_allocator_events(self, blocks: Numbers, given: Numbers) -> None:
        """Each birth and death on the device is an event of the allocator; a workspace is two for each of its blocks,
        and what it asked of the device for a block comes before that.
        """
        events, lives, placements = self.events, self.lives, self.placements
        count = ((events.rows >= 0) & self.is_here[events.rows]).astype(np.int64)
        single = np.nonzero(count)[0]
        holds = {at: [i for i, nbytes in enumerate(events.payload(at)[1]) if nbytes] for at in events.places(HELD)
                 if str(events.payload(at)[0]) == self.source.device}
        for at, parts in holds.items():
            count[at] = 2 * len(parts)
        where, first = np.cumsum(count) - count, np.cumsum(blocks) - blocks
        action, address, size, call = (np.zeros(int(count.sum()), np.int64) for _ in range(4))
        slots = self.log.allocator_events
        slots.begin_as(self.source.allocator_events, self.before.allocator_events)
        number = slots.number_of
        rows = events.rows[single]
        action[where[single]] = np.where(events.kinds[single] == DIED, number("free"), number("alloc"))
        address[where[single]], size[where[single]] = lives[rows, ADDRESS], lives[rows, BLOCK_BYTES]
        call[where[single]] = events.calls[single]
        for at, parts in holds.items():
            for j, part in enumerate(parts):
                for shift, name in ((j, "alloc"), (len(parts) + j, "free")):
                    i, place = where[at] + shift, first[at] + part
                    action[i], address[i], size[i], call[i] = (
                        number(name), placements.addresses[place], given[place], events.calls[at])
        order = np.nonzero(blocks)[0]
        asked_by = order[np.searchsorted(first[order], [place for place, *_ in placements.extras], side="right") - 1]
        extra_at: list[int] = []
        extra: list[tuple[int, int, int, int]] = []
        for (place, name, its_address, nbytes), i in zip(placements.extras, asked_by.tolist()):
            extra_at.append(int(where[i]) + place - int(first[i]))
            extra.append((number(name), its_address, nbytes, int(events.calls[i])))
        columns = [np.insert(column, extra_at, [row[k] for row in extra]) if extra else column
                   for k, column in enumerate((action, address, size, call))]
        slots.fill(columns)
        added = np.sort(np.array(extra_at, np.int64))
        for record, mark in self.ends:
            here = int(where[mark])
            record.end_allocator_event = self.before.allocator_events + here + int(
                np.searchsorted(added, here, side="left"))
