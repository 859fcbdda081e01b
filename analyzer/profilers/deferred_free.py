"""Memory that ``record_stream`` holds back: blocks which return to their pool when other streams have caught up.

Source: ``free``, ``insert_events`` and ``process_events`` in c10/cuda/CUDACachingAllocator.cpp. A block that is freed
while other streams may use it gets an event on each of these, which the allocator polls before it allocates. How far
the device is then depends on its speed. Two bounds hold on any device: each block is free at once, or not before the
host knows that it is, since it waited for something that comes after.
"""
from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from analyzer.memory.allocator import Block, CachingAllocator
from analyzer.memory.journal import JournalAction
from analyzer.meta.stream_mark import EVERY_STREAM, StreamAction, StreamMark
from analyzer.record.log import Log

from .host_time import waits_for_device


class HeldBack(NamedTuple):
    """What holding blocks back to the last would do: their number, the most bytes that they are together, and the most
    that would then be reserved, no more than there is: where memory is short, the allocator waits for the streams
    (`release_cached_blocks`).
    """

    blocks: int
    peak_bytes: int
    peak_reserved_bytes: int


def hold_back(log: Log) -> HeldBack | None:
    """The upper bound; None where the program never called ``record_stream``. At the end of a step the host is taken to
    know that all is done.
    """
    if log.journal is None or log.journal_start is None:
        return None
    return _Replay(log, log.journal_start).run()


class _HostKnowledge:
    """What the host knows to be done on each stream, by the order of events: what comes before an event on its stream,
    and before what that had waited for. Time is the number of what was asked for.
    """

    def __init__(self) -> None:
        self.now = 0
        self._floor = 0  # of every stream
        self._known: dict[int, int] = {}
        self._reached: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by stream, what it waited for of others
        self._events: dict[int, dict[int, int]] = {}

    def ask(self, mark: StreamMark) -> bool:
        """The program asks something of a stream; whether the host knows more then."""
        self.now += 1
        action, stream = mark.action, mark.stream
        if action is StreamAction.RECORD:
            self._events[mark.event] = {**self._reached[stream], stream: self.now}
        elif action is StreamAction.WAIT:
            _raise_to(self._reached[stream], self._events.get(mark.event, {}))
        elif action is StreamAction.SYNCHRONIZE:
            if mark.event:
                _raise_to(self._known, self._events.get(mark.event, {}))
            else:
                self.wait_for(stream)
            return True
        return False

    def wait_for(self, stream: int) -> None:
        """The host waits for all that a stream, or each, was given."""
        if stream == EVERY_STREAM:
            self._floor = self.now
        else:
            _raise_to(self._known, {**self._reached[stream], stream: self.now})

    def is_done(self, streams: dict[int, int]) -> bool:
        """Whether each stream has come to a time, as far as the host knows."""
        return all(max(self._floor, self._known.get(stream, 0)) >= time for stream, time in streams.items())


def _raise_to(times: dict[int, int], others: dict[int, int]) -> None:
    for stream, time in others.items():
        times[stream] = max(times.get(stream, 0), time)


class _Replay:
    """The journal asked of an allocator that gets blocks back when the host knows that it may."""

    def __init__(self, log: Log, start: CachingAllocator) -> None:
        self.log = log
        self.memory, self.live = start.copy()
        self.host = _HostKnowledge()
        self._marks = self._calls = 0  # how many were passed
        self._step = 0
        self._uses: defaultdict[int, set[int]] = defaultdict(set)  # streams, by address
        self._held: list[tuple[Block, dict[int, int]]] = []
        self._held_bytes = 0

    def run(self) -> HeldBack:
        assert self.log.journal is not None
        blocks = peak_bytes = 0
        for action, (calls, marks, step), address, nbytes, stream in self.log.journal.entries:
            self._pass(calls, marks, step)
            if action is JournalAction.ALLOCATE:
                self.live[address] = self.memory.allocate(nbytes, stream)
            elif action is JournalAction.USE:
                self._uses[address].add(stream)
            elif action is JournalAction.EMPTY:  # release_cached_blocks: synchronize_and_free_events
                self.host.wait_for(EVERY_STREAM)
                self._give_back()
                self.memory.empty_cache()
            elif streams := self._uses.pop(address, None):
                self.host.now += 1
                self._held.append((self.live.pop(address), dict.fromkeys(streams, self.host.now)))
                blocks, self._held_bytes = blocks + 1, self._held_bytes + self._held[-1][0].bytes
                peak_bytes = max(peak_bytes, self._held_bytes)
            else:
                self.memory.free(self.live.pop(address))
        peak, limit = self.memory.peak_reserved_bytes, self.log.journal.limit_bytes
        return HeldBack(blocks, peak_bytes, peak if limit is None else min(peak, limit))

    def _pass(self, calls: int, marks: int, step: int) -> None:
        """Go on to where so many calls and requests of streams have been made; the host waits between steps."""
        for mark in self.log.streams.marks[self._marks:marks]:
            self._pass_calls(mark.call)
            if self.host.ask(mark):
                self._give_back()
        self._marks = max(self._marks, marks)
        self._pass_calls(calls)
        if step != self._step:
            self._step = step
            self.host.wait_for(EVERY_STREAM)
            self._give_back()

    def _pass_calls(self, calls: int) -> None:
        """The host waits for calls that read back what they computed."""
        signatures = self.log.call_slots.signatures
        for index in range(self._calls, min(calls, len(signatures))):
            signature = signatures[index]
            if signature is not None and waits_for_device(signature):
                self.host.now += 1
                self.host.wait_for(self.log.streams.stream_at(index))
                self._give_back()
        self._calls = max(self._calls, calls)

    def _give_back(self) -> None:
        """Free what the host knows to be unused."""
        waiting = []
        for block, streams in self._held:
            if self.host.is_done(streams):
                self._held_bytes -= block.bytes
                self.memory.free(block)
            else:
                waiting.append((block, streams))
        self._held = waiting
