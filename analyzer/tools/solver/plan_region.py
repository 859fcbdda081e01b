"""Puts the checkpoints of a plan into a graph."""
from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx, nn

from analyzer.errors import InputError
from analyzer.fx.graph.region_edit import find_nodes, set_region
from analyzer.fx.graph.statement import CheckpointRegion

from .kept_result import KeepResults, tracked_norms


@dataclass(frozen=True, slots=True)
class PlanRegion:
    """Nodes that run under one checkpoint."""

    nodes: tuple[str, ...]
    #: ordinals of the products (matrix products, convolutions, fused attention) whose results are kept
    keeps: tuple[int, ...] = ()
    products: int = 0                   #: that it calls
    #: ordinals of products that are not run again though nothing is kept of them: the region does not read them
    skips: tuple[int, ...] = ()
    cost: float = 0.0                   #: of running it again, in units of the plan's objective

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InputError(f"nodes={self.nodes!r}: a checkpoint runs one node or more")


def apply_to_graph(gm: fx.GraphModule, regions: Iterable[PlanRegion], plan_name: str) -> fx.GraphModule:
    planned = copy_graph_module(gm)
    for i, region in enumerate(regions):
        nodes = find_nodes(planned, region.nodes, f"plan of {plan_name}, checkpoint {i}")
        norms = (planned.get_submodule(str(n.target)) for n in nodes if n.op == "call_module")
        set_region(planned, nodes, CheckpointRegion(i, context_fn=_context(region, norms)), recompile=False)
    planned.recompile()
    return planned


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that shares parameters, and whose annotations are its own."""
    copied = copy.copy(gm)
    copied.meta = dict(gm.meta)
    return copied


def _context(region: PlanRegion, modules: Iterable[nn.Module]) -> KeepResults | None:
    norms = tracked_norms(modules)
    keeps, skips = name_products(region.keeps), name_products(region.skips)
    return KeepResults(keeps, norms, skips) if keeps or norms or skips else None


def name_products(ordinals: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"product#{ordinal}" for ordinal in ordinals)
