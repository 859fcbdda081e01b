"""Kernels that a compiler generates: the FLOPs of their parts, the bytes that they move, and their time."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime, find_constants
from analyzer.hardware.kernel_time.generated import FAMILY, INNER, OUTER, PERSISTENT, generated_time
from analyzer.hardware.kernel_time.pointwise import FAMILY as MEMORY_BOUND
from analyzer.meta.fused_kernel import DOUBLE, FusedKernel
from analyzer.meta.spec import Signature

from .registration import FlopCount, per_input, per_output, register_flop_impl

Count = Callable[[Signature], "FlopCount | None"]

#: Operators that take many instructions, by the constant that tells how many. Of those that are fitted (exponential,
#: error function, sine) each has the one that is nearest by the instructions of CUDA's math library, ``__nv_*f`` of
#: libdevice.10.bc of CUDA 12.9 with denormals flushed, after LLVM's -O2: sqrt, rsqrt and exp2 1, exp 10, tanh and cosh
#: 18, erf 20, atan 23, log 26, the others of erf's line 27 to 31 but for atanh and atan2 with 42, asinh 46, erfc 51,
#: acosh 63, sin, cos and tan 90, lgamma 205. A random number: ten rounds of Philox, each of ten instructions
#: (``philox_impl`` of triton/language/random.py).
FUNCTIONS = {name: f"{cost}_instructions" for cost, names in {
    "exp": "exp exp2 sigmoid sqrt rsqrt",
    "erf": "erf tanh cosh sinh log log2 log10 log1p expm1 asin acos atan erfinv atan2 atanh",
    "sine": "sin cos tan asinh acosh erfc lgamma digamma",
    "random": "inductor_random",
    "online": "prepare_softmax_online",
    "atomic": "index_put _unsafe_index_put _unsafe_masked_index_put_accumulate scatter_add scatter_reduce index_add",
    }.items() for name in names.split()}
VARIANCES = frozenset(("var", "var_mean", "std", "std_mean"))
_VARIANCES = {INNER: "variance_instructions", OUTER: "column_variance_instructions"}  #: by Welford's algorithm
#: Operators that look at many neighbours of each element: their loops take what PyTorch's own kernels do.
WINDOWS = ("max_pool", "avg_pool", "upsample", "_upsample", "_low_memory_max_pool")


def count_parts(kernel: FusedKernel, count: Count) -> FlopCount | None:
    """What the parts of a kernel count together, None where one is unknown."""
    total = FlopCount(0)
    for part in kernel.parts:
        found = count(part)
        if found is None:
            return None
        total += found
    return total


def list_uncounted(signature: Signature, count: Count) -> list[str]:
    """The operators of a call whose FLOPs are unknown: its own, or those of a generated kernel's parts."""
    op: Any = signature.op
    if not isinstance(op, FusedKernel):
        return [str(op)]
    return list(dict.fromkeys(str(part.op) for part in op.parts if count(part) is None))


def name_of(part: Signature) -> str:
    """The operator's name without its namespace and overload."""
    return str(getattr(getattr(part.op, "_schema", None), "name", part.op)).rpartition("::")[2]


def count_instructions(kernel: FusedKernel, device: DeviceSpec) -> float:
    """Instructions of the functions of a kernel. A part of which it does a share (a sum of sums) counts that share."""
    constants, loops = find_constants(FAMILY, device), kernel.elements * kernel.reduced
    total = 0.0
    for part in kernel.parts:
        name = name_of(part)
        if name.endswith("index_put") and True not in part.args[3:]:  # it adds to nothing
            continue
        if name in FUNCTIONS:
            largest = max((spec.numel for spec in (*part.outputs, *part.inputs)), default=0)
            is_plain = name == "prepare_softmax_online" and kernel.kind == PERSISTENT  # the largest, then the sum
            total += constants["exp_instructions" if is_plain else FUNCTIONS[name]] * min(largest, loops)
        elif name == "pow" and not isinstance(part.args[-1], (int, float)):
            total += find_constants(MEMORY_BOUND, device)["pow_instructions"] * min(part.outputs[0].numel, loops)
        elif name in VARIANCES and kernel.kind in _VARIANCES:  # others take the mean first
            total += constants[_VARIANCES[kernel.kind]] * loops
    rates = device.flops_per_second
    slowness = rates.fp32 / rates.fp64 / 2 if rates.fp32 and rates.fp64 else 1.0  # 1 on the H200, which was measured
    for name, times in kernel.spread:
        total += times * (constants["double_instructions"] * slowness if name == DOUBLE else constants[FUNCTIONS[name]])
    return total


def fused_time(signature: Signature, device: DeviceSpec,
               time_part: Callable[[Signature], KernelTime | None]) -> KernelTime | None:
    """The time of a generated kernel; no more than its parts take as kernels of their own, which write no transposed
    copies one element after the other.
    """
    kernel: FusedKernel = signature.op  # type: ignore[assignment]
    nbytes = sum(kernel.read_bytes) + sum(kernel.written_bytes)
    found = generated_time(kernel.kind, kernel.elements, kernel.reduced, nbytes, kernel.reread_bytes,
                           count_instructions(kernel, device), device, kernel.scattered)
    if found is None:
        return None
    parts = [(name_of(part), time_part(part)) for part in kernel.parts]
    windows = sum(time.seconds for name, time in parts if name.startswith(WINDOWS) and time is not None)
    if windows > found.seconds:
        found = KernelTime(windows, found.spread, "arithmetic")
    if all(time is not None for _, time in parts):
        eager = sum(time.seconds for _, time in parts if time is not None)
        if parts and found.seconds > eager > 0 and not kernel.scattered:
            found = KernelTime(eager, found.spread, found.bound)
    return found


# FLOPs of operators that only graphs of TorchInductor have.
register_flop_impl.add("prims::fma", per_output(2))
register_flop_impl.add("prims::prepare_softmax_online", per_input(4))  # largest, its difference, exp, sum
# u, or a normal number by Box and Muller, as ``rand`` and ``randn``
register_flop_impl.add("prims::inductor_random",
    lambda _size, _seed, mode, *, out, **__: out.numel * (7 if mode == "randn" else 1))
