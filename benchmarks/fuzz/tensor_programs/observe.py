"""What a step does on real tensors of the CPU, watched by torch's own means: nothing of the package is used."""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype of a tensor."""


class Call(NamedTuple):  # a call of an operator: each tensor given and returned, with the number of its storage
    operator: Any
    inputs: tuple[tuple[int, Layout], ...]
    outputs: tuple[tuple[int, Layout], ...]


@dataclass
class Seen:  # what a step did: calls in order, and storages by number
    calls: list[Call] = field(default_factory=list)
    died: dict[int, int] = field(default_factory=dict)       #: how many calls had begun before a storage died
    storage_bytes: dict[int, int] = field(default_factory=dict)
    forward_calls: int = 0                                   #: calls before the backward pass
    trains: bool = True                                      #: whether there was a backward pass
    flops: dict[str, int] = field(default_factory=dict)      #: by operator, of those that torch counts
    saved: list[int] = field(default_factory=list)           #: bytes of storages made forward that autograd saved


class Watch(TorchDispatchMode):  # notes each operator call, and between calls which storages are gone
    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Seen()
        self.living: dict[int, tuple[int, StorageWeakRef]] = {}
        for tensor in known:
            self.number(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.look()
        given = self.describe((args, kwargs))
        out = func(*args, **kwargs)
        self.seen.calls.append(Call(func, given, self.describe(out)))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            flops = self.seen.flops
            flops[str(func)] = flops.get(str(func), 0) + (count_gradients(*args) if "convolution_backward" in str(
                func) else int(count(*args, **kwargs, out_val=out)))
        return out

    def describe(self, tree: Any) -> tuple[tuple[int, Layout], ...]:
        """Each tensor in what an operator is given or returns."""
        return tuple((self.number(t), (tuple(t.shape), t.stride(), t.dtype)) for t in tree_leaves(tree)
                     if isinstance(t, Tensor))

    def number(self, tensor: Tensor) -> int:  # the number of a tensor's storage
        storage = tensor.untyped_storage()
        found = self.living.get(storage._cdata)
        if found is None:  # a weak reference keeps the address from being given again
            found = self.living[storage._cdata] = len(self.seen.storage_bytes), StorageWeakRef(storage)
            self.seen.storage_bytes[found[0]] = storage.nbytes()
        return found[0]

    def look(self) -> None:  # note the storages that died since the last look
        for address in [a for a, (_, reference) in self.living.items() if reference.expired()]:
            number, _ = self.living.pop(address)
            self.seen.died[number] = len(self.seen.calls)


def count_gradients(gradient: Tensor, images: Tensor, weight: Tensor, *args: Any) -> int:
    """FLOPs of a convolution's gradients, which torch takes for those of a convolution without groups: each product of
    the forward pass once for the images and once for the weight, where they are wanted.
    """
    transposed, wanted = args[4], args[7]
    small = images if transposed else gradient
    return int(2 * small.numel() * (weight.numel() // weight.shape[0]) * sum(wanted[:2]))


def find_loss(output: Any) -> Tensor | None:
    """What `analyzer.profile` documents as its default: of the outputs that have a gradient the only scalar, else their
    sum; None without any.
    """
    parts = [part for part in tree_leaves(vars(output) if hasattr(output, "left") else output)
             if isinstance(part, Tensor) and part.requires_grad]
    scalars = [part for part in parts if part.dim() == 0]
    if len(scalars) == 1 < len(parts):
        return scalars[0]
    total = None
    for part in parts:
        one = part.sum()
        total = one if total is None else total + one
    return total


def observe(model: nn.Module, args: tuple[Any, ...], autocast: torch.dtype | None, trains: bool) -> Seen:
    """Watch a step: forward and, where it ``trains``, loss and backward."""
    watch = Watch([*model.parameters(), *model.buffers(), *(t for t in args if isinstance(t, Tensor))])
    region: AbstractContextManager[Any] = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with watch:
        with region, torch.set_grad_enabled(trains):
            output = model(*args)
            loss = find_loss(output) if trains else None
        del output
        watch.look()
        watch.seen.forward_calls = len(watch.seen.calls)
        watch.seen.trains = loss is not None
        if loss is not None:
            loss.backward()
        del loss
        watch.look()
    return watch.seen
