"""A compiled function's call: its graphs are made, or found among those made before, and run in place of its code."""
from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves

from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec
from analyzer.meta.source_line import user_line
from analyzer.meta.spec import Launch, Signature, TensorSpec, spec_of
from analyzer.meta.state import MetaState, active_state
from analyzer.record.log import CompileBreak, CompiledCall, CompiledGraph
from analyzer.record.recorder import CompiledPlace

from .cuda_graph import capturing, find_obstacle
from .functional import is_view
from .gradient_bucket import BucketEnds
from .lowering import LoweredGraph, compiling_for, extern_kernels, lower
from .partition import partition, partition_plainly
from .repeat import Shortened, label_of, shorten
from .trace import FunctionTrace, JointGraph
from .wrapped_tensor import GraphShape

Tensor = torch.Tensor


@dataclass(eq=False)
class CompiledGraphs:
    """The programs of one joint graph. ``saved`` are what the forward one gives beside the results, for backward."""

    forward: Program
    backward: Program | None
    results: int
    description: CompiledGraph


class Program:
    """A lowered graph that can be called under the mode."""

    def __init__(self, lowered: LoweredGraph) -> None:
        start, stop = lowered.source.index("class Runner"), lowered.source.index("\nrunner = Runner")
        self._code = compile(lowered.source[start:stop], "<compiled graph>", "exec")
        self.source, self.kernels, self.constants = lowered.source[start:stop], lowered.kernels, lowered.constants
        self.launches, self.externs = self.source.count(" launch("), self.source.count(" at(")
        self._signatures: dict[Any, Signature] = {}

    def run(self, args: list[Tensor | None], rows: Rows, is_backward: bool,
            fresh: Sequence[int] | None = None) -> Sequence[Tensor | None]:
        """The outputs; ``args`` are let go of one by one, as the program does when it is done with them. With ``fresh``
        it runs as a CUDA graph, which is given other tensors at these indices each time.
        """
        if fresh is None:
            return self._run(args, rows, is_backward, Launch(inputs=len(args)))
        with capturing(active_state(), args, fresh):
            return self._run(args, rows, is_backward, Launch(True, len(args)))

    def _run(self, args: list[Tensor | None], rows: Rows, is_backward: bool,
             launched: Launch) -> Sequence[Tensor | None]:
        state = active_state()
        recorder = state.recorder

        def launch(index: int, places: tuple[int, ...], read: list[Tensor], written: list[Tensor]) -> None:
            kernel = self.kernels[index]
            key = index, tuple(map(spec_of, read)), tuple(map(spec_of, written))
            signature = self._signatures.get(key)
            if signature is None:
                signature = self._signatures[key] = Signature(kernel, (), {}, key[1], key[2])  # type: ignore[arg-type]
            recorder.compiled_in = rows.locate(places, is_backward, recorder.count_calls(), is_fused=True)
            recorder.called(signature, [t.untyped_storage() for t in read], [t.untyped_storage() for t in written])

        def at(places: tuple[int, ...]) -> None:
            recorder.compiled_in = rows.locate(places, is_backward, recorder.count_calls())

        def reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
            state.recorder = None
            try:
                return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
            finally:
                state.recorder = recorder

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
        at(())
        recorder.launch = launched
        try:
            found: Sequence[Tensor | None] = names["Runner"](partitions=[]).call(args)
        finally:
            recorder.compiled_in = recorder.launch = None
        return found


class OperatorProgram(Program):
    """A graph whose operators run one by one."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.launches = module, 0
        self.externs = sum([1 for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
                            and not any(result.alias_info for result in node.target._schema.returns)])
        last = {n: node for node in module.graph.nodes for n in node.all_input_nodes}
        self._dying: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            self._dying.setdefault(user, []).append(node)

    def _run(self, args: list[Tensor | None], rows: Rows, is_backward: bool,
             launched: Launch) -> Sequence[Tensor | None]:
        recorder = active_state().recorder
        recorder.launch = launched if launched.captured else None  # else PyTorch dispatches them
        values: dict[fx.Node, Any] = dict(zip(self.module.graph.find_nodes(op="placeholder"), args))
        args.clear()
        try:
            for node in self.module.graph.nodes:
                if node.op == "output":
                    return fx.map_arg(node.args[0], values.__getitem__)
                if node.op == "call_function":
                    place = node.meta.get("place")
                    recorder.compiled_in = rows.locate(
                        () if place is None else (place,), is_backward, recorder.count_calls())
                    given = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = node.target(*given[0], **given[1])
                    del given
                for dead in self._dying.get(node, ()):
                    del values[dead]
        finally:
            recorder.compiled_in = recorder.launch = None
        raise AssertionError("the graph has no output")


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


_made: dict[Any, CompiledGraphs] = {}


def call_compiled(device: DeviceSpec, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
                  config: dict[str, Any]) -> Any:
    """What a call of ``function`` gives under torch.compile with its ``config``, on a ``device``."""
    state, backend = active_state(), config.get("backend", "inductor")
    if state.graph is not None or state.recorder is None or backend == "eager":  # or inside another compiled function
        return function(*args, **kwargs)
    if backend not in _BACKENDS:
        state.assume(f"torch.compile(backend={backend!r}): what it compiles runs as written, since what this backend "
                     "does is unknown")
        return function(*args, **kwargs)
    call = _Call(device, function, config)
    decompositions = select_decomp_table() if _BACKENDS[backend] else {}
    buckets = BucketEnds.of_running(call.function)
    with state.recorder.tracing():
        result = FunctionTrace(state, decompositions, call.run_graph, call.note_break, config, buckets).call(
            function, args, kwargs)
    call.note(state.recorder, [spec_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
    return result


#: What of a call's settings Inductor is not told: a replay of its kernels is another matter than which they are.
_NO_OPTIONS = frozenset({"backend", "fullgraph", "dynamic", "triton.cudagraphs"})
#: Backends whose graphs are known, and whether they decompose operators as Inductor does. All take AOTAutograd's graphs
#: and but for Inductor run their operators one by one: ``torch/_dynamo/backends/debugging.py``, ``cudagraphs.py``.
_BACKENDS = {"inductor": True, "aot_eager": False, "aot_eager_default_partitioner": False,
             "aot_eager_decomp_partition": True, "cudagraphs": False}


class _Call:
    """What a call of a compiled function comes to."""

    def __init__(self, device: DeviceSpec, function: Callable[..., Any], config: dict[str, Any]) -> None:
        self.device, self.function, self.config = device, getattr(function, "func", function), config
        self.keys: list[Any] = []
        self.captured = False
        self.graphs: list[CompiledGraph] = []
        self.breaks: list[CompileBreak] = []

    def run_graph(self, joint: JointGraph) -> Sequence[Tensor | None]:
        backend = self.config.get("backend", "inductor")
        options = {name: value for name, value in self.config.items() if name not in _NO_OPTIONS}
        with inductor_config.patch(options):
            if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
                active_state().assume("torch.compile, max-autotune: where it times kernels to choose one, the "
                                      "library's is taken")
            key = (_key_of(joint.graph, joint.results), joint.given, self.device, backend,
                   inductor_config.get_hash(), functorch_config.get_hash(), torch.backends.cuda.matmul.fp32_precision)
            graphs = _made.get(key)
            if graphs is None:
                graphs = _made[key] = _compile(joint, self.device, backend)
        self.keys.append(key)
        self.graphs.append(graphs.description)
        rows, fresh = Rows(joint), range(joint.given) if self.captures(joint, backend) else None
        if graphs.backward is None:
            with torch.no_grad():
                return joint.shape.join_results(
                    graphs.forward.run(list(joint.primals), rows, is_backward=False, fresh=fresh))
        found: Sequence[Tensor | None] = _CompiledFunction.apply(  # type: ignore[no-untyped-call]
            graphs, rows, fresh, joint.differentiated, joint.shape, list(joint.primals), *joint.inputs)
        return found

    def captures(self, joint: JointGraph, backend: str) -> bool:
        """Whether the graph runs as a CUDA graph."""
        if backend != "cudagraphs" and not self.config.get("triton.cudagraphs", inductor_config.triton.cudagraphs):
            return False
        obstacle = find_obstacle(joint) if self.device.kind == "cuda" else f"{self.device.name} has none"
        active_state().assume(
            "CUDA graphs: what lives in their pool counts as allocated, which PyTorch's counters leave out"
            if obstacle is None else f"CUDA graphs: a graph runs kernel by kernel, since {obstacle}")
        self.captured |= obstacle is None
        return obstacle is None

    def note_break(self, reason: str) -> None:
        source = user_line()
        if self.config.get("fullgraph"):
            raise InputError(f"torch.compile(fullgraph=True) compiles no function whose graph breaks, and it breaks "
                             f"{active_state().where()}: {reason}. Leave fullgraph out, or change the line")
        self.breaks.append(CompileBreak(reason, source))

    def note(self, recorder: Any, given: list[TensorSpec]) -> None:
        """Write down the call, to which tensors of ``given`` specs were passed."""
        owner, name = getattr(self.function, "__self__", None), getattr(self.function, "__qualname__", "")
        code = getattr(self.function, "__code__", type(self.function))
        known = recorder.compiled_graphs.setdefault((code, id(owner)), _Known())
        recompiled = known.compare(tuple(self.keys), given, self.config.get("dynamic"))
        if recompiled is not None and "size" in recompiled:
            active_state().assume("torch.compile: graphs for sizes that change are taken to be those of the sizes that "
                                  "they run with")
        recorder.log.compiled_calls.append(CompiledCall(
            recorder.step, recorder._running(), "" if isinstance(owner, torch.nn.Module) else name, tuple(self.graphs),
            tuple(self.breaks), recompiled, self.captured, self.config))


class _Known:
    """The graphs that calls of a function came to."""

    def __init__(self) -> None:
        self.keys: set[Any] = set()
        self.given: list[TensorSpec] = []
        self.dynamic: set[tuple[int, int]] = set()  #: (tensor, dimension) of sizes that a graph takes as they come

    def compare(self, keys: Any, given: list[TensorSpec], dynamic: bool | None) -> str | None:
        """Why a call with these graphs compiles again; None where it does not, or is the first. Source: a size that is
        another than before makes a graph for any (``automatic_dynamic_shapes`` of ``torch/_dynamo/config.py``).
        """
        before, self.given, is_first = self.given, given, not self.keys
        is_known = keys in self.keys
        self.keys.add(keys)
        if is_known or is_first:
            return None
        if len(before) != len(given) or any((a.dtype, len(a.shape)) != (b.dtype, len(b.shape))
                                            for a, b in zip(before, given)):
            return "it is given other tensors"
        changed = {(i, d) for i, (a, b) in enumerate(zip(before, given)) for d in range(len(a.shape))
                   if a.shape[d] != b.shape[d]}
        if not changed:
            return "its code takes another path, or another constant"
        adapts = dynamic is None and dynamo_config.automatic_dynamic_shapes
        new = sorted(changed - self.dynamic)
        is_special = any(given[i].shape[d] < 2 for i, d in changed)
        if not is_special and (dynamic or adapts and not new):
            return None
        if adapts:
            self.dynamic |= changed
        i, d = (new or sorted(changed))[0]
        return f"size {d} of tensor {i} is {given[i].shape[d]}, it was {before[i].shape[d]}"


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


def _compile(joint: JointGraph, device: DeviceSpec, backend: str) -> CompiledGraphs:
    # a budget is a part of what the whole graph would save
    short = shorten(joint) if backend == "inductor" and functorch_config.activation_memory_budget == 1 else None
    if short is not None:
        halves = _lower(short.joint, device)
        whole = short.extend(halves[0][1], halves[1][1] if len(halves) > 1 else None)
        if whole is not None:
            return _made_of(joint, [graph for graph, _ in halves], [Program(half) for half in whole if half], short)
    if backend == "inductor":
        halves = _lower(joint, device)
        return _made_of(joint, [graph for graph, _ in halves], [Program(half) for _, half in halves])
    with compiling_for(device, LoweredGraph("")):
        plain = [half for half in partition_plainly(joint, backend.endswith("default_partitioner")) if half is not None]
    return _made_of(joint, plain, [OperatorProgram(half) for half in plain])


def _lower(joint: JointGraph, device: DeviceSpec) -> list[tuple[fx.GraphModule, LoweredGraph]]:
    """The halves of a joint graph, and what Inductor makes of them."""
    with compiling_for(device, LoweredGraph("")):
        forward, backward = partition(joint)
    if backward is None:
        return [(forward, lower(forward, joint.fake_mode, device, "inference", joint.results))]
    return [(forward, lower(forward, joint.fake_mode, device, "forward", joint.results)),
            (backward, lower(backward, joint.fake_mode, device, "backward"))]


def _made_of(joint: JointGraph, halves: list[fx.GraphModule], programs: list[Program],
             short: Shortened | None = None) -> CompiledGraphs:
    return CompiledGraphs(programs[0], programs[1] if len(programs) > 1 else None, joint.results,
                          _describe(joint, halves, programs, short))


def _describe(joint: JointGraph, halves: list[fx.GraphModule], programs: list[Program],
              short: Shortened | None) -> CompiledGraph:
    def times(node: fx.Node) -> int:
        return 1 if short is None or "place" not in node.meta else short.times(node.meta["place"])

    whole = joint.module.graph if short is None else joint.graph  # passes give the module another graph
    first = sum([1 for node in whole.nodes if node.op == "call_function"
                 and node.meta.get("partitioner_tag") != "is_backward"])
    if len(halves) == 1:
        return CompiledGraph(first, fwd_kernels=programs[0].launches, fwd_extern_kernels=programs[0].externs)
    outputs: Any = halves[0].graph.output_node().args[0]
    saved = outputs[joint.results:]
    again = {node.meta.get("place"): node for node in halves[1].graph.nodes if node.op == "call_function"
             and joint.forward_of[node.meta.get("place", 0)] == node.meta.get("place")}
    made = {_origin_of(n): n for n in saved if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), Tensor)}
    sizes = [origin.meta["val"].untyped_storage().nbytes() * times(node) for origin, node in made.items()
             if origin.op != "placeholder"]
    return CompiledGraph(first, sum(map(times, again.values())), sum(sizes), programs[0].launches,
                         programs[1].launches, programs[0].externs, programs[1].externs)


def _origin_of(node: fx.Node) -> fx.Node:
    """The node whose storage that of ``node`` is."""
    while node.op == "call_function" and (source := next(iter(node.all_input_nodes), None)) is not None:
        view = source if node.target is operator.getitem else node
        if not isinstance(view.target, torch._ops.OpOverload) or not is_view(view.target):
            break
        node = source
    return node


class _CompiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: CompiledGraphs, rows: Rows, fresh: Sequence[int] | None, differentiated: list[int],
                shape: GraphShape, primals: list[Tensor | None], *inputs: Tensor) -> Any:
        found = graphs.forward.run(primals, rows, is_backward=False, fresh=fresh)
        ctx.graphs, ctx.rows, ctx.differentiated, ctx.shape = graphs, rows, differentiated, shape
        ctx.is_captured = fresh is not None
        results, saved = shape.join_results(found[:graphs.results]), found[graphs.results:]
        ctx.save_for_backward(*[t for t in saved if isinstance(t, Tensor)])
        ctx.constants = [(i, value) for i, value in enumerate(saved) if not isinstance(value, Tensor)]
        ctx.mark_non_differentiable(*[t for i, t in enumerate(results)
                                      if i not in differentiated and isinstance(t, Tensor)])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        args: list[Any] = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        for i, value in ctx.constants:
            args.insert(i, value)
        saved = len(args)
        args += ctx.shape.split_tangents([tangents[i] for i in ctx.differentiated])
        del tangents
        found = ctx.graphs.backward.run(args, ctx.rows, is_backward=True,
                                        fresh=range(saved, len(args)) if ctx.is_captured else None)
        return None, None, None, None, None, None, *ctx.shape.join_gradients(found)


def _key_of(graph: fx.Graph, results: int) -> Any:
    """What tells one graph from another: its nodes, with their arguments and specs."""
    places: dict[fx.Node, int] = {}
    rows = []
    for node in graph.nodes:
        places[node] = len(places)
        label, inputs = label_of(node)
        meta = node.meta
        rows.append((node.op, label, tuple([places[n] for n in inputs]), meta.get("module"), meta.get("ac_graph_id"),
                     str(meta["custom"]) if "custom" in meta else None))
    return results, tuple(rows)
