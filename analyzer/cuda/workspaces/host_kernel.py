"""What kernels of the CPU allocate inside one operator, and the order in which they allocate its outputs. Source: the
files of ``aten/src/ATen/native`` named at each rule, as of PyTorch 2.13. oneDNN's own buffers (blocked copies of what a
convolution reads and writes) depend on the processor and are left out.
"""
from __future__ import annotations

import torch

from analyzer.meta.memory_need import KernelMemory, Stage, host_memory
from analyzer.meta.signature import Signature
from analyzer.meta.spec import TensorSpec

from .kernel_temporary import is_contiguous

_aten = torch.ops.aten


@host_memory(_aten.convolution_backward)
def _convolution_backward(signature: Signature) -> KernelMemory:
    """mkldnn/Conv.cpp (mkldnn_convolution_backward_weights) and ConvolutionMM2d.cpp: the bias before the weight.
    Without oneDNN groups run one by one, and their results are joined in the order of the outputs: Convolution.cpp.
    """
    _, x, w, _, stride, _, dilation, _, _, groups, _ = signature.args
    is_joined = groups > 1 and not uses_onednn(x, w, stride, dilation, groups)
    return (), None if is_joined else (0, 2, 1)


def uses_onednn(x: TensorSpec, w: TensorSpec, stride: list[int], dilation: list[int], groups: int) -> bool:
    """Convolution.cpp, use_mkldnn; processor and threads are taken to be this machine's."""
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


@host_memory(_aten.mkldnn_rnn_layer_backward)
def _rnn_layer_backward(signature: Signature) -> KernelMemory:
    """mkldnn/RNN.cpp: the states before weights and biases."""
    return (), (0, 5, 6, 1, 2, 3, 4)


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


def _dense_layout(t: TensorSpec) -> str | None:
    """Whether ``t`` lies in memory as NCHW or as NHWC, the second where both are true and it has four dimensions."""
    if len(t) in (4, 5) and is_contiguous(_channels_last(t)):
        return "channels last"
    return "contiguous" if is_contiguous(t) else None


def _channels_last(t: TensorSpec) -> TensorSpec:
    order = (0, *range(2, len(t)), 1)
    return TensorSpec.of(tuple(t[i] for i in order), tuple(t.stride[i] for i in order), t.dtype, t.device)
