"""How a region is run again: which products' results it keeps, and running statistics that are not updated twice."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_PRODUCTS = frozenset("mm addmm bmm baddbmm addbmm mv addmv dot convolution convolution_overrideable cudnn_convolution mkldnn_convolution "
                      "_scaled_mm _grouped_mm".split())


def is_product(op: Any) -> bool:
    """Whether an operator counts among the products of a region: matrix products, convolutions, fused attention, by any backend.

    >>> is_product(torch.ops.aten.addmm.default), is_product(torch.ops.aten.add.Tensor)
    (True, False)
    """
    name = op._schema.name.partition("::")[2] if isinstance(op, torch._ops.OpOverload) else ""
    return name in _PRODUCTS or name.startswith("_scaled_dot_product_")


@dataclass(frozen=True)
class KeepProducts:
    """The ``context_fn`` of a checkpoint: keeps the results of the products with these ordinals and runs all else again.

    Products are counted in the order in which the region calls them (`is_product`), so that the same plan holds where attention or
    convolution run another kernel. ``norms`` are normalization layers of the region whose running statistics are to be updated once,
    by the forward pass, and not again.
    """

    ordinals: tuple[int, ...] = ()
    norms: tuple[nn.Module, ...] = ()

    __name__ = "keep_products"  # in generated code

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward: AbstractContextManager[Any]
        again: AbstractContextManager[Any]
        forward, again = create_selective_checkpoint_contexts(_Count(frozenset(self.ordinals))) if self.ordinals else (nullcontext(), nullcontext())
        return forward, frozen_statistics(self.norms, again) if self.norms else again


class _Count:
    """A policy that counts products, in forward and when running again."""

    def __init__(self, kept: frozenset[int]) -> None:
        self.kept = kept
        self.met = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not is_product(op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        ordinal = self.met[context.is_recompute]
        self.met[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if ordinal in self.kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def frozen_statistics(norms: tuple[nn.Module, ...], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Run a block in which ``norms`` leave their running statistics as they are: a momentum of 0 changes nothing."""
    before = [(m, m.momentum, m._buffers.get("num_batches_tracked")) for m in norms]
    try:
        for m, _, tracked in before:
            m.momentum = 0.0
            if tracked is not None:
                m._buffers["num_batches_tracked"] = None
        with inner:
            yield
    finally:
        for m, momentum, tracked in before:
            m.momentum = momentum
            if tracked is not None:
                m._buffers["num_batches_tracked"] = tracked
