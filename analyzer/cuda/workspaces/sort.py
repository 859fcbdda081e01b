"""What CUDA kernels that sort, select and scan hold while they run. Source: the files of ``aten/src/ATen/native/cuda``
named at each rule (PyTorch 2.11). Radix sort is CUB's with separate input and output, which its documentation says
needs as much again as keys and values are (DeviceRadixSort: "O(N+P) temporary storage"; only its DoubleBuffer variant
needs O(P)). Scans and selections of CUB need a few bytes for every two thousand elements, which is left out.
"""
from __future__ import annotations

from typing import Any

import torch

from analyzer.hardware.current_spec import simulated_spec
from analyzer.meta.memory_need import Stage, kernel_stages
from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec

from .kernel_temporary import copy_bytes
from .reduction import one_stage

_aten = torch.ops.aten
_INDEX_BYTES = 8          # int64, and a pair of int32
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
    dim = _argument(signature, 2, "dim", -1)
    rows, size = x.numel // x[dim], x[dim]
    blocks = [copy_bytes(x)]
    multiprocessors = simulated_spec().multiprocessors
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


@kernel_stages(_aten.cumsum, _aten.cumprod, _aten.logcumsumexp)
def _scan(signature: Signature) -> tuple[Stage, ...]:
    """ScanUtils.cuh, scan_dim: the input is made contiguous."""
    return one_stage(copy_bytes(signature.inputs[0]))


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


@kernel_stages(_aten.nonzero)
def _nonzero(signature: Signature) -> tuple[Stage, ...]:
    """Nonzero.cu: the input is made contiguous."""
    return one_stage(copy_bytes(signature.inputs[0]))
