"""The parameters that an optimizer updates, told apart by what it sees of them."""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from analyzer.meta.storage import MetaStorage
from analyzer.meta.tensor import MetaTensor
from analyzer.record.optimizer_step import has_gradient_hooks

from ..lazy_block import LazyBlock, one_by_one
from ..match import Mismatch
from ..unmaterialized_gradient import UnmaterializedGradients


class ParameterKind(NamedTuple):
    """What decides an optimizer's calls on a parameter and its gradient. A size or stride of None may be any."""

    group: int
    shape: tuple[int | None, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    grad_stride: tuple[int, ...] | None
    grad_dtype: torch.dtype


@dataclass(eq=False, frozen=True, slots=True)
class ParameterInfo:
    """A parameter's kind (its index), size, and the bytes of its and its gradient's storage; one for all alike."""

    kind: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    parameter_bytes: int
    gradient_bytes: int


def kind_of(group: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype,
            grad_stride: tuple[int, ...], grad_dtype: torch.dtype) -> ParameterKind:
    """The kind of a parameter: contiguous ones may have any sizes but 1, whose strides say nothing."""
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


class UpdatedParameters:
    """The parameters that have gradients, in the optimizer's order: ``numbers`` of their storages and ``infos``.

    Raises Mismatch where one is more than a plain tensor with a dense gradient on a storage of its own on ``device``.
    """

    def __init__(self, device: torch.device, unmaterialized: UnmaterializedGradients,
                 groups: Iterable[Iterable[torch.Tensor | LazyBlock]]) -> None:
        self.device, self.unmaterialized = device, unmaterialized
        self.kinds: dict[ParameterKind, int] = {}
        self.infos: list[ParameterInfo] = []
        self.numbers: list[int] = []
        self.holders: list[torch.Tensor | LazyBlock] = [
        ]  #: the parameters, or their block where it is not materialized
        self._infos: dict[Any, ParameterInfo] = {}
        self._infos_of_blocks: dict[Any, list[tuple[int, ParameterInfo]]] = {}
        for group, parameters in enumerate(groups):
            for parameter in one_by_one(parameters):
                if isinstance(parameter, LazyBlock):
                    self._add_block(group, parameter)
                else:
                    self._add(group, parameter)
        if len(set(self.numbers)) < len(self.numbers):
            raise Mismatch("two parameters share a storage")

    def _add(self, group: int, parameter: torch.Tensor) -> None:
        if has_gradient_hooks(parameter):
            raise Mismatch("hooks run with a parameter's gradient")
        gradient = self.unmaterialized.look(parameter)
        if gradient is None:
            return
        storage: Any = parameter.untyped_storage() if parameter.layout is torch.strided else None
        if type(parameter) is not MetaTensor or type(storage) is not MetaStorage:
            raise Mismatch("a parameter is more than a plain tensor")
        if storage.device != self.device:
            raise Mismatch("a parameter is on another device")
        self.infos.append(
            self._info(group, parameter.shape, parameter.stride(), parameter.dtype, storage.nbytes(), gradient))
        self.numbers.append(storage.number)
        self.holders.append(parameter)

    def _add_block(self, group: int, block: LazyBlock) -> None:
        gradients = self.unmaterialized.of_block(block)
        if gradients is None:
            return
        parameters = block.isomorph.parameters
        key = group, id(gradients.described), tuple([parameter.stride() for parameter in parameters])
        found = self._infos_of_blocks.get(key)
        if found is None:
            place_of = {
                (held.module, held.name): (i, held)
                for i, held in enumerate(block.isomorph.prototype.parameters)
            }
            found = self._infos_of_blocks[key] = [
                (i, self._info(group, held.shape, parameters[i].stride(), held.dtype, held.nbytes, like))
                for i, held, like in ((*place_of[index, name], like) for index, name, _, like in gradients.described)
            ]
        self.infos += [info for _, info in found]
        self.numbers += [block.first_number + i for i, _ in found]
        self.holders.append(block)

    def _info(self, group: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, nbytes: int,
              gradient: torch.Tensor) -> ParameterInfo:
        if gradient.layout is not torch.strided:
            raise Mismatch("a gradient is sparse")
        grad_bytes = gradient.untyped_storage().nbytes()
        key = group, shape, stride, dtype, nbytes, gradient.shape, gradient.stride(), gradient.dtype, grad_bytes
        found = self._infos.get(key)
        if found is None:
            if dtype.is_complex or not shape.numel() or gradient.shape != shape:
                raise Mismatch("a parameter is complex, empty, or of another shape than its gradient")
            kind = kind_of(group, tuple(shape), stride, dtype, gradient.stride(), gradient.dtype)
            number = self.kinds.setdefault(kind, len(self.kinds))
            found = self._infos[key] = ParameterInfo(number, tuple(shape), stride, shape.numel(), nbytes, grad_bytes)
        return found
