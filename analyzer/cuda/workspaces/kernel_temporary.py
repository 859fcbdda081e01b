"""What CUDA kernels of PyTorch allocate inside one operator: contiguous copies, sorted indices, partial sums. Source:
the files of ``aten/src/ATen/native/cuda`` named at each rule, as of PyTorch 2.11. Operators that are several ATen calls
need no rule: the log holds each call.
"""
from __future__ import annotations

import math
from typing import Any

import torch

from analyzer.hardware.current_spec import simulated_spec
from analyzer.meta.memory_need import Stage, kernel_stages
from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec

from .reduction import accumulate_bytes, one_stage, reduction_blocks

_aten = torch.ops.aten
_INDEX_BYTES = 8  # int64


def is_contiguous(t: TensorSpec) -> bool:
    """Whether the elements of ``t`` lie in memory in the order of its indices.

    >>> is_contiguous(TensorSpec.of((2, 1, 3), (3, 7, 1), torch.float32, "cuda:0"))
    True
    """
    expected = 1
    for size, stride in zip(reversed(t), reversed(t.stride)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# Positions of the arguments that a kernel makes contiguous before it runs: SoftMax.cu (host_softmax,
# host_softmax_backward).
_MADE_CONTIGUOUS: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((_aten._softmax, _aten._log_softmax), (0,)),
    **dict.fromkeys((_aten._softmax_backward_data, _aten._log_softmax_backward_data), (0, 1))}


@kernel_stages(*_MADE_CONTIGUOUS)
def _contiguous_copies(signature: Signature) -> tuple[Stage, ...]:
    return one_stage(*_copies(signature, _MADE_CONTIGUOUS[signature.op.overloadpacket]))


@kernel_stages(_aten.native_layer_norm, _aten._fused_rms_norm)
def _layer_norm(signature: Signature) -> tuple[Stage, ...]:
    """layer_norm_kernel.cu, layer_norm_cuda: the input is made contiguous before the outputs are allocated."""
    return _kept(*_copies(signature, (0,)))


def _kept(*blocks: int) -> tuple[Stage, ...]:
    """Blocks that are there before all outputs and as long as the operator runs."""
    return tuple(stage._replace(before=0, kept=True) for stage in one_stage(*blocks))


def copy_bytes(t: TensorSpec) -> int:
    """Bytes of the contiguous copy that a kernel makes of ``t``; 0 where it is contiguous."""
    return 0 if is_contiguous(t) else t.nbytes


def _copies(signature: Signature, positions: tuple[int, ...]) -> list[int]:
    given = [signature.args[i] for i in positions if i < len(signature.args)]
    return [copy_bytes(t) for t in given if isinstance(t, TensorSpec)]


@kernel_stages(_aten._safe_softmax)
def _safe_softmax(signature: Signature) -> tuple[Stage, ...]:
    """transformers/attention.cpp: which elements and which rows are masked, a zero; the result reuses the output."""
    x, dim = signature.args[:2]
    return one_stage(x.numel, x.numel // max(1, x[dim]), signature.outputs[0].dtype.itemsize)


@kernel_stages(_aten.native_layer_norm_backward, _aten._fused_rms_norm_backward)
def _layer_norm_backward(signature: Signature) -> tuple[Stage, ...]:
    """layer_norm_kernel.cu: the input is made contiguous before the outputs are allocated, the gradient afterwards; in
    LaunchGammaBetaBackwardCUDAKernel many short rows are summed by blocks of 32 rows first.
    """
    inputs, copies = _kept(*_copies(signature, (1,))), _copies(signature, (0,))
    x, normalized = signature.args[1:3]
    columns = math.prod(normalized)
    rows = x.numel // max(1, columns)
    grads = [o for o in signature.outputs[1:] if o.numel == columns]
    multiprocessors = simulated_spec().multiprocessors
    if multiprocessors is None or not grads or rows <= 64 * 1024 or columns // 32 >= multiprocessors // 2:
        return inputs + one_stage(*copies)
    blocks = min(64 * 1024 // 2 // -(-columns // 32), -(-rows // 32))
    partial = TensorSpec.of((blocks, columns), (columns, 1), grads[0].dtype, x.device)
    return inputs + one_stage(*copies, *[partial.nbytes] * len(grads),
                              *reduction_blocks(partial, (0,), accumulate_bytes(partial.dtype)))


@kernel_stages(_aten.embedding_dense_backward)
def _embedding_backward(signature: Signature) -> tuple[Stage, ...]:
    """Embedding.cu and EmbeddingBackwardKernel.cu: beyond 3072 indices they are sorted, and rows are summed in pieces
    of ten. The gradient is made contiguous, and indices are sorted, before the output is allocated.
    """
    grad, indices, num_weights = signature.args[:3]
    scale_by_frequency = bool(signature.args[4])
    count = indices.numel
    copies = [t.nbytes for t in (indices, grad) if not is_contiguous(t)]
    if count <= 3072 and not scale_by_frequency:
        return _kept(*copies)
    index = indices.dtype.itemsize
    segments = min(count, num_weights)
    pieces = count // 10 + segments
    width = grad[-1]
    # sorted, where from, frequencies
    return _kept(*copies, count * index, count * index, *[count * index] * scale_by_frequency) + one_stage(
        count * index, 8, segments * index, segments * index, 8, pieces * index,
        pieces * width * accumulate_bytes(grad.dtype))


@kernel_stages(_aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put)
def _index_put(signature: Signature) -> tuple[Stage, ...]:
    """Indexing.cu, index_put_with_sort_kernel: to add up where an index comes twice, the indices are sorted."""
    args = signature.args
    accumulate = args[3] if len(args) > 3 else signature.kwargs.get("accumulate", False)
    target, places, value = args[:3]
    indices = [i for i in places if isinstance(i, TensorSpec)]
    if not (accumulate or torch.are_deterministic_algorithms_enabled()) or not indices:
        return ()
    if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        return ()  # nonzero comes first, as a call of its own
    count = math.prod(torch.broadcast_shapes(*indices))
    slice_size = target.numel // max(1, math.prod(target[k] for k, i in enumerate(places) if isinstance(i, TensorSpec)))
    full = count * slice_size * value.dtype.itemsize
    copy = full if value.numel * value.dtype.itemsize != full or not is_contiguous(value) else 0
    # linear index, sorted, where from, range, and what cub's radix sort of pairs holds: both once more
    return one_stage(0 if is_contiguous(target) else target.nbytes, copy, *[count * _INDEX_BYTES] * 4,
                     2 * count * _INDEX_BYTES)


@kernel_stages(_aten.mm, _aten.addmm, _aten.addmm_, _aten._addmm_activation, _aten.bmm, _aten.baddbmm, _aten.baddbmm_)
def _product(signature: Signature) -> tuple[Stage, ...]:
    """Blas.cpp, prepare_(batch_)matrix_for_cublas: a matrix with neither rows nor columns dense is copied."""
    return one_stage(*[m.nbytes for m in signature.inputs[-2:] if m.numel and not _is_matrix(m)])


def _is_matrix(m: TensorSpec) -> bool:
    rows, columns = m[-2:]
    row_stride, column_stride = m.stride[-2:]
    if (column_stride == 1 or columns == 1) and row_stride >= max(1, columns):
        return True
    return (row_stride == 1 or rows == 1) and column_stride >= max(1, rows) or is_contiguous(m)


@kernel_stages(_aten._foreach_norm)
def _foreach_norm(signature: Signature) -> tuple[Stage, ...]:
    """ForeachReduceOp.cu: a partial result for each chunk of the longest tensor, for every tensor."""
    tensors = signature.args[0]
    chunks = max((-(-t.numel // 65536) for t in tensors), default=0)  # kChunkSize of MultiTensorApply.cuh
    return one_stage(len(tensors) * chunks * max((accumulate_bytes(t.dtype) for t in tensors), default=0))
