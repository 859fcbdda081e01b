"""Arguments and results of operators in the form in which handles of fvcore read them."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Value:
    """An argument or a result of an operator, with the methods of a ``torch._C.Value`` that handles call.

    >>> value = Value(torch.ones(2, 3))
    >>> value.isCompleteTensor(), value.type().sizes(), Value(None).isCompleteTensor(), Value(True).toIValue()
    (True, [2, 3], False, True)
    >>> [part.type().sizes() for part in Value([torch.ones(2), torch.ones(3)]).node().inputs()]
    [[2], [3]]
    """

    def __init__(self, value: Any) -> None:
        self._type, self._parts = None, []
        if isinstance(value, torch.Tensor):
            self._type, value = TensorType(value), None
        elif isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
            self._parts, value = [Value(part) for part in value], None
        self._value = value

    def isCompleteTensor(self) -> bool:
        """Whether it is a tensor."""
        return self._type is not None

    def type(self) -> TensorType | None:
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


class TensorType:
    """What is known of a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._sizes, self._strides, self._dtype = list(tensor.shape), None, tensor.dtype
        if tensor.layout is torch.strided:
            self._strides = list(tensor.stride())

    def sizes(self) -> list[int]:
        """Its shape."""
        return self._sizes

    def strides(self) -> list[int] | None:
        """None where it has none."""
        return self._strides

    def dim(self) -> int:
        """How many sizes there are."""
        return len(self._sizes)

    def dtype(self) -> torch.dtype:
        """Its dtype."""
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
    """A size for each dimension."""
    if isinstance(value, int):
        return [value] * dims
    return list(value) * (dims if len(value) == 1 else 1)
