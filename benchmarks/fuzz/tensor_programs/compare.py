"""What was observed on real tensors against what the package says: operator calls, storages and FLOPs."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from analyzer import Profile

from .observe import Call, Layout, Seen

#: calls that only read a number or put one into a tensor, which the package does not log, or logs under another name
NUMBERS = frozenset(("aten._local_scalar_dense.default", "aten.scalar_tensor.default", "aten.lift_fresh.default",
                     "aten.lift_fresh_copy.default", "aten.is_same_size.default",
                     "aten._has_same_storage_numel.default"))
#: what autograd does in place, but under a dispatch mode out of place: the sums of gradients, and gradients that are
#: scattered into zeros (areAnyTensorSubclassLike in FunctionsManual.cpp and input_buffer.cpp)
IN_PLACE = {"aten.add.Tensor": "aten.add_.Tensor", "aten.scatter_add.default": "aten.scatter_add_.default",
            "aten.index_add.default": "aten.index_add_.default", "aten.scatter.src": "aten.scatter_.src",
            "aten.index_put.default": "aten._index_put_impl_.default"}
PRODUCT = "aten.mm.default"
CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
ZEROS = {"aten.new_zeros.default", "aten.zeros.default"}


def lay_out(tensor: tuple[int, Layout]) -> Layout:
    """The layout of a tensor with no stride where there is one element: CPU and meta kernels leave another there."""
    shape, stride, dtype = tensor[1]
    return shape, tuple(step if size > 1 else 0 for size, step in zip(shape, stride)), dtype


def computes(call: Call) -> bool:  # whether a call does anything but make a view or read a number
    operator = call.operator
    if str(operator) in NUMBERS or not str(operator).startswith("aten."):
        return False
    if operator._schema.is_mutable:
        return torch.Tag.inplace_view not in operator.tags
    given = {number for number, _ in call.inputs}
    return not given or not all(number in given for number, _ in call.outputs)


def transpose(product: Call) -> Call:  # the same matrix product from the other side
    def flip(tensor: tuple[int, Layout]) -> tuple[int, Layout]:
        number, (shape, stride, dtype) = tensor
        return number, (shape[::-1], stride[::-1], dtype)

    return product._replace(inputs=tuple(map(flip, product.inputs[::-1])), outputs=tuple(map(flip, product.outputs)))


def leave_out(outputs: tuple[Any, ...], told: tuple[Any, ...]) -> tuple[Any, ...]:
    """The outputs without one that is not told, where that makes them alike."""
    wanted = list(map(lay_out, told))
    shorter = (outputs[:index] + outputs[index + 1:] for index in range(len(outputs)))
    return next((some for some in shorter if list(map(lay_out, some)) == wanted), outputs)


class Matching:
    """Calls and storages of two runs, one by one. `differences` says where they part."""

    def __init__(self, real: Seen, told: Seen) -> None:
        self.real, self.told = real, told
        self.real_at = [i for i, call in enumerate(real.calls) if computes(call)]
        self.told_at = [i for i, call in enumerate(told.calls) if computes(call)]
        self.real_of: dict[int, int] = {}
        self.taken: dict[int, int] = {}

    def differences(self) -> Iterator[str]:  # what differs first among calls; else which storages live differently
        for place, (i, j) in enumerate(zip(self.real_at, self.told_at)):
            one, other = self.real.calls[i], self.told.calls[j]
            found = self.match(one, other)
            if found:
                yield f"call {place}: {found}: really {show(one)}, told {show(other)}"
                return
        if len(self.real_at) != len(self.told_at):
            at = min(len(self.real_at), len(self.told_at))
            more, places = ((self.real, self.real_at) if len(self.real_at) > at else (self.told, self.told_at))
            yield (f"{len(self.real_at)} calls, told {len(self.told_at)}: the first beyond is "
                   f"{show(more.calls[places[at]])}")
            return
        yield from self.compare_lives()

    def match(self, one: Call, other: Call) -> str:  # in what two calls differ; their storages must be the same
        names = str(one.operator), str(other.operator)
        accumulates = IN_PLACE.get(names[0]) == names[1]
        if names == (CONVOLUTION_BACKWARD,) * 2:  # oneDNN gives those of weight and bias, whichever is asked for
            one = one._replace(outputs=leave_out(one.outputs, other.outputs))
        elif names == (PRODUCT, PRODUCT) and list(map(lay_out, one.inputs)) != list(map(lay_out, other.inputs)):
            other = transpose(other)  # the strides of a vector decide on which side autograd multiplies (mm_mat1_grad)
        elif names[0] != names[1] and not accumulates and not ZEROS.issuperset(names):
            return "operators"
        for what in ("inputs", "outputs"):
            mine, theirs = getattr(one, what), getattr(other, what)
            if what == "inputs" and names[0] != names[1] and ZEROS.issuperset(names):
                continue
            if list(map(lay_out, mine)) != list(map(lay_out, theirs)):
                return f"layouts of {what}"
            for (number, _), (claimed, _) in zip(mine, theirs):
                if accumulates and what == "outputs":
                    self.bind(claimed, number)
                elif not self.is_same(claimed, number):
                    return f"storages of {what}"
        return ""

    def bind(self, claimed: int, number: int) -> None:  # take two storages for the same from now on
        self.taken.pop(self.real_of.get(claimed, -1), None)
        self.real_of[claimed], self.taken[number] = number, claimed

    def is_same(self, claimed: int, number: int) -> bool:  # whether two storages are, or can be taken for, the same
        if claimed not in self.real_of and number not in self.taken:
            self.bind(claimed, number)
        return self.real_of.get(claimed) == number

    def compare_lives(self) -> Iterator[str]:  # storages that have other sizes or die elsewhere
        end = len(self.real_at)

        def place(died: int | None, at: list[int]) -> int:
            return end if died is None else bisect_left(at, died)

        for claimed, number in self.real_of.items():
            size, told_size = self.real.storage_bytes[number], self.told.storage_bytes.get(claimed)
            if size != told_size:
                yield f"storage {number}: {size} bytes, told {told_size}"
            died = place(self.real.died.get(number), self.real_at)
            told_died = place(self.told.died.get(claimed), self.told_at)
            if died != told_died:
                yield (f"storage {number} ({size} bytes, first in {self.first_use(number)}) dies before call {died} of "
                       f"{end}, told {told_died}")

    def first_use(self, number: int) -> str:  # the first call that has a storage
        return next((f"call {place}, {self.real.calls[i].operator}" for place, i in enumerate(self.real_at)
                     if any(number == n for n, _ in (*self.real.calls[i].inputs, *self.real.calls[i].outputs))), "none")


def show(call: Call) -> str:  # a call in a line
    def tell(pair: Any) -> str:
        number, (shape, stride, dtype) = pair
        return f"#{number} {str(dtype)[6:]}{list(shape)}/{list(stride)}"

    return (f"{call.operator}({', '.join(map(tell, call.inputs))}) -> "
            f"{', '.join(map(tell, call.outputs)) or None}")


def compare_flops(real: Seen, told: Profile) -> Iterator[str]:
    """Operators of which torch's FlopCounterMode counts another number."""
    counted = {str(overload) for packet in flop_registry if isinstance(packet, torch._ops.OpOverloadPacket)
               for overload in (getattr(packet, name) for name in packet.overloads())}
    found: dict[str, int] = {}
    for row in told.operators:
        if row.operator in counted:
            found[row.operator] = found.get(row.operator, 0) + (row.flops or 0)
    for name in sorted({*found, *real.flops}):
        if found.get(name, 0) != real.flops.get(name, 0):
            yield f"FLOPs of {name}: {real.flops.get(name)}, told {found.get(name)}"
