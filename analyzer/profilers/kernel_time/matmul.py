"""Time of matrix products and convolutions."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.convolution import convolution_time
from analyzer.hardware.kernel_time.estimate import KernelTime, join, join_known
from analyzer.hardware.kernel_time.matmul import matmul_time
from analyzer.hardware.kernel_time.pointwise import pointwise_time, stream_time
from analyzer.hardware.kernel_time.reduction import reduction_time
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.meta.spec import TensorSpec as Spec
from analyzer.profilers.traffic import bind

from .call import convolutions_use_tf32, per_dimension, products_use_tf32, recurrent_layers_use_tf32, register_time_impl

# The time of matrix products: which sizes, format and layout each operator multiplies, and what runs beside it.
#
# Recurrent layers are the products of their matrices, one for all steps with the input and one a step with the state.

_UNMEASURED = 0.5  # assumed: the least spread of what no measured row tells of
_REAL = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}


def name_of_dtype(spec: Spec) -> str:
    """A dtype's name in torch, without the module."""
    return str(spec.dtype).removeprefix("torch.")


def row_elements(spec: Spec) -> int:
    """Elements from one row of a matrix to the next in memory, in the direction in which they lie together."""
    if len(spec) < 2:
        return 0
    rows, columns = spec[-2:]
    row_stride, column_stride = spec.stride[-2:]
    if column_stride == 1 and (rows > 1 or row_stride >= columns):
        return row_stride if rows > 1 else 0
    return column_stride if columns > 1 else 0


def product_time(batch: int, m: int, n: int, k: int, dtype: str, device: DeviceSpec, rows: int | None = None,
                 use_tf32: bool | None = None, has_weights: bool = True) -> KernelTime | None:
    """The time of products, also of complex numbers, which are multiplied as real ones of twice the n and k.

    ``rows``: elements that the operands' rows are whole numbers of, 0 for any.
    """
    if dtype in _REAL:
        dtype, n, k = _REAL[dtype], 2 * n, 2 * k
    tf32 = dtype == "float32" and (products_use_tf32() if use_tf32 is None else use_tf32)
    return matmul_time(batch, m, n, k, dtype, device, allow_tf32=tf32, row_elements=rows or 16, has_weights=has_weights)


def matrices_time(a: Spec, b: Spec, out: Spec, device: DeviceSpec) -> KernelTime | None:
    """``a @ b`` of matrices, or of batches of them, of which neither is taken to be a parameter."""
    batch = math.prod(a[:-2])
    rows = math.gcd(row_elements(a), row_elements(b), out[-1])
    if a.dtype is torch.float32 and not (a.stride[-1] == b.stride[-2] == 1 or products_use_tf32()):
        rows = 0  # the CUDA cores' kernels load whole rows well, whatever their length, but where both run along k
    return product_time(batch, a[-2], b[-1], a[-1], name_of_dtype(a), device, rows, has_weights=len(b) == 2)


def _mm(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    a, b = signature.inputs[:2]
    return matrices_time(a, b, signature.outputs[0], device)


def _addmm(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """``beta * self + a @ b``: a bias vector is added by cuBLASLt in the same kernel, a matrix is copied to the output
    first, unless the output is ``self`` (``addmm_out_cuda_impl`` and ``baddbmm_out_cuda_impl`` in ATen's Blas.cpp).
    """
    added, a, b = signature.inputs[:3]
    out = signature.outputs[0] if signature.outputs else added
    time = matrices_time(a, b, out, device)
    is_in_place = signature.op._schema.name.endswith("_")
    if is_in_place or signature.kwargs.get("beta", 1) == 0 or len(a) == 2 and len(added) == 1:
        return time
    return join_known(time, stream_time(out.nbytes + added.nbytes, device))


def _addbmm(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """One product after another, each added to the output."""
    _, a, b = signature.inputs[:3]
    rows = math.gcd(row_elements(a), row_elements(b), b[-1])
    one = product_time(1, a[-2], b[-1], a[-1], name_of_dtype(a), device, rows)
    return None if one is None else join([one] * a[0])


def _linear(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """All rows of x [..., k] by weight [n, k]."""
    x, weight = signature.inputs[:2]
    n = weight[0] if len(weight) == 2 else 1
    return product_time(1, math.prod(x[:-1]), n, x[-1], name_of_dtype(x), device, math.gcd(x[-1], n))


def _matmul(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """``torch.matmul``, which folds the batch of a into its rows where b has none."""
    a, b = signature.inputs[:2]
    m, n, k = (a[-2] if len(a) > 1 else 1), (b[-1] if len(b) > 1 else 1), a[-1] if a else 1
    rows = math.gcd(row_elements(a), row_elements(b), n)
    if len(b) <= 2:
        return product_time(1, math.prod(a[:-1]), n, k, name_of_dtype(a), device, rows)
    batch = max(signature.outputs[0].numel // max(m * n, 1), 1)
    return product_time(batch, m, n, k, name_of_dtype(a), device, rows, has_weights=False)


def _vectors(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Products with a vector, which read their operands once: mv, addmv, dot, vdot, addr."""
    nbytes = sum(spec.nbytes for spec in signature.inputs) + sum(spec.nbytes for spec in signature.outputs)
    return stream_time(nbytes, device, kernels=2 if "dot" in signature.op._schema.name else 1)


def _linear_backward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    x, grad, weight = signature.inputs[:3]
    mask = signature.args[3] if len(signature.args) > 3 else signature.kwargs["output_mask"]
    m, n, k = math.prod(x[:-1]), weight[0], weight[-1]
    rows, dtype = math.gcd(n, k), name_of_dtype(x)
    parts = [product_time(1, m, k, n, dtype, device, rows)] if mask[0] else []
    if mask[1]:
        parts.append(product_time(1, n, k, m, dtype, device, rows))
    if mask[2]:
        parts.append(stream_time(grad.nbytes, device))
    return join_known(*parts)


def _grouped(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """Groups share what they split evenly, which is what is known of them without their offsets; one kernel for all."""
    a, b = signature.inputs[:2]
    m, n, k = a[-2], b[-1], a[-1]
    if len(a) == 3 and len(b) == 3:
        return product_time(a[0], m, n, k, name_of_dtype(a), device, math.gcd(k, n))
    offsets = next((spec for spec in signature.inputs[2:] if len(spec) == 1 and not spec.dtype.is_floating_point), None)
    groups = offsets[0] if offsets is not None and offsets[0] else 1
    if len(a) == 2 and len(b) == 3:
        m = -(-m // groups)
    elif len(a) == 3:
        n = -(-n // groups)
    else:
        k = -(-k // groups)
    return product_time(groups, m, n, k, name_of_dtype(a), device)


def _narrow_weight(weight: Spec, x: Spec, n: int, device: DeviceSpec) -> KernelTime | None:
    """A product with a weight of fewer bits than x: as one of x's format, less what memory does not have to bring."""
    m, k, itemsize = math.prod(x[:-1]), x[-1], x.dtype.itemsize
    product = product_time(1, m, n, k, name_of_dtype(x), device)
    others = x.nbytes + m * n * itemsize
    read, whole = stream_time(others + weight.nbytes, device), stream_time(others + n * k * itemsize, device)
    if product is None or read is None or whole is None or product.bound == "arithmetic":
        return product
    seconds = max(product.seconds - whole.seconds + read.seconds, read.seconds)
    return KernelTime(seconds, max(product.spread, _UNMEASURED), "memory", product.kernels)


def _packed_weight(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    x, weight = signature.inputs[:2]
    return _narrow_weight(weight, x, signature.outputs[0][-1], device)


def _product_4bit(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """bitsandbytes: a vector meets the packed weight in one kernel; for more rows it is unpacked first."""
    x, weight = signature.inputs[:2]
    n, k = signature.args[2]
    if math.prod(x[:-1]) == 1:
        return _narrow_weight(weight, x, n, device)
    return join_known(stream_time(weight.nbytes + n * k * x.dtype.itemsize, device),
                  product_time(1, math.prod(x[:-1]), n, k, name_of_dtype(x), device))


def _recurrent_products(weights: Iterable[Spec], steps: int, batch: int, device: DeviceSpec, dtype: str,
                        matrices: int) -> KernelTime | None:
    """Of each layer's ``matrices`` that of its input meets all rows at once, the others one step's rows at a time."""
    times: list[KernelTime | None] = []
    use_tf32 = recurrent_layers_use_tf32()
    for index, weight in enumerate(spec for spec in weights if len(spec) == 2):
        n, k = weight
        if index % matrices == 0:
            times.append(product_time(1, steps * batch, n, k, dtype, device, use_tf32=use_tf32))
        else:
            one = product_time(1, batch, n, k, dtype, device, use_tf32=use_tf32)
            times.append(None if one is None else KernelTime(
                one.seconds * steps, one.spread, "latency", one.kernels * steps))
    return join_known(*times)


def _rnn(passes: int) -> Callable[[Signature, DeviceSpec], KernelTime | None]:
    """The recurrent layers of cuDNN; backward, each matrix meets gradient and data."""
    def time(signature: Signature, device: DeviceSpec) -> KernelTime | None:
        x, weights, batch_first = signature.args[0], signature.args[1], bool(signature.args[10 if passes == 1 else 14])
        sizes: Any = signature.args[14 if passes == 1 else 18]
        if sizes:
            steps, batch = len(sizes), -(-sum(sizes) // len(sizes))
        else:
            steps, batch = (x[1], x[0]) if batch_first else (x[0], x[1])
        projects = bool(bind(signature, signature.op._schema).get("proj_size"))
        one = _recurrent_products(weights, steps, batch, device, name_of_dtype(x), 3 if projects else 2)
        return None if one is None else KernelTime(one.seconds * passes, max(one.spread, _UNMEASURED), one.bound,
                                                   one.kernels * passes)
    return time


_RULES: dict[str, Callable[[Signature, DeviceSpec], KernelTime | None]] = {
    "mm bmm _scaled_mm _scaled_mm_v2 _int_mm": _mm, "addmm baddbmm _addmm_activation": _addmm, "addbmm": _addbmm,
    "linear inner": _linear, "matmul linalg_matmul": _matmul, "mv addmv dot vdot addr": _vectors,
    "linear_backward": _linear_backward, "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2": _grouped,
    "_weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_with_scales_and_zeros _mixed_dtypes_linear":
        _packed_weight,
    "_cudnn_rnn": _rnn(1), "_cudnn_rnn_backward": _rnn(2)}
for _names, _rule in _RULES.items():
    for _name in _names.split():
        register_time_impl(f"aten::{_name}", _rule)
for _name in ("gemm_4bit", "gemv_4bit"):
    register_time_impl(f"bitsandbytes::{_name}", _product_4bit)
register_time_impl("bitsandbytes::int8_linear_matmul", _linear)


# Time of the operators that are convolutions: which ways they compute, and what runs beside cuDNN's kernels.

_COLUMNS = ("aten::_slow_conv2d_forward", "aten::thnn_conv2d", "aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d",
            "aten::slow_conv_transpose2d", "aten::slow_conv_transpose3d")
_FORWARD = ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable", "aten::cudnn_convolution",
            "aten::cudnn_convolution_transpose", "aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu",
            "aten::_conv_depthwise2d", "aten::conv_depthwise3d", *_COLUMNS)
_BACKWARD = ("aten::convolution_backward", "aten::convolution_backward_overrideable", "aten::_slow_conv2d_backward")


def _images(arguments: Mapping[str, Any]) -> TensorSpec:
    spec: TensorSpec = arguments["input"] if "input" in arguments else arguments["self"]
    return spec


def _is_channels_last(spec: TensorSpec) -> bool:
    """Whether the channels of an image or a volume lie beside each other, as ``suggest_memory_format`` tells it."""
    return len(spec) in (4, 5) and spec.stride[1] == 1 and spec.stride[-1] >= spec[1] and math.prod(spec[1:]) > 1


def _convolve(way: str, x: TensorSpec, y: TensorSpec, w: TensorSpec, arguments: Mapping[str, Any], transposed: bool,
              device: DeviceSpec) -> KernelTime | None:
    """One way of a convolution of ``x`` to ``y``, and the copies that PyTorch makes of tensors in another order."""
    dims = len(x) - 2
    channels_last = x.dtype != torch.float64 and (_is_channels_last(x) or _is_channels_last(w))
    allow_tf32 = arguments.get("allow_tf32")
    time = convolution_time(
        way, x[0], x[1], y[1], x[2:], y[2:], w[2:], arguments.get("groups", x[1] if w[1] == 1 else 1),
        str(x.dtype).removeprefix("torch."), device, stride=per_dimension(arguments.get("stride"), dims),
        dilation=per_dimension(arguments.get("dilation"), dims),
        allow_tf32=convolutions_use_tf32() if allow_tf32 is None else allow_tf32,
        channels_last=channels_last, transposed=transposed)
    read = {"forward": (x, w), "input": (y, w), "weight": (x, y)}[way]
    copied = [spec for spec in read if len(spec) in (4, 5) and channels_last != _is_channels_last(spec)
              and _pixels(spec) > 1 and spec[1] > 1]
    return join_known(time, *(stream_time(2 * spec.nbytes, device) for spec in copied))


def _pixels(spec: TensorSpec) -> int:
    return spec.numel // (spec[0] * spec[1]) if spec.numel else 0


def time_forward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """A convolution; a bias is added by a kernel of its own, except by PyTorch's depthwise kernels and fused ones."""
    name = signature.op._schema.name
    arguments = signature.named_arguments()
    x, w, y = _images(arguments), arguments["weight"], signature.outputs[0]
    transposed = bool(arguments.get("transposed", "transpose" in name))
    time = _convolve("forward", x, y, w, arguments, transposed, device)
    groups = arguments.get("groups", 1)
    if arguments.get("bias") is not None and "depthwise" not in name and "relu" not in name and groups != x[1]:
        bias = pointwise_time(y.numel, 2 * y.nbytes, device, dimensions=3, operands=3)  # a value a channel
        time = join_known(time, bias)
    if name in _COLUMNS:  # im2col before the product, or col2im after it
        columns = (x if transposed else y).numel // (x if transposed else y)[1] * w.numel // w[0]
        time = join_known(time, stream_time(2 * columns * x.dtype.itemsize, device))
    return time


def time_backward(signature: Signature, device: DeviceSpec) -> KernelTime | None:
    """The gradients that are asked for: each is a convolution, that of the bias a sum."""
    arguments = signature.named_arguments()
    x, w, y = _images(arguments), arguments["weight"], arguments["grad_output"]
    transposed = bool(arguments.get("transposed", False))
    wants_input, wants_weight, wants_bias = arguments["output_mask"]
    times = [_convolve(way, x, y, w, arguments, transposed, device)
             for way, is_wanted in (("input", wants_input), ("weight", wants_weight)) if is_wanted]
    if wants_bias:
        channels = y[1]
        times.append(reduction_time(channels, y.numel // max(1, channels), y.dtype.itemsize, device,
                                    reduces_fastest=not _is_channels_last(y)))
    return join_known(*times)


for _name in _FORWARD:
    register_time_impl(_name, time_forward)
for _name in _BACKWARD:
    register_time_impl(_name, time_backward)
