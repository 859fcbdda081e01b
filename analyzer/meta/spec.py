"""What is known of a tensor without its data."""
from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .intercept.mode_stack import without_modes
from .storage import MetaStorage, find_storage


class TensorSpec(tuple[int, ...]):
    """The shape of a tensor, as a tuple, which also knows stride, dtype and simulated device.

    Specs are interned: equal ones are the same object, so a log of many calls holds each once.

    >>> s = TensorSpec.of((2, 3), (3, 1), torch.float32, "cuda:0")
    >>> s == (2, 3), s.numel, s.nbytes, s is TensorSpec.of((2, 3), (3, 1), torch.float32, "cuda:0")
    (True, 6, 24, True)
    """

    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    numel: int
    nbytes: int  #: bytes of the elements it addresses: numel times the item size (an expanded tensor counts as full)

    _interned: dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str], TensorSpec] = {}

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str) -> TensorSpec:
        """The one spec of these properties."""
        key = (shape, stride, dtype, device)
        spec = cls._interned.get(key)
        if spec is None:
            spec = cls(shape)
            spec.stride, spec.dtype, spec.device = stride, dtype, device
            spec.numel = math.prod(shape)
            spec.nbytes = spec.numel * dtype.itemsize
            cls._interned[key] = spec
        return spec

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes as a plain tuple."""
        return tuple(self)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self)}@{self.device}"

    def __reduce__(self) -> tuple[object, ...]:
        return TensorSpec.of, (tuple(self), self.stride, self.dtype, self.device)


@functools.cache
def _name_of(device: torch.device) -> str:
    return str(device)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor that lives on meta; of a jagged one, that of its values."""
    layout = tensor.layout
    if layout is not torch.strided:
        if layout is torch.jagged:
            return spec_of(tensor._values)  # type: ignore[arg-type]
        return TensorSpec.of(tuple(tensor.shape), (), tensor.dtype, str(tensor.__dict__.get("_device", "cpu")))
    if tensor.is_nested:
        shape = padded_shape(tensor)
        return TensorSpec.of(shape, tuple(math.prod(shape[i + 1:]) for i in range(len(shape))), tensor.dtype,
                             str(tensor.device))
    storage = find_storage(tensor)
    device = storage.device if isinstance(storage, MetaStorage) else tensor.device
    return TensorSpec.of(tuple(tensor.shape), tensor.stride(), tensor.dtype, _name_of(device))


def padded_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The largest size in each dimension of a strided nested tensor's parts, to which kernels pad the others."""
    with without_modes():
        sizes: torch.Tensor = tensor._nested_tensor_size()
        return len(sizes), *map(int, sizes.max(0).values.tolist())


def to_specs(tree: Any) -> Any:
    """``tree`` with every tensor replaced by its spec."""
    if isinstance(tree, torch.Tensor):
        return spec_of(tree)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return [to_specs(x) for x in tree]
    if isinstance(tree, dict):
        return {k: to_specs(v) for k, v in tree.items()}
    return tree
