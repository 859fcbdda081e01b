"""What calls of operators are told apart by: specs of tensors, signatures and keys of operators."""
from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Container
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.library import CustomOpDef  # type: ignore[attr-defined]  # public, and not in its __all__

from analyzer.errors import InputError

from .address_space import MetaStorage, find_storage
from .intercept.mode_stack import without_modes

NUMBERS = (bool, int, float, complex)
"""What an element of a tensor can be made of."""

LITERALS = (type(None), bool, int, float, str)
"""What settings are made of: values that read the same in any file."""

CODE_CONSTANTS = (*LITERALS, complex, bytes)
"""What the compiled code of a function can hold, besides tuples of it."""

ARGUMENTS = (*LITERALS, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What operators and forward functions take besides tensors, and cannot change."""

VALUES = (*ARGUMENTS, bytes, torch.Size)
"""What can take the place of an equal one wherever it is found."""

LEAVES = frozenset({*LITERALS, complex, bytes, type, type(len), type(lambda: 0), torch.dtype, torch.device, torch.Size})
"""Exact types of what is never looked into for tensors."""


SPARSE_LAYOUTS = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


class TensorSpec(tuple[int, ...]):
    """The shape of a tensor, as a tuple, which also knows stride, dtype and simulated device.

    Specs are interned: equal ones are the same object, so a log of many calls holds each once.

    >>> s = TensorSpec.of((2, 3), (3, 1), torch.float32, "cuda:0")
    >>> s == (2, 3), s.numel, s.nbytes, s is TensorSpec.of((2, 3), (3, 1), torch.float32, "cuda:0")
    (True, 6, 24, True)
    """

    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    numel: int
    nbytes: int  #: bytes of the elements it addresses: numel times the item size (an expanded tensor counts as full)
    parts: tuple[TensorSpec, ...]  #: of a sparse tensor, which has no strides: its indices and, last, its values
    #: contents, of arguments alone by which an operator costs more or less: cumulative lengths of packed sequences
    values: tuple[int, ...] | None

    _interned: dict[tuple[Any, ...], TensorSpec] = {}

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str,
           parts: tuple[TensorSpec, ...] = (), values: tuple[int, ...] | None = None) -> TensorSpec:
        own = tuple([(part, part.stride, part.dtype) for part in parts]) if parts else ()
        key = (shape, stride, dtype, device, own, values)
        spec = cls._interned.get(key)
        if spec is None:
            spec = cls(shape)
            spec.stride, spec.dtype, spec.device, spec.parts, spec.values = stride, dtype, device, parts, values
            spec.numel = math.prod(shape)
            spec.nbytes = sum(part.nbytes for part in parts) if parts else spec.numel * dtype.itemsize
            cls._interned[key] = spec
        return spec

    def with_values(self, values: tuple[int, ...]) -> TensorSpec:
        return TensorSpec.of(self.shape, self.stride, self.dtype, self.device, values=values)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self)

    def __bool__(self) -> bool:
        return True  # a record of a tensor, also of one without dimensions

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self)}@{self.device}"

    def __reduce__(self) -> tuple[object, ...]:
        return TensorSpec.of, (tuple(self), self.stride, self.dtype, self.device, self.parts, self.values)


name_device: Callable[[torch.device], str] = functools.cache(str)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor that lives on meta; of a jagged one, that of its values."""
    layout = tensor.layout
    if layout is not torch.strided:
        if layout is torch.jagged:
            return spec_of(tensor._values)  # type: ignore[arg-type]
        parts = tuple(map(spec_of, parts_of(tensor))) if layout in SPARSE_LAYOUTS else ()
        return TensorSpec.of(tuple(tensor.shape), (), tensor.dtype, parts[-1].device if parts else str(tensor.device),
                             parts)
    if tensor.is_nested:
        shape = padded_shape(tensor)
        return TensorSpec.of(shape, tuple(math.prod(shape[i + 1:]) for i in range(len(shape))), tensor.dtype,
                             str(tensor.device))
    storage = find_storage(tensor)
    device = storage.device if isinstance(storage, MetaStorage) else tensor.device
    return TensorSpec.of(tuple(tensor.shape), tensor.stride(), tensor.dtype, name_device(device))


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a sparse one is made of, its values last."""
    with without_modes():
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def strided_of(tensor: torch.Tensor) -> torch.Tensor:
    """What has a storage: the values of a sparse tensor, any other itself."""
    return parts_of(tensor)[-1] if tensor.layout in SPARSE_LAYOUTS else tensor


def padded_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The largest size in each dimension of a strided nested tensor's parts, to which kernels pad the others."""
    with without_modes():
        sizes: torch.Tensor = tensor._nested_tensor_size()
        return len(sizes), *map(int, sizes.max(0).values.tolist())


def to_specs(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return spec_of(tree)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return [to_specs(x) for x in tree]
    if isinstance(tree, dict):
        return {k: to_specs(v) for k, v in tree.items()}
    return tree.nbytes() if isinstance(tree, torch.UntypedStorage) else tree  # which a signature would keep in memory


@functools.cache
def _argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def name_arguments(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call was given, by the names of the operator's schema; defaults are left out."""
    return {**dict(zip(_argument_names(op), args)), **kwargs}


class Launch(NamedTuple):
    """How a compiled graph launches the kernels of a call: one by one from its own program, or ``captured`` in a CUDA
    graph. The first call of a graph has the number of ``inputs`` that the graph is given, others None.
    """

    captured: bool = False
    inputs: int | None = None


class Signature:
    """Shared by all calls of one operator with the same specs, scalars and outputs: a `TensorSpec` is in place of every
    tensor. ``memo`` is where a profiler keeps what it derived, under a key of its own. ``launch``: None where PyTorch
    dispatches the operator.
    """

    __slots__ = ("op", "args", "kwargs", "inputs", "outputs", "launch", "memo")

    def __init__(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
                 inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], launch: Launch | None = None) -> None:
        self.op, self.args, self.kwargs, self.inputs, self.outputs = op, args, kwargs, inputs, outputs
        self.launch = launch
        self.memo: dict[Any, Any] = {}

    def launched(self, launch: Launch) -> Signature:
        """The same call, made by a compiled graph."""
        found: Signature | None = self.memo.get(launch)
        if found is None:
            found = self.memo[launch] = Signature(self.op, self.args, self.kwargs, self.inputs, self.outputs, launch)
        return found

    @property
    def is_sparse(self) -> bool:
        return any(spec.parts for spec in (*self.inputs, *self.outputs))

    def named_arguments(self) -> dict[str, Any]:
        return name_arguments(self.op, self.args, self.kwargs)

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(map(repr, self.args))}) -> {self.outputs}"


OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)
_NAME = re.compile(r"(\w+)::(\w+)(?:\.(\w+))?")
_ALWAYS_LOADED = ("aten", "prims")  # `import torch` defines all of theirs


def as_operator(key: Any) -> Any:
    """The operator of what ``@torch.library.custom_op`` made, anything else as it is."""
    return find_operator(key._qualname) if isinstance(key, CustomOpDef) else key


def find_operator(name: str) -> Any:
    """The operator of a name, None where no library that is loaded defines it.

    >>> find_operator("aten::mm"), find_operator("aten::mm.out"), find_operator("aten::nn")
    (<OpOverloadPacket(op='aten.mm')>, <OpOverload(op='aten.mm', overload='out')>, None)
    """
    found = None
    if match := _NAME.fullmatch(name):
        found = getattr(getattr(torch.ops, match[1]), match[2], None)
        found = found if found is None or match[3] is None else getattr(found, match[3], None)
    return found if isinstance(found, OPERATORS) else None


def check_operator(key: Any, caller: str, functions: Container[Any] | None) -> Any:
    """The operator that ``key`` stands for: that of ``torch.ops`` for what ``@torch.library.custom_op`` made and for a
    name. A name that a library may define later stays as it is, as does a Triton kernel.

    Raises InputError, which begins with ``caller``, for what is no operator: a Python function is one if it is among
    ``functions``, or wherever these are None.

    >>> check_operator("aten::mm", "register_flop_impl('aten::mm')", ())
    <OpOverloadPacket(op='aten.mm')>
    """
    key = as_operator(key)
    if isinstance(key, OPERATORS):
        return key
    if isinstance(key, str):
        return _check_name(key, caller)
    if not callable(key) or functions is not None and isinstance(key, _FUNCTIONS) and key not in functions:
        what = "a Python function becomes one by register_shape_impl" if callable(key) else "as torch.ops.aten.mm"
        raise InputError(f"{caller}: must be an operator ({what}); write @{caller.partition('(')[0]}(operator)")
    return key


def _check_name(name: str, caller: str) -> Any:
    match = _NAME.fullmatch(name)
    if match is None:
        dotted = re.fullmatch(r"(?:torch\.ops\.)?(\w+)\.(\w+)(\.\w+)?", name)
        meant = f"{dotted[1]}::{dotted[2]}{dotted[3] or ''}" if dotted else "namespace::name"
        raise InputError(f"{caller}: is no name of an operator; write {meant!r}, or pass the torch.ops operator")
    found = find_operator(name)
    if found is None and match[1] in _ALWAYS_LOADED:
        raise InputError(f"{caller}: torch {torch.__version__} has no operator of that name")
    return found or name


compositions: dict[str, Callable[..., Any]] = {}
"""What an operator of another library is made of, by its name with the namespace: a function of its arguments, in terms
of others. It may return NotImplemented to leave the call as it is, one kernel."""
