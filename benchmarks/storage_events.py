"""Births and deaths of memory on the host: as the CPU's own allocator tells torch's profiler, and as a profile predicts
them.

``DefaultCPUAllocator`` reports every allocation and every release with its address (c10/core/CPUAllocator.cpp,
ProfiledCPUMemoryReporter), those inside operators too. The profiler keeps them in order, under the operator that was
running. What an operator allocates and releases again itself is a *temporary*: the *storages* are the others.
"""
from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as watch

from analyzer.record.log import Log

MARK = "#"  # begins the name of a phase


@dataclass
class Block:
    """A block of memory from its allocation to its release. Places are positions in the list of all events."""

    nbytes: int
    born: int           #: place of its birth; -1 for one that was there before
    operator: str       #: that allocated it: the outermost one that PyTorch does not take apart
    call: int           #: the number of that operator's call, -1 outside of any
    died: int | None = None
    died_operator: str = ""
    died_call: int = -1

    @property
    def is_temporary(self) -> bool:
        """Whether the operator that allocated it released it again."""
        return self.died is not None and self.call == self.died_call != -1

    @property
    def is_number(self) -> bool:
        """Whether it is a Python number that was made a tensor, to be an operator's argument or to be written into a
        tensor: outside of any operator on the CPU (torch/csrc/utils/python_arg_parser.h, ATen/TensorIndexing.h).
        """
        return self.nbytes <= 16 and self.born >= 0 and (self.call == -1 or "scalar_tensor" in self.operator)


@dataclass
class Trail:
    """What happened to memory, in order: the block of each event and whether it was born, and where phases end."""

    events: list[tuple[bool, Block]]
    ends: dict[tuple[int, str], int]   #: step and phase -> how many events came before its end
    base_bytes: int                   #: allocated before the first event

    def births(self) -> list[Block]:
        """The blocks that were born, in order."""
        return [block for is_birth, block in self.events if is_birth]

    def bytes_at_ends(self) -> dict[tuple[int, str], int]:
        """Allocated bytes at the end of each phase."""
        totals = list(running_bytes(self))
        return {key: totals[end] for key, end in self.ends.items()}


def watch_memory(run: Callable[[Callable[[int, str], Any]], None], base_bytes: int) -> Trail:
    """What the CPU's allocator did in ``run(phase)``, where ``with phase(step, name)`` is a phase of a step."""
    gc.collect()
    settings = _ExperimentalConfig(capture_overload_names=True)
    with watch(activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=settings) as watched:
        run(lambda step, name: record_function(f"{MARK}{step} {name}"))
    results = watched.profiler.kineto_results
    return _read_tree(results.experimental_event_tree(), base_bytes)


def _read_tree(roots: list[Any], base_bytes: int) -> Trail:
    trail = Trail([], {}, base_bytes)
    alive: dict[int, Block] = {}
    calls = 0

    def walk(event: Any, operator: str, call: int) -> None:
        nonlocal calls
        kind = event.typed[0]
        if kind == _EventType.Allocation:
            fields = event.extra_fields
            place = len(trail.events)
            if fields.alloc_size > 0:
                block = alive[fields.ptr] = Block(fields.alloc_size, place, operator, call)
                trail.events.append((True, block))
            else:
                block = alive.pop(fields.ptr, Block(-fields.alloc_size, -1, "before", -1))
                block.died, block.died_operator, block.died_call = place, operator, call
                trail.events.append((False, block))
            return
        if call < 0 and kind == _EventType.TorchOp and is_kernel(event.name, event.overload_name):
            operator, call = f"{event.name}.{event.overload_name or 'default'}", calls
            calls += 1
        elif call < 0:
            operator = event.name
        for child in event.children:
            walk(child, operator, call)
        if event.name.startswith(MARK):
            step, phase = event.name[len(MARK):].split()
            trail.ends[int(step), phase] = len(trail.events)

    for root in roots:
        walk(root, "", -1)
    return trail


@functools.cache
def is_kernel(name: str, overload: str) -> bool:
    """Whether an operator is one that PyTorch does not take apart into others before it gets to the device."""
    space, _, short = name.partition("::")
    if not short or not hasattr(torch.ops, space) or not hasattr(getattr(torch.ops, space), short):
        return False
    packet = getattr(getattr(torch.ops, space), short)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or (overload or "default") not in packet.overloads():
        return False
    operator = getattr(packet, overload or "default").name()
    return has_kernel(operator, "CPU") or not has_kernel(operator, "CompositeImplicitAutograd")


def predicted_trail(log: Log) -> Trail:
    """What the profile's log says that the allocator of the host does."""
    given = {life.address for life in log.storages.values() if life.category == "input"}
    changes = [change for change in log.allocator_events if change[1] not in given]
    shown = [0, *itertools.accumulate(change[1] not in given for change in log.allocator_events)]
    made = {address for action, address, _, _ in changes if action == "alloc"}
    base = sum(life.block_bytes for life in log.storages.values()
               if life.device == log.device and life.address not in made)
    trail, alive = Trail([], {}, base), dict[int, Block]()
    names = [*(str(call.signature.op) for call in log.calls), ""]
    for place, (action, address, nbytes, call) in enumerate(changes):
        if action == "alloc":
            block = alive[address] = Block(nbytes, place, names[call], call)
        else:
            block = alive.pop(address, Block(nbytes, -1, "before", -1))
            block.died, block.died_operator, block.died_call = place, names[call], call
        trail.events.append((action == "alloc", block))
    for record in log.phases:
        trail.ends[record.step, record.phase] = shown[record.end_allocator_event]
    return trail


def storages_of(trail: Trail) -> Trail:
    """The storages alone, without what lives in one operator and without numbers."""
    kept = [not block.is_temporary and not block.is_number for _, block in trail.events]
    before = [0]
    for keep in kept:
        before.append(before[-1] + keep)
    return Trail([event for event, keep in zip(trail.events, kept) if keep],
                 {key: before[end] for key, end in trail.ends.items()}, trail.base_bytes)


def running_bytes(trail: Trail) -> Iterator[int]:
    """Allocated bytes at the start and after each event."""
    total = trail.base_bytes
    yield total
    for is_birth, block in trail.events:
        total += block.nbytes if is_birth else -block.nbytes
        yield total
