"""Fills a log while a model runs under the mode."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from analyzer.memory.allocator import CachingAllocator, DeviceOutOfMemoryError
from analyzer.meta.address_space import Region
from analyzer.meta.mode import MetaTensorMode
from analyzer.meta.operator_info import describe_operator
from analyzer.meta.plain_type import LEAVES
from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec, spec_of
from analyzer.meta.state import current
from analyzer.meta.storage import MetaStorage, find_storage

from .autograd_node import current_backward_node, next_sequence_number
from .event import BEGAN, BORN, CALLED, DIED, ENDED, HELD, OUTSIDE, Event
from .hooks import listen
from .log import Log, LogModule, LogModuleCall, LogNode, PhaseRecord, Shortage
from .module_walk import walk_modules
from .progress import report_progress
from .row_name import identifier
from .sequence_index import SequenceIndex
from .storage_life import StorageLife

_ROOT = 0
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_DETACH = torch.ops.aten.detach.default


class Recorder:
    """Listens to a `MetaTensorMode` and writes a `Log`.

    ``claim`` is the device whose memory is watched; ``is_leaf`` tells which modules become one node (eager runs),
    ``find_leaf_impl`` what runs instead of a module's own forward, ``walked`` are the modules of ``root``, where
    these were listed already. A driver that knows its nodes (the graph interpreter) sets `node` itself.
    """

    def __init__(self, mode: MetaTensorMode, root: torch.nn.Module, claim: torch.device,
                 is_leaf: Callable[[torch.nn.Module], bool] | None = None,
                 find_leaf_impl: Callable[[torch.nn.Module], Callable[..., Any] | None] = lambda module: None,
                 walked: Sequence[tuple[str, torch.nn.Module]] | None = None) -> None:
        self.mode = mode
        self.log = Log()
        self.space = mode.space
        self.memory = mode.space.memory(claim)
        self.is_leaf, self.find_leaf_impl = is_leaf, find_leaf_impl
        self.node = OUTSIDE
        self.step = 0
        self.phase = "forward"
        self.outermost = _ROOT  #: the module of what runs outside of all modules
        self._module_index: dict[int, int] = {}
        self._modules: list[torch.nn.Module] = []
        #: plays a block's record instead of running it, where it can
        self.reuse: Callable[[torch.nn.Module, Any, Any], Any] | None = None
        self._stack: list[int] = []
        self._open_calls: list[int | None] = []  #: beside the stack: index in `Log.module_calls`
        self._leaf_depth = 0
        self._call_of_sequence = SequenceIndex()
        self._hooked: set[int] = set()  # nodes of several calls, before which nothing may run
        self._place_of_call: dict[int, tuple[int, int]] = {}  # module and node of calls that stand for a played block
        self._collective_of_sequence: dict[int, int] = {}
        self._last_sequence = -1
        self._parameter_owner: dict[int, int] = {}
        self._producer: dict[int, int] = {}  # storage number -> node that wrote it last
        self.events: list[Event] | None = None  #: collected while a step is to be replayed
        self.first_node = 0  #: of the present step
        self.watched: set[int] = set()  #: storages; `touched` is told of a forward call that reads one
        self.touched: Callable[[int, Signature], None] = _nothing
        self.restart: BaseException | None = None  #: why the run cannot go on, raised when the next phase begins
        self.unseen_gradients: Any = None  #: `replay.unseen_gradient`; None where gradients may be looked at
        self.before_backward: Callable[[bool], None] = _keep  #: told whether one pass computes all gradients, once
        self.recomputing = 0  #: how many `enable_grad` blocks that began in backward are open
        self.creates_graph = False  #: the running backward pass is itself differentiated
        self.shortage: Shortage | None = None  #: the last time that memory ran out
        self._shortage_cause: Callable[[], DeviceOutOfMemoryError | None] = lambda: None
        self._entered = 0
        self.described_step = 0  #: the step whose calls of modules are written down
        self.planned_calls = 0  #: module calls that the driver expects, to tell how far the run has come
        self.log.device = str(claim)
        self._collect_modules(walk_modules(root) if walked is None else walked)

    def hears(self) -> bool:
        """Whether what this thread runs now is for this recorder."""
        state = current()
        return state is not None and state.recorder is self

    def start_step(self, step: int, placeholders: bool = True) -> None:
        """Another step begins: its nodes are named afresh, the first of them the inputs (unless the driver has its
        own).
        """
        self.end()
        self.check()
        self.step, self.log.steps = step, step + 1
        self.first_node = len(self.log.node_slots)
        self._producer.clear()
        self.node = OUTSIDE
        for life in self.log.lives_in("input") if placeholders else ():
            node = self.add_node("placeholder", life.label or "input", life.label or "input", _ROOT)
            self.node_at(node).outputs += ((life.number, life.spec),)
            self._producer[life.number] = node

    def describe_step(self, step: int) -> None:
        """Write down the calls of modules of this step, and forget those of an earlier one."""
        self.described_step = step
        self.log.module_call_slots.clear()
        for module in self.log.modules:
            module.calls, module.inputs, module.outputs = 0, (), ()

    def forward_returned(self, output: Any) -> None:
        """The model's outputs: the last row of the table."""
        if self.is_leaf is None:
            return
        node = self.add_node("output", "output", "output", _ROOT)
        self.read(node, tensors_in(output))

    @contextmanager
    def computing_loss(self, loss_fn: Any) -> Iterator[None]:
        """What a block runs is the loss: a row of its own after the model's."""
        node = self.add_node("call_function", "loss", getattr(loss_fn, "__name__", type(loss_fn).__name__), _ROOT)
        before, self.node = self.node, node
        try:
            yield
        finally:
            self.node = before

    # ---- modules

    def _collect_modules(self, walked: Sequence[tuple[str, torch.nn.Module]]) -> None:
        index_of_path = self.log.index_of_path
        self._modules += [module for _, module in walked]
        for path, module in walked:
            parent = None if path == "" else index_of_path[path.rpartition(".")[0]]
            index_of_path[path] = self._module_index[id(module)] = len(self.log.modules)
            self.log.modules.append(LogModule(path, type(module).__name__, parent))

    def where(self) -> str:
        """The path of the module that runs, for messages."""
        return self.log.modules[self._stack[-1]].path if self._stack else ""

    def skip_sequence(self) -> int:
        """Autograd nodes were made that no call of the log made; the result is the number of the last."""
        self._last_sequence = next_sequence_number()
        return self._last_sequence - 1

    def has_unnamed_nodes(self) -> bool:
        """Whether autograd nodes were made since the last call: they count to the next one."""
        return next_sequence_number() != self._last_sequence

    def call_of_sequence(self, sequence: int) -> int | None:
        """The call that made an autograd node."""
        return self._call_of_sequence.get(sequence)

    def let_stand(self, sequence: int, stands_for: tuple[int, int, int] | None) -> None:
        """An autograd node stands for a call (its index, module and node) from now on; None: for none that is known."""
        if stands_for is None:
            self._hooked.add(sequence)
            return
        self._hooked.discard(sequence)
        self._call_of_sequence[sequence] = stands_for[0]
        self._place_of_call[stands_for[0]] = stands_for[1:]

    def place_of_call(self, index: int) -> tuple[int, int]:
        """The module and the node of a call."""
        place = self._place_of_call.get(index)
        return self.log.call_slots.place(index) if place is None else place

    def node_at(self, index: int) -> LogNode:
        """A row that was not played."""
        node = self.log.node_slots[index]
        assert node is not None
        return node

    def producer_of(self, number: int) -> int | None:
        """The node that wrote a storage last."""
        return self._producer.get(number)

    def set_producer(self, number: int, node: int) -> None:
        self._producer[number] = node

    def running_call(self) -> int | None:
        """The index in `Log.module_calls` of the innermost call of a module of the model's."""
        return self._open_calls[-1]

    def modules(self) -> list[torch.nn.Module]:
        """The modules of the model, each once."""
        return self._modules

    def path_of(self, module: torch.nn.Module) -> str:
        """The path of a module of the model's."""
        return self.log.modules[self._module_index[id(module)]].path

    def register_existing(self, tensors: Iterable[torch.Tensor | tuple[Any, str]]) -> None:
        """Note the storages made before the recording began, and blocks not materialized, with their category."""
        for tensor in tensors:
            if isinstance(tensor, tuple):
                reserved, category = tensor
                reserved.enter(self.log, category, self._module_index[id(reserved.twin.block)])
                self.watch_peak(0)
            elif tensor.layout is torch.strided and not is_lazy(tensor):
                storage = self.storage_of(tensor)
                if storage is not None and storage.number not in self.log.storage_table:
                    self.born(storage)
        if self.log.peak_bytes == self.memory.allocated_bytes:
            self.log.peak_event = self.log.events  # now that all of it is in the log

    def own_parameters(self, root: torch.nn.Module) -> None:
        """Mark the storages of the parameters and buffers of the model or of a module of it (they must be the mode's
        own by now).
        """
        self.own_parameters_of([module for _, module in walk_modules(root)])

    def own_parameters_of(self, modules: Iterable[torch.nn.Module]) -> None:
        """As `own_parameters`, for these modules alone."""
        lives, number_of_label = self.log.storage_table, self.log.number_of_label
        for module in modules:
            index = self._module_index[id(module)]
            path = self.log.modules[index].path
            for category, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is None or tensor.layout is not torch.strided or is_lazy(tensor):
                        continue
                    self._parameter_owner.setdefault(id(tensor), index)
                    storage = self.storage_of(tensor)
                    life = None if storage is None else lives.get(storage.number)
                    if life is None:
                        continue
                    label = f"{path}.{name}" if path else name
                    if not life.category:
                        life.belongs(category, label, index)
                    number_of_label[label] = life.number
                    life.requires_grad = tensor.requires_grad

    def mark(self, tensors: Any, category: str, label: str = "") -> None:
        """Put the storages of ``tensors`` that have no category yet into ``category``."""
        lives = self.log.storage_table
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = self.storage_of(tensor)
                life = None if storage is None else lives.get(storage.number)
                if life is not None and not life.category:
                    life.category, life.label = category, label
                    life.requires_grad = tensor.requires_grad
                    life.spec = describe(tensor) if category == "input" else None

    def mark_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the storages of an optimizer's states into their category."""
        found: list[torch.Tensor] = []
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else (state,):
                found += [value] if isinstance(value, torch.Tensor) else tensors_in(value)
        self.mark(found, "optimizer state")

    def storage_of(self, tensor: torch.Tensor) -> MetaStorage | None:
        """The storage of a strided tensor; None for one that is not in the books."""
        storage = find_storage(tensor)
        return storage if type(storage) is MetaStorage else None

    def enter_module(self, module: torch.nn.Module, args: Any, kwargs: Any) -> int:
        """A module's call begins; the result is what `leave_module` needs."""
        index = own = self._module_index.get(id(module))
        if index is None:  # made on the way, or behind a wrapper: it runs for its caller
            index = self._stack[-1] if self._stack else self.outermost
        record = self.log.modules[index]
        record.calls += self.step == self.described_step
        self._stack.append(index)
        self._open_calls.append(self._open_calls[-1] if self._open_calls else None)
        self._entered += 1
        report_progress(self._entered / max(1, self.planned_calls), record.path)
        if self.is_leaf is None or self.phase != "forward":
            return -1
        inputs = record.inputs
        if self.step == self.described_step or not inputs:
            inputs = tuple(describe_tensors((args, kwargs)))
        if own is not None:
            record.inputs = record.inputs or inputs
        if own is not None and self.step == self.described_step:
            self.log.module_call_slots.append(LogModuleCall(own, self._open_calls[-1], inputs))
            self._open_calls[-1] = len(self.log.module_call_slots) - 1
        if self._leaf_depth:
            self._leaf_depth += 1
            return -1
        if self.is_leaf(module):
            self._leaf_depth = 1
            self.node = self.add_node("call_module", record.path or "root", record.path, index)
            self.read(self.node, tensors_in((args, kwargs)))
            return self.node
        return -1

    def leave_module(self, module: torch.nn.Module, token: int, result: Any) -> None:
        index, call = self._stack.pop(), self._open_calls.pop()
        if self.is_leaf is None or self.phase != "forward":
            return
        record = self.log.modules[index]
        outputs = record.outputs
        if self.step == self.described_step or not outputs:
            outputs = tuple(describe_tensors(result))
        if self._module_index.get(id(module)) is not None:
            record.outputs = record.outputs or outputs
        if call is not None and self.step == self.described_step:
            open_call = self.log.module_call_slots[call]
            if open_call is not None and open_call.module == self._module_index.get(id(module)):
                open_call.outputs = outputs
        if self._leaf_depth:
            self._leaf_depth -= 1
        if token >= 0:
            self.set_outputs(token, result)
            self.node = OUTSIDE

    # ---- nodes

    def add_node(self, op: str, name: str, target: str, module: int) -> int:
        """A new row of the node table; ``name`` is made an identifier, and by the log unique, as torch.fx does."""
        nodes = self.log.node_slots
        nodes.append(LogNode(op, "", target, module, base=identifier(name), step=self.step))
        return len(nodes) - 1

    def set_outputs(self, node: int, result: Any) -> None:
        record = self.node_at(node)
        for tensor in tensors_in(result):
            if tensor.layout is torch.strided:
                storage = self.storage_of(tensor)
                if storage is not None:
                    record.outputs += ((storage.number, describe(tensor)),)
                    self._producer[storage.number] = node

    def read(self, node: int, tensors: Any) -> None:
        record = self.node_at(node)
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = self.storage_of(tensor)
                if storage is not None:
                    self._read_storage(record, node, storage.number)

    def _read_storage(self, record: LogNode, node: int, number: int) -> None:
        if number not in record.reads:
            record.reads += (number,)
        producer = self._producer.get(number)
        if producer is not None and producer != node and producer not in record.inputs:
            record.inputs += (producer,)

    # ---- calls (CallListener)

    def called(self, signature: Signature, inputs: list[MetaStorage], outputs: list[MetaStorage]) -> None:
        phase, log = self.phase, self.log
        if not log.phases or log.phases[-1].last_call >= 0:
            self.begin(phase)
        forward: int | None = None
        recomputed = False
        module = self._stack[-1] if self._stack else self.outermost
        node = self.node
        index = len(log.call_slots)
        if phase == "backward":
            recomputed = self._recomputes()
            if not recomputed:
                forward, module, node = self._forward_of_gradient(module, _communicates(signature))
        made_grad = False
        if phase == "forward" or recomputed:
            sequence = next_sequence_number()
            # which has no gradient: a saved-tensor hook calls it
            if sequence != self._last_sequence and signature.op is not _DETACH:
                # nodes around this call, as those of nested checkpoints
                for earlier in range(self._last_sequence, sequence - 1):
                    if self._call_of_sequence.get(earlier) is None:
                        self._call_of_sequence[earlier] = index
                self._last_sequence = sequence
                self._call_of_sequence[sequence - 1] = index
                made_grad = True
            if _communicates(signature):
                self._collective_of_sequence.setdefault(sequence - 1, index)
            if self.is_leaf is not None and not self._leaf_depth and self._stack and not recomputed:
                node = self._add_operator(signature, inputs, outputs, module)
            elif recomputed and node == OUTSIDE:
                backward = current_backward_node()
                found = self._call_of_sequence.get(backward[0]) if backward else None
                node = self.place_of_call(found)[1] if found is not None and found < index else OUTSIDE
        in_numbers = tuple([s.number for s in inputs])
        if phase == "forward" and not self.watched.isdisjoint(in_numbers) and torch.is_grad_enabled():
            for number in self.watched.intersection(in_numbers):
                self.touched(number, signature)
        out_numbers = tuple([s.number for s in outputs])
        if self.events is not None:
            self.events.append((CALLED, index))
        log.call_slots.append(signature, in_numbers, out_numbers, self.step, phase, module, node, forward, recomputed)
        for number in out_numbers:
            life = log.storage_table.get(number)
            if life is not None and life.born_call == index and not life.category:
                life.module, life.node = module, node
                life.requires_grad = made_grad

    def _recomputes(self) -> bool:
        """Whether the operator that runs in backward belongs to a forward pass that runs again.

        The engine turns gradients off; who runs a forward pass again turns them on. Inside it they can be off once more
        (a checkpoint within a checkpoint, a custom function), and of a gradient that is to be differentiated they are
        on.
        """
        if self.recomputing:
            return True
        return torch.is_grad_enabled() and not self.creates_graph and torch._C._current_autograd_node() is not None

    def _add_operator(self, signature: Signature, inputs: list[MetaStorage], outputs: list[MetaStorage],
                      module: int) -> int:
        op = signature.op
        info = describe_operator(op) if isinstance(op, torch._ops.OpOverload) else None
        node = self.add_node("call_function", op.__name__ if info is None else info.name,
                             str(op) if info is None else info.text, module)
        record = self.node_at(node)
        for storage in inputs:
            self._read_storage(record, node, storage.number)
        for storage, spec in zip(outputs, signature.outputs):
            record.outputs += ((storage.number, spec),)
            self._producer[storage.number] = node
        return node

    def _forward_of_gradient(self, module: int, communicates: bool) -> tuple[int | None, int, int]:
        backward = current_backward_node()
        if backward is None:
            return None, module, OUTSIDE
        sequence, variable = backward
        if sequence in self._hooked:
            self.before_backward(False)
        if variable is not None:
            return None, self._parameter_owner.get(id(variable), self.outermost), OUTSIDE
        # A custom function's operators share its number: its backward belongs to the first, a collective to the
        # collective.
        forward = self._collective_of_sequence.get(sequence) if communicates else None
        if forward is None:
            forward = self._call_of_sequence.get(sequence)
        if forward is None:
            return None, module, OUTSIDE
        return forward, *self.place_of_call(forward)

    def took_workspace(self, nbytes: int, claim: torch.device, blocks: tuple[int, ...]) -> None:
        """The allocator just gave a workspace of ``nbytes`` for ``blocks``, which its kernel gives back at once."""
        self.log.events += 1
        if self.events is not None:
            self.events.append((HELD, (claim, blocks)))
        self.watch_peak(nbytes)

    def holds_workspace(self, storage: MetaStorage) -> None:
        """The storage just born is an operator's temporary, which dies when the operator ends."""
        self.log.storage_table[storage.number].category = "workspace"

    def kept_workspace(self, region: Region, nbytes: int, claim: torch.device, label: str) -> None:
        """A library just took a workspace that it keeps for as long as the process lives."""
        log = self.log
        log.events += 1
        number = -1 - len(self.space.library_workspaces)  # storages count from 0
        life = log.storage_table[number] = StorageLife(log.life_table, number, nbytes, region.bytes, region.address,
                                                       str(claim), log.events, len(log.call_slots), self.phase,
                                                       self.step, OUTSIDE, _ROOT)
        life.category, life.label = "workspace", label
        self.watch_peak(0)

    # ---- memory that is not there

    def ran_out(self, operator: str, error: DeviceOutOfMemoryError) -> None:
        """An operator could not get its memory. The run need not end here: the user's code may catch the error."""
        if error is self._shortage_cause():
            return  # the operators that called it see the same error
        module, node = self._stack[-1] if self._stack else self.outermost, self.node
        if self.phase == "backward" and not self._recomputes():
            _, module, node = self._forward_of_gradient(module, False)
        self.end()
        self._shortage_cause = weakref.ref(error)  # weak: its traceback holds tensors
        self.shortage = Shortage(operator, self.phase, self.step, module, node, self.log.events, len(
            self.log.act_slots), error.requested_bytes, error.short_bytes, error.allocated_bytes, error.reserved_bytes,
                                 error.capacity_bytes)

    def end_short(self, error: DeviceOutOfMemoryError) -> None:
        """The run ended with ``error``: what was not finished is no step."""
        self.ran_out("(outside an operator)", error)
        assert self.shortage is not None
        self.log.shortage = self.shortage
        if self.shortage.step:
            self.log.steps = self.shortage.step  # the steps before it are whole

    # ---- storages (StorageListener)

    def born(self, storage: MetaStorage) -> None:
        log = self.log
        log.events += 1
        if self.events is not None:
            self.events.append((BORN, storage.number))
        region = storage.region
        log.storage_table[storage.number] = StorageLife(log.life_table, storage.number, storage.nbytes(), region.bytes,
                                                        region.address, str(storage.device), log.events,
                                                        len(log.call_slots), self.phase, self.step, self.node,
                                                        self._stack[-1] if self._stack else self.outermost)
        self.watch_peak(0)

    def died(self, storage: MetaStorage) -> None:
        self._note_death(storage.number)

    def _note_death(self, number: int) -> None:
        log = self.log
        log.events += 1
        if self.events is not None:
            self.events.append((DIED, number))
        life = log.storage_table.get(number)
        if life is not None:
            life.died = log.events
            life.died_call = len(log.call_slots)

    def watch_peak(self, workspace_bytes: int) -> None:
        """Note the highest use so far, and the workspace that is part of it."""
        allocated = self.memory.allocated_bytes
        if allocated > self.log.peak_bytes:
            log = self.log
            log.peak_bytes, log.peak_event, log.peak_workspace_bytes = allocated, log.events, workspace_bytes

    # ---- phases

    def begin(self, phase: str) -> None:
        """A stretch of ``phase`` begins; what ran before has ended."""
        self.end()
        self.check()
        if self.events is not None:
            self.events.append((BEGAN, phase))
        self.phase = phase
        self.memory.begin_lap()
        self.log.phases.append(PhaseRecord(self.step, phase, len(self.log.call_slots), last_call=-1))

    def begins_backward(self, is_plain: bool) -> None:
        """A backward pass begins; ``is_plain`` is one that frees its graph and leaves a gradient in every parameter."""
        self.before_backward(is_plain and not self._stack)

    def check(self) -> None:
        """Raise what keeps the run from going on."""
        if self.restart is not None:
            raise self.restart

    def end(self) -> None:
        """The running stretch ends: note what the allocator says."""
        if not self.log.phases or self.log.phases[-1].last_call >= 0:
            return
        if self.events is not None:
            self.events.append((ENDED, None))
        record, memory = self.log.phases[-1], self.memory
        record.last_call = len(self.log.call_slots)
        record.end_event, record.end_act = self.log.events, len(self.log.act_slots)
        record.allocated_bytes, record.requested_bytes = memory.allocated_bytes, memory.requested_bytes
        record.reserved_bytes = memory.reserved_bytes
        record.peak_allocated_bytes, record.peak_requested_bytes, record.peak_reserved_bytes = memory.lap_peaks()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Run a block in ``phase``, then go back to the phase before. Nested blocks of a phase are one."""
        before = self.phase
        if before == phase:
            yield
            return
        self.begin(phase)
        try:
            yield
        finally:
            self.resume(before)

    def resume(self, phase: str) -> None:
        """What ran has ended; a stretch of ``phase`` begins with the next operator, if one comes."""
        self.end()
        self.phase = phase

    @contextmanager
    def at(self, node: int, path: str) -> Iterator[None]:
        """Attribute what a block runs to ``node`` and to the module at ``path`` (graph runs)."""
        before = self.node
        self.node = node
        self._stack.append(self.log.index_of_path.get(path, _ROOT))
        try:
            yield
        finally:
            self._stack.pop()
            self.node = before

    def _observe_memory(self) -> None:
        acts, calls = self.log.act_slots, self.log.call_slots
        self.log.keeps_acts = True
        if isinstance(self.memory, CachingAllocator):
            for spans in self.memory.mapped_ranges():
                acts.append("segment_alloc" if spans[0].segment.page_bytes is None else "segment_map", spans[0].address,
                            sum([span.size_bytes for span in spans]), 0)
                live = [span for span in spans if span.requested_bytes is not None]
                acts.extend("alloc", [span.address for span in live], [span.size_bytes for span in live], 0)

        def observe(action: str, address: int, nbytes: int) -> None:
            acts.append(action, address, nbytes, len(calls))

        self.memory.observer = observe

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Listen to the mode, which must be active, for the length of a block."""
        state = self.mode.state
        state.recorder, self.space.listener = self, self
        if getattr(self.mode.options, "keep_events", False):
            self._observe_memory()
        self._last_sequence = next_sequence_number()
        try:
            with listen(self):
                yield self
        finally:
            self.end()
            state.recorder = self.space.listener = self.memory.observer = None
            # a recorder that outlives the run keeps no model
            self.reuse, self.touched, self.before_backward, self._modules = None, _nothing, _keep, []
            self.log.assumptions = list(state.assumptions)


def _nothing(number: int, signature: Signature) -> None:
    """Reads of storages are not followed."""


def _keep(is_plain: bool) -> None:
    """Nothing was replayed that a backward pass could reach."""


def _communicates(signature: Signature) -> bool:
    found: bool | None = signature.memo.get("communicates")
    if found is None:
        found = signature.memo["communicates"] = getattr(signature.op, "namespace", "") in COLLECTIVE_NAMESPACES
    return found


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples, dicts and dataclasses."""
    found: list[torch.Tensor] = []
    _collect_tensors(tree, found)
    return found


def _collect_tensors(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple, set, dict)):
        for x in tree.values() if isinstance(tree, dict) else tree:
            if type(x) not in LEAVES:
                _collect_tensors(x, found)
    elif hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        for name in tree.__dataclass_fields__:
            _collect_tensors(getattr(tree, name, None), found)


def describe(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor of the mode's."""
    with torch._C.DisableTorchFunction():
        return spec_of(tensor)


def describe_tensors(tree: Any) -> list[TensorSpec]:
    """The specs of all tensors in a nested structure."""
    with torch._C.DisableTorchFunction():
        return [spec_of(t) for t in tensors_in(tree)]
