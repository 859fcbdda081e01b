"""What the log of a run of all blocks says beside its tables: modules, nodes, compiled code, layouts, assumptions."""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, islice
from operator import attrgetter

import numpy as np

from analyzer.record.log import Log, LogModule, LogModuleCall, LogNode, identifier

from .match import NotRepeated
from .name import Names, Numbers, RunNames


def repeat_assumptions(names: RunNames) -> list[str]:
    """What is assumed of a reference block is assumed of those that were not run, behind it."""
    found = list(names.log.assumptions)
    for chain in names.chains:
        members = [[path for path, _ in block] for block in chain.members]
        mine = members[chain.reference]
        path = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, sorted(mine, key=len, reverse=True)))})(?!\w)")
        texts, found = found, []
        for is_of_block, together in groupby(texts, partial(_mentions, path)):
            about = list(together)
            found += about
            for place in chain.skipped if is_of_block else ():
                theirs = dict(zip(mine, members[place]))
                found += [path.sub(lambda match: theirs[match[1]], text) for text in about]  # noqa: B023
    return list(dict.fromkeys(found))


def tell_facts(names: RunNames, log: Log, list_numbers: Callable[[str, Names, int], list[int]], calls: int) -> None:
    """Tell in a log of all blocks, which has so many ``calls``, what that of the short run says beside its tables.
    ``list_numbers`` gives what a thing is in that log, and what those in its place in blocks that were not run are.
    """
    def list_calls(index: int) -> list[int]:  # of an index that none has, how many there are
        known = 0 <= index < len(names.calls.kind)
        return list_numbers("call", names.calls, index) if known else [min(index, calls)]

    source = names.log
    log.assumptions = repeat_assumptions(names)
    for name in ("saved_inputs", "groups", "steps", "listed_samples", "world", "modules",
                 "index_of_path", "events_at_start", "memory_at_start"):
        setattr(log, name, getattr(source, name))
    log.layouts = {
        (number, shape): placements for (old, shape), placements in source.layouts.items() for number in (
            list_numbers("storage", names.storages, names.where[old]) if old in names.where else [old])}
    log.outer_calls = [call._replace(position=list_calls(call.position)[0]) for call in source.outer_calls]
    log.compiled_calls = [
        call._replace(module=module, position=position) for call in source.compiled_calls
        for module, position in zip(list_numbers("module", names.modules, call.module), list_calls(call.position))]
    if names.chains:
        log.compiled_calls.sort(key=attrgetter("position"))


def count_module_calls(names: RunNames, written: Sequence[LogModuleCall]) -> None:
    """Write what is told of the modules of blocks that were not run, as of those of reference blocks. They call
    modules outside of blocks, as a layer that all share, as those that were run do: ``written`` has all calls.
    """
    modules = names.log.modules
    for chain, first, size in zip(names.chains, names.first_modules, names.block_sizes):
        for place in chain.skipped:
            for i in range(size):
                mine, theirs = modules[int(first[place]) + i], modules[int(first[chain.reference]) + i]
                mine.calls, mine.inputs, mine.outputs = theirs.calls, theirs.inputs, theirs.outputs
    before, after = (np.bincount([call.module for call in calls], minlength=len(modules))
                     for calls in (names.log.module_calls, written))
    for index in np.nonzero((after > before) & (names.modules.kind < 0))[0].tolist():
        module = modules[index]
        if module.calls != before[index]:  # it ran in a recomputation, or counts a module that it holds aside
            raise NotRepeated(f"its blocks call {module.path}, which is outside of them, more than in forward")
        module.calls = int(after[index])


def _mentions(path: re.Pattern[str], text: str) -> bool:
    return path.search(text) is not None


def copy_spans(starts: Numbers, counts: Numbers) -> Numbers:
    """The numbers of spans, one behind the other.

    >>> copy_spans(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    found: Numbers = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return found


def make_nodes(nodes: Sequence[LogNode], copied: Numbers, repetitions: Numbers, columns: Sequence[Numbers],
               modules: Sequence[LogModule]) -> list[LogNode]:
    """A node for each that is ``copied``, of these repetitions of the step; ``columns`` have what is numbered of all:
    outputs, reads, inputs, modules.
    """
    made, read, given = (iter(column.tolist()) for column in columns[:3])
    found: list[LogNode] = []
    for at, repetition, index in zip(copied.tolist(), repetitions.tolist(), columns[3].tolist()):
        node = nodes[at]
        target, base = node.target, node.base
        if index != node.module and node.op == "call_module":
            target = modules[index].path
            base = identifier(target)
        outputs = tuple([(next(made), spec) for _, spec in node.outputs])
        found.append(LogNode(node.op, "", target, index, base, node.source, outputs,
                             tuple(islice(given, len(node.inputs))), tuple(islice(read, len(node.reads))),
                             node.region, node.step + repetition))
    return found
