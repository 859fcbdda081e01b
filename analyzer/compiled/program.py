"""The programs of a compiled graph, as they run under the mode: kernel by kernel, or as one CUDA graph.

CUDA graphs are as in ``torch/_inductor/cudagraph_trees.py``: graphs of a process have one private pool. What a graph
allocates, its results among it, lives there, and the pool's memory is kept for later runs. In the step of its first run
a graph warms up, kernel by kernel; in the next it is captured, and replayed from then on. Of graphs without a backward
half each call is a step (``can_start_new_generation``). Tensors that a replay gives anew are copied to the addresses
that the graph has for them; parameters and buffers, and what an earlier graph left in the pool, are read where they
are. Workspaces of libraries, those of what runs beside graphs too, are given back before a graph warms up or is
captured, and behind (``clear_cublas_manager``); a capture begins with an ``empty_cache()`` (``torch.cuda.graph``). A
replay asks no allocator for memory: what lives in the pool then is reserved, and is not allocated.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from analyzer.memory.allocator import Block
from analyzer.meta.address_space import AddressSpace
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.spec import Launch, Signature, spec_of
from analyzer.meta.state import MetaState, active_state
from analyzer.meta.tensor import device_of, keep_class
from analyzer.record.call_recorder import CompiledPlace

from .generated_kernel import read_places
from .joint_graph import JointGraph
from .lowering import LoweredGraph, extern_kernels

Tensor = torch.Tensor

_POOL = (1, 0)  #: of all CUDA graphs of torch.compile: PyTorch's ids of a capture's pool are so (MempoolId_t)
_CAPTURED = -1
#: in which step of a run, that has a memory of its own, each program ran first; _CAPTURED once it ran again
_first_steps: WeakKeyDictionary[AddressSpace, dict[Any, int]] = WeakKeyDictionary()


class Rows:
    """Where in the log what a graph computes is: the calls of its operators, by their places in the joint graph."""

    def __init__(self, joint: JointGraph) -> None:
        self.modules, self.forward_of = joint.modules, joint.forward_of
        self._calls: dict[int, int] = {}
        self._last = CompiledPlace(self.modules[0] if self.modules else 0)

    def locate(self, places: Sequence[int], is_backward: bool, call: int, is_fused: bool = False) -> CompiledPlace:
        """Of what the call numbered ``call``, of a kernel that computes the operators at ``places``, is a part."""
        if not places:  # passes made it of nothing that was there: it is a part of what runs before it
            return self._last._replace(is_backward=is_backward, recomputed=False)
        module = _most([self.modules[p] for p in places], 0)
        if not is_backward:
            for place in places:  # one's own kernel, else the first: others prepare what it reads
                if not is_fused or place not in self._calls:
                    self._calls[place] = call
            self._last = CompiledPlace(module)
        else:
            forward = [self.forward_of[p] for p in places]
            self._last = CompiledPlace(module, True, _most([self._calls[p] for p in forward if p in self._calls], None),
                                       all(p == f for p, f in zip(places, forward)))
        return self._last


def _most(values: Sequence[Any], default: Any) -> Any:
    return Counter(values).most_common(1)[0][0] if values else default


class Program:
    """A lowered graph that can be called under the mode."""

    def __init__(self, lowered: LoweredGraph) -> None:
        start, stop = lowered.source.index("class Runner"), lowered.source.index("\nrunner = Runner")
        self._code = compile(lowered.source[start:stop], "<compiled graph>", "exec")
        self.source, self.kernels, self.constants = lowered.source[start:stop], lowered.kernels, lowered.constants
        self.launches, self.externs = self.source.count(" launch("), self.source.count(" at(")
        self._signatures: dict[Any, Signature] = {}

    def run(self, args: list[Tensor | None], rows: Rows, is_backward: bool, fresh: Sequence[int] | None = None,
            infers: bool = False) -> Sequence[Tensor | None]:
        """The outputs; ``args`` are let go of one by one, as the program does when it is done with them. With ``fresh``
        it runs as a CUDA graph, which is given other tensors at these indices each time; one that ``infers`` has no
        backward half.
        """
        if fresh is None:
            return self._run(args, rows, is_backward, Launch(inputs=len(args)))
        state = active_state()
        first_steps, step = _first_steps.setdefault(state.space, {}), state.recorder.run.step
        is_warm = self in first_steps if infers else first_steps.get(self, step) < step
        if first_steps.setdefault(self, step) != _CAPTURED:
            free_workspaces(state)
            if is_warm:
                first_steps[self] = _CAPTURED
                for allocator in state.space.allocators.values():
                    allocator.empty_cache()
        with in_pool(state, args, fresh if is_warm else (), is_warm):
            return self._run(args, rows, is_backward, Launch(True, len(args)))

    def _run(self, args: list[Tensor | None], rows: Rows, is_backward: bool,
             launched: Launch) -> Sequence[Tensor | None]:
        state = active_state()
        calls = state.recorder.calls

        def launch(index: int, places: str, read: list[Tensor], written: list[Tensor]) -> None:
            with torch._C.DisableTorchFunction():
                key = index, tuple(map(spec_of, read)), tuple(map(spec_of, written))
                signature = self._signatures.get(key)
                if signature is None:
                    kernel: Any = self.kernels[index]
                    signature = self._signatures[key] = Signature(kernel, (), {}, key[1], key[2])
                calls.compiled_in = rows.locate(
                    read_places(places), is_backward, calls.count(), is_fused=True)
                calls.called(signature, [t.untyped_storage() for t in read], [t.untyped_storage() for t in written])

        def at(places: str) -> None:
            calls.compiled_in = rows.locate(read_places(places), is_backward, calls.count())

        def reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
            with without_modes():
                found: Tensor = keep_class(torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset))
                return found

        names: dict[str, Any] = {
            "torch": torch, "aten": torch.ops.aten, "launch": launch, "at": at, "reinterpret_tensor": reinterpret,
            "extern_kernels": _EXTERN, "assert_size_stride": _nothing, "assert_alignment": _nothing,
            "get_raw_stream": _nothing, "inf": float("inf"), "nan": float("nan"), "device": torch.device}
        for name, value in self.constants.items():
            names[name] = _factory(state, str(value.device))(value.shape, value.stride(), value.dtype)
        for device in ("cuda", "cpu"):
            names[f"empty_strided_{device}"] = _factory(state, device)
        names["empty_strided"] = lambda size, stride, device, dtype: _factory(state, device)(size, stride, dtype)
        exec(self._code, names)
        before = calls.compiled_in, calls.launch  # of the graph with the operator that has this one inside
        at("")
        calls.launch = launched
        try:
            found: Sequence[Tensor | None] = names["Runner"](partitions=[]).call(args)
        finally:
            calls.compiled_in, calls.launch = before
        return found


class OperatorProgram(Program):
    """A graph whose operators run one by one."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.launches = module, 0
        self.externs = sum([1 for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
                            and not any(result.alias_info for result in node.target._schema.returns)])

    def _run(self, args: list[Tensor | None], rows: Rows, is_backward: bool,
             launched: Launch) -> Sequence[Tensor | None]:
        calls = active_state().recorder.calls
        before = calls.compiled_in, calls.launch

        class Located(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                if n.op == "call_function":
                    places = [n.meta["place"]] if "place" in n.meta else []
                    calls.compiled_in = rows.locate(places, is_backward, calls.count())
                return super().run_node(n)

        calls.launch = launched if launched.captured else None  # else PyTorch dispatches them
        try:
            found: Sequence[Tensor | None] = Located(self.module).boxed_run(args)
        finally:
            calls.compiled_in, calls.launch = before
        return found


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _factory(state: MetaState, device: str) -> Callable[..., Tensor]:
    """What makes memory, of which the log has no call."""
    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        recorder, state.recorder = state.recorder, None
        try:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        finally:
            state.recorder = recorder
    return empty_strided


class _Extern:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name, None) or getattr(extern_kernels, name)


_EXTERN = _Extern()


def find_capture_obstacle(joint: JointGraph, is_partitioned: bool) -> str | None:
    """Why a graph is not captured, None where it is: ``check_for_mutation`` and
    ``check_multiple_devices_or_any_cpu_nodes`` of ``torch/_inductor/cudagraph_utils.py``. What runs on the CPU lies
    between captured parts where Inductor's ``graph_partition`` is on.
    """
    given = set(joint.graph.find_nodes(op="placeholder")[:joint.given])
    copies = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = sum(node.args[0] in given for node in copies)
    if written:
        return f"it writes to {written} of the tensors that it is given"
    if not is_partitioned and any(device_of(primal).type == "cpu" and primal.ndim for primal in joint.primals):
        return "a tensor on the CPU takes part in it"
    return None


@contextmanager
def in_pool(state: MetaState, args: list[Any], fresh: Iterable[int], is_replay: bool) -> Iterator[None]:
    """A block whose storages are in the pool; tensors in ``args`` at the indices ``fresh`` are copied there first."""
    space = state.space
    before = space.capture, space.is_replaying, space.library_workspaces
    space.begin_capture(_POOL)
    space.is_replaying, space.library_workspaces = is_replay, {}
    try:
        fresh = [i for i in fresh if isinstance(args[i], Tensor) and _is_outside(args[i], space)]
        given = [args[i] for i in fresh]
        placed = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in given]
        if placed:
            torch._foreach_copy_([_distinct(t) for t in placed], [_distinct(t) for t in given])
        for i, tensor in zip(fresh, placed):
            args[i] = tensor
        del given, placed
        yield
    finally:
        free_workspaces(state)
        space.capture, space.is_replaying, space.library_workspaces = before


def free_workspaces(state: MetaState) -> None:
    """What ``_cuda_clearCublasWorkspaces`` does: products take their workspaces anew."""
    kept = state.space.library_workspaces
    for key in [key for key in kept if str(key[0]).startswith("cublas")]:
        region = kept.pop(key)
        state.recorder.memory.freed_workspace(region)
        state.space.give_back(torch.device(f"cuda:{key[1]}"), region)


def _is_outside(tensor: Tensor, space: AddressSpace) -> bool:
    """Whether a tensor is on the device, and not in the pool."""
    assert space.capture is not None
    region = getattr(tensor.untyped_storage(), "region", None)
    return isinstance(region, Block) and region.stream not in space.capture.values()


def _distinct(tensor: Tensor) -> Tensor:
    """Of a tensor that was expanded, one of the elements that lie in the same place (``index_expanded_dims``)."""
    for dimension, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
