"""A compiled function's call: its graphs are made, or found among those made before, and run in place of its code."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_unflatten

from analyzer.hardware import DeviceSpec
from analyzer.meta.spec import Signature, spec_of
from analyzer.meta.state import MetaState, active_state

from .lowering import LoweredGraph, compiling_for, lower
from .partition import partition
from .trace import JointGraph, trace_joint

Tensor = torch.Tensor


@dataclass(eq=False)
class CompiledGraphs:
    """The programs of one joint graph. ``saved`` are what the forward one gives beside the results, for backward."""

    forward: Program
    backward: Program | None
    results: int


class Program:
    """A lowered graph that can be called under the mode."""

    def __init__(self, lowered: LoweredGraph) -> None:
        start, stop = lowered.source.index("class Runner"), lowered.source.index("\nrunner = Runner")
        self._code = compile(lowered.source[start:stop], "<compiled graph>", "exec")
        self.source, self.kernels, self.constants = lowered.source[start:stop], lowered.kernels, lowered.constants
        self._signatures: dict[Any, Signature] = {}

    def run(self, args: list[Tensor | None], modules: Sequence[int]) -> Sequence[Tensor | None]:
        """The outputs; ``args`` are let go of one by one, as the program does when it is done with them. ``modules``
        are those of the call, by the numbers that they have in the program.
        """
        state = active_state()
        recorder = state.recorder

        def launch(index: int, module: int, read: list[Tensor], written: list[Tensor]) -> None:
            kernel = self.kernels[index]
            key = index, tuple(map(spec_of, read)), tuple(map(spec_of, written))
            signature = self._signatures.get(key)
            if signature is None:
                signature = self._signatures[key] = Signature(kernel, (), {}, key[1], key[2])  # type: ignore[arg-type]
            recorder.compiled_in = modules[module]
            recorder.called(signature, [t.untyped_storage() for t in read], [t.untyped_storage() for t in written])

        def at(module: int) -> None:
            recorder.compiled_in = modules[module]

        def reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
            with _unlogged(state):
                return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

        names: dict[str, Any] = {
            "torch": torch, "aten": torch.ops.aten, "launch": launch, "at": at, "reinterpret_tensor": reinterpret,
            "extern_kernels": _EXTERN, "assert_size_stride": _nothing, "assert_alignment": _nothing,
            "get_raw_stream": _nothing, "inf": float("inf"), "nan": float("nan"), **self.constants}
        for device in ("cuda", "cpu"):
            names[f"empty_strided_{device}"] = _factory(device)
        exec(self._code, names)
        recorder.compiled_in = modules[0] if modules else 0
        try:
            found: Sequence[Tensor | None] = names["Runner"](partitions=[]).call(args)
        finally:
            recorder.compiled_in = None
        return found


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


def _factory(device: str) -> Callable[..., Tensor]:
    def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        with _unlogged(active_state()):
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
    return empty_strided


class _Extern:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_EXTERN = _Extern()


@contextmanager
def _unlogged(state: MetaState) -> Iterator[None]:
    before, state.recorder = state.recorder, None
    try:
        yield
    finally:
        state.recorder = before


_made: dict[Any, CompiledGraphs] = {}


def call_compiled(device: DeviceSpec, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
                  config: dict[str, Any]) -> Any:
    """What a call of ``function`` gives under torch.compile with its ``config``, on a ``device``."""
    state = active_state()
    if state.graph is not None or state.recorder is None:  # inside another compiled function
        return function(*args, **kwargs)
    with state.recorder.tracing():
        joint = trace_joint(state, function, args, kwargs, select_decomp_table())
    modules = _number_modules(joint.module.graph)
    key = _key_of(joint.module.graph, joint.results), device
    graphs = _made.get(key)
    if graphs is None:
        graphs = _made[key] = _compile(joint, device)
    results: Any
    if graphs.backward is None:
        results = graphs.forward.run(list(joint.primals), modules)
    else:
        results = _CompiledFunction.apply(graphs, modules, *joint.primals)  # type: ignore[no-untyped-call]
    return tree_unflatten(_restore(joint, results), joint.structure)


def _restore(joint: JointGraph, results: Sequence[Tensor | None]) -> list[Any]:
    """What the function returns, flattened: results, views of what it was given, and constants."""
    places, found = iter(joint.places), []
    by_number = {p.untyped_storage().number: p for p in joint.primals}  # type: ignore[attr-defined]
    for value in joint.outputs:
        if isinstance(value, Tensor):
            place = next(places)
            if place is not None:
                value = results[place]
            else:
                primal = by_number[value.untyped_storage().number]  # type: ignore[attr-defined]
                is_same = primal.shape == value.shape and primal.stride() == value.stride()
                value = primal if is_same else primal.as_strided(value.shape, value.stride(), value.storage_offset())
        found.append(value)
    return found


def _compile(joint: JointGraph, device: DeviceSpec) -> CompiledGraphs:
    with compiling_for(device, LoweredGraph("")):
        forward, backward = partition(joint)
    half = "inference" if backward is None else "forward"
    return CompiledGraphs(Program(lower(forward, joint.fake_mode, device, half, joint.results)),
                          None if backward is None else Program(lower(backward, joint.fake_mode, device, "backward")),
                          joint.results)


class _CompiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: CompiledGraphs, modules: list[int], *primals: Tensor) -> Any:
        found = graphs.forward.run(list(primals), modules)
        ctx.graphs, ctx.modules = graphs, modules
        results, saved = found[:graphs.results], found[graphs.results:]
        ctx.save_for_backward(*saved)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        args = [*saved, *tangents]
        del saved, tangents
        return None, None, *ctx.graphs.backward.run(args, ctx.modules)


def _number_modules(graph: fx.Graph) -> list[int]:
    """The modules of a graph's nodes in the order of appearance; in the graph are their numbers in this list."""
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        if "module" in node.meta:
            node.meta["module"] = numbers.setdefault(node.meta["module"], len(numbers))
    return list(numbers)


def _key_of(graph: fx.Graph, results: int) -> Any:
    """What tells one graph from another: its nodes, with their arguments and specs."""
    places: dict[fx.Node, int] = {}
    rows = []
    for node in graph.nodes:
        places[node] = len(places)
        value = fx.map_arg((node.args, node.kwargs), lambda n: _Place(places[n]))
        specs = [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device)
                 for t in torch.utils._pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        target = str(node.target) if node.op == "call_function" else ""
        rows.append((node.op, node.meta.get("module"), target, repr(value), str(specs)))
    return results, tuple(rows)


class _Place(str):
    def __new__(cls, number: int) -> Any:
        return str.__new__(cls, f"%{number}")
