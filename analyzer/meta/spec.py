"""What is known of a tensor without its data."""
from __future__ import annotations

import math

import torch


class TensorSpec(tuple[int, ...]):
    """The shape of a tensor, as a tuple, which also knows stride, dtype and claimed device.

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
        return tuple(self)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self)}@{self.device}"

    def __reduce__(self) -> tuple[object, ...]:
        return TensorSpec.of, (tuple(self), self.stride, self.dtype, self.device)
