"""The dispatch half of the mode: the way of one operator call, from its arguments to the log."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward, increment_version
from torch.utils._pytree import tree_leaves, tree_map_only

from analyzer.errors import InputError
from analyzer.memory.allocator import DeviceOutOfMemoryError
from analyzer.meta import argument as collective
from analyzer.meta.address_space import AddressSpace
from analyzer.meta.function.mode import answering
from analyzer.meta.intercept.mode_stack import DirectDispatchMode, FakeTensor
from analyzer.meta.intercept.replacement import call_handlers, waiting
from analyzer.meta.operator_info import (
    OperatorFacts,
    describe_operator,
    has_rule,
    hold_blocks,
    is_described,
    kernel_memory,
)
from analyzer.meta.refusal.overlap import check_in_place, check_outputs, is_dense
from analyzer.meta.simulated_device import devices, reopened
from analyzer.meta.spec import Signature, name_arguments, spec_of, to_specs
from analyzer.meta.state import MetaState, mode_in_force, set_state
from analyzer.meta.tensor import device_of, name_of_node
from analyzer.meta.value.barred import follow_bars
from analyzer.meta.value.data_dependent import answer_data_dependent, depends_on_data

from .call import OperatorCall, find_entry, rebuild, resolve, result_device, storage_of
from .kernel import check_devices, follow_met, run_kernel
from .propagate import propagate

Tensor = torch.Tensor


class MetaDispatchMode(DirectDispatchMode):
    """The dispatch half of `MetaTensorMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.state: MetaState | None = None
        self._whole: list[Any] = []  # operators that are not taken apart, on the parts of tensors either

    @contextmanager
    def staying_whole(self, op: Any) -> Iterator[None]:
        self._whole.append(op)
        try:
            yield
        finally:
            self._whole.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        if waiting:
            call_handlers()
        for kind in types:
            # a tensor around tensors (nested, quantised): what it does with them comes here
            dispatches = getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl
            if dispatches and kind is not FakeTensor:  # one that is met stands for a tensor, as those with data do
                if kind.__name__ == "DTensor":  # NotImplemented hands it to this class, which calls it on parts
                    if (answer := collective.redispatching.get(kind)) is None:
                        raise InputError(f"{func} of a DTensor outside a world of ranks: run this inside `with "
                                         "analyzer.parallel.world(...)`, or profile the module as it is before it is "
                                         "wrapped")
                    return answer(func, args, kwargs or {}, self.handle)
                with self, reopened(), mode_in_force():
                    return self._call_around(kind, func, types, args, kwargs or {})
        if func is _ADD and _is_engines_sum(args):
            func = _ADD_IN_PLACE
        with torch._C.DisableTorchFunction():  # backward calls this with the function mode still active
            result = self.handle(func, args, kwargs)
        assert self.state is not None
        if self.state.tape is not None:
            self.state.tape.dispatched(func, args, kwargs or {}, result)
        return result

    def _call_around(self, kind: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a tensor around tensors does, given the device that its user asked for and not the one of kernels."""
        state = self.state
        assert state is not None
        device = state.pending_device
        if device is not None and "device" in kwargs:
            kwargs = {**kwargs, "device": device}
            state.pending_device = None
        try:
            if state.graph is None:
                return kind.__torch_dispatch__(func, types, args, kwargs)
            run = partial(kind.__torch_dispatch__, func, types, args, kwargs)
            return state.graph.call_around(func, args, kwargs, run)
        finally:
            state.pending_device = device

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, whole: bool = False) -> Any:
        """The result of an operator; one that is composed of others is taken apart, unless it is to stay ``whole``."""
        state = self.state
        assert state is not None
        try:
            if state.graph is not None and state.graph.called is None:
                if state.graph.ends_before(func, args):
                    with self, reopened(), mode_in_force(), state.tracing.outside(f"Dynamo takes no {func}"):
                        return func(*args, **kwargs or {})
                return state.graph.call(func, args, kwargs or {}, self._handle, whole)
            if state.space.is_shared:
                with state.space.turn:
                    return self._handle(func, args, kwargs or {}, whole)
            return self._handle(func, args, kwargs or {}, whole)
        except DeviceOutOfMemoryError as error:
            if state.recorder is not None:
                state.recorder.calls.ran_out(str(func), error)
            raise

    def _compositions(self, state: MetaState, info: OperatorFacts, whole: bool) -> list[Callable[..., Any]]:
        """What takes an operator apart: a compiler's decomposition, its own, or what the device makes it of."""
        found: list[Any] = []
        if state.graph is not None and not info.composite:
            found.append(answering(state.graph.composition(info.op)))
        if not whole and info.op not in self._whole:
            found += [info.op.decompose if info.composite else None, answering(info.composition),
                      None if info.written is None else partial(_run_written, state, info)]
        return [compose for compose in found if compose is not None]

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> Any:
        state = self.state
        assert state is not None
        info = describe_operator(func)
        if info.may_be_silent and (info.silent or state.zeros):
            return func(*args, **kwargs)
        if info.composite or info.composition is not None or info.written is not None or state.graph is not None:
            for compose in self._compositions(state, info, whole):
                with self, reopened():
                    result = compose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        call = resolve(state, info, args, kwargs)
        if info.data_dependent:
            _check_places(state, call)
            if state.graph is not None and depends_on_data(info, call.args):
                state.graph.asked(func)
            answer = answer_data_dependent(state, info, call.args, call.kwargs, call.tensors)
            if answer is not NotImplemented:
                _account_for_answer(state, call, answer)
                if state.graph is not None and isinstance(answer, (Tensor, list, tuple)):
                    state.graph.dispatched(func, args, kwargs, answer)
                return answer
        if info.check_values is not None:
            info.check_values(*call.args, **call.kwargs)
        if info.communicates and collective.impl is not None:
            given = name_arguments(info.op, call.args, call.kwargs)
            with collective.impl.launching(info, given):  # other ranks take part in it
                _execute(state, call)
                with torch._C.DisableTorchFunction():
                    collective.impl.propagate(info, given, call.result)
                _account(state, call)
            if state.graph is not None:
                state.graph.dispatched(func, args, kwargs, call.result)
            return call.result
        _execute(state, call)
        _follow(state, call)
        _account(state, call)
        if state.graph is not None:
            state.graph.dispatched(func, args, kwargs, call.result)
        return call.result


def _follow(state: MetaState, call: OperatorCall) -> None:
    if state.meets_data:
        follow_met(call)
    if call.info.bars:
        follow_bars(call.info.name, call.args, call.kwargs, call.storages, call.result)
    if call.is_followed():
        propagate(state, call)


# What ``torch.library.custom_op`` made of a function runs as this function does: what it launches, computes and holds
# meanwhile is seen. One that needs data, or calls what is no operator (a Triton kernel, a library), stays one operator.

_runs_without_data: dict[Any, bool] = {}  #: by operator and kind of device


def _run_written(state: MetaState, info: OperatorFacts, *args: Any, **kwargs: Any) -> Any:
    if state.graph is not None or state.tape is not None or is_described(info):
        return NotImplemented
    kind = next((device_of(t).type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), "cpu")
    kernels = info.written._backend_fns
    function = kernels.get(kind, kernels.get(None))
    if function is None:
        return NotImplemented
    if (info.op, kind) not in _runs_without_data:
        with torch._C._EnableTorchFunction(), mode_in_force(), torch.no_grad():
            _runs_without_data[info.op, kind] = _can_run(state, function, args, kwargs)
    if not _runs_without_data[info.op, kind]:
        return NotImplemented
    with torch._C._EnableTorchFunction(), mode_in_force(), torch.no_grad():
        return function(*args, **kwargs)


def _can_run(state: MetaState, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function runs on tensors without data: tried in a memory of its own, where nothing is recorded."""
    def copy(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_of(tensor))

    set_state(MetaState(replace(state.options, unknown_value="error"), AddressSpace(), state.adopted_device,
                        device_count=state.device_count))
    try:
        args, kwargs = tree_map_only(Tensor, copy, (args, kwargs))
        function(*args, **kwargs)
    except Exception:  # whatever the function raises: the answer is no
        return False
    finally:
        set_state(state)
    return True


def _check_places(state: MetaState, call: OperatorCall) -> None:
    check_devices(state, call)
    if call.info.has_out:
        check_outputs(call.info.op, call.info.name, call.args, call.kwargs)


def _execute(state: MetaState, call: OperatorCall) -> None:
    if call.info.looks_in_place and len(call.storages) > 1:
        number = call.storages[0].number
        if any(s.number == number for s in call.storages[1:]):
            check_in_place(call.info.name, call.tensors[0], call.tensors[1:])
    key, entry = find_entry(call)
    if entry is None:
        run_kernel(state, call, key)
    else:
        rebuild(state, call, entry)
    if call.info.counts_versions:
        increment_version([tensor for _, tensor in call.written()])


def _account(state: MetaState, call: OperatorCall) -> None:
    if state.graph is not None:  # only a graph is made of it
        call.kept.clear()
        return
    signature = call.signature
    for device in devices:
        if needs := device.library_needs(signature):
            device.take_library_workspaces(state, signature, needs)
    for stage in call.stages:
        if stage.before is None:
            hold_blocks(state, result_device(state, call.storages), stage.blocks, stage.elsewhere)
    call.kept.clear()
    if state.recorder is not None:
        outputs = [storage_of(o) for o in call.outputs if isinstance(o, Tensor)]
        state.recorder.calls.called(signature, call.storages, outputs)


def _account_for_answer(state: MetaState, call: OperatorCall, answer: Any) -> None:
    outputs = [t for t in (answer if isinstance(answer, (list, tuple)) else (answer,)) if isinstance(t, Tensor)]
    signature = Signature(call.info.op, to_specs(call.args), to_specs(call.kwargs),
                          tuple(spec_of(t) for t in call.tensors), tuple(spec_of(t) for t in outputs))
    if has_rule(call.info):
        for stage in kernel_memory(signature)[0]:
            hold_blocks(state, result_device(state, call.storages), stage.blocks, stage.elsewhere)
    if outputs and state.recorder is not None and state.graph is None:
        state.recorder.calls.called(signature, call.storages, [storage_of(t) for t in outputs])


# Where autograd adds gradients in place on a real device. The engine writes the sum of a tensor's gradients into one
# that it holds alone, unless that is ``isTensorSubclassLike``, which meta tensors are: then it makes one tensor more.
# Source: ``torch/csrc/autograd/input_buffer.cpp``, can_accumulate_inplace.

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
# Nodes whose own formula adds tensors (torch/csrc/autograd/FunctionsManual.cpp, tools/autograd/derivatives.yaml).
_ADDING_NODES = ("VarMean", "StdMean", "Atan2", "Linalg", "Cumprod", "Prod", "Polar", "Svd")
_NORM = "LinalgVectorNormBackward"  # adds nothing: norm_backward

_alone: list[tuple[int, int, int]] = []  # what `_count_holders` gives for a first operand that only the engine holds


def _count_holders(x: Tensor) -> tuple[int, int, int]:
    """References to the C++ tensor, to its storage and to its Python object, those on the way here included."""
    storage = torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    return x._use_count(), storage, sys.getrefcount(x)  # type: ignore[attr-defined]


class _Learned(Exception):
    """Ends the backward pass of `learn_counts` before its sum runs, for which torch would import for seconds."""


def counts_are_known() -> bool:
    return bool(_alone)


def learn_counts() -> None:
    """Measure, once in the process and under the mode, what an operand that only the engine holds looks like."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(1, requires_grad=True).clone()
        grads = tuple(torch.empty(1, dtype=torch.float64) for _ in range(2))
        with suppress(_Learned):  # the first gradient, a cast, is the engine's own when the second comes
            _engine_run_backward((x.double(), x.double()), grads, False, False, (), allow_unreachable=True,
                                 accumulate_grad=True)


def _is_engines_sum(args: tuple[Any, ...]) -> bool:
    """Whether ``__torch_dispatch__``, which must ask directly, got a sum that the engine would make in place."""
    if torch.is_grad_enabled() or len(args) != 2:
        return False
    node = torch._C._current_autograd_node()
    name = "" if node is None else name_of_node(node)
    if not name or name.startswith(_ADDING_NODES) and not name.startswith(_NORM):
        return False
    caller = sys._getframe(2)
    if caller.f_code.co_name != "_engine_run_backward":  # hooks and functions written in Python add as they say
        return False
    old, new = args
    if not _alone:
        _alone.append(_count_holders(old))
        raise _Learned
    return (isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape and old.dtype == new.dtype
            and old.layout is torch.strided and new.layout is torch.strided
            and _count_holders(old) == _alone[0] and is_dense(old))
