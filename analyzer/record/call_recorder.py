"""Writes down the calls of operators: of which module and node each is, and of which forward call in backward."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from analyzer.distributed.world_state import module_worked_for
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta.address_space import MetaStorage
from analyzer.meta.operator_info import describe_operator
from analyzer.meta.source_line import script_line
from analyzer.meta.spec import Launch, Signature

from .log import Shortage
from .memory_recorder import ROOT
from .module_recorder import ModuleRecorder
from .process_group import communicates, find_group, read_world, takes_group
from .reference_count import current_backward_node, next_sequence_number
from .storage_lifetime import CALLED, OUTSIDE, StorageLifetime
from .tensor_walk import local_part

_DETACH = torch.ops.aten.detach.default


class CompiledPlace(NamedTuple):
    """Of what a kernel of a compiled graph is a part: most of its operators are of ``module``; in the backward half
    they are gradients of the forward call ``forward``, or ``recomputed``.
    """

    module: int
    is_backward: bool = False
    forward: int | None = None
    recomputed: bool = False


class CallRecorder:
    """The part of a `Recorder` that hears of operators. A call in backward is of the forward call whose autograd node
    has its sequence number.
    """

    def __init__(self, modules: ModuleRecorder) -> None:
        self.modules, self.memory, self.run, self.log = modules, modules.memory, modules.run, modules.log
        self._call_of_sequence: dict[int, int] = {}  # the call that made an autograd node
        self._collective_of_sequence: dict[int, int] = {}
        self._gathered_at: dict[int, int] = {}  # nodes of collectives of wrappers in forward, by the module's index
        self._last_sequence = -1
        #: whether a call that no module makes has a record of the phase forward for itself: it may be evaluation's
        self.is_cut_outside = False
        self.recomputing = 0  #: how many `enable_grad` blocks that began in backward are open
        self.creates_graph = False  #: the running backward pass is itself differentiated
        self.compiled_graphs: dict[Any, Any] = {}  #: what calls of each compiled function came to, for the next ones
        self.compiled_in: CompiledPlace | None = None  #: while a compiled graph runs: what its next call is of
        self.launch: Launch | None = None  #: how it launches that
        self.shortage: Shortage | None = None  #: the last time that memory ran out
        self._shortage_cause: Callable[[], DeviceOutOfMemoryError | None] = lambda: None

    def start_step(self) -> None:
        """A step begins: autograd nodes that a backward pass made before belong to no call of it."""
        self._gathered_at.clear()
        self._last_sequence = next_sequence_number()

    def called(self, signature: Signature, inputs: list[MetaStorage], outputs: list[MetaStorage]) -> None:
        log, run, modules = self.log, self.run, self.modules
        phase = run.phase
        if not log.phases or log.phases[-1].last_call >= 0:
            self.memory.begin(phase)
        forward: int | None = None
        recomputed = made_grad = False
        owner, node = module_worked_for(), run.node
        # that a wrapper works for, else the one that runs
        module = modules.index_of.get(id(owner), run.stack[-1] if run.stack else ROOT)
        index = len(log.call_slots.signatures)
        place = self.compiled_in
        if phase == "backward":
            recomputed = self._recomputes()
            if owner is not None:
                node = self._gathered_at.get(module, OUTSIDE)
            elif not recomputed:
                forward, module, node = self._forward_of_gradient(module, communicates(signature))
        if place is not None:
            signature = self._as_launched(signature)
            module, recomputed = place.module, place.recomputed if place.is_backward else recomputed
            if place.forward is not None:
                forward, node = place.forward, self.log.call_slots.place(place.forward)[1]
        if phase == "forward" or recomputed:
            sequence = next_sequence_number()
            # which has no gradient: a saved-tensor hook calls it
            if sequence != self._last_sequence and signature.op is not _DETACH:
                self._give_nodes(sequence, index)
                made_grad = True
            if communicates(signature):
                self._collective_of_sequence.setdefault(sequence - 1, index)
            if modules.is_leaf is not None and not modules.leaf_depth and run.stack and not recomputed:
                node = self._add_operator(signature, inputs, outputs, module)
            elif recomputed and node == OUTSIDE and owner is None and place is None:
                node = self._node_run_again(index)
        if takes_group(signature):
            self._note_group(signature, module if owner is not None and phase == "forward" else None, node)
        in_numbers = tuple([s.number for s in inputs])
        out_numbers = tuple([s.number for s in outputs])
        if run.events is not None:
            run.events.append((CALLED, index))
        log.call_slots.append(signature, in_numbers, out_numbers, run.step, phase, module, node, forward, recomputed)
        self._note_made(out_numbers, index, module, node, made_grad)
        if self.is_cut_outside and not run.stack:
            self._end_call_outside(index)

    def _end_call_outside(self, index: int) -> None:
        """A call that no module of a script makes has ended."""
        phase = self.run.phase
        if phase == "forward" or phase != "backward" and not self.run.step:
            line = script_line()
            if line is not None:
                self.log.lines[index] = line
        if phase == "forward":
            self.memory.begin("forward")

    def _note_made(self, numbers: Iterable[int], call: int, module: int, node: int, made_grad: bool) -> None:
        for number in numbers:
            lifetime = self.log.storages.get(number)
            if lifetime is not None:
                lifetime.place(call, module, node, made_grad)

    def _give_nodes(self, sequence: int, call: int) -> None:
        """A call made the autograd nodes up to ``sequence``: the last, and some around it, as of nested checkpoints."""
        for around in range(self._last_sequence, sequence - 1):
            self._call_of_sequence.setdefault(around, call)
        self._call_of_sequence[sequence - 1] = call
        self._last_sequence = sequence

    def _as_launched(self, signature: Signature) -> Signature:
        """The signature of a call of a compiled graph with how it is launched; as it is where PyTorch dispatches it."""
        if self.launch is None:
            return signature
        launch, self.launch = self.launch, self.launch._replace(inputs=None)
        return signature.launched(launch)

    def _note_group(self, signature: Signature, module: int | None, node: int) -> None:
        """Read a call's process group while it is there, and keep the node where a wrapper of ``module`` gathers."""
        if module is not None:
            self._gathered_at[module] = node
        if signature not in self.log.groups:
            self.log.groups[signature] = find_group(signature)
            self.log.world = self.log.world or read_world()

    def count(self) -> int:
        return len(self.log.call_slots)

    def repeat(self, begin: int, end: int) -> None:
        """Log calls again, of no node, on their storages; the stream of the first is now the current one."""
        slots = self.log.call_slots
        if self.log.streams:
            self.log.streams.repeat(begin, end, len(slots))
        for index in range(begin, end):
            call = slots[index]
            if call.phase != self.run.phase or not self.log.phases or self.log.phases[-1].last_call >= 0:
                self.memory.begin(call.phase)
            slots.append(call.signature, call.inputs, call.outputs, self.run.step, call.phase, call.module, OUTSIDE,
                         None, call.recomputed)

    def _add_operator(self, signature: Signature, inputs: list[MetaStorage], outputs: list[MetaStorage],
                      module: int) -> int:
        op = signature.op
        info = describe_operator(op) if isinstance(op, torch._ops.OpOverload) else None
        modules = self.modules
        node = modules.add_node("call_function", op.__name__ if info is None else info.name,
                                str(op) if info is None else info.text, module)
        record = self.log.node_slots[node]
        record.source = modules.source_line()
        for storage in inputs:
            modules.read_storage(record, node, storage.number)
        record.outputs = tuple([(storage.number, spec) for storage, spec in zip(outputs, signature.outputs)])
        modules.producers.update((storage.number, node) for storage in outputs)
        return node

    def lies_over(self, number: int, shape: Any, tensor: Any, describe: Callable[[Any], tuple[str, ...]]) -> None:
        """A part of this shape in a storage is of a sharded ``tensor``, whose layout ``describe`` tells."""
        if self.run.phase == "forward" and (number, shape) not in self.log.layouts:
            self.log.layouts[number, shape] = describe(tensor)

    # ---- calls in backward

    def _recomputes(self) -> bool:
        """Whether the operator that runs in backward is of a forward pass that runs again, for which gradients are
        turned on. In it they can be off once more (a checkpoint in another, a custom function); in a gradient that is
        differentiated they are on.
        """
        return self.recomputing > 0 or (torch.is_grad_enabled() and not self.creates_graph
                                        and torch._C._current_autograd_node() is not None)

    def _node_run_again(self, index: int) -> int:
        """The node of the forward pass that the recomputed call at ``index`` is for."""
        backward = current_backward_node()
        forward = None if backward is None else self._call_of_sequence.get(backward[0])
        return OUTSIDE if forward is None or forward >= index else self.log.call_slots.place(forward)[1]

    def _forward_of_gradient(self, module: int, communicates: bool) -> tuple[int | None, int, int]:
        """The call whose gradient is computed now, its module and its node; ``module`` is the one that runs."""
        backward = current_backward_node()
        if backward is None:
            return None, module, OUTSIDE
        sequence, variable = backward
        if variable is not None:
            return None, self.modules.owner_of(variable), OUTSIDE
        # A custom function's operators share its number: its backward belongs to the first, a collective to the
        # collective.
        forward = self._collective_of_sequence.get(sequence) if communicates else None
        if forward is None:
            forward = self._call_of_sequence.get(sequence)
        if forward is None:
            return None, module, OUTSIDE
        return forward, *self.log.call_slots.place(forward)

    def places_of(self, results: Iterable[Any]) -> list[tuple[int, int] | None]:
        """The module and the node of each result of a graph, None for what is no tensor in the books."""
        lifetimes = [self._lifetime_of(result) for result in results]
        return [None if lifetime is None else (lifetime.module, lifetime.node) for lifetime in lifetimes]

    def place_zeros(self, gradients: Iterable[Any], places: Iterable[tuple[int, int] | None]) -> None:
        """Gradients that a graph's backward half is about to read: those that the engine made, zeros for results that
        led to no loss, are of what made these results; ``places`` are those of `places_of`.
        """
        backward = current_backward_node()
        forward = None if backward is None else self._call_of_sequence.get(backward[0])
        for gradient, place in zip(gradients, places):
            lifetime = self._lifetime_of(gradient)
            if lifetime is None or place is None or not 0 <= lifetime.born_call < self.count():
                continue
            call = self.log.call_slots[lifetime.born_call]
            if call.phase == "backward" and call.forward == forward is not None:
                lifetime.module, lifetime.node = place
                self.log.call_slots.put_at(lifetime.born_call, *place)

    def _lifetime_of(self, tensor: Any) -> StorageLifetime | None:
        storage = self.memory.storage_of(local_part(tensor)) if isinstance(tensor, torch.Tensor) else None
        return None if storage is None else self.log.storages.get(storage.number)

    def ran_out(self, operator: str, error: DeviceOutOfMemoryError) -> None:
        """An operator could not get its memory. The run need not end here: the user's code may catch the error."""
        if error is self._shortage_cause():
            return  # the operators that called it see the same error
        shortage = self.describe_shortage(operator, error)
        self.memory.end()
        self._shortage_cause = weakref.ref(error)  # weak: its traceback holds tensors
        self.shortage = shortage

    def describe_shortage(self, operator: str, error: DeviceOutOfMemoryError) -> Shortage:
        """Where the run is, and what an ``operator`` that runs now cannot get."""
        module, node = self.modules.running(), self.run.node
        if self.run.phase == "backward" and not self._recomputes():
            _, module, node = self._forward_of_gradient(module, False)
        return Shortage(operator, self.run.phase, self.run.step, module, node, self.log.events,
                        len(self.log.allocator_events), error.requested_bytes, error.short_bytes,
                        error.allocated_bytes, error.reserved_bytes, error.capacity_bytes, error.device)
