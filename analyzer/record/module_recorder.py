"""Writes down the modules that run, the nodes of a step, and which storages are parameters and buffers."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from analyzer.meta.source_line import user_line
from analyzer.meta.spec import SPARSE_LAYOUTS, parts_of
from analyzer.meta.tensor import PLAIN_TENSORS

from .log import LogModule, LogModuleCall, LogNode, OuterCall, identifier
from .memory_recorder import ROOT, MemoryRecorder
from .options import count_samples, count_tokens, name_tensors
from .progress import report_progress
from .storage_lifetime import OUTSIDE
from .tensor_walk import describe, describe_tensors, local_part, parts_of_parameter, tensors_in, walk_modules


class BlockSkipper(Protocol):
    """Knows which modules are blocks that need not run."""

    def skip(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """What a module gives without running; NotImplemented where it has to run."""

    def will_skip(self, module: torch.nn.Module, args: Any) -> bool:
        """Whether a module that is about to be called in a checkpoint need not run."""


class ModuleRecorder:
    """The part of a `Recorder` that hears of calls of modules, of ``root`` (``walked`` where they were listed), and
    writes the node table. ``is_leaf`` tells which modules become one node (eager runs), ``find_leaf_impl`` what runs
    instead of a module's forward. A driver that knows its nodes (the graph interpreter) sets `RecordedRun.node` itself.
    """

    def __init__(self, memory: MemoryRecorder, root: torch.nn.Module,
                 is_leaf: Callable[[torch.nn.Module], bool] | None = None,
                 find_leaf_impl: Callable[[torch.nn.Module], Callable[..., Any] | None] = lambda module: None,
                 walked: Sequence[tuple[str, torch.nn.Module]] | None = None) -> None:
        walked = walk_modules(root) if walked is None else walked
        self.memory, self.run, self.log = memory, memory.run, memory.log
        self.is_leaf, self.find_leaf_impl = is_leaf, find_leaf_impl
        self.skipper: BlockSkipper | None = None
        self.compiled: dict[int, dict[str, Any] | None] = {}  #: modules under torch.compile: `Borrowed.compiled`
        self.described_step = 0  #: the step whose calls of modules are written down
        self.called_from: str | None = None  #: the line that called what is recorded, which is no part of the model
        self.planned_calls = 0  #: module calls that the driver expects, to tell how far the run has come
        self.share_done: float | None = None  #: how far it has come, where the driver knows that
        self._entered = 0
        self.listed = [module for _, module in walked]
        self.index_of: dict[int, int] = {}  #: id of a module -> its index in `Log.modules`
        self.owners: dict[int, int] = {}  #: id of a parameter or buffer -> index of the module that holds it
        self._open_calls: list[int | None] = []  # beside the stack: index in `Log.module_calls`
        self.leaf_depth = 0  #: how many modules run inside of a leaf, and the leaf itself
        self.producers: dict[int, int] = {}  #: by number of a storage the node that wrote it last
        for path, module in walked:
            parent = None if path == "" else self.log.index_of_path[path.rpartition(".")[0]]
            self.log.index_of_path[path] = self.index_of[id(module)] = len(self.log.modules)
            self.log.modules.append(LogModule(path, type(module).__name__, parent))

    # ---- steps

    def start_step(self, step: int, placeholders: bool = True) -> None:
        """Another step begins: its first nodes are the inputs, unless the driver has its own."""
        self.memory.end()
        for listener in self.run.listeners:
            listener.step_begins(step)
        self.run.step, self.log.steps = step, step + 1
        self.producers.clear()
        self.run.node = OUTSIDE
        for lifetime in self.log.lifetimes_in("input") if placeholders else ():
            node = self.add_node("placeholder", lifetime.label or "input", lifetime.label or "input", ROOT)
            self.log.node_slots[node].outputs += ((lifetime.number, lifetime.spec),)
            self.producers[lifetime.number] = node

    def describe_step(self, step: int) -> None:
        """Write down the calls of modules of this step, and forget those of an earlier one."""
        self.described_step = step
        self.log.module_calls.clear()
        self._open_calls = [None] * len(self._open_calls)  # those under way are of an earlier one
        for module in self.log.modules:
            module.calls, module.inputs, module.outputs = 0, (), ()

    def compute_loss(self, loss_fn: Callable[[Any], Any], output: Any) -> Any:
        """What ``loss_fn`` gives; what it runs is a row of its own, after the last of the model's, its outputs."""
        if self.is_leaf is not None:
            self.read(self.add_node("output", "output", "output", ROOT), tensors_in(output))
        node = self.add_node("call_function", "loss", getattr(loss_fn, "__name__", type(loss_fn).__name__), ROOT)
        before, self.run.node = self.run.node, node
        try:
            return loss_fn(output)
        finally:
            self.run.node = before

    @contextmanager
    def at(self, node: int, path: str) -> Iterator[None]:
        """Attribute what a block runs to ``node`` and to the module at ``path`` (graph runs)."""
        before, self.run.node = self.run.node, node
        self.run.stack.append(self.log.index_of_path.get(path, ROOT))
        try:
            yield
        finally:
            self.run.stack.pop()
            self.run.node = before

    # ---- nodes

    def add_node(self, op: str, name: str, target: str, module: int) -> int:
        """A new row of the node table; ``name`` is made an identifier, and by the log unique, as torch.fx does."""
        nodes = self.log.node_slots
        nodes.append(LogNode(op, "", target, module, base=identifier(name), step=self.run.step))
        return len(nodes) - 1

    def source_line(self) -> str | None:
        """The model's line that runs; None where no module runs, or none of its own code."""
        line = user_line() if self.run.stack else None
        return None if line == self.called_from else line

    def set_outputs(self, node: int, result: Any) -> None:
        record = self.log.node_slots[node]
        for tensor, number in self._numbered(tensors_in(result)):
            record.outputs += ((number, describe(tensor)),)
            self.producers[number] = node

    def read(self, node: int, tensors: Iterable[torch.Tensor]) -> None:
        record = self.log.node_slots[node]
        for _, number in self._numbered(tensors):
            self.read_storage(record, node, number)

    def _numbered(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
        """The strided tensors whose storages are in the books, with the numbers of these."""
        return ((tensor, storage.number) for tensor in map(local_part, tensors) if tensor.layout is torch.strided
                and (storage := self.memory.storage_of(tensor)) is not None)

    def read_storage(self, record: LogNode, node: int, number: int) -> None:
        if number not in record.reads:
            record.reads += (number,)
        producer = self.producers.get(number)
        if producer is not None and producer != node and producer not in record.inputs:
            record.inputs += (producer,)

    # ---- modules

    def path_of(self, module: torch.nn.Module) -> str:
        return self.log.modules[self.index_of[id(module)]].path

    def running(self) -> int:
        """The index of the innermost module that runs; the root's outside of all."""
        return self.run.stack[-1] if self.run.stack else ROOT

    def runs_module(self) -> bool:
        return bool(self.run.stack)

    def where(self) -> str:
        return self.log.modules[self.run.stack[-1]].path if self.run.stack else ""

    def running_call(self) -> int | None:
        return self._open_calls[-1]

    def enter_module(self, module: torch.nn.Module, args: Any, kwargs: Any) -> int:
        """A module's call begins; the result is what `leave_module` needs: its node, or -1."""
        for listener in self.run.listeners:
            listener.module_entered(module, args, kwargs)
        index = own = self.index_of.get(id(module))
        if index is None:  # made on the way, or behind a wrapper: it runs for its caller
            index = self.running()
        record = self.log.modules[index]
        if own is not None and not self.run.stack and self.run.phase == "forward":
            if next(module.parameters(), None) is not None:
                self.log.outer_calls.append(OuterCall(
                    self.run.step, len(self.log.call_slots), own, count_samples([*args, *kwargs.values()]),
                    count_tokens(name_tensors((args, kwargs)))))
        is_described = self.run.step == self.described_step
        record.calls += is_described
        if not self.run.stack:
            self.called_from = user_line()
        self.run.stack.append(index)
        self._open_calls.append(self._open_calls[-1] if self._open_calls else None)
        self._entered += 1
        share = self._entered / max(1, self.planned_calls) if self.share_done is None else self.share_done
        report_progress(share, record.path)
        if self.is_leaf is None or self.run.phase != "forward":
            return -1
        if own is not None:
            inputs = describe_tensors((args, kwargs)) if is_described or not record.inputs else record.inputs
            record.inputs = record.inputs or inputs
            if is_described:
                self.log.module_calls.append(LogModuleCall(own, self._open_calls[-1], inputs))
                self._open_calls[-1] = len(self.log.module_calls) - 1
        if self.leaf_depth:
            self.leaf_depth += 1
            return -1
        if self.is_leaf(module):
            self.leaf_depth = 1
            self.run.node = self.add_node("call_module", record.path or "root", record.path, index)
            self.log.node_slots[self.run.node].source = self.source_line()
            self.read(self.run.node, tensors_in((args, kwargs)))
            return self.run.node
        return -1

    def leave_module(self, module: torch.nn.Module, token: int, result: Any) -> None:
        """The innermost call ends; ``token`` is what `enter_module` gave for it."""
        index, call = self.run.stack.pop(), self._open_calls.pop()
        if self.is_leaf is not None and self.run.phase == "forward":
            self._note_result(module, index, call, token, result)
        for listener in self.run.listeners:
            listener.module_left(module, result)

    def _note_result(self, module: torch.nn.Module, index: int, call: int | None, token: int, result: Any) -> None:
        own = self.index_of.get(id(module))
        if own is not None:
            record, is_described = self.log.modules[index], self.run.step == self.described_step
            outputs = describe_tensors(result) if is_described or not record.outputs else record.outputs
            record.outputs = record.outputs or outputs
            open_call = self.log.module_calls[call] if call is not None and is_described else None
            if open_call is not None and open_call.module == own:
                open_call.outputs = outputs
        if self.leaf_depth:
            self.leaf_depth -= 1
        if token >= 0:
            self.set_outputs(token, result)
            self.run.node = OUTSIDE

    # ---- parameters and buffers

    def owner_of(self, variable: torch.Tensor) -> int:
        """The module that holds a leaf whose gradient is accumulated; the root where none does, which is told."""
        index = self.owners.get(id(variable))
        if index is not None:
            return index
        for listener in self.run.listeners:
            listener.leaf_met(variable)
        return ROOT

    def own_variable(self, variable: torch.Tensor, module: torch.nn.Module) -> None:
        """Let what backward does for ``variable``, which no module registers, be of ``module``."""
        self.owners.setdefault(id(variable), self.index_of[id(module)])

    def own_parameters(self, root: torch.nn.Module) -> None:
        """Mark the parameters and buffers of the model or of a module of it, which are the mode's own by now."""
        self.own_parameters_of([module for _, module in walk_modules(root)])

    def own_parameters_of(self, modules: Iterable[torch.nn.Module]) -> None:
        for module in modules:
            index = self.index_of[id(module)]
            path = self.log.modules[index].path
            for category, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is None or is_lazy(tensor):
                        continue
                    self.owners.setdefault(id(tensor), index)
                    parts: Iterable[tuple[str, str, torch.Tensor]] = [("", category, tensor)]
                    if tensor.layout in SPARSE_LAYOUTS:
                        parts = [("", category, part) for part in parts_of(tensor)]
                    elif category == "parameter" and (tensor.__dict__ or type(tensor) not in PLAIN_TENSORS):
                        parts = parts_of_parameter(tensor)
                    for suffix, kind, part in parts:
                        self.own(part, kind, (f"{path}.{name}" if path else name) + suffix, index)

    def own(self, tensor: torch.Tensor, category: str, label: str, index: int) -> None:
        storage = self.memory.storage_of(tensor)
        lifetime = None if storage is None else self.log.storages.get(storage.number)
        if lifetime is not None:
            if lifetime.category in self.memory.undecided:
                lifetime.category, lifetime.label, lifetime.module = category, label, index
            lifetime.requires_grad = tensor.requires_grad
