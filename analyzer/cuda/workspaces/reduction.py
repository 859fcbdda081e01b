"""Buffers through which the blocks of one CUDA reduction hand partial results to each other. Source:
``setReduceConfig`` and ``gpu_reduce_kernel`` in ``aten/src/ATen/native/cuda/Reduce.cuh`` (PyTorch 2.11 to 2.13).
"""
from __future__ import annotations

import math
from functools import cmp_to_key
from typing import NamedTuple

import torch

from analyzer.hardware.catalogue import simulated_spec
from analyzer.meta.operator_info import Stage, kernel_stages
from analyzer.meta.spec import Signature, TensorSpec

_aten = torch.ops.aten
_WARP = 32
_MAX_THREADS = 512            # mnt_wrapper
# CUDA programming guide, table of compute capabilities
_MAX_THREADS_PER_SM = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
_MOST_THREADS_PER_SM = 2048   # the others since 6.0
_VALUES_PER_THREAD = (16, 256)


class _Dim(NamedTuple):
    size: int
    stride: int    #: of the input, in elements
    is_reduced: bool
    out_stride: int


def reduction_blocks(x: TensorSpec, dims: tuple[int, ...], accumulator_bytes: int,
                     input_vector: int = 4) -> tuple[int, ...]:
    """Bytes of the two buffers (partial results of ``accumulator_bytes``, semaphores) that reducing ``dims`` of ``x``
    takes; none where blocks need not meet.

    >>> reduction_blocks(TensorSpec.of((1568, 3072), (3072, 1), torch.float32, "cuda:0"), (0,), 4)
    (39321600, 96)
    """
    multiprocessors = simulated_spec().multiprocessors
    if multiprocessors is None or not x.numel:
        return ()
    order = _iteration_order(x, dims)
    reduced = [d for d in order if d.is_reduced]
    kept = [d for d in order if not d.is_reduced]
    inputs = math.prod(d.size for d in reduced)
    outputs = x.numel // inputs
    # block.x goes along the fastest dimension
    if not reduced:
        return ()  # one input per output
    reduces_fastest = not kept or reduced[0].stride < kept[0].stride
    width, height = (inputs, outputs) if reduces_fastest else (outputs, inputs)
    fastest = (reduced if reduces_fastest else kept)[0].stride
    vector = 1
    if fastest == 1 and reduces_fastest:
        if width >= 128 and len(reduced) == 1:
            width //= input_vector
    elif fastest == 1:
        vector = _output_vector(order, kept[0])
        width //= vector
    # set_block_dimension
    most = _MAX_THREADS // vector
    width_limit, height_limit = min(_last_power_of_two(width), most), min(_last_power_of_two(height), most)
    block_width = min(width_limit, _WARP)
    block_height = min(height_limit, most // block_width)
    block_width = min(width_limit, most // block_height)
    step_input, step_output = (block_width, 1) if reduces_fastest else (1, block_width)
    least, largest = _VALUES_PER_THREAD
    if _div_up(inputs, step_input) < min(block_height * 16, largest):
        return ()  # each warp has outputs of its own
    step_input *= block_height
    values = _div_up(inputs, step_input)
    grid = _div_up(outputs // vector, step_output)
    per_sm = _MAX_THREADS_PER_SM.get(simulated_spec().compute_capability or (0, 0), _MOST_THREADS_PER_SM)
    target = multiprocessors * (per_sm // (block_width * block_height))
    if values < largest or grid > target:
        return ()
    blocks_per_output = max(min(_div_up(target, grid), _div_up(values, least)), _div_up(values, largest))
    if blocks_per_output <= 1:
        return ()
    nbytes = accumulator_bytes * outputs * blocks_per_output  # global_memory_size
    if not reduces_fastest:
        nbytes *= block_width * vector
    return nbytes, 4 * grid


def _iteration_order(x: TensorSpec, dims: tuple[int, ...]) -> list[_Dim]:
    """Dimensions as ``TensorIterator`` orders and merges them: reduced first, then by stride, fastest first."""
    reduced = {d % len(x) for d in dims} if dims and len(x) else set(range(len(x)))
    out_stride = 1
    found: list[_Dim] = []
    for i in reversed(range(len(x))):
        found.append(_Dim(x[i], x.stride[i], i in reduced, 0 if i in reduced else out_stride))
        if i not in reduced:
            out_stride *= max(1, x[i])
    def compare(a: _Dim, b: _Dim) -> int:  # reorder_dimensions, should_swap
        if a.is_reduced != b.is_reduced:
            return -1 if a.is_reduced else 1
        for s, t in ((a.out_stride, b.out_stride), (a.stride, b.stride)):
            if s and t and s != t:
                return -1 if s < t else 1
        return 0
    found = sorted((d for d in found if d.size != 1), key=cmp_to_key(compare))
    merged: list[_Dim] = []
    for d in found:  # coalesce_dimensions
        last = merged[-1] if merged else None
        if last is not None and last.is_reduced == d.is_reduced and last.size * last.stride == d.stride \
                and last.size * last.out_stride == d.out_stride:
            merged[-1] = last._replace(size=last.size * d.size)
        else:
            merged.append(d)
    return merged


def _output_vector(order: list[_Dim], first_kept: _Dim) -> int:
    """get_output_vec_size: how many outputs one thread reduces at once (addresses of storages are multiples of 512)."""
    vector = 4
    for n in (first_kept.size, *(d.stride for d in order if d is not first_kept)):
        while n % vector:
            vector //= 2
    return vector


def _last_power_of_two(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)


def _div_up(a: int, b: int) -> int:
    return -(-a // b)


def _dims(signature: Signature, position: int = 1) -> tuple[int, ...]:
    args = signature.args
    dims = args[position] if len(args) > position else signature.kwargs.get("dim")
    return () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)


def accumulate_bytes(dtype: torch.dtype) -> int:
    """Bytes of the type in which CUDA accumulates ``dtype`` (``at::acc_type``): float32 for half types."""
    return max(4, dtype.itemsize) if dtype.is_floating_point else dtype.itemsize


def one_stage(*blocks: int) -> tuple[Stage, ...]:
    kept = tuple(b for b in blocks if b)
    return (Stage(kept),) if kept else ()


@kernel_stages(_aten.sum, _aten.mean, _aten.nansum, _aten.prod, _aten.amax, _aten.amin, _aten.any, _aten.all,
               _aten.linalg_vector_norm)
def _reduce(signature: Signature) -> tuple[Stage, ...]:
    x, out = signature.inputs[0], signature.outputs[0]
    dims = _dims(signature, 2 if signature.op.overloadpacket is _aten.linalg_vector_norm else 1)
    if signature.op.overloadpacket in (_aten.sum, _aten.mean) and out.dtype != x.dtype and x.dtype.itemsize > 2:
        return ()  # a cast comes first
    return one_stage(*reduction_blocks(x, dims, accumulate_bytes(out.dtype)))


@kernel_stages(_aten.var, _aten.std, _aten.var_mean, _aten.std_mean)
def _welford(signature: Signature) -> tuple[Stage, ...]:
    x = signature.inputs[0]
    # WelfordData in SharedReduceOps.h: mean, second moment, two counts
    return one_stage(*reduction_blocks(x, _dims(signature), 4 * accumulate_bytes(x.dtype), 2))


@kernel_stages(_aten.argmax, _aten.argmin, _aten.max, _aten.min)
def _with_index(signature: Signature) -> tuple[Stage, ...]:
    if signature.op._overloadname not in ("dim", "default") or len(signature.inputs) > 1:
        return ()
    x = signature.inputs[0]
    dims = _dims(signature)
    is_value = signature.op.overloadpacket in (_aten.max, _aten.min) and not dims
    # value and int64 index, aligned
    return one_stage(*reduction_blocks(x, dims, accumulate_bytes(x.dtype) if is_value else 16))
