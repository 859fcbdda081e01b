"""Graphs of a model in `DistributedDataParallel`, which end where its buckets of gradients do.

Source: ``DDPOptimizer`` in torch/_dynamo/backends/distributed.py: a graph gives all its gradients at its end, so that
one of the whole model would leave nothing for its all-reduces to run beside.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo.utils import get_optimize_ddp_mode
from torch.distributed import _DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel


class BucketEnds:
    """Where the graph of a module's forward ends: before the parameter with which a bucket is full, counted from the
    last module on. Modules are taken to run in the order in which they are registered, as DDP takes them at first.
    """

    def __init__(self, module: torch.nn.Module, bucket_bytes: int) -> None:
        held = [[p for p in m._parameters.values() if p is not None and p.requires_grad and not getattr(
            p, "_ddp_ignored", False)] for m in module.modules()]
        self._firsts: list[set[int]] = []  # parameters of the modules with which a graph begins
        size, cap, first = 0, min(_DEFAULT_FIRST_BUCKET_BYTES, bucket_bytes), set[int]()
        for parameters in reversed([one for one in held if one]):
            if size >= cap:
                self._firsts.append(first)
                size, cap = 0, bucket_bytes
            size += sum([p.untyped_storage().nbytes() for p in parameters])
            first = set(map(id, parameters))

    @classmethod
    def of_running(cls, function: Any) -> BucketEnds | None:
        """Those of a function of the wrapped model that runs; None where none does, or its user wants one graph."""
        wrapper: Any = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None or get_optimize_ddp_mode() != "ddp_optimizer":
            return None
        owner = getattr(function, "__self__", None)
        return cls(owner if isinstance(owner, torch.nn.Module) else wrapper.module, wrapper.bucket_bytes_cap)

    def is_before(self, args: Iterable[Any]) -> bool:
        """Whether a graph ends before the torch function that is called with ``args``; each end is told once."""
        if not self._firsts:
            return False
        given = {id(a) for a in args}
        begun = [first for first in self._firsts if not first.isdisjoint(given)]
        self._firsts = [first for first in self._firsts if first not in begun]
        return bool(begun)
