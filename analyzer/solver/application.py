"""Puts a plan into a program: regions on the nodes of a graph, or checkpoints around a model's own modules."""
from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError
from analyzer.fx.graph.region import CheckpointRegion
from analyzer.fx.graph.region_edit import find_nodes, set_region
from analyzer.fx.graph.saved_edit import set_saved

from .kept_product import KeepProducts


@dataclass(frozen=True, slots=True)
class PlanRegion:
    """Nodes that run under one checkpoint."""

    nodes: tuple[str, ...]
    module_path: str | None = None      #: the module whose whole forward this is
    #: ordinals of the products (matrix products, convolutions, fused attention) whose results are kept
    keeps: tuple[int, ...] = ()
    products: int = 0                   #: that it calls
    #: ordinals of products that are not run again though nothing is kept of them: the region does not read them
    skips: tuple[int, ...] = ()
    cost: float = 0.0                   #: of running it again, in units of the plan's objective

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InputError(f"nodes={self.nodes!r}: a checkpoint runs one node or more")


def apply_to_graph(gm: fx.GraphModule, regions: Iterable[PlanRegion], offloads: Sequence[str],
                   plan_name: str) -> fx.GraphModule:
    """A new graph module with checkpoints around the regions, and the saved results of ``offloads`` on the host."""
    planned = copy_graph_module(gm)
    for i, region in enumerate(regions):
        nodes = find_nodes(planned, region.nodes, f"plan of {plan_name}, checkpoint {i}")
        norms = (planned.get_submodule(str(n.target)) for n in nodes if n.op == "call_module")
        set_region(planned, nodes, CheckpointRegion(i, context_fn=_context(region, norms)), recompile=False)
    if offloads:
        set_saved(planned, offloads, "offload", recompile=False)
    planned.recompile()
    return planned


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that shares parameters, and whose annotations are its own."""
    copied = copy.copy(gm)
    copied.meta = dict(gm.meta)
    return copied


def _context(region: PlanRegion, modules: Iterable[nn.Module]) -> KeepProducts | None:
    norms = tuple(m for m in modules if isinstance(m, _NormBase) and m.track_running_stats)
    return KeepProducts(region.keeps, norms, region.skips) if region.keeps or norms or region.skips else None


class CheckpointedForward:
    """A module's forward under a checkpoint, in the place of ``forward`` on the module; its class and hooks stay."""

    def __init__(self, module: nn.Module, region: PlanRegion) -> None:
        self.module = module
        self.before = vars(module).get("forward")  #: what the user had put there
        self.region = region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, under a checkpoint where gradients are enabled."""
        forward = self.before or type(self.module).forward.__get__(self.module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        context = _context(self.region, self.module.modules())
        options: dict[str, Any] = {} if context is None else {"context_fn": context}
        # whose own keywords may have the same names
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)


def apply_to_modules(model: nn.Module, regions: Iterable[PlanRegion], plan_name: str) -> nn.Module:
    """Wrap the modules that the regions name, where they are."""
    call = f"plan.apply({type(model).__name__})"
    if not isinstance(model, nn.Module):
        raise InputError(f"{call}: takes a GraphModule or a torch.nn.Module")
    modules = []
    for region in regions:
        if region.module_path is None:
            raise InputError(
                f"{call}: the checkpoint of {region.nodes[0]} to {region.nodes[-1]} is no whole module; apply this "
                "plan to the traced graph, or solve with granularity='module'")
        try:
            module = model.get_submodule(region.module_path)
        except AttributeError:
            raise InputError(
                f"{call}: the plan of {plan_name} names module {region.module_path!r}, which this model does not have"
            ) from None
        if isinstance(vars(module).get("forward"), CheckpointedForward):
            raise InputError(f"{call}: {region.module_path} is under a plan already; plan.undo(model) first")
        modules.append((module, region))
    for module, region in modules:
        module.forward = CheckpointedForward(module, region)
    return model


def undo_modules(model: nn.Module, regions: Iterable[PlanRegion]) -> nn.Module:
    """Give the modules that the regions name their own forward back."""
    for region in regions:
        module = model.get_submodule(region.module_path or "")
        wrapped = vars(module).get("forward")
        if not isinstance(wrapped, CheckpointedForward):
            raise InputError(f"plan.undo({type(model).__name__}): {region.module_path} is not under a plan")
        del module.forward
        if wrapped.before is not None:
            module.forward = wrapped.before
    return model
