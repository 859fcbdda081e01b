"""The bytes that one rank sends of a message, by the algorithms of NCCL, whose bandwidths are defined so.

NVIDIA/nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth": of n ranks an all-reduce has the factor 2(n-1)/n, all-gather,
reduce-scatter and all-to-all (n-1)/n, broadcast and reduce 1. Rings carry the first three, pipelined chains the last
two, sends beside each other the others (pytorch, torch/csrc/cuda/nccl.cpp, `all2all`, `gather`, `scatter`).

Each rule takes the call, its whole bytes, and its group; None where the group does not say which of its ranks this is.
"""
from __future__ import annotations

from collections.abc import Callable

from analyzer.record.process_group import ProcessGroupSpec

from .call import CollectiveCall

WireRule = Callable[[CollectiveCall, int, ProcessGroupSpec], "int | None"]


def _part(nbytes: int, numerator: int, denominator: int) -> int:
    """A fraction of bytes, rounded up to whole ones."""
    return -(-nbytes * numerator // denominator)


def once_around(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A ring in which each rank passes on every block but one, as large as the others."""
    return _part(whole, group.size - 1, group.size)


def twice_around(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A reduce-scatter, then an all-gather."""
    return _part(whole, 2 * (group.size - 1), group.size)


def all_but_block(name: str, after: int) -> WireRule:
    """A ring over blocks of any size: in an all-gather each rank passes on all but that of the rank ``after`` it, in a
    reduce-scatter all but its own. ProcessGroupNCCL broadcasts or reduces uneven blocks one by one, which sends the
    same (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `allgather` and `reduce_scatter`).
    """
    def sent(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
        blocks = call.parts(name)
        if len(blocks) != group.size or len(set(blocks)) == 1:
            return once_around(call, whole, group)
        return None if group.rank is None else sum(blocks) - blocks[(group.rank + after) % group.size]
    return sent


def all_but_own(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
    """All parts of the input but this rank's: as tensors, by the sizes of the splits, else as large as each other."""
    parts = call.parts("input_tensors") or list(call.given.get("input_split_sizes") or ())
    if len(parts) != group.size or len(set(parts)) == 1:
        return once_around(call, whole, group)
    if group.rank is None:
        return None
    return _part(whole, sum(parts) - parts[group.rank], sum(parts)) if sum(parts) else 0


def passed_on(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A chain from the root on, in an order that NCCL chooses: every rank sends the message to the next. The last one
    sends nothing, and this one is taken not to be the last.
    """
    return whole if group.size > 1 else 0


def towards_root(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
    """A chain that ends at the root."""
    return _by_role(call, group, 0, passed_on(call, whole, group))


def own_to_root(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
    """Every rank but the root sends its part."""
    return _by_role(call, group, 0, whole // group.size)


def from_root(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int | None:
    """The root sends each other rank its part."""
    return _by_role(call, group, once_around(call, whole, group), 0)


def _by_role(call: CollectiveCall, group: ProcessGroupSpec, of_root: int, of_others: int) -> int | None:
    return None if group.rank is None else of_root if group.rank == call.given.get("root_rank") else of_others


def read_by_each(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """Every other rank reads the buffer: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu, one_shot."""
    return whole * (group.size - 1)


def everything(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A message to one other rank."""
    return whole


def nothing(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """A rank that receives only."""
    return 0


def sends_of_batch(call: CollectiveCall, whole: int, group: ProcessGroupSpec) -> int:
    """Those of a batch of sends and receives that are sends."""
    sizes = call.parts("tensors")
    return sum(size for op, size in zip(call.given["op_list"], sizes) if op == "isend")
