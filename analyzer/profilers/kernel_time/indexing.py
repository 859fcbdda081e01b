"""The time of look-ups, scattered sums, losses of class labels, pooling and resampling."""
from __future__ import annotations

import math
from functools import partial

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime, join_known
from analyzer.hardware.kernel_time.pointwise import (
    atomic_time,
    embedding_backward_time,
    gather_rows_time,
    lone_block_time,
    plane_time,
    pointwise_time,
    position_loss_time,
    sort_time,
    stream_time,
    window_time,
)
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.traffic import plan_of

from .call import per_dimension
from .pointwise import register_all
from .reduction import given


def traffic_of(signature: Signature) -> int:
    """Bytes read and written."""
    total = plan_of(signature).total
    return total.read_bytes + total.written_bytes


def embedding_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Rows of the table: as many as the result has, which are more than indices where an inner dimension is picked."""
    table, out = signature.inputs[0], signature.outputs[0]
    width = max(out[-1], 1) if out else 1
    return gather_rows_time(out.numel // width, width, table.dtype.itemsize, device)


def embedding_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The table's gradient."""
    gradient, indices = signature.inputs[:2]
    table = signature.outputs[0]
    return embedding_backward_time(indices.numel, gradient[-1], table[0], gradient.dtype.itemsize, device,
                                   index_bytes=indices.dtype.itemsize)


def gather_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """An address for each element, from an index that is read (``ScatterGatherKernel.cu``, ``IndexKernel.cu``)."""
    if not signature.outputs:
        return NO_TIME
    out = signature.outputs[0]
    return pointwise_time(out.numel, traffic_of(signature), device, dimensions=2, operands=3)


def scatter_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """As many elements as the index has; a copy of the first argument before, unless it is in place."""
    if not signature.outputs:
        return NO_TIME
    arguments = given(signature)
    index = arguments.get("index")
    source = arguments.get("source", arguments.get("src"))
    spec = source if isinstance(source, TensorSpec) else index
    if not isinstance(spec, TensorSpec):
        return stream_time(traffic_of(signature), device)
    out = signature.outputs[0]
    kernel = pointwise_time(spec.numel, spec.numel * (3 * out.dtype.itemsize + 8), device, dimensions=2, operands=3)
    if signature.op._schema.name.endswith("_"):
        return kernel
    return join_known(stream_time(2 * out.nbytes, device), kernel)


def index_put_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Written as it comes; where it adds up, indices are sorted first and those that are alike follow each other."""
    if not signature.outputs:
        return NO_TIME
    arguments = given(signature)
    values: TensorSpec = arguments["values"]
    out = signature.outputs[0]
    indices = [i for i in arguments["indices"] if isinstance(i, TensorSpec)]
    count = max((i.numel for i in indices), default=0)
    kernel = pointwise_time(values.numel, traffic_of(signature), device, dimensions=2, operands=3)
    parts = [kernel]
    if arguments.get("accumulate"):
        parts += [sort_time(count, 8, 8, device, bits=max(out.numel, 2).bit_length()),
                  stream_time(8 * count * len(indices), device, kernels=2 * len(indices))]
    if not signature.op._schema.name.endswith("_"):
        parts.append(stream_time(2 * out.nbytes, device))
    return join_known(*parts)


def nll_loss_rule(signature: Signature, device: DeviceSpec, backward: bool = False) -> KernelTime | None:
    """One element for each target, by one block; backward into a result of zeros."""
    arguments = given(signature)
    target: TensorSpec = arguments["target"]
    if not backward:
        return lone_block_time(target.numel, device)
    return join_known(stream_time(signature.outputs[0].nbytes, device), lone_block_time(target.numel, device, 0.5))


def nll_loss2d_rule(signature: Signature, device: DeviceSpec, backward: bool = False) -> KernelTime | None:
    """One element for each position, by a block an image; backward into a result of zeros."""
    target: TensorSpec = given(signature)["target"]
    kernel = position_loss_time(target[0], target.numel // max(target[0], 1), device)
    return join_known(stream_time(signature.outputs[0].nbytes, device), kernel) if backward else kernel


def pool_rule(signature: Signature, device: DeviceSpec, backward: bool = False) -> KernelTime | None:
    """A window for each result; backward the windows that hold an element, after the gradient is cleared."""
    arguments = given(signature)
    dimensions = 3 if "3d" in signature.op._schema.name else 2
    kernel = per_dimension(arguments["kernel_size"], dimensions)
    stride = per_dimension(arguments.get("stride") or kernel, dimensions)
    out = signature.outputs[0]
    if not backward:
        return window_time(out.numel, math.prod(kernel), traffic_of(signature), device)
    windows = math.prod(-(-k // s) for k, s in zip(kernel, stride))
    time = window_time(out.numel, 1.5 * windows, traffic_of(signature), device)
    return join_known(stream_time(out.nbytes, device), time)


def adaptive_pool_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Each element in a window or two, whichever way."""
    elements = max(signature.inputs[0].numel, signature.outputs[0].numel)
    return window_time(elements, 1, traffic_of(signature), device)


def upsample_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Neighbours of each result: bilinear by a thread a position, nearest (and bicubic, taken to be like it) by a
    thread an element.
    """
    out = signature.outputs[0]
    if "bilinear" in signature.op._schema.name:
        return plane_time(out[0] * out[1], math.prod(out[2:]), traffic_of(signature), device,
                          math.prod(signature.inputs[0][2:]))
    return window_time(out.numel, 1, traffic_of(signature), device)


def upsample_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Into a result of zeros: bilinear (and bicubic, taken to be like it) adds each gradient at four places."""
    gradient, out = signature.inputs[0], signature.outputs[0]
    fill = stream_time(out.nbytes, device)
    if "bilinear" not in signature.op._schema.name and "bicubic" not in signature.op._schema.name:
        return join_known(fill, window_time(gradient.numel, 1, traffic_of(signature), device))
    return join_known(fill, atomic_time(4 * gradient.numel, 4 * out.numel, traffic_of(signature), device))


register_all(["embedding", "index_select"], embedding_rule)
register_all(["embedding_dense_backward"], embedding_backward_rule, copies=True)
register_all(["gather", "index", "_unsafe_index", "take", "take_along_dim", "masked_select", "roll", "flip", "repeat"],
             gather_rule, measured=False)
register_all(["scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "masked_scatter"],
             scatter_rule, measured=False)
register_all(["index_put", "_index_put_impl_", "_unsafe_index_put"], index_put_rule, measured=False)
register_all(["nll_loss_forward"], nll_loss_rule)
register_all(["nll_loss_backward"], partial(nll_loss_rule, backward=True))
register_all(["nll_loss2d_forward"], nll_loss2d_rule)
register_all(["nll_loss2d_backward"], partial(nll_loss2d_rule, backward=True))
register_all(["max_pool2d_with_indices"], pool_rule, copies=True)
register_all(["max_pool2d_with_indices_backward"], partial(pool_rule, backward=True), copies=True)
register_all(["avg_pool2d", "avg_pool3d", "max_pool3d_with_indices"], pool_rule, copies=True, measured=False)
register_all(["avg_pool2d_backward"], partial(pool_rule, backward=True), copies=True, measured=False)
register_all(["_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d"], adaptive_pool_rule,
             measured=False)
register_all(["upsample_bilinear2d"], upsample_rule)
register_all(["upsample_bilinear2d_backward"], upsample_backward_rule)
register_all(["upsample_nearest2d", "upsample_bicubic2d", "_upsample_nearest_exact2d"], upsample_rule, measured=False)
register_all(["upsample_nearest2d_backward", "upsample_bicubic2d_backward"], upsample_backward_rule, measured=False)
