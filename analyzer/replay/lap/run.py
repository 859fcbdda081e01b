"""Runs some blocks of a chain, and gives the log of a run of all."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn

from analyzer.meta.address_space import AddressSpace
from analyzer.meta.storage import MetaStorage
from analyzer.record.log import Log
from analyzer.record.model_failure import first_line
from analyzer.record.recorder import Recorder

from ..attribute_watch import watch_reads
from ..cache_slot import noting_slots
from ..match import Mismatch
from .chain import REFERENCE, Chain
from .extension import Extension
from .tape import Tape


class WholeRun(NamedTuple):
    """The log of a run of all blocks, and the memory that it leaves."""

    log: Log
    space: AddressSpace


def _copy_before(log: Log, space: AddressSpace,
                 live: Iterable[MetaStorage]) -> tuple[Log, AddressSpace, dict[int, tuple[torch.device, Any]]]:
    """The log and the memory as they are, in copies, and where in that memory storages are, by number."""
    table = log.lifetime_table.copy()
    memo: dict[int, Any] = {id(log.lifetime_table): table}
    memo.update((id(life), life.copy_to(table)) for life in log.storage_table.values())
    memo.update((id(module), copy(module)) for module in log.modules)
    before, memory = deepcopy((log, space), memo)
    return before, memory, {storage.number: (storage.device, deepcopy(storage.region, memo)) for storage in live}


def _list_indices(chain: Chain) -> list[tuple[str, str]]:
    """(path, attribute) of integers in which each block has one more than the block before it."""
    def value(block: nn.Module, path: str, name: str) -> Any:
        return vars(block.get_submodule(path)).get(name)

    return [(path, name) for path, name in sorted(chain.unread)
            if all(value(block, path, name) == value(chain.blocks[REFERENCE], path, name) + place - REFERENCE
                   for place, block in enumerate(chain.blocks[1:-1], 1))]


def _run_model(run: Callable[[], None]) -> None:
    """The model's own code may fail where some blocks are not run; running all shows whether it does without that."""
    try:
        run()
    except Mismatch:
        raise
    except Exception as error:
        raise Mismatch(f"with some of its blocks alone it fails: {first_line(error)}") from error


def run_some(recorder: Recorder, chain: Chain, live: Iterable[MetaStorage], run: Callable[[], None],
             stands_in: bool) -> WholeRun:
    """The log and memory of what ``run`` does as if all blocks ran; with gradients of blocks that are not run where
    something ``stands_in`` for them. Raises Mismatch where it cannot be told.
    """
    space = recorder.space
    listener, space.listener = space.listener, None
    try:
        before, memory, regions = _copy_before(recorder.log, space, live)
    finally:
        space.listener = listener
    recorder.mode.state.asks_memory = False
    reference = chain.blocks[REFERENCE]
    with noting_slots(reference, _list_indices(chain)) as (indices, filled):
        tape = Tape(recorder, chain, stands_in, filled)
        with tape.running(), watch_reads(reference) as reads:
            _run_model(run)
    unread = {place for place in chain.unread if place not in indices or indices[place].used}
    read = next(((path, name) for path, name in sorted(reads) if (path, name) in unread or (
        name == "*" and any(p == path for p, _ in chain.unread))), None)
    if read is not None:
        raise Mismatch(f"its blocks read {'.'.join(filter(None, read))}, in which they differ")
    if recorder.log.shortage is not None:
        raise Mismatch("memory ran out")
    if recorder.log.journal is not None:
        raise Mismatch("its tensors are used on other streams when they die (record_stream)")
    if recorder.mode.state.asks_memory:
        raise Mismatch("a step asks how much memory is in use, or gives it back")
    try:
        return WholeRun(Extension(tape, before, memory, regions).write(), memory)
    except torch.OutOfMemoryError as error:
        raise Mismatch("memory ran out") from error
