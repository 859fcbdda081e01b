"""The parameters that an optimizer updates, and of what kinds they are."""
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from analyzer.meta.spec import TensorSpec
from analyzer.meta.storage import MetaStorage
from analyzer.meta.tensor import MetaTensor

from .optimizer_script import Birth, Like
from .reserved import Reserved
from .unseen_gradient import UnseenGradients


class ParameterKind(NamedTuple):
    """What an optimizer sees of a parameter and its gradient. A size or strides of None: it does not matter which."""

    group: int
    shape: tuple[int | None, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    grad_stride: tuple[int, ...] | None
    grad_dtype: torch.dtype


def kind_of(group: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype,
            grad_stride: tuple[int, ...], grad_dtype: torch.dtype) -> ParameterKind:
    """The kind of a parameter: what is dense and row by row may have any sizes but 1, whose strides say nothing."""
    if math.prod(shape) > 1 and stride == grad_stride == contiguous_stride(shape):
        return ParameterKind(group, tuple([1 if size == 1 else None for size in shape]), None, dtype, None, grad_dtype)
    return ParameterKind(group, shape, stride, dtype, grad_stride, grad_dtype)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie row by row.

    >>> contiguous_stride((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


class Variant(NamedTuple):
    """Parameters of one kind and size, and the bytes of the storages that they and their gradients are in."""

    kind: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    parameter_bytes: int
    gradient_bytes: int

    def spec_of(self, like: Like) -> TensorSpec:
        """The spec of a tensor of these parameters' shape."""
        return TensorSpec.of(self.shape, self.stride, like.dtype, like.device)

    def bytes_of(self, birth: Birth) -> int:
        """The size of a storage that is made for such a parameter."""
        return birth.each_bytes * self.numel + birth.all_bytes


class Member:
    """A parameter: the number of its storage, and the first one of the slots of what the optimizer makes for it."""

    __slots__ = ("number", "kind", "variant", "first")

    def __init__(self, number: int, variant: Variant) -> None:
        self.number, self.variant, self.kind, self.first = number, variant, variant.kind, -1


class Members:
    """The parameters that have gradients, in the optimizer's order, and what kinds there are."""

    def __init__(self, claim: torch.device, unseen: UnseenGradients) -> None:
        self.claim, self.unseen = claim, unseen
        self.kinds: dict[ParameterKind, int] = {}
        self.all: list[Member] = []
        self.updated: list[torch.Tensor | Reserved] = []  #: the same, as tensors, and blocks without tensors
        self._variants: dict[Any, Variant | None] = {}
        self._blocks: dict[Any, list[tuple[int, Variant | None]]] = {}

    def add(self, group: int, parameter: torch.Tensor | Reserved) -> bool:
        """Take in a parameter of a group, or those of a block, if they have gradients; False where one is more than a
        plain tensor on the watched device.
        """
        if isinstance(parameter, Reserved):
            return self._add_block(group, parameter)
        gradient = self.unseen.look(parameter)
        if gradient is None:
            return True
        storage: Any = parameter.untyped_storage() if parameter.layout is torch.strided else None
        if type(parameter) is not MetaTensor or type(storage) is not MetaStorage or storage.claim != self.claim:
            return False
        variant = self._variant(group, parameter.shape, parameter.stride(), parameter.dtype, storage.nbytes(), gradient)
        if variant is None:
            return False
        self.all.append(Member(storage.number, variant))
        self.updated.append(parameter)
        return True

    def _add_block(self, group: int, reserved: Reserved) -> bool:
        gradients = self.unseen.of_block(reserved)
        if gradients is None:
            return True
        twin = reserved.twin
        key = group, id(gradients.described), tuple([parameter.stride() for parameter in twin.parameters])
        found = self._blocks.get(key)
        if found is None:
            place_of = {(spec.module, spec.name): (i, spec) for i, spec in enumerate(twin.pattern.parameters)}
            found = self._blocks[key] = [
                (i, self._variant(group, spec.shape, twin.parameters[i].stride(), spec.dtype, spec.nbytes, like))
                for i, spec, like in ((*place_of[index, name], like) for index, name, _, like in gradients.described)
            ]
        for i, variant in found:
            if variant is None:
                return False
            self.all.append(Member(reserved.first_number + i, variant))
        self.updated.append(reserved)
        return True

    def _variant(self, group: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, nbytes: int,
                 gradient: torch.Tensor) -> Variant | None:
        if gradient.layout is not torch.strided:
            return None
        grad_bytes = gradient.untyped_storage().nbytes()
        key = group, shape, stride, dtype, nbytes, gradient.shape, gradient.stride(), gradient.dtype, grad_bytes
        if key not in self._variants:
            variant = None
            if not dtype.is_complex and shape.numel() and gradient.shape == shape:
                kind = kind_of(group, tuple(shape), stride, dtype, gradient.stride(), gradient.dtype)
                variant = Variant(self.kinds.setdefault(kind, len(self.kinds)), tuple(shape), stride, shape.numel(),
                                  nbytes, grad_bytes)
            self._variants[key] = variant
        return self._variants[key]
