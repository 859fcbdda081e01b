"""FLOPs and MACs of calls of torch's functions as DeepSpeed's profiler and those made after it count them (calflops
0.3.2, ``calflops/pytorch_ops.py``): a multiply-add is two FLOPs, an element of an activation or a pooling is one.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .function_call import Rule
from .fvcore_handle import estimate_einsum

Count = tuple[int, int]


def count_elements(input: Tensor, *args: Any, **kwargs: Any) -> Count:
    """One FLOP for each element of the input."""
    return input.numel(), 0


def count_nothing(*args: Any, **kwargs: Any) -> Count:
    """No FLOP."""
    return 0, 0


def count_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Count:
    """Products alone, without the bias."""
    return _double(input.numel() * weight.shape[0])


def _double(macs: int) -> Count:
    return 2 * macs, macs


def count_convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                      dilation: Any = 1, groups: int = 1) -> Count:
    """Products, and one FLOP for each output with a bias. ``padding="same"`` is half of the kernel on each side."""
    kernel, spatial = weight.shape[2:], input.shape[2:]
    dilations = _expand(dilation, len(kernel))
    if padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilations, kernel))
    paddings = _expand(0 if padding == "valid" else padding, len(kernel))
    outputs = input.shape[0] * math.prod(
        (size + 2 * p - (d * (k - 1) + 1)) // s + 1
        for size, p, d, k, s in zip(spatial, paddings, dilations, kernel, _expand(stride, len(kernel))))
    macs = math.prod(kernel) * input.shape[1] * (weight.shape[0] // groups) * outputs
    return 2 * macs + (0 if bias is None else weight.shape[0] * outputs), macs


def count_transposed(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Count:
    """Products; a bias counts for as many outputs as a convolution with these arguments would have."""
    kernel, channels = weight.shape[2:], weight.shape[1]
    spatial = [(size + 2 * p - (d * (k - 1) + 1)) // s + 1
               for size, k, p, s, d in zip(input.shape[2:], kernel, *(_expand(value, len(kernel))
                                                                      for value in (padding, stride, dilation)))]
    macs = math.prod(kernel) * input.shape[1] * (channels // groups) * input.shape[0] * math.prod(input.shape[2:])
    return 2 * macs + (0 if bias is None else channels * input.shape[0] * math.prod(spatial)), macs


def _expand(value: Any, dims: int) -> Sequence[int]:
    """A size for each dimension."""
    return value if isinstance(value, (tuple, list)) else (value, ) * dims


def count_batch_norm(input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
                     training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Count:
    """Five FLOPs for each element in training, two in evaluation; one less without a weight."""
    return input.numel() * ((5 if training else 2) - (weight is None)), 0


def count_norm(input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Count:
    """Five FLOPs for each element, four without a weight."""
    return input.numel() * (5 - (weight is None)), 0


def count_instance_norm(input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None,
                        bias: Any = None, *args: Any, **kwargs: Any) -> Count:
    """The same."""
    return count_norm(input, None, weight)


def count_interpolation(input: Tensor, size: Any = None, scale_factor: Any = None, *args: Any, **kwargs: Any) -> Count:
    """The sizes given, multiplied, or the elements of the input: calflops leaves a scale out."""
    return (input.numel() if size is None else math.prod(_expand(size, 1))), 0


def count_product(input: Tensor, other: Tensor, *, out: Any = None) -> Count:
    """Products of ``matmul``: the left elements, each with the columns of the right."""
    return _double(input.numel() * other.shape[-1])


def count_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **kwargs: Any) -> Count:
    """Products, and a FLOP for each element of what is added."""
    flops, macs = count_product(mat1, mat2)
    return flops + input.numel(), macs


def count_pair(input: Any, other: Any, **kwargs: Any) -> Count:
    """A FLOP for each element of two arguments made one shape."""
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else () for value in (input, other)]
    dims = max(map(len, shapes))
    # aligned at the first dimension, as those tools do
    first, second = (shape + (1, ) * (dims - len(shape)) for shape in shapes)
    return math.prod(map(max, first, second)), 0


def count_einsum(equation: str, *operands: Tensor) -> Count:
    """What NumPy's report of the best order says, to four digits; no MACs."""
    return int(estimate_einsum(equation.replace(" ", ""), [list(t.shape) for t in operands])), 0


_POOLS = [f"F.{adaptive}{kind}_pool{d}d" for adaptive in ("", "adaptive_") for kind in ("avg", "max")
          for d in (1, 2, 3)]
ACTIVATIONS: dict[str, Rule] = {
    f"F.{name}": count_elements for name in ("relu", "prelu", "elu", "relu6", "silu", "gelu")}
POOLS_AND_SOFTMAX: dict[str, Rule] = dict.fromkeys([*_POOLS, "F.softmax"], count_elements)
ARITHMETIC: dict[str, Rule] = {
    "torch.matmul": count_product, "Tensor.matmul": count_product, "torch.addmm": count_addmm,
    "Tensor.addmm": count_addmm, "torch.baddbmm": count_addmm, "torch.mul": count_pair, "Tensor.mul": count_pair,
    "torch.add": count_pair, "Tensor.add": count_pair}
CALFLOPS_RULES: dict[str, Rule] = {
    "F.linear": count_linear, **{f"F.conv{d}d": count_convolution for d in (1, 2, 3)},
    **{f"F.conv_transpose{d}d": count_transposed for d in (1, 2, 3)}, **ACTIVATIONS, "F.leaky_relu": count_elements,
    "F.batch_norm": count_batch_norm, "F.layer_norm": count_norm, "F.instance_norm": count_instance_norm,
    "F.group_norm": count_norm, **POOLS_AND_SOFTMAX, "F.upsample": count_interpolation,
    "F.interpolate": count_interpolation, "F.embedding": count_nothing, **ARITHMETIC, "torch.einsum": count_einsum}

_BESIDES = {"RNN": 1, "GRU": 7, "LSTM": 10}  # additions and products of states, by hidden size


def count_recurrent(module: nn.Module, input: Tensor, of_product: int = 2) -> int:
    """FLOPs of a recurrent layer or cell: each weight ``of_product`` times a position, less a gate's first addition
    where that is twice, and what is added and multiplied besides. A layer of two directions is twice the first.
    """
    kind = type(module).__name__.removesuffix("Cell")
    is_cell = kind != type(module).__name__
    flops = 0
    for suffix in [""] if is_cell else [f"_l{i}" for i in range(module.num_layers)]:  # type: ignore[arg-type]
        weights = [getattr(module, f"weight_{name}{suffix}") for name in ("ih", "hh")]
        flops += sum(of_product * w.numel() - (of_product - 1) * w.shape[0] for w in weights)
        flops += _BESIDES[kind] * module.hidden_size  # type: ignore[operator]
        if module.bias:
            flops += sum(getattr(module, f"bias_{name}{suffix}").numel() for name in ("ih", "hh"))
    positions = input.shape[0] if is_cell else input.shape[0] * input.shape[1]
    return int(flops) * positions * (2 if not is_cell and module.bidirectional else 1)


RECURRENT = (nn.RNN, nn.GRU, nn.LSTM, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
