"""How a call is read for its time: its operands, their precision and where they lie, and calls without a rule."""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime
from analyzer.hardware.kernel_time.pointwise import stream_time
from analyzer.hardware.listing import find_peak
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.flop_registry import count_call, family, foreach_single
from analyzer.profilers.operator_registry import OperatorRegistry
from analyzer.profilers.traffic import NOTHING, plan_of
from analyzer.record.call_table import OpCall
from analyzer.record.log import Log
from analyzer.record.process_group import communicates
from analyzer.registry import Call

from .collective import communication_time, find_medium

# Which rule gives the time of an operator.

TimeRule = Callable[[Signature, DeviceSpec], KernelTime | None]
"""The kernels' time of a call of that signature on a device, None where it is not known."""

#: The files beside this one that register rules.
FAMILIES: tuple[str, ...] = (
    "attention", "indexing", "matmul", "optimizer", "pointwise", "reduction")


register_time_impl: OperatorRegistry[TimeRule] = OperatorRegistry(
    "register_time_impl", __package__, FAMILIES, Call("f(signature, device)", 2))
"""Register the seconds of an operator's kernels: a function of the call's `Signature` and a `DeviceSpec` that returns a
`KernelTime`, or None where it is not known. An operator without a rule takes the time of the bytes that it moves."""


def find_rule(op: Hashable) -> TimeRule | None:
    """The rule of an operator: its own, or that of the operator it is a variant of; None for those without one."""
    for key in family(op):
        rule = register_time_impl.find(key)
        if rule is not None:
            return rule
    single = foreach_single(op)
    return None if single is None else register_time_impl.find(f"aten::{single}")


# Private torch API: whether float32 products and convolutions may run in TF32, as PyTorch is set while a model is
# profiled.
#
# The precision of each kind of operation is asked, not the older ``allow_tf32``: that one warns, and raises where a
# program sets precisions by name. The older setters change the same precisions. Not by ``torch.backends.cudnn.rnn``
# either: in torch 2.9 a module of that name hides the setting.

def products_use_tf32() -> bool:
    """Whether float32 matrix products on CUDA run in TF32; not by default.

    Follows ``torch.set_float32_matmul_precision`` and ``torch.backends.cuda.matmul``.

    >>> products_use_tf32()
    False
    """
    return _use_tf32("matmul")


def convolutions_use_tf32() -> bool:
    """Whether cuDNN's float32 convolutions run in TF32; they do by default. Follows ``torch.backends.cudnn.conv``.

    >>> convolutions_use_tf32()
    True
    """
    return _use_tf32("conv")


def recurrent_layers_use_tf32() -> bool:
    """Whether cuDNN's float32 recurrent layers run in TF32; they do by default. Follows ``torch.backends.cudnn.rnn``.

    >>> recurrent_layers_use_tf32()
    True
    """
    return _use_tf32("rnn")


def _use_tf32(kind: str) -> bool:
    return bool(torch._C._get_fp32_precision_getter("cuda", kind) == "tf32")


# Where the tensors of a call are, and which of them a kernel walks through.

def is_on_host(signature: Signature, device: DeviceSpec) -> bool:
    """Whether all tensors of a call are on the host beside ``device``, which does the work itself: counters of
    optimizer steps. Never where the host is the device.

    >>> import torch
    >>> from analyzer.hardware import find_device
    >>> step = TensorSpec.of((), (), torch.float32, "cpu")
    >>> signature = Signature(torch.ops.aten.add_.Tensor, (step, 1), {}, (step,), (step,))
    >>> is_on_host(signature, find_device("h200")), is_on_host(signature, find_device("cpu"))
    (True, False)
    """
    if device.kind == "cpu":
        return False
    inputs = signature.inputs
    if inputs:
        return inputs[0].device == "cpu" and all(spec.device == "cpu" for spec in (*inputs, *signature.outputs))
    return bool(signature.outputs) and all(spec.device == "cpu" for spec in signature.outputs)


def per_dimension(value: Any, dims: int) -> tuple[int, ...]:
    """What an operator is given for its dimensions: one number for all of them, or one each; 1 where it is left out.

    >>> per_dimension(3, 2), per_dimension([3], 3), per_dimension((3, 5), 2), per_dimension(None, 2)
    ((3, 3), (3, 3, 3), (3, 5), (1, 1))
    """
    values = tuple(value) if isinstance(value, (list, tuple)) else (1 if value is None else value,)
    return values * dims if len(values) == 1 else values


def broadcast_strides(spec: TensorSpec, shape: TensorSpec) -> tuple[int, ...]:
    """The strides with which ``spec`` is read as if it had ``shape``; 0 along what is repeated.

    >>> import torch
    >>> row, all_rows = (TensorSpec.of(s, t, torch.float32, "cpu") for s, t in (((3,), (1,)), ((5, 3), (3, 1))))
    >>> broadcast_strides(row, all_rows)
    (0, 1)
    """
    missing = len(shape) - len(spec)
    if missing == 0 and tuple(spec) == tuple(shape):
        return spec.stride
    return (0,) * missing + tuple(
        0 if size == 1 else stride for size, stride in zip(spec, spec.stride, strict=True))


def is_dense(spec: TensorSpec) -> bool:
    """Whether the elements lie side by side in the order of the dimensions."""
    expected = 1
    for size, stride in zip(reversed(spec), reversed(spec.stride)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def dense_strides(shape: TensorSpec) -> tuple[int, ...]:
    """The strides of a tensor of that shape whose elements lie side by side.

    >>> import torch
    >>> dense_strides(TensorSpec.of((2, 3, 4), (1, 2, 6), torch.float32, "cpu"))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def is_channels_last(source: TensorSpec) -> bool:
    """Whether the channels of a position lie side by side."""
    return len(source) > 3 and source[1] > 1 and source.stride[1] == 1 and math.prod(source[2:]) > 1


# The time of operators that have no rule of their own: their traffic through memory, or their arithmetic.

#: How far off the time of an operator may be of which only the traffic is known: as much as it is too low if each
#: byte is moved twice.
SPREAD = 1.0
#: Part of the peak rate that products reach, for those without a rule of their own: the median of the 19,913 bf16
#: products of 1e10 FLOPs or more in ``benchmarks/truth/kernels/gemm.csv.gz`` (without vllm's) is 0.595. A measured
#: device tells its own.
PRODUCT_FRACTION = 0.6


def default_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """One kernel that moves what the operator reads and writes; none for a view. None where a figure is unknown.

    Arithmetic counts where it takes longer: on the tensor cores for products, else in instructions of the CUDA cores.

    >>> import torch
    >>> from analyzer.hardware import find_device
    >>> from analyzer.meta.spec import TensorSpec
    >>> x = TensorSpec.of((1024, 1024), (1024, 1), torch.float32, "cuda:0")
    >>> default_time(Signature(torch.ops.aten.view.default, (x, [1024**2]), {}, (x,), (x,)), find_device("h200"))
    KernelTime(seconds=0.0, spread=0.0, bound='memory', kernels=0)
    """
    total = plan_of(signature).total
    count = count_call(signature)
    flops, macs = (0, 0) if count is None else (count.flops, count.macs)
    if total == NOTHING and not flops:
        return NO_TIME
    time = stream_time(total.read_bytes + total.written_bytes, device)
    if time is None:
        return None
    tensors = (*signature.outputs, *signature.inputs)
    dtype = next((s.dtype for s in tensors if s.dtype.is_floating_point or s.dtype.is_complex), None)
    peak = find_peak(dtype, device, macs > 0) if flops and dtype is not None else None
    if peak is not None:
        own = device.calibration.get("default", {})
        arithmetic = flops / (peak * own.get("product_fraction", PRODUCT_FRACTION))
        if arithmetic > time.seconds:
            return KernelTime(arithmetic, SPREAD, "arithmetic")
    return KernelTime(time.seconds, SPREAD, time.bound)


# The time of one operator call's kernels, by the rule of its operator or by its traffic.

MEMO_KEY = "kernel_time"


def signature_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The time of any call of a signature that is no view; None where it is not known."""
    if communicates(signature):
        return communication_time(signature, device)  # which the group decides that has a name now: nothing is kept
    return _signature_time(signature, device, (register_time_impl.version, products_use_tf32(),
                                               convolutions_use_tf32(), recurrent_layers_use_tf32()))


def _signature_time(signature: Signature, device: DeviceSpec, state: tuple[int, bool, bool, bool]) -> KernelTime | None:
    memo = signature.memo.get(MEMO_KEY)
    if memo is not None and memo[0] is device and memo[1] == state:
        return memo[2]  # type: ignore[no-any-return]
    time = _make_time(signature, device)
    signature.memo[MEMO_KEY] = device, state, time
    return time


def _make_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    if is_on_host(signature, device):
        return NO_TIME
    rule = None if signature.is_sparse else find_rule(signature.op)
    time = None if rule is None else rule(signature, device)
    # most rules know the kernels of CUDA alone
    return default_time(signature, device) if rule is None or time is None and device.kind != "cuda" else time


def is_view(call: OpCall) -> bool:
    """Whether a call makes another tensor over a storage that it was given, and runs no kernel."""
    return bool(call.outputs) and plan_of(call.signature).may_be_view and set(call.outputs) <= set(call.inputs)


def kernel_time(call: OpCall, device: DeviceSpec, log: Log | None = None) -> KernelTime | None:
    """The time of a call's kernels on ``device``; of none for a view, None where it is not known. ``log`` is where the
    call is from, which knows its process group; without it that is looked for among those there are.
    """
    signature = call.signature
    if communicates(signature):
        return communication_time(signature, device) if log is None else communication_time(
            signature, device, log.group_of(signature), log.world)
    return NO_TIME if is_view(call) else signature_time(signature, device)


# What kernels do on their stream, and which of them run one at a time though they are on different ones.

COMPUTE, COMMUNICATION, TO_HOST, FROM_HOST = "compute", "communication", "copy to host", "copy from host"


def find_kind(signature: Signature) -> str:
    """What the kernels of a call do: they compute, communicate, or copy from or to the host."""
    if communicates(signature):
        return COMMUNICATION
    if signature.op.__name__.partition(".")[0] in ("copy_", "_to_copy") and signature.inputs and signature.outputs:
        source, target = signature.inputs[-1].device, signature.outputs[0].device
        if (source == "cpu") != (target == "cpu"):
            return TO_HOST if target == "cpu" else FROM_HOST
    return COMPUTE


def find_turn(signature: Signature, kind: str, kernel: KernelTime, device: DeviceSpec, log: Log) -> Hashable:
    """What the kernels of a call take turns for; None where they run beside all others.

    A kernel of enough blocks holds every multiprocessor, and the blocks of a second one are placed when there is room:
    two kernels that are bound by arithmetic or memory take as long beside each other as one after the other (Amert et
    al., "GPU Scheduling on the NVIDIA TX2: Hidden Details Revealed", RTSS 2017, rules X1 and R1 to R3). Those too small
    to fill the device leave room. Collectives take turns for the links that bound them, and leave the multiprocessors
    to the others: the few that NCCL takes are not taken off. Copies from and to the host have an engine for each
    direction (CUDA C++ Programming Guide, "Concurrent Data Transfers").
    """
    if kernel.bound == "latency" or not kernel.kernels:
        return None
    return kind if kind != COMMUNICATION else find_medium(signature, device, log.group_of(signature), log.world)
