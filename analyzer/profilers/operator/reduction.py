"""Reductions, scans, sorts, distances, look-ups and sums by index: FLOPs, and the time of their kernels."""
from __future__ import annotations

from math import ceil, log2, prod
from typing import Any

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import NO_TIME, KernelTime, join_known
from analyzer.hardware.kernel_time.pointwise import (
    embedding_backward_time,
    gather_rows_time,
    pointwise_time,
    sort_time,
    stream_time,
)
from analyzer.hardware.kernel_time.reduction import reduction_time
from analyzer.meta.spec import Signature
from analyzer.meta.spec import TensorSpec as Spec

from .pointwise import COMPLEX_FLOPS, moved_bytes, unmeasured, with_copies
from .registration import (
    FlopCount,
    OfSignature,
    bind,
    indexed_elements,
    multiply_adds,
    per_input,
    register_each,
    register_times,
)

# FLOPs. A reduction counts the operations on each input element, its accumulation among them (so a sum of n counts n);
# what is done once per result is left out, but for a mean, whose n - 1 sums and one quotient make n exactly.
# Finding an extreme counts its comparisons; a boolean result (any, all, count_nonzero) counts none.

# FLOPs to one input element.
REDUCTION_FLOPS = {
    "sum": 1, "nansum": 1, "mean": 1, "prod": 1, "amax": 1, "amin": 1, "max": 1, "min": 1, "argmax": 1, "argmin": 1,
    "cumsum": 1, "cumprod": 1, "cummax": 1, "cummin": 1, "_cummax_helper": 1, "_cummin_helper": 1, "sum_to_size": 1,
    "aminmax": 2, "_aminmax": 2,
    "var": 4, "std": 4, "var_mean": 4, "std_mean": 4,   # mean's sum; x - mean, square, sum
    "logsumexp": 4,                                     # maximum, - maximum, exp, sum
    "_logcumsumexp": 7, "logcumsumexp": 7,              # a logaddexp each
    # - lowest, × bins / range, count
    "histc": 3, "histogram": 3, "_histogramdd_from_bin_cts": 3, "_histogramdd_from_bin_tensors": 3,
    "_histogramdd_bin_edges": 2,                        # lowest and highest
    "segment_reduce": 1, "bincount": 1}


def norm_flops(x: Spec, order: Any = 2, *_: Any, out: Any = None, **__: Any) -> int:
    """|x|ᵖ and its sum: 2 FLOPs an element for p of 1, 2 or infinity, 3 (abs, pow, +) for others."""
    simple = order is None or order in (0, 1, 2, float("inf"), float("-inf"))
    return x.numel * (2 if simple else 3) * (2 if x.dtype.is_complex else 1)


def sorted_flops(x: Spec, *args: Any, out: Any = None, **kwargs: Any) -> int:
    """A comparison sort of each row: n ⌈log₂ n⌉ comparisons (Knuth, TAOCP 3, 5.3.1). CUDA's radix sorts do none.

    >>> import torch
    >>> sorted_flops(Spec.of((3, 8), (8, 1), torch.float32, "cpu"))
    72
    """
    dim = next((int(a) for a in (*args, kwargs.get("dim")) if isinstance(a, int) and not isinstance(a, bool)), -1)
    return whole_rows_flops(x, x[dim] if len(x) else 1)


def whole_rows_flops(x: Spec, row: int) -> int:
    return x.numel * ceil(log2(row)) if row > 1 else 0


def search_flops(sorted_sequence: Any, values: Any, *_: Any, out: Spec, **__: Any) -> int:
    """Binary search: ⌈log₂(n + 1)⌉ comparisons a value."""
    return out.numel * ceil(log2(sorted_sequence[-1] + 1))


def pair_flops(p: float) -> int:
    """An element of a pair: difference, |·| or square, + (or maximum); pow too for other exponents; a count for 0."""
    return 3 if p in (1, 2, float("inf")) else 1 if p == 0 else 4


def cdist_backward_flops(grad: Spec, x1: Spec, x2: Spec, p: float, *_: Any, out: Any = None, **__: Any) -> int:
    """Difference, ÷ distance and × grad, + : 4; two more (abs, pow) for other exponents."""
    return grad.numel * x1[-1] * (0 if p == 0 else 4 if p in (1, 2, float("inf")) else 6)


def bag_gradient_flops(signature: Signature) -> FlopCount:
    """Each index adds its bag's gradient, ÷ the bag's size in mode 1, × a weight if given; mode 2 adds once a bag."""
    named = signature.named_arguments()
    grad, elements = named["grad"], named["indices"].numel * named["grad"][-1]
    if named["mode"] == 2:
        return FlopCount(grad.numel)
    if named.get("per_sample_weights") is not None:
        return multiply_adds(elements)
    return FlopCount(elements * (2 if named["mode"] == 1 else 1))


for _name, _flops in REDUCTION_FLOPS.items():
    register_each(_name, lambda x, *_, name=_name, flops=_flops, **__: (
        flops * x.numel * (COMPLEX_FLOPS.get(name, 2) if x.dtype.is_complex else 1)))
register_each("linalg_vector_norm norm native_norm linalg__powsum", norm_flops)
register_each("dist", lambda x, other, p=2, *_, **__: x.numel + norm_flops(x, p))  # The norm of a difference
register_each("trace", lambda x, *_, **__: min(x))
register_each("sort argsort mode unique_dim", sorted_flops)
register_each("topk kthvalue", lambda x, k, dim=-1, *_, **__: whole_rows_flops(x, x[dim] if len(x) else 1))
# The median over a dimension, or over all
register_each("median nanmedian",
    lambda x, *args, **__: sorted_flops(x, *args) if args else whole_rows_flops(x, x.numel))
register_each("_unique _unique2", lambda x, *_, **__: whole_rows_flops(x, x.numel))
# Without replacement: p ÷ exponential (3), largest of each row; with: cumulative sums (2), binary search
register_each("multinomial", lambda probabilities, num_samples, replacement=False, *_, out, **__: (
    5 * probabilities.numel if not replacement or num_samples == 1 else
    2 * probabilities.numel + search_flops(probabilities, None, out=out)))
register_each("searchsorted", search_flops)
register_each("bucketize", lambda values, boundaries, *_, out, **__: search_flops(boundaries, values, out=out))
# One sum an element of the source, and a product where alpha is not 1
register_each("index_add", lambda _self, _dim, _index, source, alpha=1, *_, **kwargs: (
    source.numel * (1 if kwargs.get("alpha", alpha) == 1 else 2)))
# Moves elements; with ``reduce``, one operation for each index
register_each("scatter", lambda _self, _dim, index, *_, reduce=None, **__: 0 if reduce is None else index.numel)
register_each("scatter_add scatter_reduce", lambda _self, _dim, index, *_, **__: index.numel)
register_each("index_reduce _unsafe_masked_index_put_accumulate", per_input(1, position=3))
# Moves elements; accumulating adds one for each addressed, whose number a mask leaves to data: ``values`` stand for it
register_each("index_put _index_put_impl _unsafe_index_put", lambda self, indices, values, accumulate=False, *_, **__: (
    0 if not accumulate else values.numel if (found := indexed_elements(self, indices)) is None else found))
register_each("put", lambda _self, index, _source, accumulate=False, *_, **__: index.numel if accumulate else 0)
register_each("_segment_reduce_backward", per_input(1, position=2))
register_each("embedding_dense_backward unfold_backward", per_input(1))  # gradients summed into place
register_each(
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward "
    "adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward "
    "max_pool2d_backward mkldnn_max_pool2d_backward mkldnn_max_pool3d_backward "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward "
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward "
    "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
    "col2im", per_input(1))
# Distances between the rows of x1 [..., p, m] and x2 [..., r, m]
register_each("_cdist_forward", lambda x1, x2, p, *_, out, **__: out.numel * x1[-1] * pair_flops(p))
register_each("_cdist_backward", cdist_backward_flops)
register_each("_pdist_forward", lambda x, p=2, *_, out, **__: out.numel * x[-1] * pair_flops(p))
register_each("_pdist_backward", lambda grad, x, p, *_, **__: cdist_backward_flops(grad, x, x, p))
# √ of [-2 x1, |x1|², 1]·[x2, 1, |x2|²]: a product of m + 2 columns, the squared norms, × -2, maximum and root
register_each("_euclidean_dist", lambda x1, x2, *_, out, **__: (
    multiply_adds(out.numel * (x1[-1] + 2), x1) + FlopCount(3 * x1.numel + 2 * x2.numel + 2 * out.numel)))
# A plain embedding moves rows and does no arithmetic
# Each index adds a row (mode 0), adds it to a mean (1) or compares it (2); with weights it is a multiply-add
register_each("_embedding_bag _embedding_bag_forward_only embedding_bag",
    lambda table, indices, offsets, scaled=False, mode=0, sparse=False, weights=None, *_, **__: (
        (FlopCount if weights is None else multiply_adds)(indices.numel * table[-1])))
register_each("_embedding_bag_backward _embedding_bag_dense_backward", OfSignature(bag_gradient_flops))
# The dot product of a row and its bag's gradient, for each index
register_each("_embedding_bag_per_sample_weights_backward",
    lambda grad, weight, indices, *_, **__: multiply_adds(indices.numel * weight[-1]))
# Norm (2) and scale (1) of each row addressed, taken as distinct and all over the limit
register_each("embedding_renorm", lambda weight, indices, *_, **__: 3 * indices.numel * weight[-1])


# The time of reductions and of what moves by index.

NAMES = """all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm max mean median min nansum norm prod
std std_mean sum var var_mean"""


def reduction_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    if not signature.inputs or not signature.outputs:
        return None
    source, dims = signature.inputs[0], bind(signature).get("dim")
    if source.numel == 0:
        return stream_time(0, device)
    if dims is None or dims == []:
        dims = range(len(source))
    reduced = {d % len(source) for d in ([dims] if isinstance(dims, int) else dims)} if len(source) else set()
    outputs = prod(size for i, size in enumerate(source) if i not in reduced)
    fastest = min((i for i, size in enumerate(source) if size > 1), key=lambda i: source.stride[i], default=-1)
    return reduction_time(outputs, source.numel // outputs, source.dtype.itemsize, device,
                          reduces_fastest=fastest in reduced or outputs == 1,
                          written_itemsize=sum(o.dtype.itemsize for o in signature.outputs))


def embedding_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Rows of the table: as many as the result has, which are more than indices where an inner dimension is picked."""
    table, out = signature.inputs[0], signature.outputs[0]
    width = max(out[-1], 1) if len(out) else 1
    return gather_rows_time(out.numel // width, width, table.dtype.itemsize, device)


def embedding_backward_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    gradient, indices = signature.inputs[:2]
    table = signature.outputs[0]
    return embedding_backward_time(indices.numel, gradient[-1], table[0], gradient.dtype.itemsize, device,
                                   index_bytes=indices.dtype.itemsize)


def scatter_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """As many elements as the index has; a copy of the first argument before, unless it is in place."""
    if not signature.outputs:
        return NO_TIME
    arguments = bind(signature)
    index = arguments.get("index")
    source = arguments.get("source", arguments.get("src"))
    spec = source if isinstance(source, Spec) else index
    if not isinstance(spec, Spec):
        return stream_time(moved_bytes(signature), device)
    out = signature.outputs[0]
    kernel = pointwise_time(spec.numel, spec.numel * (3 * out.dtype.itemsize + 8), device, dimensions=2, operands=3)
    if signature.op._schema.name.endswith("_"):
        return kernel
    return join_known(stream_time(2 * out.nbytes, device), kernel)


def index_put_rule(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Written as it comes; where it adds up, indices are sorted first and those that are alike follow each other."""
    if not signature.outputs:
        return NO_TIME
    arguments = bind(signature)
    values: Spec = arguments["values"]
    out = signature.outputs[0]
    indices = [i for i in arguments["indices"] if isinstance(i, Spec)]
    count = max((i.numel for i in indices), default=0)
    kernel = pointwise_time(values.numel, moved_bytes(signature), device, dimensions=2, operands=3)
    parts = [kernel]
    if arguments.get("accumulate"):
        parts += [sort_time(count, 8, 8, device, bits=max(out.numel, 2).bit_length()),
                  stream_time(8 * count * len(indices), device, kernels=2 * len(indices))]
    if not signature.op._schema.name.endswith("_"):
        parts.append(stream_time(2 * out.nbytes, device))
    return join_known(*parts)


register_times(NAMES, reduction_rule)
# keys with their places; sorted by radix, whatever the rows (``SortStable.cu``)
register_times("sort argsort msort _unique2", unmeasured(lambda signature, device: sort_time(
    signature.inputs[0].numel, signature.inputs[0].dtype.itemsize, 8, device)))
# a row is read for each 8 bits of its keys, and once more for what is picked (``TensorTopK.cu``)
register_times("topk kthvalue mode", unmeasured(lambda signature, device: stream_time(
    signature.inputs[0].nbytes * (signature.inputs[0].dtype.itemsize + 1) + 3 * sum(
        o.nbytes for o in signature.outputs), device, kernels=2)))
# running sums: rows in one kernel, a single long one by CUB in two
register_times("cumsum cumprod logcumsumexp cummax cummin", unmeasured(lambda signature, device: stream_time(
    signature.inputs[0].nbytes + sum(o.nbytes for o in signature.outputs), device,
    kernels=2 if len(signature.inputs[0]) == 1 else 1)))
register_times("embedding index_select", embedding_rule)
register_times("embedding_dense_backward", with_copies(embedding_backward_rule))
# an address for each element, from an index that is read (``ScatterGatherKernel.cu``, ``IndexKernel.cu``)
register_times("gather index _unsafe_index take take_along_dim masked_select roll flip repeat", unmeasured(
    lambda signature, device: NO_TIME if not signature.outputs else pointwise_time(
        signature.outputs[0].numel, moved_bytes(signature), device, dimensions=2, operands=3)))
register_times("scatter scatter_add scatter_reduce index_add index_copy index_fill masked_scatter",
               unmeasured(scatter_rule))
register_times("index_put _index_put_impl_ _unsafe_index_put", unmeasured(index_put_rule))
