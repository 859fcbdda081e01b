"""The joint graph of a compiled function: its forward and backward operators as one functional ``torch.fx`` graph.

AOTAutograd makes this graph with tensors that claim the device of the step, for which it needs that device. Here the
function runs under the mode, in a memory of its own: the mode already takes the path of the claimed device (attention
kernels, autocast's casts), and each operator that Inductor decomposes is decomposed where it is dispatched.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.tensor import alias, device_of
from analyzer.record.reference_count import next_sequence_number

_aten = torch.ops.aten
_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]  # storage, offset, shape, strides, dtype
Tensor = torch.Tensor


class GraphBreak(Exception):
    """The function cannot be one graph."""


class GraphTape:
    """Writes down each operator that is dispatched. A write to a tensor is a new value of its storage."""

    def __init__(self, fake_mode: FakeTensorMode, decompositions: Mapping[Any, Callable[..., Any]],
                 locate: Callable[[], int]) -> None:
        self.graph = fx.Graph()
        self.fake_mode, self.decompositions, self.locate = fake_mode, decompositions, locate
        self.primals: list[Tensor] = []
        self.written: list[int] = []
        self.in_backward = False
        self.primal_of: dict[int, int] = {}                   #: index of a primal by the number of its storage
        self._values: dict[_Place, tuple[fx.Node, int]] = {}  # with the version of the storage that it is of
        self._versions: dict[int, int] = {}
        self._bases: dict[int, tuple[fx.Node, Tensor]] = {}   # value of a whole storage, and a tensor that is all of it
        self.placeholders: list[fx.Node] = []                 #: of the primals
        self._last_placeholder: fx.Node | None = None
        self._forward_of: dict[int, fx.Node] = {}             # by number of the autograd node that it made
        self._sequence = next_sequence_number()

    def fake(self, tensor: Tensor) -> FakeTensor:
        """A tensor of torch's own compiler, on the device that ``tensor`` claims."""
        with without_modes():
            plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            return FakeTensor(self.fake_mode, plain, device_of(tensor))

    def placeholder(self, tensor: Tensor, name: str) -> fx.Node:
        """An input of the graph, behind those that are there."""
        first = next(iter(self.graph.nodes), None) if self._last_placeholder is None else self._last_placeholder.next
        with self.graph.inserting_before(first if first is not None else self.graph._root):
            node = self.graph.placeholder(name)
        self._last_placeholder = node
        node.meta["val"] = self.fake(tensor)
        self._keep(tensor, node)
        return node

    def value(self, tensor: Tensor) -> fx.Node:
        """The node whose value ``tensor`` is now; one that the graph has not met is an input."""
        place = place_of(tensor)
        version = self._versions.get(place[0])
        # tensors that share a storage from before, as the parts of one that was split, are inputs each for itself
        is_part = version == 0 and place[0] in self.primal_of and place not in self._values
        if version is None or is_part and not self.in_backward:
            assert not self.in_backward, place
            self.primal_of.setdefault(place[0], len(self.primals))
            self.primals.append(tensor)
            self.placeholders.append(self.placeholder(tensor, f"primals_{len(self.primals)}"))
            return self.placeholders[-1]
        known = self._values.get(place)
        if known is not None and known[1] == version:
            return known[0]
        base, whole = self._bases[place[0]]
        offset = int(tensor.storage_offset() - whole.storage_offset())
        node = self._call(_aten.as_strided.default, (base, place[2], place[3], offset), {}, tensor)
        self._values[place] = node, version
        return node

    def write_back(self, primal: int) -> None:
        """The present contents of a primal are put where it is."""
        number = place_of(self.primals[primal])[0]
        node, whole = self._bases[number]
        self._call(_aten.copy_.default, (self.placeholders[primal], node), {}, whole)

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator ran."""
        if func is _aten.detach.default or func is _aten.alias.default:
            return  # the same place in the same storage
        schema = func._schema
        if not schema.is_mutable:
            if isinstance(result, Tensor) and args and result is args[0]:
                return  # a conversion to what it is already
            args, kwargs = tree_map_only(Tensor, self.value, (args, kwargs))
            self._record(func, args, kwargs, result)
            return
        written = [a for a, argument in zip(args, schema.arguments)
                   if argument.alias_info is not None and argument.alias_info.is_write and isinstance(a, Tensor)]
        written += [kwargs[argument.name] for argument in schema.arguments if argument.name in kwargs and (
            argument.alias_info is not None and argument.alias_info.is_write)]
        func, keep = _functional(func)
        before = args
        args, kwargs = tree_map_only(Tensor, self.value, (args[:keep], kwargs))
        if func is _aten.copy.default and before[0].dtype == before[1].dtype and before[0].shape == before[1].shape:
            self._write(before[0], args[1])
            return
        node = self._call(func, args, kwargs, written[0] if len(written) == 1 else tuple(written))
        if len(written) == 1:
            self._write(written[0], node)
            return
        for i, tensor in enumerate(written):
            self._write(tensor, self._call(operator.getitem, (node, i), {}, tensor))

    def asked(self, func: Any) -> None:
        """The contents of a tensor are asked for, or decide a size: torch's compiler breaks the graph there."""
        if not self.in_backward:
            raise GraphBreak(f"{func} needs the contents of a tensor")

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        node = self._call(func, args, kwargs, result)
        if isinstance(result, Tensor):
            self._keep(result, node)
        elif isinstance(result, (list, tuple)):
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._keep(part, self._call(operator.getitem, (node, i), {}, part))

    def _call(self, func: Any, args: Any, kwargs: Any, result: Any) -> fx.Node:
        if isinstance(result, Tensor):  # the mode calls factories on meta
            args, kwargs = tree_map_only(torch.device, lambda _: device_of(result), (args, kwargs))
        node = self.graph.call_function(func, tuple(args), dict(kwargs))
        node.meta["val"] = tree_map_only(Tensor, self.fake, result)
        if self.in_backward:
            node.meta["partitioner_tag"] = "is_backward"
            current = torch._C._current_autograd_node()
            origin = None if current is None else self._forward_of.get(current._sequence_nr())
            node.meta["module"] = self.locate() if origin is None else origin.meta["module"]
            node.meta["forward"] = origin
            return node
        node.meta["module"] = self.locate()
        sequence = next_sequence_number()
        for number in range(self._sequence, sequence):
            self._forward_of[number] = node
        self._sequence = sequence
        return node

    def _keep(self, tensor: Tensor, node: fx.Node) -> None:
        """``node`` is the value of ``tensor``; of its storage where the tensor is the first one of it."""
        place = place_of(tensor)
        version = self._versions.setdefault(place[0], 0)
        if place[0] not in self._bases:
            self._bases[place[0]] = node, alias(tensor)  # of which no user's code has a reference
        self._values[place] = node, version

    def _write(self, tensor: Tensor, node: fx.Node) -> None:
        """``tensor`` has the value ``node`` from now on, and what shares its storage another one than before."""
        place = place_of(tensor)
        if place[0] not in self._bases:  # it was never read
            self.value(tensor)
        base, whole = self._bases[place[0]]
        if place != place_of(whole):
            offset = int(tensor.storage_offset() - whole.storage_offset())
            base = self._call(_aten.as_strided_scatter.default, (base, node, place[2], place[3], offset), {}, whole)
        else:
            base = node
        version = self._versions[place[0]] = self._versions[place[0]] + 1
        self._bases[place[0]] = base, whole
        self._values[place_of(whole)] = base, version
        self._values[place] = node, version
        primal = self.primal_of.get(place[0])
        if primal is not None and primal not in self.written:
            self.written.append(primal)


def place_of(tensor: Tensor) -> _Place:
    """What tells a tensor's elements from others: its storage, and which part of it is read how."""
    storage: Any = tensor.untyped_storage()
    return storage.number, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _functional(func: Any) -> tuple[Any, int | None]:
    """The operator that returns what ``func`` writes, and how many positional arguments it takes (None: all)."""
    packet = getattr(getattr(torch.ops, func.namespace), func._schema.name.split("::")[1].rstrip("_"))
    if func._schema.name.endswith("_"):
        return getattr(packet, func._overloadname), None
    base = func._overloadname.removesuffix("out").rstrip("_") or "default"
    return getattr(packet, base), None
