"""How fvcore 0.1.5 counts each operator, and the arguments in the form in which its handles read them."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import numpy
import torch


class Value:
    """An argument or a result of an operator, with the methods of a ``torch._C.Value`` that handles call."""

    def __init__(self, value: Any) -> None:
        self._type, self._parts = None, []
        if isinstance(value, torch.Tensor):
            self._type, value = _TensorType(value), None
        elif isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
            self._parts, value = [Value(part) for part in value], None
        self._value = value

    def isCompleteTensor(self) -> bool:
        """Whether it is a tensor."""
        return self._type is not None

    def type(self) -> _TensorType | None:
        """Shape and dtype of a tensor; None of anything else."""
        return self._type

    def toIValue(self) -> Any:
        """What is not a tensor, as Python has it."""
        return self._value

    def node(self) -> Value:
        """What made it: itself, for its `inputs`."""
        return self

    def inputs(self) -> list[Value]:
        """The parts of a list of tensors."""
        return self._parts


class _TensorType:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._sizes, self._strides, self._dtype = list(tensor.shape), None, tensor.dtype
        if tensor.layout is torch.strided:
            self._strides = list(tensor.stride())

    def sizes(self) -> list[int]:
        return self._sizes

    def strides(self) -> list[int] | None:
        return self._strides

    def dim(self) -> int:
        return len(self._sizes)

    def dtype(self) -> torch.dtype:
        return self._dtype


_CONVOLUTIONS = {f"aten::conv{transpose}{d}d": (d, bool(transpose)) for transpose in ("", "_transpose")
                 for d in (1, 2, 3)}


def describe_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
                  result: Any) -> tuple[str, list[Value], list[Value]]:
    """An operator's name, all its arguments with the defaults of those not given, and its results. Convolutions are
    told by the one operator, ``aten::_convolution``, that a trace by ``torch.jit`` has for all of them.
    """
    name = str(func._schema.name)
    given = [args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
             for i, a in enumerate(func._schema.arguments)]
    if name in _CONVOLUTIONS and isinstance(given[4], str):
        name = "aten::_convolution_mode"  # padding="same"
    elif name in _CONVOLUTIONS:
        name, given = "aten::_convolution", _as_convolution(*_CONVOLUTIONS[name], given)
    elif name == "aten::convolution":
        name, given = "aten::_convolution", [*given, *_BACKEND]
    results = result if isinstance(result, (list, tuple)) else [result]
    return name, [Value(value) for value in given], [Value(value) for value in results]


def describe_function(function: Any, args: Sequence[Any], result: Any) -> tuple[str, list[Value], list[Value]]:
    """A class of `torch.autograd.Function`, or a scripted function, as the operator that a trace has for it: its name,
    its tensors and its result, which may be a tuple.
    """
    inputs = [Value(value) for value in args if isinstance(value, torch.Tensor)]
    if isinstance(function, type):
        return f"prim::PythonOp.{function.__name__}", inputs, [Value(result)]
    return "prim::CallFunction", [Value(function), *inputs], [Value(result)]


_BACKEND = (False, False, True, True)  # benchmark, deterministic, cudnn_enabled, allow_tf32


def _as_convolution(dims: int, transposed: bool, given: Sequence[Any]) -> list[Any]:
    """The arguments of ``_convolution`` for those of ``conv2d`` or ``conv_transpose2d`` and their like."""
    x, weight, bias, stride, padding, *rest = given
    if transposed:
        output_padding, groups, dilation = rest
    else:
        (dilation, groups), output_padding = rest, 0
    return [x, weight, bias, *(_expand(value, dims) for value in (stride, padding, dilation)), transposed,
            _expand(output_padding, dims), groups, *_BACKEND]


def _expand(value: Any, dims: int) -> Any:
    if isinstance(value, int):
        return [value] * dims
    return list(value) * (dims if len(value) == 1 else 1)


# How fvcore 0.1.5 counts each operator: a multiply-add is one, what is added besides is mostly left out. The counts
# are those of its ``fvcore/nn/jit_handles.py``.

Count = Union[int, float, "Counter[str]"]
#: Counts one call of an operator, from its arguments and results.
Handle = Callable[[list[Any], list[Any]], Count]


def _sizes(value: Value) -> list[int]:
    found = value.type()
    assert found is not None, "a tensor was expected"
    return found.sizes()


def _numel(value: Value) -> int:
    return math.prod(_sizes(value))


def make_product_handle(first: int, second: int, axis: int) -> Handle:
    """The elements of one argument, each with a size of another."""
    return lambda inputs, outputs: _numel(inputs[first]) * _sizes(inputs[second])[axis]


def count_convolution(inputs: list[Value], outputs: list[Value]) -> Counter[str]:
    """Products of a convolution, under the name ``conv``."""
    x, weight, y = _sizes(inputs[0]), _sizes(inputs[1]), _sizes(outputs[0])
    positions = (x if inputs[6].toIValue() else y)[2:]
    return Counter({"conv": x[0] * math.prod(weight) * math.prod(positions)})


def count_einsum(inputs: list[Value], outputs: list[Value]) -> int | float:
    """Half of what NumPy's report of the best order says, to four digits; exact in two forms of a batched product."""
    equation = str(inputs[0].toIValue()).replace(" ", "")
    shapes = [_sizes(part) for part in inputs[1].node().inputs()]
    letters: dict[str, str] = {}
    renamed = "".join(letters.setdefault(c, chr(97 + len(letters))) if c.isalpha() else c for c in equation)
    if renamed == "abc,abd->acd":
        return math.prod(shapes[0]) * shapes[-1][-1]
    if renamed == "abc,adc->adb":
        return math.prod(shapes[0]) * shapes[-1][1]
    report = numpy.einsum_path(renamed, *(numpy.broadcast_to(numpy.zeros(()), shape) for shape in shapes),
                               optimize="optimal")[1]
    return next(float(line.rpartition(":")[2]) // 2 for line in report.splitlines() if "optimized flop" in line.lower())


def make_norm_handle(weight_index: int) -> Handle:
    """Five for each element, four without a weight, which is the argument at that place."""
    return lambda inputs, outputs: _numel(inputs[0]) * (5 if inputs[weight_index].isCompleteTensor() else 4)


def count_batch_norm(inputs: list[Value], outputs: list[Value]) -> Count:
    """As another norm in training; in evaluation two for each element, one without a weight."""
    if inputs[5].toIValue():
        return make_norm_handle(1)(inputs, outputs)
    return _numel(inputs[0]) * (2 if inputs[1].isCompleteTensor() else 1)


def make_elementwise_handle(of_input: int, of_output: int) -> Handle:
    """So much for each element of the first argument, and of the result."""
    return lambda inputs, outputs: of_input * _numel(inputs[0]) + of_output * _numel(outputs[0])


_PRODUCT = make_product_handle(0, 1, -1)
FLOP_HANDLES: dict[str, Handle] = {
    "aten::addmm": make_product_handle(1, 2, -1), "aten::bmm": _PRODUCT, "aten::matmul": _PRODUCT,
    "aten::mm": _PRODUCT, "aten::linear": make_product_handle(0, 1, 0), "aten::_convolution": count_convolution,
    "aten::einsum": count_einsum, "aten::batch_norm": count_batch_norm, "aten::group_norm": make_norm_handle(2),
    "aten::layer_norm": make_norm_handle(2), "aten::instance_norm": make_norm_handle(1),
    "aten::upsample_nearest2d": make_elementwise_handle(0, 1),
    "aten::upsample_bilinear2d": make_elementwise_handle(0, 4),
    "aten::adaptive_avg_pool2d": make_elementwise_handle(1, 0), "aten::grid_sampler": make_elementwise_handle(0, 4)}
#: The elements of the result.
ACTIVATION_HANDLES: dict[str, Handle] = {
    "aten::_convolution": lambda inputs, outputs: Counter({"conv": _numel(outputs[0])}),
    **{f"aten::{name}": lambda inputs, outputs: _numel(outputs[0])
       for name in ("addmm", "bmm", "einsum", "matmul", "linear")}}

#: operators without arithmetic, which are not named as unsupported (``_IGNORED_OPS`` of fvcore/nn/jit_analysis.py, and
#: ``alias``, which stands here for what does nothing, such as dropout in evaluation)
IGNORED = frozenset(f"aten::{name}" for name in """
    alias Int ScalarImplicit __and__ arange bitwise_not cat chunk clamp clamp_ constant_pad_nd contiguous copy_ detach
    dropout
    empty eq expand flatten floor floor_divide full full_like gather ge gt index index_put_ masked_fill max narrow
    new_empty new_full new_zeros nonzero ones permute relu relu_ remainder reshape roll select size slice split
    split_with_sizes squeeze stack t to transpose type_as unbind unsqueeze unsqueeze_ view zeros zeros_like""".split())
