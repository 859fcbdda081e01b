"""Puts a plan into a program, and says which results a region keeps."""
from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from analyzer.errors import InputError
from analyzer.fx.fake_tensor import GeneratorState
from analyzer.fx.graph.offload import StorageTable, alias_with_version
from analyzer.fx.graph.region_edit import find_nodes, set_region
from analyzer.fx.graph.statement import CheckpointRegion

_PRODUCTS = frozenset("mm addmm bmm baddbmm addbmm mv addmv dot convolution convolution_overrideable cudnn_convolution "
                      "mkldnn_convolution _scaled_mm _grouped_mm".split())


def is_product(op: Any) -> bool:
    """Whether an operator is among a region's products: matrix products, convolutions, fused attention, by any backend.

    >>> is_product(torch.ops.aten.addmm.default), is_product(torch.ops.aten.add.Tensor)
    (True, False)
    """
    name = op._schema.name.partition("::")[2] if isinstance(op, torch._ops.OpOverload) else ""
    return name in _PRODUCTS or name.startswith("_scaled_dot_product_")


@dataclass(frozen=True)
class KeepProducts:
    """The ``context_fn`` of a checkpoint: keeps the results of products with these ordinals and runs the rest again.

    Products at ``skips`` are not run again either, and nothing is kept of them: their results are read outside of the
    region alone, and all that a gradient needs of them are their inputs. In place of such a result there are NaNs that
    take no memory.

    Products are counted in the order in which the region calls them (`is_product`), so that the same plan holds where
    attention or convolution run another kernel. What is written into a result in place right after (a bias, a mask) is
    kept with it. ``norms`` are normalization layers of the region whose running statistics the forward updates, once.

    Raises RuntimeError in backward where a kept result was written to after the region.
    """

    ordinals: tuple[int, ...] = ()
    norms: tuple[_NormBase, ...] = ()
    skips: tuple[int, ...] = ()

    __name__ = "keep_products"  # in generated code

    def __call__(self) -> tuple[AbstractContextManager[Any], _Again]:
        kept = _Keeping(frozenset(self.ordinals), frozenset(self.skips))
        return kept if kept.ordinals or kept.skips else nullcontext(), _Again(kept, self.norms)


class _Keeping(TorchDispatchMode):
    """Is around the region when it runs, and holds the results that this run keeps."""

    def __init__(self, ordinals: frozenset[int], skips: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ordinals, self.skips, self.met = ordinals, skips, 0
        self.skipped: dict[int, tuple[torch.Size, torch.dtype]] = {}
        self.results: dict[int, Any] = {}
        self.generators: dict[int, GeneratorState | None] = {}
        self.versions: dict[int, list[int]] = {}  #: when the region has run: what is written later, it did not write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_product(func):
            if self.met in self.ordinals:
                self.results[self.met] = tree_map_only(torch.Tensor, alias_with_version, result)
                self.generators[self.met] = GeneratorState.after(func, result)
            elif self.met in self.skips and isinstance(result, torch.Tensor) and result.is_floating_point():
                self.skipped[self.met] = result.shape, result.dtype
            self.met += 1
        return result

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self.versions = {i: [t._version for t in _tensors(result)] for i, result in self.results.items()}

    def give(self, ordinal: int) -> Any:
        """A kept result, which is given out once, so that it is freed as early as a saved tensor."""
        result = self.results.pop(ordinal)
        if [t._version for t in _tensors(result)] != self.versions[ordinal]:
            raise RuntimeError(
                f"the result of product {ordinal} that a checkpoint keeps was written to in place after the "
                f"checkpointed region ran; make a plan that runs it again, or write to a copy of it")
        if (generator := self.generators[ordinal]) is not None:  # what draws after it draws the same numbers as before
            generator.restore()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


def _writes_first(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable:
        return False
    first = op._schema.arguments[0]
    return first.alias_info is not None and first.alias_info.is_write and str(first.type) == "Tensor"


class _Giving(TorchDispatchMode):
    def __init__(self, kept: _Keeping) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.met = kept, 0
        self.given: StorageTable[bool] = StorageTable()  #: where results lie that were given out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_product(func):
            self.met += 1
            if self.met - 1 in self.kept.results:  # not in a second backward pass: then it runs again
                result = self.kept.give(self.met - 1)
                for tensor in _tensors(result):
                    self.given.put(tensor, True)
                return result
            if self.met - 1 in self.kept.skipped:
                shape, dtype = self.kept.skipped[self.met - 1]
                source = next(t for t in args if isinstance(t, torch.Tensor))
                nothing = source.new_full((), math.nan, dtype=dtype).expand(shape)
                self.given.put(nothing, True)
                return nothing
        elif args and _writes_first(func) and self.given.find(args[0]):
            return args[0]  # it was kept as this left it
        return func(*args, **(kwargs or {}))


class _Again:
    """What is around the region when it runs again; it can be entered again, for another backward pass."""

    def __init__(self, kept: _Keeping, norms: tuple[_NormBase, ...]) -> None:
        self.kept, self.norms = kept, norms
        self.undo = ExitStack()

    def __enter__(self) -> None:
        for m in self.norms:
            self.undo.callback(setattr, m, "momentum", m.momentum)
            m.momentum = 0.0  # the new statistics are the old ones
            if (tracked := m._buffers.get("num_batches_tracked")) is not None:
                self.undo.callback(m._buffers.__setitem__, "num_batches_tracked", tracked)
                m._buffers["num_batches_tracked"] = None
        if self.kept.ordinals or self.kept.skips:
            self.undo.enter_context(_Giving(self.kept))

    def __exit__(self, *exc: Any) -> None:
        self.undo.__exit__(*exc)


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
        forward = self.before or type(self.module).forward.__get__(self.module)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        context = _context(self.region, self.module.modules())
        options: dict[str, Any] = {} if context is None else {"context_fn": context}
        # whose own keywords may have the same names
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)


def apply_to_modules(model: nn.Module, regions: Iterable[PlanRegion], plan_name: str) -> nn.Module:
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
    for region in regions:
        module = model.get_submodule(region.module_path or "")
        wrapped = vars(module).get("forward")
        if not isinstance(wrapped, CheckpointedForward):
            raise InputError(f"plan.undo({type(model).__name__}): {region.module_path} is not under a plan")
        del module.forward
        if wrapped.before is not None:
            module.forward = wrapped.before
    return model
