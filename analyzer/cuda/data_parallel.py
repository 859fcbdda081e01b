"""``nn.DataParallel`` over the one simulated device: torch without CUDA lacks what hands out its inputs."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.parallel._functions
import torch.nn.parallel.comm

from analyzer.meta.intercept.replacement import Undo, replace
from analyzer.meta.state import current


def replacements() -> Iterator[Undo]:
    """Hand out chunks of tensors, and the streams that copy them; each result undoes one step."""
    yield replace(torch.nn.parallel.comm, "scatter", _scatter)
    yield replace(torch.nn.parallel._functions, "_get_stream", lambda f: lambda device: f(device)
                  if current() is None else torch.cuda.Stream(device))
    yield replace(torch.accelerator, "device_index", lambda f: lambda index: f(index)
                  if current() is None else torch.cuda.device(index))


def _scatter(original: Any) -> Any:
    def scatter(tensor: torch.Tensor, devices: Any = None, chunk_sizes: Any = None, dim: int = 0, streams: Any = None,
                *, out: Any = None) -> Any:
        if current() is None or out is not None:
            return original(tensor, devices, chunk_sizes, dim, streams, out=out)
        # torch/csrc/cuda/comm.cpp, scatter
        chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
        places = [torch.device("cuda", d) if isinstance(d, int) else d for d in devices]
        return tuple(chunk.to(place) for chunk, place in zip(chunks, places))
    return scatter
