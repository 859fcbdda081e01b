"""Where formulas for FLOPs and rules for kernel time are registered, and how they read the arguments of a call."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from itertools import zip_longest
from math import prod
from typing import Any, TypeAlias, TypeVar

import torch

from analyzer.hardware import DeviceSpec
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.meta.operator_info import other_rules, register_shape_impl
from analyzer.meta.spec import Signature, TensorSpec, as_operator, check_operator
from analyzer.registry import Form, Registry


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of one call; counts add.

    ``flops`` takes masks as dense; ``executed_flops`` leaves out what a causal or sliding-window mask hides
    (None: the same as ``flops``). ``macs`` are the multiply-adds of multiply-accumulate operators, each 2 of the FLOPs.

    >>> FlopCount(8, 4) + FlopCount(10, 5, executed_flops=6)
    FlopCount(flops=18, macs=9, executed_flops=14)
    """

    flops: int
    macs: int = 0
    executed_flops: int | None = None

    def __add__(self, other: FlopCount) -> FlopCount:
        is_same = self.executed_flops is None and other.executed_flops is None
        return FlopCount(self.flops + other.flops, self.macs + other.macs,
                         None if is_same else self.executed + other.executed)

    def times(self, number: int) -> FlopCount:
        return FlopCount(number * self.flops, number * self.macs,
                         None if self.executed_flops is None else number * self.executed_flops)

    @property
    def executed(self) -> int:
        """``executed_flops``, or ``flops`` where they are the same."""
        return self.flops if self.executed_flops is None else self.executed_flops


@dataclass(frozen=True)
class OfSignature:
    """A formula that reads the arguments of a call by their names."""

    formula: Callable[[Signature], int | FlopCount | None]

    def __call__(self, signature: Signature) -> int | FlopCount | None:
        return self.formula(signature)


Formula: TypeAlias = Callable[..., int | FlopCount | None]  # None: this call's count depends on data
TimeRule = Callable[[Signature, DeviceSpec], KernelTime | None]
"""The kernels' time of a call of that signature on a device, None where it is not known."""


V = TypeVar("V", bound=Callable[..., Any])
FAMILIES = ("attention", "convolution", "fused", "linear_algebra", "matmul", "normalization", "optimizer", "pointwise",
            "recurrent", "reduction")


def name_key(key: Hashable) -> Hashable:
    """One key for the ways to name an operator: ``aten::mm`` for a packet, ``aten::mm.out`` for an overload.

    >>> name_key(torch.ops.aten.mm), name_key(torch.ops.aten.mm.default), name_key("aten::mm")
    ('aten::mm', 'aten::mm.default', 'aten::mm')
    """
    if isinstance(key, torch._ops.OpOverload):
        return f"{key._schema.name}.{key._overloadname}"
    if isinstance(key, torch._ops.OpOverloadPacket):
        return key._qualified_op_name
    return key if isinstance(key, str) or (operator := as_operator(key)) is key else name_key(operator)


@cache
def family(op: Hashable) -> tuple[Hashable, ...]:
    """Keys under which what is registered for an operator may be found, its own first.

    >>> family(torch.ops.aten.add_.Tensor)
    ('aten::add_.Tensor', 'aten::add_', 'aten::add')
    >>> family(torch.ops.aten.view_copy.default)[1:], family(torch.ops.prims.add.default)[1:]
    (('aten::view_copy', 'aten::view'), ('prims::add', 'aten::add'))
    """
    if not isinstance(op, torch._ops.OpOverload):
        return (op,)
    namespace, _, name = op._schema.name.partition("::")
    names = [name]
    if name.endswith("_") and not name.endswith("__"):  # in place; __and__ is a name of its own
        names.append(name[:-1])
    names += [name.removesuffix(suffix) for suffix in ("_copy", "_functional") if name.endswith(suffix)]
    spaces = (namespace, "aten") if namespace == "prims" else (namespace,)
    return (name_key(op), *(f"{space}::{n}" for space in spaces for n in names))


# Where the name without `_foreach_` is not the operator's.
SINGLE = {"norm": "linalg_vector_norm", "max": "amax", "powsum": "linalg__powsum"}


@cache
def foreach_single(op: Hashable) -> str | None:
    """The operator that a `_foreach_` operator applies to each element."""
    if not isinstance(op, torch._ops.OpOverload) or not op._schema.name.startswith("aten::_foreach_"):
        return None
    name = op._schema.name.removeprefix("aten::_foreach_").removesuffix("_")
    return SINGLE.get(name, name)


class OperatorRegistry(Registry[Hashable, V]):
    """`Registry` whose keys are operators, operator packets, their names, higher-order operators or Triton kernels.
    What the families `add` is imported at the first use of any of these registries: with the package, it would take a
    tenth of torch's time. A thread that comes while another imports them waits for each, as imports do.
    """

    _is_filled = False

    def __init__(self, name: str, call: Form) -> None:
        super().__init__(name, lambda key, caller: name_key(check_operator(key, caller, register_shape_impl)), call)

    def fill(self) -> None:
        """Import the package's own implementations, once."""
        if not OperatorRegistry._is_filled:
            for name in FAMILIES:
                import_module(f"{__package__}.{name}")
            OperatorRegistry._is_filled = True

    def find(self, key: Hashable) -> V | None:
        return super().find(name_key(key))

    def find_variant(self, op: Hashable) -> V | None:
        """The implementation for an operator: its own, its packet's, or that of the operator it is a variant of."""
        return next((found for key in family(op) if (found := self.find(key)) is not None), None)

    def __contains__(self, key: Hashable) -> bool:
        return super().__contains__(name_key(key))


register_flop_impl: OperatorRegistry[Formula] = OperatorRegistry(
    "register_flop_impl", Form("f(*args, out=..., **kwargs)", keywords=("out",)))
"""Register the FLOPs of an operator: a function of the call's own arguments, each tensor a `TensorSpec`, and ``out``.

It returns FLOPs, a `FlopCount`, or None where data decides. The key is a ``torch.ops`` operator (one overload or all),
its name, what ``@torch.library.custom_op`` made, a Triton kernel, or a Python function with a registered shape. Raises
InputError for another key, and a profile does for another result. An operator without a formula stands in
`Profile.uncounted`, never as zero."""

register_time_impl: OperatorRegistry[TimeRule] = OperatorRegistry("register_time_impl", Form("f(signature, device)", 2))
"""Register the seconds of an operator's kernels: a function of the call's `Signature` and a `DeviceSpec` that returns a
`KernelTime`, or None where it is not known. An operator without a rule takes the time of the bytes that it moves."""

other_rules.append(lambda op: any(registry.find_variant(op) is not None
                                  for registry in (register_flop_impl, register_time_impl)))

SPARSE_FORMULAS: dict[str, Formula] = {}
"""By the name of an operator of ATen, what it counts where it takes or gives a sparse tensor; of others, which have
arithmetic, nothing is known: adding up elements at one place depends on data."""


def register_each(names: str, formula: Formula) -> None:
    for name in names.split():
        register_flop_impl.add(f"aten::{name}", formula)


def register_times(names: str, rule: TimeRule) -> None:
    for name in names.split():
        register_time_impl.add(f"aten::{name}", rule)


# What formulas and rules share: results kept with a signature, its arguments, elements of tensors, multiply-adds.

Made = TypeVar("Made")


def kept_with_signature(make: Callable[[Signature], Made]) -> Callable[[Signature], Made]:
    """A function of a signature alone, whose result is made once and kept in the signature's ``memo``."""
    key = f"{make.__module__}.{make.__name__}"

    @wraps(make)
    def find(signature: Signature) -> Made:
        if key not in signature.memo:
            signature.memo[key] = make(signature)
        return signature.memo[key]  # type: ignore[no-any-return]
    return find


def bind(signature: Signature) -> dict[str, Any]:
    """Argument values by name, defaults included."""
    given = {a.name: a.default_value for a in signature.op._schema.arguments if a.has_default_value()}
    return given | signature.named_arguments()


def multiply_adds(count: int, dtype_of: TensorSpec | None = None) -> FlopCount:
    """``count`` multiply-adds: 2 FLOPs and 1 MAC each. A complex one is four real ones: 4 products, as many sums."""
    if dtype_of is not None and dtype_of.dtype.is_complex:
        count *= 4
    return FlopCount(2 * count, count)


def is_inexact(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def tensors(value: Any) -> Iterator[TensorSpec]:
    """Every tensor in a value: a spec, None, a number, or lists and dicts of them, in order."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not isinstance(value, TensorSpec)


def first(value: Any) -> TensorSpec:
    return next(tensors(value))


def components(spec: TensorSpec) -> int:
    """Real numbers in the tensor: 2 to a complex element."""
    return spec.numel * (2 if spec.dtype.is_complex else 1)


def per_input(flops: int, position: int = 0) -> Formula:
    """The formula of ``flops`` for each real number of the tensor argument at ``position``."""
    return lambda *args, **__: flops * components(args[position])


def per_output(flops: int) -> Formula:
    return lambda *_, out, **__: flops * first(out).numel


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that shapes broadcast to.

    >>> broadcast((7, 1), (5,)), broadcast((), (3, 1)), broadcast((1,), (0,))
    ((7, 5), (3, 1), (0,))
    """
    aligned = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in aligned)[::-1]


def indexed_elements(shape: Sequence[int], indices: Sequence[Any]) -> int | None:
    """Elements that ``indices`` address, of which None stands for a whole dimension; unknown where one is a mask."""
    given = list(tensors(indices))
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return None
    untouched: int = prod(size for d, size in enumerate(shape) if d >= len(indices) or indices[d] is None)
    return prod(broadcast(*given)) * untouched


def spread(sizes: int | Iterable[int] | None, dims: int) -> tuple[int, ...]:
    """One size per dimension, where a single one stands for all (kernel_size=3); 1 where it is left out.

    >>> spread(3, 2), spread([3], 2), spread((3, 5), 2), spread(None, 2)
    ((3, 3), (3, 3), (3, 5), (1, 1))
    """
    given = (1,) if sizes is None else (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return given * dims if len(given) == 1 else given


#: kinds of float32 operations, each of which PyTorch can be set to run in TF32
TF32_KINDS = ("matmul", "conv", "rnn")


def uses_tf32(kind: str) -> bool:
    """Whether float32 operations of a kind run in TF32 on CUDA, as PyTorch is set now: ``"matmul"`` not by default, as
    ``torch.set_float32_matmul_precision`` and ``torch.backends.cuda.matmul`` say; cuDNN's ``"conv"`` and ``"rnn"`` do.

    Private torch API. The precision of each kind is asked, not the older ``allow_tf32``: that one warns, and raises
    where a program sets precisions by name. The older setters change the same precisions. Not by
    ``torch.backends.cudnn.rnn`` either: in torch 2.9 a module of that name hides the setting.

    >>> [uses_tf32(kind) for kind in TF32_KINDS]
    [False, True, True]
    """
    return bool(torch._C._get_fp32_precision_getter("cuda", kind) == "tf32")
