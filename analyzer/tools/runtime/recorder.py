"""Fills a log, and tells the time, while a model runs on real tensors."""
from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import torch

from analyzer.api.argument import argument_names, mark_inputs
from analyzer.api.session import Session
from analyzer.errors import InputError
from analyzer.fx.module_wrapper import uncompiled
from analyzer.fx.trace.tracer_impl import is_leaf
from analyzer.hardware import DeviceSpec, simulated_spec
from analyzer.memory.host_memory import HostMemory
from analyzer.meta.intercept.mode_stack import cut_mode_stacks, is_active, mode_stack_depths
from analyzer.meta.intercept.replacement import InterruptsDeferred, InterruptsHeld
from analyzer.meta.spec import Signature
from analyzer.meta.state import current
from analyzer.meta.tensor import MetaTensor
from analyzer.on_use import rare_collections
from analyzer.record.hooks import FAILED, listen
from analyzer.record.memory_recorder import MemoryRecorder
from analyzer.record.module_recorder import ModuleRecorder
from analyzer.record.recorder import Recorder

from .clock import Clock, StorageBook
from .dispatch import MeasuringMode, run_as_written

ROOT = 0
TRANSPARENT = -2  #: token of a module whose work is its caller's
Key = tuple[int, str, int]
"""Whose time it is: step, phase, index of the module in `Log.modules`."""
Span = tuple[Any, Any]


class TimedMemory(MemoryRecorder):
    """The memory of a real run: a book knows its storages, and the clock is read where phases begin and end."""

    def __init__(self, recorder: RuntimeRecorder, device: torch.device) -> None:
        host = HostMemory()
        super().__init__(cast(Any, SimpleNamespace(memory=lambda device: host, devices=1, host=host,
                                                   describe_settings=lambda device: None)), device)
        self.recorder = recorder
        self.book = StorageBook(host, device, cast(Any, self.born), self.died)

    def storage_of(self, tensor: torch.Tensor) -> Any:
        """What the log knows the storage of ``tensor`` by, None for a tensor that has none of its own."""
        storage, is_new = self.book.find(tensor)
        if is_new:  # it was made before the recording
            self.log.storages[storage.number].step = -1
        return None if storage is self.book.nowhere else storage

    def begin(self, phase: str) -> None:
        super().begin(phase)  # which ends what ran
        self.recorder.laps.append((None, self.recorder.clock.pause()))
        self.recorder.clock.go()

    def end(self) -> None:
        if self.recorder.runs():
            self.recorder.lap()
            super().end()
            self.recorder.clock.go()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        recorder = self.recorder
        recorder.hold_mode()
        try:
            with super().during(phase):
                yield
        except BaseException:
            recorder.release_mode()
            if not recorder.whole and not self.run.stack:
                recorder.stop()
            raise
        recorder.release_mode()


class TimedModules(ModuleRecorder):
    """Calls of the modules of a real run: the clock is read where one begins and ends, and a module that another wraps,
    or of a type in `RuntimeRecorder.ignored`, is part of the one that calls it.
    """

    def __init__(self, recorder: RuntimeRecorder, memory: TimedMemory) -> None:
        root = recorder.model
        leaves = {id(module): is_leaf(module) for module in root.modules()}
        super().__init__(memory, root, lambda m: leaves[id(m)] if id(m) in leaves else is_leaf(m))
        self.recorder = recorder
        self._knows_inputs = False
        self._open: list[tuple[int, list[Any] | None]] = []  # beside the stack: id of the module, its marks
        self._wrapped: dict[int, int] = {}
        self._wrappers: list[tuple[int, int]] = []
        for module in root.modules():
            inner = uncompiled(module)
            if inner is not module:  # it runs the forward of what it wraps, without always calling that module
                self._wrapped[id(module)] = id(inner)
                self._wrappers.append((self.index_of[id(module)], self.index_of[id(inner)]))
                self.index_of[id(module)] = self.index_of[id(inner)]

    def enter_module(self, module: torch.nn.Module, args: Any, kwargs: Any) -> int:
        """A module's call begins; the result is what `leave_module` needs."""
        recorder, run = self.recorder, self.run
        if isinstance(module, recorder.ignored) or self._open and self._wrapped.get(self._open[-1][0]) == id(module):
            return TRANSPARENT
        index = self.index_of.get(id(module))
        if not run.stack:
            if index is None and not recorder.whole:
                return TRANSPARENT
            if not recorder.runs():
                self.memory.begin(run.phase)
        mark = recorder.lap()
        if module is recorder.model and not (recorder.whole or run.stack or self._knows_inputs):
            self._knows_inputs = True
            with suppress(InputError):  # where the call does not fit, the model itself will say so
                mark_inputs(recorder, args, kwargs, argument_names(uncompiled(module), args, kwargs))
        span = None
        if index is not None and run.phase == "forward":
            span = [mark, None]
            recorder.call_spans.setdefault(run.step, []).append(span)
        token = super().enter_module(module, args, kwargs)
        self._open.append((id(module), span))
        recorder.clock.go()
        recorder.hold_mode()
        return token

    def leave_module(self, module: torch.nn.Module, token: int, result: Any) -> None:
        if token == TRANSPARENT:
            return
        recorder, run = self.recorder, self.run
        recorder.release_mode()
        mark = recorder.lap()
        span = self._open.pop()[1]
        if span is not None:
            span[1] = mark
        try:
            super().leave_module(module, token, result)
            if module is recorder.model and not run.stack:
                recorder.call_ended(recorder)
        finally:
            recorder.clock.go()
            # there an exception also ends what checkpointing runs again
            if not (run.stack or recorder.whole or run.phase == "backward"):
                if result is FAILED:
                    recorder.stop()
                elif run.phase == "forward":
                    self.memory.end()

    def describe_wrappers(self) -> None:
        """Compiled modules were called as often, and with what, as the modules that they wrap."""
        modules = self.log.modules
        for wrapper, inner in ((modules[i], modules[j]) for i, j in self._wrappers):
            wrapper.calls, wrapper.inputs, wrapper.outputs = inner.calls, inner.inputs, inner.outputs


class RuntimeRecorder(Recorder):
    """The recorder of predicted runs, listening to a real one.

    Time is cut into laps, each of which belongs to one module in one phase: modules take over from each other as they
    are entered and left, and in backward each operator's lap belongs to the module whose forward operator it
    differentiates. So the laps of a phase add up to its length, nothing is counted twice, and no hook is put on a
    module or a tensor.

    ``whole``: whatever runs while recording belongs to the step, as in a step that is run for the purpose. Else only
        what runs in a call of a module of the model, in a backward pass or in an optimizer's step does, as in a
        training loop of its user's; recording ends by itself where an exception leaves one of these. Modules of the
        types in ``ignored`` are part of the module that calls them.
    """

    modules: TimedModules

    def __init__(self, root: torch.nn.Module, clock: Clock, *, whole: bool, ignored: Collection[type] = ()) -> None:
        #: whether what runs is simulated: no device spends the time that it takes
        self.is_simulated = current() is not None or not has_data(root)
        #: the device whose speed is then predicted, where one is simulated
        self.spec: DeviceSpec | None = None
        device = device_of(root)
        if self.is_simulated:
            clock = Clock()
            if current() is not None and device.type == simulated_spec().kind:
                self.spec = simulated_spec()
        self.model, self.clock, self.whole, self.ignored = root, clock, whole, tuple(ignored)
        self.laps: list[tuple[Key | None, Any]] = []            #: who had the time before each mark
        self.spans: dict[int, Span] = {}                        #: marks around each operator, by index in `Log.calls`
        #: by step: marks around each run of a module in the forward pass, in order
        self.call_spans: dict[int, list[list[Any]]] = {}
        #: is called when a call of the model in a loop of its user's has returned
        self.call_ended: Callable[[RuntimeRecorder], object] = lambda recorder: None
        self._mode = MeasuringMode(self.ran, clock)
        self._mode_depth = 0
        self._undo: ExitStack | None = None
        self._thread = -1
        memory = TimedMemory(self, device)
        self.book = memory.book
        machine = SimpleNamespace(space=memory.space, state=SimpleNamespace())
        super().__init__(cast(Any, machine), TimedModules(self, memory))
        self.memory.register_existing([*root.parameters(), *root.buffers()])
        self.modules.own_parameters(root)

    def lap(self) -> Any:
        """Give the time since the last mark to the module that runs; the clock stands still until `Clock.go`."""
        mark = self.clock.pause()
        self.laps.append((self._owner(), mark))
        return mark

    def _owner(self) -> Key | None:
        if self.run.stack:
            return self.run.step, self.run.phase, self.run.stack[-1]
        return (self.run.step, self.run.phase, ROOT) if self.runs() else None

    def runs(self) -> bool:
        return bool(self.log.phases) and self.log.phases[-1].last_call < 0

    def hears(self) -> bool:
        if threading.get_ident() == self._thread:
            return True
        # in a thread of the engine, of another device
        return self._thread >= 0 and self.run.phase == "backward" and is_active(self._mode)

    def ran(self, signature: Signature, inputs: list[torch.Tensor], outputs: list[torch.Tensor], start: Any,
            end: Any) -> None:
        if not self.runs():
            self.memory.begin(self.run.phase)
            self.laps[-1] = None, start
        # by torch.tensor(), which copies Python's numbers
        made_here = signature.op is torch.ops.aten.lift_fresh.default
        read: list[Any] = [self.book.find(t)[0] if made_here else self.memory.storage_of(t) or self.book.nowhere
                           for t in inputs]
        written: list[Any] = [self.book.find(t)[0] for t in outputs]
        index = len(self.log.call_slots)
        self.calls.called(signature, read, written)
        self.spans[index] = start, end
        if self.run.phase == "backward":
            self.laps.append(((self.run.step, "backward", self.log.calls[index].module), end))

    def hold_mode(self) -> None:
        self._mode_depth += 1
        if self._mode_depth == 1:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def release_mode(self) -> None:
        self._mode_depth -= 1
        if self._mode_depth == 0:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        with InterruptsHeld(), ExitStack() as undo:
            if self.whole:
                undo.callback(cut_mode_stacks, *mode_stack_depths())
            if self.is_simulated and current() is None:
                undo.enter_context(Session(None).simulate())  # a CPU's kernels, where the model is on meta
            undo.enter_context(rare_collections())  # records of each operator set off collections that find none
            undo.enter_context(listen(self))
            undo.enter_context(run_as_written())
            self.calls.start_step()
            if self.whole:
                self.hold_mode()
            else:
                self.start_step(self.run.step, placeholders=False)
            self._thread = threading.get_ident()
            self._undo = undo.pop_all()

    @property
    def is_running(self) -> bool:
        return self._undo is not None

    def stop(self) -> None:
        if self._undo is None:
            return
        with InterruptsHeld():
            undo, self._undo, self._thread = self._undo, None, -1
            try:
                self.memory.end()
                self.book.check()
            finally:
                if self.whole:
                    self.release_mode()
                undo.close()
                self.book.close()
                self.clock.settle()

    @contextmanager
    def recording(self) -> Iterator[RuntimeRecorder]:
        with InterruptsDeferred():
            self.start()
            try:
                yield self
            finally:
                self.stop()


def device_of(root: torch.nn.Module) -> torch.device:
    """Where the first parameter or buffer of a model is; a model on meta is assumed to be on the CPU."""
    cpu = torch.device("cpu")
    found = next((t.device for tensors in (root.parameters(), root.buffers()) for t in tensors), cpu)
    return cpu if found.type == "meta" else found


def has_data(root: torch.nn.Module) -> bool:
    """Whether all parameters of a model, and its first buffer where it has none, have data."""
    tensors = [*root.parameters()] or [*root.buffers()][:1]
    return not any(t.device.type == "meta" or isinstance(t, MetaTensor) for t in tensors)
