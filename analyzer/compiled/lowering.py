"""TorchInductor asked for a device that is not there: the program that it generates, each kernel by its name.

Inductor's own scheduler fuses, plans buffers and orders; of each kernel that it would generate the program has a call
with what it reads and writes in place of source code (`generated_kernel.py`).
"""
from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import compile_fx, config, cpu_vec_isa, ir, scheduler, select_algorithm, utils
from torch._inductor.codegen import common, cpp, mps, simd, triton, triton_combo_kernel, triton_split_scan, wrapper
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import joint_graph, pad_mm
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import empty_strided, fallback_handler, register_lowering
from torch._inductor.runtime import hints
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor

from analyzer.cuda.kernels.flex_attention import FLEX_ATTENTION, FLEX_ATTENTION_BACKWARD
from analyzer.cuda.workspaces.convolution import suggests_channels_last
from analyzer.hardware import DeviceSpec, find_peak
from analyzer.hardware.kernel_time import KernelTime, join
from analyzer.hardware.kernel_time.matmul import matmul_time
from analyzer.hardware.kernel_time.pointwise import (
    MULTIPROCESSORS,
    RESIDENT_THREADS,
    kernel_time,
    read_machine,
    scattered_bytes,
)
from analyzer.meta.fused_kernel import FusedKernel
from analyzer.meta.intercept.mode_stack import modes_taken_off
from analyzer.meta.spec import TensorSpec
from analyzer.meta.state import current, set_state

from .generated_kernel import describe, list_buffers, name_of, origins_of_extern, places_of
from .partition import BINDINGS

extern_kernels = select_algorithm.extern_kernels  #: those that generated programs call and torch has no name for


@dataclass
class LoweredGraph:
    """The program of one graph: Python source whose function ``call(args)`` gives the outputs, and its kernels."""

    source: str
    kernels: list[FusedKernel] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)


def lower(graph: fx.GraphModule, fake_mode: Any, device: DeviceSpec, half: str = "forward",
          results: int = 0) -> LoweredGraph:
    """What Inductor, as it is configured now, makes of ``graph``, whose nodes have fake tensors as ``meta["val"]``.

    ``half`` is "forward", "backward" or "inference". The first ``results`` outputs are seen outside of the compiled
    function and keep their strides.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    inputs = [node.meta["val"] for node in placeholders]
    for node in graph.graph.nodes:
        node.meta.setdefault("original_aten", node.target if node.op == "call_function" else None)
        if torch.Tag.needs_exact_strides in getattr(node.target, "tags", ()):  # as make_fx notes: fx/proxy_tensor.py
            node.meta.setdefault("eager_input_vals", fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"]))
    found = LoweredGraph("")
    with (compiling_for(device), _patched(_replacements(found)), V.set_fake_mode(fake_mode),
          V.set_debug_handler(DebugContext())):
        view_to_reshape(graph)
        compile_fx.record_original_output_strides(graph)
        output = graph.graph.output_node()
        outputs: Any = output.args[0]
        output.meta["user_visible_output_idxs"] = [
            i for i, value in enumerate(outputs[:results]) if isinstance(value, fx.Node)]
        compile_fx._recursive_post_grad_passes(graph, is_inference=half == "inference")
        lowered = GraphLowering(graph, example_inputs=inputs, shape_env=None, is_inference=half == "inference",
                                is_backward=half == "backward")
        lowered.bw_donated_idxs = [i for i, node in enumerate(placeholders) if "donated" in node.meta]
        with V.set_graph_handler(lowered):
            lowered.run(*inputs)
            found.source = lowered.codegen()[0].value
        found.constants = dict(lowered.constants)
    return found


def _call_flex_attention(operator: Any, first: int) -> None:
    """Inductor calls one of the two kernels as its own (``torch/_inductor/kernel/flex/flex_attention.py``): the kernel
    returns its ``first`` result and writes the others to buffers, which do not wait for what it reads.
    """
    def call(*args: Any) -> tuple[Any, ...]:
        results = [empty_strided([*t.shape], [*t.stride()], dtype=t.dtype, device=t.device)
                   for i, t in enumerate(V.graph.current_node.meta["val"]) if i != first]
        results.insert(first, fallback_handler(operator.into, add_to_fallback_set=False)(*args, *results))
        return tuple(results)

    register_lowering(operator.default, type_promotion_kind=None)(call)


_call_flex_attention(FLEX_ATTENTION, 0)
_call_flex_attention(FLEX_ATTENTION_BACKWARD, 1)


@contextmanager
def compiling_for(device: DeviceSpec) -> Iterator[None]:
    """A block outside of the mode, in which torch's compiler finds ``device`` here."""
    state = current()
    set_state(None)
    try:
        with (modes_taken_off(), torch.no_grad(), torch._C._DisableAutocast(), _patched(_claims(device)),
              config.patch({**_QUIET, "cpp.threads": device.multiprocessors or MULTIPROCESSORS})):
            yield
    finally:
        set_state(state)


@contextmanager
def _patched(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """A block in which attributes, as (owner, name, value), have other values."""
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


_QUIET = {"size_asserts": False, "nan_asserts": False, "alignment_asserts": False, "scalar_asserts": False,
          "compile_threads": 1, "fx_graph_cache": False, "triton.multi_kernel": 0, "cpp_wrapper": False,
          "benchmark_fusion": False, "benchmark_combo_kernel": False, "benchmark_kernel": False,
          "_micro_pipeline_tp": False,
          "max_autotune_gemm_backends": "ATEN", "max_autotune_conv_backends": "ATEN"}
"""What Inductor must not do here: run or time a kernel, pipeline products with collectives, and checks that cost a step
nothing. A kernel that it would generate in several versions, to take the fastest, is taken in the first; of products
and convolutions that it would time to choose, the library's kernels."""


def _claims(device: DeviceSpec) -> Iterator[tuple[Any, str, Any]]:
    """What Inductor asks about the hardware, as (owner, name, answer)."""
    capability = device.compute_capability
    major, minor = capability or (0, 0)
    count, threads = device.multiprocessors or MULTIPROCESSORS, RESIDENT_THREADS.get((major, minor), 2048)
    warp = 64 if device.vendor == "AMD" else 32
    # 65,536 registers, 1,024 threads, 227 KiB of shared memory: compute capability 9.0 (CUDA C++ Programming Guide,
    # "Technical Specifications per Compute Capability"); the first two are those of other GPUs of NVIDIA's too
    properties = hints.DeviceProperties(
        type=device.kind, index=0, multi_processor_count=count, cc=major * 10 + minor, major=major,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=threads, max_threads_per_block=1024,
        warp_size=warp)

    class Properties:
        name, multi_processor_count, warp_size = device.name, count, warp
        total_memory, regs_per_multiprocessor = device.memory_bytes, 65536
        max_threads_per_multi_processor, gcnArchName = threads, device.architecture or ""
        shared_memory_per_block_optin = 232448

    Properties.major, Properties.minor = major, minor  # type: ignore[attr-defined]

    def lay_out(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        """``determine_backend_memory_format`` of Convolution.cpp, which has no answer where cuDNN is not built in."""
        specs = [TensorSpec.of(tuple(t.shape), t.stride(), t.dtype, "cuda") for t in (x, weight)]
        last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
        return last if suggests_channels_last(*specs) else torch.contiguous_format

    make_patterns = joint_graph.lazy_init

    def create_backend(self: Any, place: torch.device) -> Any:
        return common.get_scheduling_for_device(place.type)(self)  # type: ignore[misc]

    yield from BINDINGS
    yield fx.proxy, "_COPY_META_FIELDS", [*fx.proxy._COPY_META_FIELDS, "place"]  # what takes a node's place has its
    yield hints.DeviceProperties, "create", staticmethod(lambda place: properties)
    yield torch.cuda, "get_device_properties", lambda place=None: Properties
    yield torch.cuda, "get_device_capability", lambda place=None: (major, minor)
    yield torch.cuda, "current_device", lambda: 0
    yield utils, "is_big_gpu", lambda place=0: count >= 68  # Inductor's own number, without its warning
    # these methods, written in C++, ask for the device of their tensor; their operators do not
    yield FakeTensor, "contiguous", lambda self, **order: torch.ops.aten.contiguous(self, **order)
    yield FakeTensor, "copy_", lambda self, source, waits=False: torch.ops.aten.copy_(self, source, waits)
    if device.kind != "cpu":
        yield torch._C, "_conv_determine_backend_memory_format", lay_out
    yield scheduler.Scheduler, "create_backend", create_backend
    yield joint_graph, "lazy_init", lambda place=None: make_patterns(torch.device("cpu"))  # of any device the same
    yield pad_mm, "has_triton", lambda: True
    yield pad_mm, "should_pad_bench_key", lambda *product, **others: product
    yield pad_mm, "get_cached_should_pad", lambda product: (
        not config.deterministic and _is_worth_padding(device, *product))
    yield pad_mm, "set_cached_should_pad", lambda key, value: None
    for module in (utils, scheduler):  # 0 for what is unknown, which Inductor then leaves out
        yield module, "get_device_tflops", lambda dtype: (find_peak(
            dtype, device, True, torch.backends.cuda.matmul.fp32_precision == "tf32") or 0.0) / 1e12
        yield module, "get_gpu_dram_gbps", lambda: (device.memory_bandwidth or 0.0) / 1e9
    yield cpu_vec_isa.VecAVX512, "__bool__", lambda self: True
    yield cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.VecAVX512()


#: What ``import triton.language`` gives where there is no Triton: the bits of its types.
_TRITON = SimpleNamespace(language=SimpleNamespace(**{
    f"{kind}{bits}": SimpleNamespace(primitive_bitwidth=bits)
    for kind, sizes in (("int", (1, 8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in sizes}))


def _replacements(found: LoweredGraph) -> Iterator[tuple[Any, str, Any]]:
    """What writes calls of kernels into the program in place of their source code, and frees buffers in the order of
    their numbers, as (owner, name, function).
    """
    defined: list[tuple[str, Any, Sequence[Any]]] = []
    numbers: dict[FusedKernel, int] = {}
    extern_call, combine = scheduler.Scheduler.codegen_extern_call, simd.SIMDScheduling.generate_combo_kernel_code
    scan_in_parts: Callable[..., Any] = triton_split_scan.TritonSplitScanKernel.scan

    def write_no_code(self: Any, name: str | None = None) -> str:
        self.inductor_meta, self.triton_meta = {}, {}
        return ""

    def write_no_combo(self: Any, name: str | None = None) -> str:
        self.dispatch_class = triton_combo_kernel.ComboKernel.SequentialDispatch  # a call asks that there is one
        return write_no_code(self)

    def define(self: Any, source: str, nodes: Sequence[Any], kernel: Any = None) -> str:
        """A name for the next call. ``kernel`` is a kernel, what a kernel of C++ takes, or None: the group's."""
        defined.append((name_of(nodes, kernel), self.kernel_group if kernel is None else kernel,
                        getattr(kernel, "combined", nodes)))
        return f"kernel {len(defined) - 1}"

    def call(self: Any, name: str, arguments: Any, **others: Any) -> None:
        title, kernel, nodes = defined[int(name.split()[1])]
        read, written = list_buffers(getattr(kernel, "args", kernel))
        made, places = describe(title, kernel, nodes, read, written)
        if made not in numbers:
            numbers[made] = len(found.kernels)
            found.kernels.append(made)
        self.writeline(f"launch({numbers[made]}, {places!r}, [{', '.join(read.values())}], "
                       f"[{', '.join(written.values())}])")

    def call_metal(self: Any, name: str, node: Any = None, deallocate_ws: bool = True) -> None:
        V.graph.wrapper_code.generate_kernel_call(name, [])

    def combine_kernels(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = combine(self, *args, **kwargs)
        for _, kernel, nodes in made:
            kernel.combined = nodes
        return made

    def call_extern(self: Any, node: Any) -> None:
        if not isinstance(node.node, ir.MultiOutput):  # which takes a result out of a call's tuple
            V.graph.wrapper_code.writeline(f"at({places_of(origins_of_extern(node.node))!r})")
        extern_call(self, node)

    def scan(self: Any, *args: Any) -> Any:  # which asks Triton, that may not be installed, how wide a type is
        known = {} if importlib.util.find_spec("triton") else {"triton": _TRITON, "triton.language": _TRITON.language}
        with mock.patch.dict(sys.modules, known):
            return scan_in_parts(self, *args)

    yield triton_split_scan.TritonSplitScanKernel, "scan", scan
    # how a mixed reduction is split would be timed with max_autotune: Inductor's first choice is taken
    yield CoordescTuner, "autotune_single_field", staticmethod(lambda bench, value, *limits: value)
    yield triton.TritonKernel, "codegen_kernel", write_no_code
    yield triton_combo_kernel.ComboKernel, "codegen_kernel", write_no_combo
    yield mps.MetalKernel, "codegen_kernel", write_no_code
    yield mps.MetalKernel, "call_kernel", call_metal
    for owner in (triton.TritonScheduling, cpp.CppScheduling, mps.MetalScheduling):
        yield owner, "define_kernel", define
    yield simd.SIMDScheduling, "generate_combo_kernel_code", combine_kernels
    yield wrapper.PythonWrapperCodegen, "generate_kernel_call", call
    yield scheduler.Scheduler, "codegen_extern_call", call_extern
    yield select_algorithm.AlgorithmSelectorCache, "__call__", _choose
    # Python's own, in ``free_buffers``: by name buf99 is behind buf100; by number laps that are alike free them alike
    yield scheduler, "sorted", _sort_by_number


_DIGITS = re.compile(r"(\d+)")


def _sort_by_number(values: Iterable[Any], **kwargs: Any) -> list[Any]:
    return sorted(values, **kwargs or {"key": lambda name: [int(p) if p.isdigit() else p for p in _DIGITS.split(name)]})


def _is_worth_padding(device: DeviceSpec, match: Any, a: torch.Tensor, b: torch.Tensor, op: Any,
                      added: torch.Tensor | None = None) -> bool:
    """Whether a product is faster with the zeros that align its rows, their copies counted, as ``_should_pad`` of
    Inductor's pad_mm.py times it: the copies of what other kernels can write padded are not. So too where unknown.
    """
    size, dtype = pad_mm.get_alignment_size(a), str(a.dtype).removeprefix("torch.")
    (*batch, m, k), n = a.shape, b.shape[-1]
    tf32 = dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32"

    def multiply(m: int, n: int, k: int, rows: int) -> KernelTime | None:
        return matmul_time(math.prod(batch), m, n, k, dtype, device, allow_tf32=tf32, row_elements=rows or size)

    # the CUDA cores' kernels load whole rows well, whatever their length, but where both operands run along k
    is_slow_if_odd = dtype != "float32" or tf32 or a.stride(-1) == b.stride(-2) == 1
    rows = [s for t in (a, b) for s in t.stride()[-2:] if s != 1]
    plain = multiply(m, n, k, math.gcd(*rows, n) if is_slow_if_odd else size)
    m, n, k = [old + pad_mm.get_padded_length(old, size) for old in (m, n, k)]
    machine, parts = read_machine(device), [multiply(m, n, k, size)]
    for name, t, new in (("mat1", a, (m, k)), ("mat2", b, (k, n))):
        if machine is not None and new != tuple(t.shape[-2:]) and not pad_mm.should_exclude_padding_time(match, name):
            # ``constant_pad_nd`` fills a contiguous tensor, then copies; rows that are copied together share sectors
            # of a transposed one, which the cache gives again
            sectors = scattered_bytes(t.numel(), t.itemsize, t.stride(-1))
            parts += [kernel_time(machine, math.prod((*batch, *new)) * t.itemsize),
                      kernel_time(machine, 2 * t.numel() * t.itemsize, waiting=sectors / machine.cache_rate)]
    if added is not None and machine is not None:
        parts.append(kernel_time(machine, 2 * added.numel() * added.itemsize))
    known = [part for part in parts if part is not None]
    if plain is None or len(known) < len(parts):
        return True
    return bool(pad_mm.is_padded_faster("", plain.seconds, join(known).seconds))


def _choose(self: Any, name: str, choices: list[Any], *args: Any, **kwargs: Any) -> Any:
    """What autotuning takes without timing: the library's kernel where it is among the choices, as it most often is
    for large products, else the first, which is what Inductor takes by default. Of the library's, the first too, but
    for the one that adds a vector in the product's kernel: it is the faster but for few shapes (``bias_addmm`` of
    Inductor's kernel/mm.py).
    """
    if not choices:
        raise self.create_no_valid_choices(name, "No choices exist for backend.")
    choice = min(choices, key=lambda c: (not isinstance(c, select_algorithm.ExternKernelCaller),
                                         c.name != "bias_addmm"))
    return (choice.output_node(), choice) if torch.__version__ >= "2.12" else choice.output_node()
