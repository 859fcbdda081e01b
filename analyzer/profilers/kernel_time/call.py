"""The time of one operator call's kernels, by the rule of its operator or by its traffic."""
from __future__ import annotations

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime
from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec
from analyzer.profilers.traffic import plan_of
from analyzer.record.log import Log
from analyzer.record.op_call import OpCall
from analyzer.record.process_group import communicates

from .collective import communication_time
from .default import default_time
from .placement import is_on_host
from .precision import convolutions_use_tf32, products_use_tf32, recurrent_layers_use_tf32
from .registry import find_rule, register_time_impl

MEMO_KEY = "kernel_time"


def signature_time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The time of any call of a signature that is no view; None where it is not known."""
    if communicates(signature):
        return communication_time(signature, device)  # which the group decides that has a name now: nothing is kept
    return _signature_time(signature, device, (register_time_impl.version, products_use_tf32(),
                                               convolutions_use_tf32(), recurrent_layers_use_tf32()))


def takes_sparse(signature: Signature) -> bool:
    """Whether an operator takes tensors without strides, which `Signature.inputs` leaves out: rules read it by place.

    >>> import torch
    >>> from analyzer.meta.spec import TensorSpec
    >>> x = TensorSpec.of((4, 4), (4, 1), torch.float32, "cuda:0")
    >>> [takes_sparse(Signature(torch.ops.aten.mm.default, (x, x), {}, inputs, (x,))) for inputs in ((x,), (x, x))]
    [True, False]
    """
    return sum(isinstance(value, TensorSpec) for value in signature.args) > len(signature.inputs)


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
    rule = None if takes_sparse(signature) else find_rule(signature.op)
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
