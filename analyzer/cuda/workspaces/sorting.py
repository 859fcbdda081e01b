"""What CUDA kernels that sort and select allocate. Source: ``aten/src/ATen/native/cuda``, in files named at each
rule, as of PyTorch 2.11, and CUB's (``cub/device/dispatch``), as of CUDA 12.8. Scans and selections of CUB need a few
bytes for every two thousand elements, which is left out.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from analyzer.hardware.catalogue import simulated_spec
from analyzer.meta.operator_info import Stage, kernel_stages
from analyzer.meta.spec import Signature, TensorSpec

from .kernel_temporary import copy_bytes, is_contiguous, kept_stage
from .reduction import accumulate_bytes, one_stage

_aten = torch.ops.aten
_INDEX_BYTES = 8  # int64

# tuning_radix_sort.cuh, or dispatch_radix_sort.cuh before, for keys and values of 4 or of 8 bytes each: pairs that one
# block sorts alone (SingleTilePolicy: 256 threads, 19 items of 4 bytes), and that each block of several takes
# (OnesweepPolicy from compute capability 9, 8 and below on; with offsets of 64 bits, as PyTorch counts in int64).
_SINGLE_TILE = {4: 256 * 19, 8: 256 * (19 * 4 // 8)}
_TILES = (((9, 0), {4: 384 * 17, 8: 384 * (24 * 4 // 8)}), ((8, 0), {4: 384 * 17, 8: 384 * (21 * 4 // 8)}),
          ((0, 0), {4: 256 * 46, 8: 256 * (23 * 4 // 8)}))
_DIGITS, _DIGIT_BITS, _OFFSET_BYTES, _COUNTER_BYTES = 256, 8, 8, 4
_ALIGNED = 256  # util_temporary_storage.cuh, alias_temporaries: each part begins at a multiple


def sort_pairs_bytes(count: int, bits: int, item: int = _INDEX_BYTES) -> int:
    """The temporary storage of DeviceRadixSort::SortPairs (dispatch_radix_sort.cuh, InvokeOnesweep) for keys of which
    ``bits`` differ, and values, each of ``item`` bytes: counts of digits, what blocks tell each other, both arrays once
    more where a second digit follows, and a counter for each digit.

    >>> sort_pairs_bytes(2304, 20), sort_pairs_bytes(100_000, 8), sort_pairs_bytes(100_000, 9)
    (1, 25087, 1627135)
    """
    if count <= _SINGLE_TILE[item]:
        return 1
    passes = -(-bits // _DIGIT_BITS)
    capability = simulated_spec().compute_capability or (9, 0)
    tile = next(tiles[item] for least, tiles in _TILES if capability >= least)
    again = [count * item] * 2 if passes > 1 else []
    parts = [passes * _DIGITS * _OFFSET_BYTES, -(-count // tile) * _DIGITS * _COUNTER_BYTES, *again,
             passes * _COUNTER_BYTES]
    return sum(-(-part // _ALIGNED) * _ALIGNED for part in parts) + _ALIGNED - 1


@kernel_stages(_aten.embedding_dense_backward)
def _embedding_backward(signature: Signature) -> tuple[Stage, ...]:
    """Embedding.cu: the gradient is made contiguous; up to 3072 indices are not sorted."""
    grad, indices, num_weights, _, scale_by_frequency = signature.args[:5]
    copies = [copy_bytes(indices), copy_bytes(grad)]
    if indices.numel <= 3072 and not scale_by_frequency:
        return kept_stage(*copies)
    return _sum_rows(grad, indices, num_weights, scale_by_frequency, copies)


@kernel_stages(_aten._embedding_bag_backward, _aten._embedding_bag_dense_backward)
def _embedding_bag_backward(signature: Signature) -> tuple[Stage, ...]:
    """EmbeddingBag.cu, _embedding_bag_dense_backward_cuda: sums and means (modes 0 and 1) add up sorted rows."""
    grad, indices, *others = signature.args
    is_dense = signature.op.overloadpacket is _aten._embedding_bag_dense_backward
    rows, scale_by_frequency, mode = others[3:6] if is_dense else others[4:7]
    is_sparse = not is_dense and others[7]
    copies = [copy_bytes(grad)] if is_dense else [copy_bytes(indices), copy_bytes(grad)]
    if is_sparse:
        return ()
    if mode == 2 or not indices.numel:
        return kept_stage(*copies)
    return _sum_rows(grad, indices, rows, scale_by_frequency, copies)


def _sum_rows(grad: TensorSpec, indices: TensorSpec, rows: int, scale_by_frequency: bool,
              copies: list[int]) -> tuple[Stage, ...]:
    """EmbeddingBackwardKernel.cu, and what comes before: indices are sorted by all their bits before the output is
    allocated, then gradients of the same row are summed in pieces of ten.
    """
    count, item = indices.numel, indices.dtype.itemsize
    index = count * item
    sorting = Stage((index, sort_pairs_bytes(count, 8 * item, item)), before=0)  # a range, CUB's storage
    segments = min(count, rows)
    pieces = count // 10 + segments
    # sorted, where from; then frequencies
    before = (*kept_stage(*copies, index, index), sorting, *kept_stage(*[index] * bool(scale_by_frequency)))
    # where rows begin, how many there are; the keys that cub::unique_by_key leaves; then the sums of pieces
    return before + one_stage(index, 8, index) + one_stage(
        index, 8, segments * item, segments * item, 8, pieces * item, pieces * grad[-1] * accumulate_bytes(grad.dtype))


@kernel_stages(_aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put)
def _index_put(signature: Signature) -> tuple[Stage, ...]:
    """Indexing.cu, index_put_with_sort_kernel: to add up where an index comes twice, the indices are sorted."""
    args = signature.args
    accumulate = args[3] if len(args) > 3 else signature.kwargs.get("accumulate", False)
    target, places, value = args[:3]
    indices = [i for i in places if isinstance(i, TensorSpec)]
    if not (accumulate or torch.are_deterministic_algorithms_enabled()) or not indices or not target.numel:
        return ()
    if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        return ()  # nonzero comes first, as a call of its own
    count = math.prod(torch.broadcast_shapes(*indices))
    at = [k for k, i in enumerate(places) if isinstance(i, TensorSpec)]
    slice_size = target.numel // math.prod([target[k] for k in at])
    full = count * slice_size * value.dtype.itemsize
    copy = full if value.numel * value.dtype.itemsize != full or not is_contiguous(value) else 0
    # indices that do not stand side by side are moved to the front; largestIndex is that of all dimensions
    row = math.prod(target[at[-1] + 1:]) if at[-1] - at[0] < len(at) else slice_size
    bits = max(1, ((target.numel - 1) // row).bit_length())
    # linear index, sorted, where from, range
    return one_stage(copy_bytes(target), copy, *[count * _INDEX_BYTES] * 4, sort_pairs_bytes(count, bits))


# Other sorts are assumed to need as much again as keys and values are (DeviceRadixSort: "O(N+P) temporary storage").

_SMALL_SORT = 4096        # Sort.h, should_use_small_sort: up to here rows are sorted in place
_LARGE_SEGMENT = 1_000_000  # SortStable.cu, launch_stable_sort_kernel: such rows are sorted one by one
_MANY_SEGMENTS = 128      # same: from here on all rows in one segmented sort
# TensorTopK.cu, get_items_per_thread: threads of a block, registers of one, bounds of the items of a thread
_TOPK_THREADS, _TOPK_REGISTERS, _TOPK_ITEMS = 256, 40, (4, 64)
_REGISTERS_PER_MULTIPROCESSOR = 65536  # every GPU since compute capability 3.0 (CUDA programming guide)
# TensorTopK.cu, should_use_multiblock: (at most so many rows, at least so long)
_MULTIBLOCK = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (float("inf"), 400))


def _argument(signature: Signature, position: int, name: str, default: Any) -> Any:
    return signature.args[position] if len(signature.args) > position else signature.kwargs.get(name, default)


def _sort_blocks(x: TensorSpec, dim: int) -> tuple[int, ...]:
    """Sort.cpp, sort_cuda_kernel, and SortStable.cu."""
    if not len(x) or not x.numel or x[dim] <= _SMALL_SORT:
        return ()
    count, size, key = x.numel, x[dim], x.dtype.itemsize
    is_innermost = x.stride[dim] == 1
    # other dimensions are copied to be the innermost, and results copied back
    blocks = () if is_innermost else (count * key, count * key, count * _INDEX_BYTES)
    segments = count // size
    if segments == 1 or size >= _LARGE_SEGMENT:
        return (*blocks, size * _INDEX_BYTES, size * (key + _INDEX_BYTES))
    # all rows by value, then by row: (index, row) twice, the sorted keys, and what radix sort holds
    if segments < _MANY_SEGMENTS:
        return (*blocks, count * _INDEX_BYTES, count * _INDEX_BYTES, count * key, count * (key + _INDEX_BYTES))
    return (*blocks, count * _INDEX_BYTES, count * (key + _INDEX_BYTES))


@kernel_stages(_aten.sort)
def _sort(signature: Signature) -> tuple[Stage, ...]:
    x = signature.inputs[0]
    is_stable = signature.op._overloadname == "stable"
    return one_stage(*_sort_blocks(x, _argument(signature, 2 if is_stable else 1, "dim", -1)))


@kernel_stages(_aten.topk)
def _topk(signature: Signature) -> tuple[Stage, ...]:
    """TensorTopK.cpp and .cu: where blocks share a row, 16-bit counts for each; more than 4096 results are sorted."""
    x, values = signature.inputs[0], signature.outputs[0]
    if not len(x) or not x.numel:
        return ()
    dim, multiprocessors = _argument(signature, 2, "dim", -1), simulated_spec().multiprocessors
    rows, size = x.numel // x[dim], x[dim]
    blocks = [copy_bytes(x)]
    if multiprocessors is not None and size >= next(least for most, least in _MULTIBLOCK if rows <= most):
        resident = multiprocessors * (_REGISTERS_PER_MULTIPROCESSOR //
                                      (_TOPK_REGISTERS * _TOPK_THREADS)) * _TOPK_THREADS
        least, most = _TOPK_ITEMS
        items = max(least, min(-(-x.numel // resident), most))
        parts = rows * -(-size // (items * _TOPK_THREADS))
        # a value, a semaphore, a rank and a digit for each row; counts of 256 digits and two sums for each block
        blocks += [rows * x.dtype.itemsize, rows * 4, rows * 4, rows * 4, parts * 256 * 2, parts * 4, parts * 4]
    if _argument(signature, 4, "sorted", True) and values[dim] > _SMALL_SORT:
        blocks += [values.numel * _INDEX_BYTES, values.nbytes, *_sort_blocks(values, dim)]
    return one_stage(*blocks)


@kernel_stages(_aten._unique2, _aten._unique, _aten.unique_consecutive)
def _unique(signature: Signature) -> tuple[Stage, ...]:
    """UniqueCub.cu: sorted keys, for the inverse also where each came from; then a mask and its sums."""
    x = signature.inputs[0]
    index = x.numel * _INDEX_BYTES
    if signature.op.overloadpacket is _aten.unique_consecutive:
        inverse = bool(_argument(signature, 1, "return_inverse", False))
        return one_stage(copy_bytes(x), *[index, index] * inverse)
    inverse = bool(_argument(signature, 2, "return_inverse", False))
    held = (copy_bytes(x), x.nbytes, *[index, index] * inverse)
    return one_stage(*held, x.nbytes + index * inverse) + (one_stage(*held, index, index) if inverse else ())
