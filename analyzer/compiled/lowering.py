"""TorchInductor asked for a device that is not there: the program that it generates, each kernel by its name.

Inductor's own scheduler fuses, plans buffers and orders; of each kernel of Triton the program has a call with what it
reads and writes in place of source code. All of Inductor's private interfaces that this needs are used in this file.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import config, scheduler
from torch._inductor.codegen import triton
from torch._inductor.codegen.common import get_scheduling_for_device
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import hints
from torch._inductor.utils import get_fused_kernel_name
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves, tree_map

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.pointwise import read_machine
from analyzer.meta.fused_kernel import FusedKernel
from analyzer.meta.intercept.mode_stack import modes_taken_off
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.meta.state import current, set_state


@dataclass
class LoweredGraph:
    """The program of one graph: Python source whose function ``call(args)`` gives the outputs, and its kernels."""

    source: str
    kernels: list[FusedKernel] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)


def lower(graph: fx.GraphModule, fake_mode: Any, device: DeviceSpec) -> LoweredGraph:
    """What Inductor makes of ``graph``, whose nodes have fake tensors as ``meta["val"]``."""
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    found = LoweredGraph("")
    with compiling_for(device, found), V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=None)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            found.source = lowering.codegen()[0].value
        found.constants = dict(lowering.constants)
    return found


@contextmanager
def compiling_for(device: DeviceSpec, found: LoweredGraph) -> Iterator[None]:
    """A block outside of the mode, in which torch's compiler finds ``device`` here."""
    state = current()
    set_state(None)
    try:
        with modes_taken_off(), torch.no_grad(), _claiming(device, found):
            yield
    finally:
        set_state(state)


@contextmanager
def _claiming(device: DeviceSpec, found: LoweredGraph) -> Iterator[None]:
    """Inductor is told of ``device`` for the block, and writes names of kernels in place of their source."""
    machine = read_machine(device)
    major, minor = device.compute_capability
    properties = hints.DeviceProperties(
        type="cuda", index=0, multi_processor_count=machine.multiprocessors, cc=major * 10 + minor, major=major,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=machine.resident_threads, warp_size=32)

    class Properties:
        name, multi_processor_count, warp_size = device.name, properties.multi_processor_count, 32
        total_memory, regs_per_multiprocessor = device.memory_bytes, 65536
        max_threads_per_multi_processor, gcnArchName = machine.resident_threads, ""
        shared_memory_per_block_optin = 232448

    Properties.major, Properties.minor = major, minor

    def create_backend(self: Any, place: torch.device) -> Any:
        return get_scheduling_for_device(place.type)(self)

    def codegen_kernel(self: Any, name: str | None = None) -> str:
        self.inductor_meta, self.triton_meta = {}, {}
        return ""

    def define_kernel(self: Any, source: str, nodes: Sequence[Any], kernel: Any) -> str:
        name = get_fused_kernel_name(nodes, "original_aten")
        kernel.generated = [node for node in nodes if isinstance(node, scheduler.BaseSchedulerNode)]
        return f"{'red' if kernel.inside_reduction else 'poi'}_{name}"

    def call_kernel(self: Any, name: str, node: Any = None, deallocate_ws: bool = True) -> None:
        self.args.python_argdefs()
        for workspace in self.args.workspace_args:
            V.graph.wrapper_code.generate_workspace_allocation(workspace)
        read, written = _list_buffers(self)
        module = _describe(self, name, read, written, found.kernels)
        V.graph.wrapper_code.writeline(
            f"launch({len(found.kernels) - 1}, {module}, [{', '.join(read.values())}], "
            f"[{', '.join(written.values())}])")
        if deallocate_ws:
            self.deallocate_workspaces()

    codegen_extern = scheduler.Scheduler.codegen_extern_call

    def codegen_extern_call(self: Any, node: Any) -> None:
        origins = () if node.node is None else node.node.get_origins()
        V.graph.wrapper_code.writeline(f"at({_module_of(origins)})")
        codegen_extern(self, node)

    with ExitStack() as stack:
        for owner, name, value in (
                (hints.DeviceProperties, "create", staticmethod(lambda place: properties)),
                (torch.cuda, "get_device_properties", lambda place=None: Properties),
                (torch.cuda, "get_device_capability", lambda place=None: (major, minor)),
                (torch.cuda, "current_device", lambda: 0),
                (scheduler.Scheduler, "create_backend", create_backend),
                (scheduler.Scheduler, "codegen_extern_call", codegen_extern_call),
                (triton.TritonKernel, "codegen_kernel", codegen_kernel),
                (triton.TritonKernel, "call_kernel", call_kernel),
                (triton.TritonScheduling, "define_kernel", define_kernel)):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(config.patch(size_asserts=False, nan_asserts=False, alignment_asserts=False,
                                         compile_threads=1, fx_graph_cache=False))
        yield


def _list_buffers(kernel: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The buffers that a kernel reads and writes, by name, without those that live in registers alone; each with the
    name that the program has for it when the kernel runs: one that is written in place has its new one by then.
    """
    arguments = kernel.args
    inplace = {id(a): a for a in arguments.inplace_buffers.values() if hasattr(a, "other_names")}.values()
    written = {b: b for b, name in arguments.output_buffers.items() if isinstance(name, str)}
    read = {b: b for b in arguments.input_buffers}
    for argument in inplace:
        read[argument.other_names[0]] = written[argument.other_names[-1]] = argument.other_names[-1]
    removed = kernel.removed_buffers | V.graph.removed_buffers
    return ({b: now for b, now in read.items() if b not in removed},
            {b: now for b, now in written.items() if b not in removed})


def _describe(kernel: Any, name: str, read: Iterable[str], written: Iterable[str], kernels: list[FusedKernel]) -> int:
    """Add what a kernel is to ``kernels``; the result is the module that most of it was made for."""
    touched: list[dict[str, int]] = [{}, {}]
    origins: dict[fx.Node, None] = {}
    for node in kernel.generated:
        for found, is_read in zip(touched, (True, False)):
            for buffer, numel in node.get_read_write_buffer_accesses(is_read, not is_read).items():
                found[buffer] = max(found.get(buffer, 0), numel)
        origins.update(dict.fromkeys(() if node.node is None else node.node.get_origins()))
    numels = {prefix: int(V.graph.sizevars.optimization_hint(n)) for prefix, n in kernel.numels.items()}
    reduced = math.prod(n for prefix, n in numels.items() if prefix.startswith("r"))
    elements = math.prod(n for prefix, n in numels.items() if not prefix.startswith("r"))
    signatures = tuple([_signature_of(origin) for origin in origins])
    kernels.append(FusedKernel(name, elements, reduced, tuple([touched[0].get(b, 0) for b in read]),
                               tuple([touched[1].get(b, 0) for b in written]),
                               tuple([str(origin.target) for origin in origins]), signatures))
    return _module_of(origins)


def _module_of(origins: Iterable[fx.Node]) -> int:
    """The module that most of a kernel's operators are of."""
    modules = Counter(origin.meta.get("module", 0) for origin in origins)
    return modules.most_common(1)[0][0] if modules else 0


def _signature_of(node: fx.Node) -> Signature:
    """A node of a graph as the call of an operator."""
    inputs: list[TensorSpec] = []

    def specify(value: Any) -> Any:
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return value
        shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
        return TensorSpec.of(shape, stride, value.dtype, str(value.device))

    args, kwargs = tree_map(specify, (node.args, node.kwargs), is_leaf=lambda x: isinstance(x, fx.Node))
    inputs = [spec for spec in tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, TensorSpec))
              if isinstance(spec, TensorSpec)]
    outputs = tuple([specify(t) for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)])
    return Signature(node.target, args, kwargs, tuple(inputs), outputs)
