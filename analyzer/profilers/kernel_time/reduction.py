"""The time of reductions."""
from __future__ import annotations

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime, join_known
from analyzer.hardware.kernel_time.gather import sort_time
from analyzer.hardware.kernel_time.memory_bound import stream_time
from analyzer.hardware.kernel_time.reduction import reduction_time
from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec
from analyzer.profilers.traffic import bind

from .pointwise import register_all

NAMES = """all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm max mean median min nansum norm prod
std std_mean sum var var_mean""".split()


def reduced_dimensions(signature: Signature, source: TensorSpec) -> set[int]:
    """Which dimensions of ``source`` a call reduces: those of its argument ``dim``, or all."""
    dims = bind(signature, signature.op._schema).get("dim")
    if dims is None or isinstance(dims, (list, tuple)) and not dims:
        return set(range(len(source)))
    listed = dims if isinstance(dims, (list, tuple)) else (dims, )
    return {d % len(source) for d in listed} if source else set()


def reduction_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Sums and the like over some or all dimensions."""
    if not signature.inputs or not signature.outputs:
        return None
    source = signature.inputs[0]
    if source.numel == 0:
        return stream_time(0, device)
    reduced = reduced_dimensions(signature, source)
    outputs = 1
    for i, size in enumerate(source):
        if i not in reduced:
            outputs *= size
    fastest = min((i for i, size in enumerate(source) if size > 1), key=lambda i: source.stride[i], default=-1)
    return reduction_time(outputs, source.numel // outputs, source.dtype.itemsize, device,
                          reduces_fastest=fastest in reduced or outputs == 1,
                          written_itemsize=sum(o.dtype.itemsize for o in signature.outputs))


def elementwise_loss_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A pointwise kernel that writes each term, and their sum."""
    source = signature.inputs[0]
    terms = stream_time(sum(s.nbytes for s in signature.inputs) + source.nbytes, device)
    if bind(signature, signature.op._schema).get("reduction") == 0 or terms is None:
        return terms
    return join_known(terms, reduction_time(1, source.numel, source.dtype.itemsize, device))


def sort_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Keys with their places; sorted by radix, whatever the rows (``SortStable.cu``)."""
    source = signature.inputs[0]
    return sort_time(source.numel, source.dtype.itemsize, 8, device)


def topk_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A row is read for each 8 bits of its keys, and once more for what is picked (``TensorTopK.cu``)."""
    source = signature.inputs[0]
    picked = sum(o.nbytes for o in signature.outputs)
    return stream_time(source.nbytes * (source.dtype.itemsize + 1) + 3 * picked, device, kernels=2)


def scan_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Running sums: rows in one kernel, a single long one by CUB in two."""
    source = signature.inputs[0]
    nbytes = source.nbytes + sum(o.nbytes for o in signature.outputs)
    return stream_time(nbytes, device, kernels=2 if len(source) == 1 else 1)


register_all(NAMES, reduction_rule)
register_all(["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"],
             elementwise_loss_rule, measured=False)
register_all(["sort", "argsort", "msort", "_unique2"], sort_rule, measured=False)
register_all(["topk", "kthvalue", "mode"], topk_rule, measured=False)
register_all(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"], scan_rule, measured=False)
