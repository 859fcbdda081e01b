"""What a recorded run of a graph says of its values, so that a part of it can be run again as if all of it ran."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from analyzer.meta.plain_type import ARGUMENTS
from analyzer.meta.spec import TensorSpec
from analyzer.meta.storage import MetaStorage
from analyzer.record.log import Log
from analyzer.record.tensor_walk import describe

Tensor = torch.Tensor

@dataclass(frozen=True)
class Value:
    """A tensor that a node returned."""

    spec: TensorSpec
    offset: int
    requires_grad: bool
    storage: int          #: its number, unique in the process
    storage_bytes: int
    known: Any            #: contents of its storage, where they are known

    def is_like(self, other: object) -> bool:
        """Whether nodes that read it would do the same with ``other``."""
        return isinstance(other, Value) and (self.spec, self.offset, self.requires_grad, self.storage_bytes) == (
            other.spec, other.offset, other.requires_grad, other.storage_bytes)


class Unknown:
    """A result that cannot be made again: an object, or a tensor without strides."""


@dataclass
class RunRecord:
    """By name of node: results (leaves, as `Value`, and their tree), specs of their gradients, fingerprints; to read,
    `complete` it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, dict[int, TensorSpec]] = field(default_factory=dict)
    fingerprints: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    differentiable: dict[str, tuple[bool, ...]] = field(default_factory=dict)  #: of the storages that it made
    #: (category, path, bytes) of parameters and buffers it uses
    held: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)

    log: Log | None = None  #: of the run, until it was read

    def complete(self) -> None:
        """Write down what was left until it is asked for."""
        log, self.log = self.log, None
        if log is not None:
            self._note_storages(log)

    def _note_storages(self, log: Log) -> None:
        """Note the parameters and buffers that each node uses, in order, and whether what it made is differentiable."""
        def note(node: int, number: int) -> None:
            lifetime = log.storages.get(number)
            if lifetime is not None and lifetime.category in ("parameter", "buffer"):
                held = self.held.setdefault(log.nodes[node].name, [])
                if (lifetime.category, lifetime.label, lifetime.nbytes) not in held:
                    held.append((lifetime.category, lifetime.label, lifetime.nbytes))

        for i, node in enumerate(log.nodes):
            lifetimes = [log.storages[number] for number, _ in node.outputs if number in log.storages]
            self.differentiable[node.name] = tuple(lifetime.requires_grad for lifetime in lifetimes
                                                   if lifetime.node == i)
            for number, _ in node.outputs if node.op == "get_attr" else ():
                note(i, number)
        for call in log.calls:
            for number in call.inputs if call.phase == "forward" and call.node >= 0 else ():
                note(call.node, number)

    def note(self, node: fx.Node, result: Any) -> None:
        """``node`` returned ``result``."""
        leaves, spec = pytree.tree_flatten(result)
        self.values[node.name] = list(map(_describe, leaves)), spec  # some containers take tensors alone
        row = self.gradients[node.name] = {}
        for i, tensor in enumerate(leaves):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(_noting(row, i))

    def tensors(self, name: str) -> list[Value]:
        """The tensors that a node returned."""
        return [v for v in pytree.tree_leaves(self.values.get(name)) if isinstance(v, Value)]

    def storages(self, name: str) -> set[int]:
        """The numbers of the storages that a node's tensors are in."""
        return {v.storage for v in self.tensors(name)}


def _noting(row: dict[int, TensorSpec], index: int) -> Any:
    def note(gradient: Tensor | None) -> None:
        if gradient is not None:  # as of a custom function that has none for an input
            row[index] = describe(gradient)

    return note


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        storage = value.untyped_storage() if value.layout is torch.strided else None
        if not isinstance(storage, MetaStorage):
            return Unknown()
        return Value(describe(value), int(value.storage_offset()), value.requires_grad, storage.number,
                     storage.nbytes(), storage.known)
    return value if isinstance(value, ARGUMENTS) else Unknown()


def fingerprint_nodes(graph: fx.Graph) -> dict[str, tuple[Any, ...]]:
    """By name, what tells whether a node still does what it did, for its inputs and for the other readers of these."""
    position = {n: i for i, n in enumerate(graph.nodes)}

    def readers(node: fx.Node) -> tuple[str, ...]:
        return tuple(u.name for u in sorted(node.users, key=position.__getitem__))

    read_by = {n: readers(n) for n in graph.nodes}
    held = {n: held_tensors(n) for n in graph.nodes}
    held_by: dict[int, tuple[str, ...]] = {}
    for n, tensors in held.items():
        for t in tensors:
            held_by[id(t)] = (*held_by.get(id(t), ()), n.name)
    return {n.name: (n.op, n.target, str(n.args), str(n.kwargs), n.meta.get("region") or (), n.meta.get("saved"),
                     n.meta.get("module_path"), read_by[n], tuple((i.name, read_by[i]) for i in n.all_input_nodes),
                     _modules(n), tuple((id(t), t.shape, t.dtype, t.requires_grad, held_by[id(t)]) for t in held[n]))
            for n in graph.nodes}


def held_tensors(node: fx.Node) -> list[Tensor]:
    """The parameters and buffers behind a ``call_module`` or ``get_attr`` node."""
    root = node.graph.owning_module
    if root is None or node.op not in ("call_module", "get_attr"):
        return []
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    owner, _, name = str(node.target).rpartition(".")
    value = getattr(root.get_submodule(owner), name)
    return [value] if isinstance(value, Tensor) else []


def _modules(node: fx.Node) -> tuple[Any, ...]:
    root = node.graph.owning_module
    if root is None or node.op != "call_module":
        return ()
    return tuple((id(m), m.training) for m in root.get_submodule(str(node.target)).modules())
