"""What kernels of PyTorch allocate inside one operator, on CUDA and on the CPU."""
from __future__ import annotations

import math
from math import ceil
from typing import Any

import torch

from analyzer.hardware.catalogue import simulated_spec
from analyzer.meta.operator_info import KernelMemory, Stage, host_memory, kernel_stages
from analyzer.meta.spec import Signature, TensorSpec

from .library import passing_workspace_bytes
from .reduction import accumulate_bytes, one_stage, reduction_blocks

# What CUDA kernels allocate. Source: files of ``aten/src/ATen/native/cuda`` named at each rule, as of PyTorch 2.11.

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


# Arguments made contiguous: SoftMax.cu (host_softmax, host_softmax_backward), ScanUtils.cuh (scan_dim), Nonzero.cu.
_MADE_CONTIGUOUS: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((_aten._softmax, _aten._log_softmax, _aten.cumsum, _aten.cumprod, _aten.logcumsumexp,
                     _aten.nonzero), (0,)),
    _aten._log_softmax_backward_data: (0, 1)}


@kernel_stages(*_MADE_CONTIGUOUS)
def _contiguous_copies(signature: Signature) -> tuple[Stage, ...]:
    return one_stage(*_copies(signature, _MADE_CONTIGUOUS[signature.op.overloadpacket]))


@kernel_stages(_aten._softmax_backward_data)
def _softmax_backward(signature: Signature) -> tuple[Stage, ...]:
    """SoftMax.cu, softmax_backward_cuda_out: the gradient times the output, and what host_softmax_backward copies."""
    grad, output = signature.args[:2]
    return one_stage(max(grad.nbytes, output.nbytes), copy_bytes(grad), copy_bytes(output))


@kernel_stages(_aten.native_layer_norm, _aten._fused_rms_norm)
def _layer_norm(signature: Signature) -> tuple[Stage, ...]:
    """layer_norm_kernel.cu, layer_norm_cuda: the input is made contiguous before the outputs are allocated."""
    return kept_stage(*_copies(signature, (0,)))


def kept_stage(*blocks: int) -> tuple[Stage, ...]:
    """What is held from before the first output to the end of the operator."""
    return tuple(stage._replace(before=0, kept=True) for stage in one_stage(*blocks))


def copy_bytes(t: TensorSpec) -> int:
    return 0 if is_contiguous(t) else t.nbytes


def _copies(signature: Signature, positions: tuple[int, ...]) -> list[int]:
    given = [signature.args[i] for i in positions if i < len(signature.args)]
    return [copy_bytes(t) for t in given if isinstance(t, TensorSpec)]


@kernel_stages(_aten.im2col, _aten.col2im)
def _columns(signature: Signature) -> tuple[Stage, ...]:
    """Im2Col.cu and Col2Im.cu: the result begins as large as the input, and one that grows is allocated once more."""
    x, out = signature.inputs[0], signature.outputs[0]
    return kept_stage(x.nbytes, copy_bytes(x)) if out.numel > x.numel else one_stage(copy_bytes(x))


host_memory(_aten.im2col, _aten.col2im)(lambda signature: (_columns(signature), None))


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
    inputs, copies = kept_stage(*_copies(signature, (1,))), _copies(signature, (0,))
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


@kernel_stages(_aten.native_group_norm)
def _group_norm(signature: Signature) -> tuple[Stage, ...]:
    """group_norm_kernel.cu, GroupNormKernelImplInternal: a factor and a summand for each channel of a sample."""
    x, weight, bias, batch, channels, size = signature.args[:6]
    if size == 1 or weight is None and bias is None:
        return ()
    return one_stage(*[batch * channels * accumulate_bytes(x.dtype)] * 2)


@kernel_stages(_aten.native_group_norm_backward)
def _group_norm_backward(signature: Signature) -> tuple[Stage, ...]:
    """group_norm_kernel.cu, GroupNormBackwardKernelImplInternal and GroupNorm1dBackward: two sums for each channel of a
    sample; while the gradient of the input is computed two factors for each group, and with a weight one for each
    channel.
    """
    x, weight, batch, channels, size, groups, is_wanted = *signature.args[1:2], *signature.args[4:]
    item = accumulate_bytes(x.dtype)
    sums = [] if size == 1 else [batch * channels * item] * 2
    factors = [batch * groups * item] * 2 + [batch * channels * item] * (size > 1 and weight is not None)
    return one_stage(*sums, *(factors if is_wanted[0] else []))


@kernel_stages(_aten.mm, _aten.addmm, _aten.addmm_, _aten._addmm_activation, _aten.bmm, _aten.baddbmm, _aten.baddbmm_)
def _product(signature: Signature) -> tuple[Stage, ...]:
    """Blas.cpp, prepare_(batch_)matrix_for_cublas: a matrix with neither rows nor columns dense is copied."""
    return one_stage(*[m.nbytes for m in signature.inputs[-2:] if m.numel and not _is_matrix(m)],
                     passing_workspace_bytes(signature))


def _is_matrix(m: TensorSpec) -> bool:
    (rows, columns), (row_stride, column_stride) = m[-2:], m.stride[-2:]
    if (column_stride == 1 or columns == 1) and row_stride >= max(1, columns):
        return True
    return (row_stride == 1 or rows == 1) and column_stride >= max(1, rows) or is_contiguous(m)


@kernel_stages(_aten._foreach_norm)
def _foreach_norm(signature: Signature) -> tuple[Stage, ...]:
    """ForeachReduceOp.cu: a partial result for each chunk of the longest tensor, for every tensor."""
    tensors = signature.args[0]
    chunks = max((-(-t.numel // 65536) for t in tensors), default=0)  # kChunkSize of MultiTensorApply.cuh
    return one_stage(len(tensors) * chunks * max((accumulate_bytes(t.dtype) for t in tensors), default=0))


_FLOAT_BYTES = 4
_BLOCK = 64  # rows and columns that one block of the float32 kernel handles


@kernel_stages(_aten._scaled_dot_product_efficient_attention_backward)
def efficient_backward_stages(signature: Signature) -> tuple[Stage, ...]:
    """``_efficient_attention_backward`` in ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``, of float32
    (for halves PyTorch prefers others). First (grad · out) summed over each head, then what the splits of the keys add
    their gradient of the query into: GradQTempStorage of ``mem_eff_attention/kernel_backward.h``, 16 bytes and a block
    of floats each. On an H200 it took 6,297,600 bytes for queries of (4, 12, 512, 64).
    """
    grad_out, query, key = signature.inputs[:3]
    if query.dtype is not torch.float32:
        return ()
    batch, heads, length, size = query
    delta_bytes = batch * heads * length * _FLOAT_BYTES
    blocks = ceil(length / _BLOCK) * ceil(size / _BLOCK) if key[2] > _BLOCK else 0
    return Stage((grad_out.nbytes, delta_bytes)), Stage(
        (delta_bytes, batch * heads * blocks * (16 + _BLOCK * _BLOCK * _FLOAT_BYTES)))


@kernel_stages(_aten._scaled_dot_product_cudnn_attention_backward)
def cudnn_backward_stages(signature: Signature) -> tuple[Stage, ...]:
    """``run_cudnn_SDP_bprop`` in ``aten/src/ATen/native/cudnn/MHA.cpp``: a copy of a gradient whose rows have gaps,
    then by ``get_fe_workspace_size_node`` of CompositeSDPABackwardNode (cudnn-frontend, cuDNN 9,
    node/scaled_dot_product_flash_attention.h) the query's gradient and the row sums in float32. What cuDNN's engine
    adds, as for the full heads of grouped queries, is not known.
    """
    grad_out, query = signature.inputs[:2]
    if not query.numel:
        return ()
    workspace = query.numel * _FLOAT_BYTES + query.numel // query[-1] * _FLOAT_BYTES
    return (Stage((workspace,) if grad_out.stride[-1] == 1 else (grad_out.nbytes, workspace)),)


@kernel_stages(_aten._scaled_dot_product_flash_attention_backward)
def flash_backward_stages(signature: Signature) -> tuple[Stage, ...]:
    """``mha_bwd`` in ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``: row sums and the query's
    gradient in float32; with grouped queries, the gradients of keys and values per query head.
    """
    _, query, key = signature.inputs[:3]
    batch, heads, length, size = query
    rounded_length = ceil(length / 128) * 128
    rounded_size = ceil(size / 32) * 32 if size <= 192 else 256
    blocks = [batch * heads * rounded_length * _FLOAT_BYTES,
              batch * rounded_length * heads * rounded_size * _FLOAT_BYTES]
    if key[1] != heads:
        blocks += 2 * [batch * key[2] * heads * size * query.dtype.itemsize]
    return (Stage(tuple(blocks)),)


@kernel_stages(_aten._flash_attention_backward)
def _flash_varlen_backward(signature: Signature) -> tuple[Stage, ...]:
    """``mha_bwd`` as above, of [batch, length, heads, size]; ``mha_varlen_bwd`` of packed [tokens, heads, size], whose
    row sums and query's gradient have 128 rows more for each text.
    """
    _, query, key, *others = signature.inputs
    *_, heads, size = query
    if len(query) == 4:
        rows = query[0] * ceil(query[1] / 128) * 128
    else:
        rows = query[0] + 128 * (others[3].numel - 1)  # behind value, out and logsumexp: where texts begin
    blocks = [heads * rows * _FLOAT_BYTES, rows * heads * (ceil(size / 32) * 32 if size <= 192 else 256) * _FLOAT_BYTES]
    if key[-2] != heads:
        blocks += 2 * [key.numel // key[-2] * heads * query.dtype.itemsize]
    return (Stage(tuple(blocks)),)


@kernel_stages(_aten._ctc_loss)
def _ctc_loss(signature: Signature) -> tuple[Stage, ...]:
    """LossCTC.cu: where each target begins, and both lengths, for the kernel."""
    batch = signature.inputs[0][1]
    return kept_stage(*[batch * _INDEX_BYTES] * 3)


@kernel_stages(_aten._ctc_loss_backward)
def _ctc_loss_backward(signature: Signature) -> tuple[Stage, ...]:
    """The same, and the states from the end on; for many classes (``is_large``) sums of states that are blanks."""
    log_probs, states = signature.args[1], signature.args[6]
    steps, batch, classes = log_probs
    first = kept_stage(*[batch * _INDEX_BYTES] * 3, states.nbytes)
    if 2 * steps + 24 * batch // 10 + 2 * classes // 10 <= 450:
        return first
    blanks = batch * steps * (states[2] // 2 + 1) * states.dtype.itemsize
    return first + one_stage(blanks, blanks)  # logsumexp takes the largest off in another one


# What kernels of the CPU allocate, and in which order their outputs. Source: the files of ``aten/src/ATen/native`` that
# are named at each rule, as of PyTorch 2.13. oneDNN's own buffers depend on the processor and are left out.

@host_memory(_aten.convolution_backward)
def _convolution_backward(signature: Signature) -> KernelMemory:
    """mkldnn/Conv.cpp (mkldnn_convolution_backward_weights) and ConvolutionMM2d.cpp: the bias before the weight.
    Without oneDNN groups run one by one, and their results are joined in the order of the outputs: Convolution.cpp.
    """
    _, x, w, _, stride, _, dilation, _, _, groups, _ = signature.args
    is_joined = groups > 1 and not uses_onednn(x, w, stride, dilation, groups)
    return (), None if is_joined else (0, 2, 1)


def uses_onednn(x: TensorSpec, w: TensorSpec, stride: list[int], dilation: list[int], groups: int) -> bool:
    """Convolution.cpp, use_mkldnn; processor and threads are assumed to be this machine's."""
    if not torch._C._get_mkldnn_enabled():
        return False
    if x.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if x.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    window = w[2:] if len(w) > 3 else (1, *w[2:])
    is_product = window[-2:] == (1, 1) and {*stride, *dilation} == {1} and x[0] < 16
    is_large = groups > 1 or min(window[-2:]) > 3 or x[0] > 1 or x.numel > 20480
    return x.dtype == torch.float32 and is_large and not (is_product and torch.get_num_threads() == 1)


# LossCTC.cpp: the states before the losses; those from the end on beside the gradient
host_memory(_aten._ctc_loss)(lambda signature: ((), (1, 0)))
host_memory(_aten._ctc_loss_backward)(lambda signature: (one_stage(signature.args[6].nbytes), None))
# mkldnn/RNN.cpp: the states before weights and biases
host_memory(_aten.mkldnn_rnn_layer_backward)(lambda signature: ((), (0, 5, 6, 1, 2, 3, 4)))


@host_memory(_aten.native_batch_norm_backward)
def _batch_norm_backward(signature: Signature) -> KernelMemory:
    """Normalization.cpp, batch_norm_backward_cpu: where both inputs lie alike, the gradient of the input is allocated a
    second time (batch_norm_backward_cpu_template) and the first is given back at the end.
    """
    gradient, x = signature.inputs[:2]
    is_wanted: list[bool] = signature.args[9]
    layout = _dense_layout(x)
    if not is_wanted[0] or layout is None or layout != _dense_layout(gradient):
        return (), None
    first = next(i for i, index in enumerate((1, 2, 0)) if is_wanted[index])
    return (Stage((x.nbytes,), before=first, kept=True),), (1, 2, 0)


_QUERY_PARTS = ((768, 256), (192, 64), (0, 32))  # FlashAttentionKernel.cpp: from how many rows on, rows of a part
_KEY_PART = 512


@host_memory(_aten._scaled_dot_product_flash_attention_for_cpu,
             _aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention(signature: Signature) -> KernelMemory:
    """FlashAttentionKernel.cpp: for each thread scores, also in 16 bits where the query has them; forward two numbers a
    row and a part of the output, backward the scores' gradients, sums of rows and the gradient with heads behind rows.
    """
    *gradient, query, key = signature.inputs[:2 + (len(signature.outputs) > 2)]
    size, threads = max(_FLOAT_BYTES, query.dtype.itemsize), torch.get_num_threads()
    rows = min(query[2], next(rows for least, rows in _QUERY_PARTS if query[2] >= least))
    scores = (1 + len(gradient)) * rows * min(key[2], _KEY_PART)
    narrow = threads * scores * query.dtype.itemsize if query.dtype.itemsize < size else 0
    if not gradient:
        return one_stage(threads * (scores + rows * (2 + query[3])) * size, narrow), None
    copied = sum([copy_bytes(_permuted(g, (0, 2, 1, 3))) for g in gradient])
    return one_stage(copied, threads * scores * size, narrow, rows * size), None


def _dense_layout(t: TensorSpec) -> str | None:
    """Whether ``t`` lies in memory as NCHW or as NHWC, the second where both are true and it has four dimensions."""
    if len(t) in (4, 5) and is_contiguous(_channels_last(t)):
        return "channels last"
    return "contiguous" if is_contiguous(t) else None


def _channels_last(t: TensorSpec) -> TensorSpec:
    return _permuted(t, (0, *range(2, len(t)), 1))


def _permuted(t: TensorSpec, order: tuple[int, ...]) -> TensorSpec:
    return TensorSpec.of(tuple(t[i] for i in order), tuple(t.stride[i] for i in order), t.dtype, t.device)
