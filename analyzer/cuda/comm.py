"""Exchanges between the devices of one process, as torch/csrc/cuda/comm.cpp makes them for `torch.nn.DataParallel`."""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors, _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors

from analyzer.meta.intercept.replacement import Undo, answer, replace, supply

from .stream import simulated_cuda

Tensor = torch.Tensor


def _scatter(original: Any, tensor: Tensor, devices: Any = None, chunk_sizes: Any = None, dim: int = 0,
             streams: Any = None, *, out: Any = None) -> Any:
    if out is not None:
        return original(tensor, devices, chunk_sizes, dim, streams, out=out)
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    places = [torch.device("cuda", d) if isinstance(d, int) else d for d in devices]
    return tuple(chunk.to(place) for chunk, place in zip(chunks, places))


def _scatter_out(tensor: Tensor, out: Sequence[Tensor], dim: int = 0, streams: Any = None) -> tuple[Tensor, ...]:
    sizes = [one.size(dim) for one in out]
    return tuple(one.copy_(chunk) for one, chunk in zip(out, tensor.split(sizes, dim)))


def _broadcast(tensor: Tensor, devices: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(tensor if tensor.get_device() == index else tensor.to(torch.device("cuda", index))
                 for index in devices)


def _broadcast_out(tensor: Tensor, out: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(one.copy_(tensor) for one in out)


def _broadcast_coalesced(tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int) -> list[list[Tensor]]:
    """Copies on each device but the first are parts of one tensor for each ``buffer_size`` bytes."""
    if any(tensor.get_device() != devices[0] for tensor in tensors):
        raise RuntimeError(f"All tensors must be on devices[0]: {devices[0]}")
    made: list[list[Tensor]] = [[] for _ in devices]
    for chunk in _take_tensors(tensors, buffer_size):
        flat = chunk[0].contiguous().view(-1) if len(chunk) == 1 else _flatten_dense_tensors(chunk)
        for found, copy in zip(made, _broadcast(flat, devices)):
            found += [part.detach() for part in _unflatten_dense_tensors(copy, chunk)]
    return [list(tensors), *(list(_reorder_tensors_as(found, tensors)) for found in made[1:])]


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    first = tensors[0]
    at = torch.device("cuda", torch.cuda.current_device() if destination is None else destination) if (
        destination != -1) else torch.device("cpu")
    size = [*first.shape]
    size[dim] = sum(tensor.size(dim) for tensor in tensors)
    return _gather_out(tensors, torch.empty(size, dtype=first.dtype, device=at), dim)


def _gather_out(tensors: Sequence[Tensor], out: Tensor, dim: int) -> Tensor:
    for tensor, part in zip(tensors, out.split([tensor.size(dim) for tensor in tensors], dim)):
        part.copy_(tensor)
    return out


class _Turn:
    """A thread of ``parallel_apply``: threads take turns where they run Python, and a mode is one thread's."""

    def __init__(self, target: Callable[..., Any], args: Sequence[Any]) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        self._target(*self._args)

    def join(self) -> None:
        """It has ended."""


class _Threading:
    Lock = threading.Lock

    @staticmethod
    def Thread(target: Callable[..., Any], args: Sequence[Any]) -> Any:  # noqa: N802
        return (threading.Thread if simulated_cuda() is None else _Turn)(target=target, args=args)


class _Nccl:
    """``torch.cuda.nccl`` for `torch.nn.parallel.comm`: builds for CUDA have it, and add by it, without copies."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def is_available(self, tensors: Sequence[Tensor]) -> bool:
        return bool(simulated_cuda() or self._original.is_available(tensors))

    def reduce(self, inputs: Sequence[Tensor], output: Tensor, root: int = 0) -> None:
        """What crosses the links is what copies to the root would be."""
        if simulated_cuda() is None:
            self._original.reduce(inputs, output=output, root=root)
            return
        for at in sorted(range(len(inputs)), key=lambda at: at == root):
            output.copy_(inputs[at])


def replacements() -> Iterator[Undo]:
    made: dict[str, Callable[..., Any]] = {
        "_broadcast": _broadcast, "_broadcast_out": _broadcast_out, "_broadcast_coalesced": _broadcast_coalesced,
        "_scatter_out": _scatter_out, "_gather": _gather, "_gather_out": _gather_out}
    for name, simulated in made.items():
        if hasattr(torch._C, name):
            yield answer(torch._C, name, simulated, where=simulated_cuda)
        else:
            yield supply(torch._C, name, simulated)
    yield answer(torch.nn.parallel.comm, "scatter", _scatter, passes_original=True)
    yield replace(torch.nn.parallel.comm, "nccl", _Nccl)
    yield replace(sys.modules["torch.nn.parallel.parallel_apply"], "threading", lambda original: _Threading)
    # which copies the inputs
    yield answer(torch.nn.parallel._functions, "_get_stream", lambda device: torch.cuda.Stream(device),
                 where=simulated_cuda)
