"""Where the graph of a compiled function ends: what its results are, and which tensors of the function get them.

While the graph is made, leaves stand in for tensors that have a history from before it.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from analyzer.meta.address_space import UNFOLLOWED, AddressSpace, MetaStorage
from analyzer.meta.tensor import alias
from analyzer.record.reference_count import next_sequence_number

from .graph_tape import GraphTape
from .joint_graph import JointGraph, put_writes_last
from .traced_tensor import (
    GraphShape,
    coerce_like,
    exchange,
    is_plain,
    is_unrecorded,
    is_wrapped,
    parts_of,
    place_of,
    rebuild_like,
    space_of,
    tangent_like,
)

Tensor = torch.Tensor


class _Apart(torch.autograd.Function):
    """The same contents, which may be written in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def set_apart(leaf: Tensor) -> Tensor:
    """What stands for a result of an earlier graph: it has a history, that of ``leaf`` alone."""
    found: Tensor = _Apart.apply(leaf)  # type: ignore[no-untyped-call]
    return found


@dataclass
class _Replaced:
    """A tensor with a history, which a graph's own history must not reach into: a leaf is in its place meanwhile."""

    tensor: Tensor
    other: Tensor  #: has the C++ tensor meanwhile
    leaf: Tensor
    node: Any      #: that the tensor is made by; another one after a write


class StandIns:
    """Tensors from before a graph that need a gradient, and what is in their place while the graph is made."""

    def __init__(self) -> None:
        self.replaced: dict[int, _Replaced] = {}
        self.wrapped: dict[int, Tensor] = {}  #: those that are tensors around others
        self._first_node = next_sequence_number()

    def replace(self, tensor: Tensor) -> None:
        """Put a leaf in the place of ``tensor``, where it has a history from before the graph."""
        if is_unrecorded(tensor) or not tensor.requires_grad:
            return
        made_by = tensor.grad_fn
        if made_by is None and not tensor._backward_hooks and not is_wrapped(tensor):
            return
        if made_by is not None and made_by._sequence_nr() >= self._first_node:
            return  # the graph made it
        if is_wrapped(tensor):
            self.wrapped[id(tensor)] = tensor
            if made_by is None:
                return
        if id(tensor) in self.replaced or not is_wrapped(tensor) and not is_plain(tensor):
            return
        with torch.enable_grad():
            leaf = (tensor.detach() if is_wrapped(tensor) else alias(tensor)).requires_grad_()
            other = set_apart(leaf)
        exchange(tensor, other)
        self.replaced[id(tensor)] = _Replaced(tensor, other, leaf, tensor.grad_fn)

    def put_back(self) -> None:
        """Each tensor is in its own place again."""
        for replaced in self.replaced.values():
            exchange(replaced.tensor, replaced.other)
        self.replaced = {}

    def leaf_of(self, tensor: Tensor) -> Tensor:
        """What a gradient for ``tensor`` is asked of."""
        replaced = self.replaced.get(id(tensor))
        return tensor if replaced is None else replaced.leaf


@dataclass
class _Put:
    """A tensor that gets a part of a result, or of a primal."""

    tensor: Tensor
    base: int | Tensor      #: index of the result, or the primal
    part: Any = None        #: (offset from the result's own, shape, strides, dtype), None: all of it
    is_leaf: bool = False

    def make(self, results: Sequence[Any]) -> Tensor:
        base: Tensor = self.base if isinstance(self.base, Tensor) else results[self.base]
        if self.part is None:
            return base
        offset, shape, stride, dtype, needs_gradient = self.part
        with torch._C._EnableTorchFunction():
            whole = base if base.dtype is dtype else base.view(dtype)
            offset += 0 if isinstance(self.base, Tensor) else whole.storage_offset()
            found = whole.as_strided(shape, stride, offset)
            return found if needs_gradient else found.detach()


class GraphEnd:
    """Where a graph ends: what its results are, and which tensors get them."""

    def __init__(self, tape: GraphTape, space: AddressSpace, stand_ins: StandIns,
                 gradients: list[tuple[Tensor, Tensor]]) -> None:
        self.tape, self.space, self.stand_ins = tape, space, stand_ins
        self.results: list[Tensor] = []  # of the trace
        self._puts: list[_Put] = []
        self._copies: list[tuple[Tensor, int]] = []  # primals that results are copied to
        self._followed: list[tuple[int, Any, int]] = []
        self._gradients = gradients  # that the function assigned, each behind the tensor that has it

    def close(self, live: list[Tensor], given: int) -> JointGraph | None:
        """The graph, whose first ``given`` primals are arguments; None where there is none. ``live`` are the tensors
        that the function made and holds.
        """
        tape = self.tape
        groups: dict[int, list[Tensor]] = {}
        listed = {id(t): t for t in (*live, *[g for _, g in self._gradients])}
        for tensor in listed.values():
            if is_wrapped(tensor):
                self._add_wrapped(tensor)
                continue
            number, offset, shape, stride, dtype = place_of(tensor)
            primal = tape.primal_of.get(number)
            if space_of(tensor) is self.space:
                groups.setdefault(number, []).append(tensor)
            elif (primal is not None and not is_unrecorded(tensor) and tensor.grad_fn is not None
                  and id(tensor) not in self.stand_ins.replaced and all(tensor is not p for p in tape.primals)):
                self._puts.append(_Put(tensor, tape.primals[primal], (offset, shape, stride, dtype, True)))
        for group in groups.values():
            self._add_group(group)
        self._write_primals()
        return self._make_graph(given) if self.results or tape.written else None

    def _add_wrapped(self, tensor: Tensor) -> None:
        is_made = any(space_of(part) is self.space for part in parts_of(tensor))
        if is_made or tensor.grad_fn is not None and id(tensor) not in self.stand_ins.wrapped:
            self._puts.append(_Put(tensor, len(self.results)))
            self.results.append(tensor)

    def _add_group(self, group: list[Tensor]) -> None:
        """Tensors on one storage: one result, of which the others are views as AOTAutograd makes them again."""
        base = next((t for t in group if t.requires_grad), group[0])
        if len({place_of(t) for t in group}) > 1:
            whole = next((t for t in group if not t._is_view()), base._base)
            if whole is None:  # in inference mode views do not tell what they are of
                for tensor in group:
                    self._add_group([tensor])
                return
            base = whole
        self.results.append(base)
        index, storage, start = len(self.results) - 1, base.untyped_storage(), base.storage_offset()
        assert isinstance(storage, MetaStorage)
        if storage.followed != UNFOLLOWED:
            self._followed.append((index, storage.followed, storage.nbytes()))
        for tensor in group:
            part = None if tensor is base else (
                tensor.storage_offset() - start * base.itemsize // tensor.itemsize, tuple(tensor.shape),
                tensor.stride(), tensor.dtype, tensor.requires_grad)
            self._puts.append(_Put(tensor, index, part, tensor.is_leaf and tensor.requires_grad))

    def _write_primals(self) -> None:
        """A primal that got a history is written outside of the graph, where autograd sees it."""
        for i in self.tape.written:
            primal = self.tape.primals[i]
            replaced = self.stand_ins.replaced.get(id(primal))
            if is_unrecorded(primal) or primal.grad_fn is None or (
                    replaced is not None and primal.grad_fn is replaced.node):
                self.tape.write_back(i)
            else:
                self.results.append(primal)
                self._copies.append((primal, len(self.results) - 1))

    def _make_graph(self, given: int) -> JointGraph:
        tape = self.tape
        forward = [tape.value(part) for t in self.results for part in parts_of(t)]
        primals = list(tape.primals)
        inputs, own = self._list_inputs(primals)
        leaves = [self.stand_ins.leaf_of(p) for p in inputs]
        wanted = [i for i, t in enumerate(leaves) if t.requires_grad and t.is_leaf]
        differentiated = [i for i, t in enumerate(self.results) if t.grad_fn is not None]
        if not torch.is_grad_enabled() or not wanted:
            differentiated = []
        gradients: list[fx.Node | None] = [None] * len(primals)
        shape = GraphShape([(len(parts_of(t)), rebuild_like(t)) for t in self.results], [], [None] * len(inputs))
        if differentiated:
            tangents = []
            for i in differentiated:
                with torch._C._EnableTorchFunction():
                    tangents.append(tangent_like(self.results[i]))
            shape.tangents += map(coerce_like, tangents)
            for number, part in enumerate([part for t in tangents for part in parts_of(t)], 1):
                tape.placeholder(part, f"tangents_{number}")
            tape.in_backward = True
            with torch._C._EnableTorchFunction():  # for custom functions' backward passes, which may make tensors
                found = torch.autograd.grad([self.results[i] for i in differentiated], [leaves[i] for i in wanted],
                                            tangents, allow_unused=True)
            for i, gradient in zip(wanted, found):
                if gradient is not None:
                    parts = parts_of(gradient)  # of a tensor around several, the gradient may be a plain one
                    own_places = own[i][:len(parts)]
                    shape.gradients[i] = own_places, rebuild_like(gradient)
                    for place, part in zip(own_places, parts, strict=True):
                        gradients[place] = tape.value(part)
            primals = list(tape.primals)  # constants of custom functions' backward passes are behind the others
            gradients += [None] * (len(primals) - len(gradients))
        for primal, _ in self._copies:
            if id(primal) not in self.stand_ins.replaced:  # it had no history before
                exchange(primal, alias(primal))
        put_writes_last(tape.graph)
        tape.graph.output((*forward, *gradients))
        for node in reversed(tape.graph.nodes):
            if not node.users and not node.is_impure():
                tape.graph.erase_node(node)
        places = {node: place for place, node in enumerate(tape.graph.nodes)}
        for node, place in places.items():
            node.meta["place"] = place
        return JointGraph(
            tape.graph, primals, min(given, len(primals)), len(forward), differentiated,
            [node.meta.get("module", 0) for node in places],
            [places.get(node.meta.get("forward")) if node.meta.get("partitioner_tag") == "is_backward" else place
             for node, place in places.items()], inputs, shape)

    def _list_inputs(self, primals: list[Tensor]) -> tuple[list[Tensor], list[list[int]]]:
        """The tensors that may get a gradient, and of which primals each consists."""
        index = {id(primal): i for i, primal in enumerate(primals)}
        wrapped = {id(t): [index[id(part)] for part in parts_of(t) if id(part) in index]
                   for t in self.stand_ins.wrapped.values()}
        found = [t for t in self.stand_ins.wrapped.values() if wrapped[id(t)]]
        parts = {i for t in found for i in wrapped[id(t)]}
        plain = [i for i in range(len(primals)) if i not in parts]
        own = [alias(primals[i]) if is_unrecorded(primals[i]) else primals[i] for i in plain]
        return [*own, *found], [*[[i] for i in plain], *[wrapped[id(t)] for t in found]]

    def finish(self, results: Sequence[Any]) -> None:
        """Tensors that the code holds become the real ones."""
        for index, followed, nbytes in self._followed:
            storage = results[index].untyped_storage()
            if storage.nbytes() == nbytes:
                storage.followed = followed
        for primal, index in self._copies:
            with torch._C._EnableTorchFunction():
                primal.copy_(results[index])
        found = [put.make(results) for put in self._puts]
        for put, real in zip(self._puts, found):
            if put.is_leaf:
                real.requires_grad_()
            for part, other in zip(parts_of(put.tensor), parts_of(real)) if is_wrapped(real) else ():
                exchange(part, other)
            exchange(put.tensor, real)
        for holder, gradient in self._gradients:
            holder.grad = gradient
