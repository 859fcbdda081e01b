"""CUDA graphs of compiled functions: which graphs are captured, and the memory that they share.

After ``torch/_inductor/cudagraph_trees.py``: all graphs of a program have one private pool. What a graph allocates, its
results among it, lives there, and the pool's memory is kept for later runs. Tensors that a run gives anew are copied to
the addresses that the graph has for them; parameters and buffers, and what an earlier graph left in the pool, are read
where they are.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from analyzer.meta.state import MetaState
from analyzer.meta.tensor import device_of

from .trace import JointGraph

_POOL = "CUDA graphs of torch.compile"


def find_obstacle(joint: JointGraph) -> str | None:
    """Why Inductor does not capture a graph, None where it does: ``check_for_mutation`` and
    ``check_multiple_devices_or_any_cpu_nodes`` of ``torch/_inductor/cudagraph_utils.py``.
    """
    given = set(joint.graph.find_nodes(op="placeholder")[:joint.given])
    copies = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = sum(node.args[0] in given for node in copies)
    if written:
        return f"it writes to {written} of the tensors that it is given"
    if any(device_of(primal).type == "cpu" and primal.ndim for primal in joint.primals):
        return "a tensor on the CPU takes part in it"
    return None


@contextmanager
def capturing(state: MetaState, args: list[Any], fresh: Iterable[int]) -> Iterator[None]:
    """A block whose storages are in the pool; tensors in ``args`` at the indices ``fresh`` are copied there first."""
    space = state.space
    before = space.capture
    space.begin_capture(_POOL)
    try:
        fresh = [i for i in fresh if isinstance(args[i], torch.Tensor)]
        given = [args[i] for i in fresh]
        placed = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given]
        if placed:
            torch._foreach_copy_([_distinct(t) for t in placed], [_distinct(t) for t in given])
        for i, tensor in zip(fresh, placed):
            args[i] = tensor
        del given, placed
        yield
    finally:
        space.capture = before


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that was expanded, one of the elements that lie in the same place (``index_expanded_dims``)."""
    for dimension, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
