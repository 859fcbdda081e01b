"""The one log that everything reported comes from: operator calls, and the lifetimes of storages between them."""
from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from analyzer.meta.source_line import shorten_line
from analyzer.meta.spec import Signature
from analyzer.on_use import rare_collections

from .call_table import CallTable, OpCall
from .device_log import DeviceLog, PhaseMemory, PhaseRecord, device_index, swap
from .process_group import ProcessGroupSpec, WorldFacts, find_group
from .storage_lifetime import (
    CATEGORY,
    WIDTH,
    AllocatorEventTable,
    LifetimesLater,
    LifetimeTable,
    StorageLifetime,
    StreamOrder,
)


@dataclass(slots=True)
class LogModule:
    """One module of the model: its path, class, and the index of the module that holds it (None for the root)."""

    path: str
    type: str
    parent: int | None
    calls: int = 0
    inputs: tuple[object, ...] = ()
    outputs: tuple[object, ...] = ()


@dataclass(slots=True)
class LogModuleCall:
    """One run of a module's forward: which module, in which other call (index in `Log.module_calls`), on what."""

    module: int
    parent: int | None
    inputs: tuple[object, ...] = ()
    outputs: tuple[object, ...] = ()


class OuterCall(NamedTuple):
    """A forward run of a module with parameters that no module called: the step, how many operator calls came before
    it, the module's index, how many samples and tokens it was given (`analyzer.record.options`).
    """

    step: int
    position: int
    module: int
    samples: int | None
    tokens: int | None = None


class CompileBreak(NamedTuple):
    """Where torch.compile ends a graph of a function and begins the next: between them Python runs as it is written."""

    reason: str                             #: what the compiler cannot put into a graph
    source: str | None = None               #: "file.py:123", of the user's code


class CompiledGraph(NamedTuple):
    """What the compiler makes of one graph, for one call of it: both halves where there is a backward one."""

    operators: int                          #: of the graph as it was traced, forward
    recomputed: int = 0                     #: of these, those that the backward half computes again
    saved_bytes: int | None = None          #: what the forward half gives the backward one; None without one
    fwd_kernels: int = 0                    #: that the compiler generates
    bwd_kernels: int = 0
    fwd_extern_kernels: int = 0             #: that libraries and PyTorch have: products, attention, collectives
    bwd_extern_kernels: int = 0


class CompiledCall(NamedTuple):
    """A call of a function or module under torch.compile; those of one step are in `Log.compiled_calls` in order."""

    step: int
    module: int                             #: index of the module: the one that is compiled, or that called a function
    function: str                           #: the function's qualified name, "" of a module
    graphs: tuple[CompiledGraph, ...]       #: that ran, in order
    breaks: tuple[CompileBreak, ...] = ()
    recompiled: str | None = None           #: why an earlier call's graphs did not do; None where they did, or none was
    cuda_graphs: bool = False               #: whether each half is launched as one
    config: Mapping[str, Any] = {}          #: of the compiler, where it is not as usual: mode, dynamic, options
    position: int = -1                      #: index of the last operator call that is a part of it


@dataclass(slots=True)
class LogNode:
    """One row of the node table: an fx node, or in eager runs a leaf module's call or an operator outside leaves."""

    op: str
    name: str
    target: str
    module: int
    base: str = ""                                                   #: its name before it was made unique
    source: str | None = None                                        #: "file.py:123"
    outputs: tuple[tuple[int, object], ...] = ()  #: (storage number, TensorSpec) of each output tensor
    inputs: tuple[int, ...] = ()                                     #: nodes it reads
    reads: tuple[int, ...] = ()                                      #: storage numbers of its distinct tensor inputs
    region: tuple[object, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Where memory ran out, and what the books said at that moment."""

    operator: str
    phase: str
    step: int
    module: int
    node: int
    event: int                              #: of the log's events, the last before it
    allocator_event: int                                #: how many of `Log.allocator_events` came before it
    requested_bytes: int
    short_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    device: str | None = None               #: that lacks memory, of several
    source: str | None = None               #: the line that asked, where that is looked for


class Tally(NamedTuple):
    """Calls of one kind: the step, one of them with the storages that its numbers are in, and how many there are."""

    step: int
    call: OpCall
    storages: Mapping[int, StorageLifetime]
    number: int


#: How assumptions begin that tell of memory which a script need not take: first screens show them.
GROWS, KEEPS_GRAPHS, WIDE_STATES = "memory grows:", "evaluation with gradients:", "wide optimizer states:"


@functools.lru_cache(maxsize=1 << 14)
def identifier(name: str) -> str:
    """``name`` as torch.fx would write it.

    >>> identifier("layers.0.fc"), identifier("0"), identifier("add")
    ('layers_0_fc', '_0', 'add')
    """
    if name.isidentifier():
        return name
    name = re.sub(r"\W", "_", name)
    return f"_{name}" if name[:1].isdigit() else name or "_"


@dataclass
class Log(DeviceLog):
    """Everything one recorded run did, and of the device that is watched what memory it took; of several devices
    `watch` chooses the one.
    """

    call_slots: CallTable = field(default_factory=CallTable)
    streams: StreamOrder = field(default_factory=StreamOrder)
    storages: dict[int, StorageLifetime] = field(default_factory=dict)
    lifetime_table: LifetimeTable = field(default_factory=LifetimeTable)
    modules: list[LogModule] = field(default_factory=list)
    module_calls: list[LogModuleCall] = field(default_factory=list)
    outer_calls: list[OuterCall] = field(default_factory=list)  #: of steps that were not replayed
    compiled_calls: list[CompiledCall] = field(default_factory=list)  #: of steps that were not replayed
    phases: list[PhaseRecord] = field(default_factory=list)
    events: int = 0                          #: births, deaths and workspaces so far
    #: numbers of input storages that autograd holds after a forward pass
    saved_inputs: set[int] = field(default_factory=set)
    steps: int = 0
    others: dict[str, DeviceLog] = field(default_factory=dict)  #: of the devices beside the watched one, by name
    assumptions: list[str] = field(default_factory=list)
    listed_samples: tuple[int, ...] = ()  #: as many as its inputs may be, where the first is a list of tensors
    allocator_events: AllocatorEventTable = field(default_factory=AllocatorEventTable)
    keeps_allocator_events: bool = False
    events_at_start: int = 0  #: how many of them are of what was there already
    shortage: Shortage | None = None         #: where the run ended for want of memory
    #: of a script, by index: the line behind a call outside of modules, in a forward pass and in the first step of all
    lines: dict[int, str] = field(default_factory=dict)
    first_shortage: Shortage | None = None   #: where a run that went on, as on a larger device, would have ended
    world: WorldFacts | None = None          #: the job that the process was one of
    #: of the calls of a signature, as it was when one of them was recorded
    groups: dict[Signature, ProcessGroupSpec | None] = field(default_factory=dict)
    #: placements over a mesh of tensors that are parts of sharded ones, by number of the storage and shape of the part
    layouts: dict[tuple[int, tuple[int, ...]], tuple[str, ...]] = field(default_factory=dict)
    index_of_path: dict[str, int] = field(default_factory=dict)    #: of each module in `modules`
    make_nodes: Callable[[], list[LogNode]] = list  #: those that there are when they are asked for first
    _nodes: list[LogNode] | None = None
    _tallies: tuple[int, list[Tally], npt.NDArray[np.int64], Collection[Signature]] | None = None
    _read: list[OpCall] | None = None  # all calls, while many read them
    _named: int = 0
    _names: dict[tuple[int, str], int] = field(default_factory=dict)

    def group_of(self, signature: Signature) -> ProcessGroupSpec | None:
        return self.groups[signature] if signature in self.groups else find_group(signature)

    @property
    def devices(self) -> list[str]:
        """The names of the devices whose memory was followed, in order."""
        return sorted([self.device, *self.others], key=device_index)

    def watch(self, device: str) -> None:
        """Let the memory of the log, of its phases and of the peak be that of another of the devices."""
        if device not in self.others:
            return
        other, before = self.others.pop(device), self.device
        self.others[before] = mine = DeviceLog()
        for record in self.phases:
            theirs = record.others.pop(device)
            record.others[before] = swapped = PhaseMemory()
            swap(PhaseMemory, swapped, record)
            swap(PhaseMemory, record, theirs)
        swap(DeviceLog, mine, self)
        swap(DeviceLog, self, other)

    @contextmanager
    def watching(self, device: str) -> Iterator[None]:
        """A block in which another device is the watched one."""
        before = self.device
        self.watch(device)
        try:
            yield
        finally:
            self.watch(before)

    def lifetimes_in(self, category: str) -> list[StorageLifetime]:
        """The storages of a category."""
        if isinstance(self.storages, LifetimesLater):
            code = self.lifetime_table.code_of.get(category, -1)
            return self.storages.in_rows({*np.nonzero(self.lives(CATEGORY)[0] == code)[0].tolist()})
        return [lifetime for lifetime in self.storages.values() if lifetime.category == category]

    def lives(self, *columns: int) -> npt.NDArray[np.int64]:
        """Columns of `LifetimeTable`, a number for each storage in each."""
        rows = np.frombuffer(self.lifetime_table.numbers, np.int64).reshape(-1, WIDTH)
        if len(rows) > len(self.storages):  # a number was given again: of its storages the last counts
            rows = rows[[lifetime.row // WIDTH for lifetime in self.storages.values()]]
        found: npt.NDArray[np.int64] = rows.T[list(columns)]
        return found

    @property
    def calls(self) -> Sequence[OpCall]:
        return self.call_slots if self._read is None else self._read

    @property
    def node_slots(self) -> list[LogNode]:
        """The nodes as they are written, without names."""
        if self._nodes is None:
            self._nodes = self.make_nodes()
        return self._nodes

    @property
    def nodes(self) -> list[LogNode]:
        for node in self.node_slots[self._named:]:  # names of each step's nodes are unique, as torch.fx makes them
            count = self._names.get((node.step, node.base), 0)
            self._names[node.step, node.base] = count + 1
            node.name = f"{node.base}_{count}" if count else node.base
        self._named = len(self.node_slots)
        return self.node_slots

    def name_holder(self, lifetime: StorageLifetime) -> str:
        """What a storage is held as: its label, its node, or the line of a script."""
        node = self.nodes[lifetime.node].name if lifetime.node >= 0 else None
        return lifetime.label or node or self.lines.get(lifetime.born_call, "(outside the model)")

    def find_line(self, lifetime: StorageLifetime) -> str | None:
        """The line of code that made a storage; None where it is not known."""
        source = self.node_slots[lifetime.node].source if lifetime.node >= 0 else None
        return self.lines.get(lifetime.born_call) if source is None else shorten_line(source)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Make each call once for all that read them in a block, not once for each reader."""
        before = self._read
        with rare_collections():
            self._read = self.call_slots.to_list() if before is None else before
            try:
                yield
            finally:
                self._read = before

    def tallies(self) -> list[Tally]:
        """Calls that are alike, and how many there are of each: enough for sums."""
        return self._tally()[0]

    def tally_numbers(self) -> npt.NDArray[np.int64]:
        """Of each call, which of the `tallies` it is of."""
        return self._tally()[1]

    def signatures(self) -> Collection[Signature]:
        """The signature of every call, each once."""
        return self._tally()[2]

    def _tally(self) -> tuple[list[Tally], npt.NDArray[np.int64], Collection[Signature]]:
        slots, table = self.call_slots, self.storages
        if self._tallies is None or self._tallies[0] != len(slots):
            copies = slots.copies
            groups = slots.group_alike(np.arange(len(slots)) if copies is None else copies.first, self._list_sizes)
            number = groups.number if copies is None else groups.number[copies.number]
            calls = [slots[place] for place in groups.first.tolist()]
            tallies = [Tally(call.step, call, table, count) for call, count in zip(calls, np.bincount(number).tolist())]
            self._tallies = len(slots), tallies, number, dict.fromkeys([call.signature for call in calls])
        return self._tallies[1:]

    def _list_sizes(self, numbers: list[int]) -> list[int]:
        """The bytes of storages; -1 of one that is not in the books."""
        storages = self.storages
        return [storages[number].nbytes if number in storages else -1 for number in numbers]

    def with_signatures(self, signatures: list[Signature]) -> Log:
        """The same calls with other sizes: a signature for each. What is known of storages stays as it is."""
        made = copy(self)
        made.call_slots = self.call_slots.with_signatures(signatures)
        made._tallies = made._read = None
        return made

    def count_module_calls(self) -> int:
        """How many calls of modules a forward pass makes."""
        return sum([m.calls for m in self.modules])
