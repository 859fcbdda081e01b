"""Which dtypes the kernels of the CPU and of CUDA are not there for: the table in analyzer/meta/refusal/dtype.py.

    python -m benchmarks.fuzz.run refused-dtypes     # prints it anew, to be held against that which stands there

Operators that samples of torch's database call (`torch_samples`) are called again with all floating
tensors in another dtype. The CPU refuses a dtype where all calls with elements fail and say that it is the dtype. Of
CUDA the database tells itself for which dtypes it has tests; what it leaves out there and the CPU refuses, CUDA does.
"""
from __future__ import annotations

import argparse
import re
from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from analyzer import MetaTensorMode
from benchmarks.fuzz.torch_samples import load_operators

#: one letter for each dtype in the table
LETTERS = {torch.bool: "b", torch.uint8: "u", torch.int8: "c", torch.int16: "s", torch.int32: "i", torch.int64: "l",
           torch.float16: "h", torch.bfloat16: "g", torch.float32: "f", torch.float64: "d", torch.complex64: "F",
           torch.complex128: "D"}
_ABOUT_DTYPE = re.compile(
    r"not implemented for|not support|only support|floating|complex|boolean|bool |dtype|scalar type|integer", re.I)
_MOST_CALLS = 6  #: of one operator
_MOST_ELEMENTS = 10_000


class Collector(TorchDispatchMode):
    """Keeps some calls of each operator of ATen, with copies of what they were given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.calls: dict[str, list[tuple[Any, Any, Any]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        name = func._schema.name
        if (name.startswith("aten::") and given and len(self.calls[name]) < _MOST_CALLS
                and any(t.dtype is self.dtype for t in given)
                and all(t.layout is torch.strided and 0 < t.numel() < _MOST_ELEMENTS for t in given)):
            self.calls[name].append((func, *tree_map_only(torch.Tensor, torch.clone, (args, kwargs))))
        return func(*args, **kwargs)


# Suffixes of parts that operators are made of, and names of those whose samples call the part of another name
_PARTS = ("_backward_data", "_with_indices_backward", "_with_indices", "_backward", "_forward", "_kernel", "_ex",
          "_vec")
_SAMPLED_AS = {"convolution": "conv2d", "batch_norm_with_update": "batch_norm", "native_batch_norm_legit": "batch_norm",
               "linalg_solve": "linalg_solve", "hash_tensor": "hash_tensor", "native_group_norm": "group_norm",
               "safe_softmax": "softmax", "rrelu_with_noise": "rrelu"}


# Dtypes of their tensors are not those of what they compute, or they have overloads of their own.
_NOT_BY_INPUT = {"linspace", "bernoulli", "embedding_renorm_", "hash_tensor", "bucketize", "kthvalue", "index_reduce",
                 "rand_like", "convolution"}


def base_name(name: str) -> str:
    name = name.strip("_")
    for part in _PARTS:
        name = name.removesuffix(part)
    return "interpolate" if name.startswith("upsample") else _SAMPLED_AS.get(name, name)


def cast(call: tuple[Any, Any, Any], given: torch.dtype, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    func, args, kwargs = call
    return func, *tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.dtype is given else t.clone(), (args, kwargs))


def refusal(call: tuple[Any, Any, Any]) -> str | None:
    func, args, kwargs = call
    try:
        func(*args, **kwargs)
    except Exception as error:  # of any kind
        return f"{type(error).__name__}: {error}"
    return None


def find_refused() -> dict[str, tuple[str, str]]:
    """By operator, the letters of the dtypes that the CPU and that CUDA refuses, where it is not so on meta."""
    on_cuda: dict[str, set[torch.dtype]] = defaultdict(set)
    collectors = [Collector(torch.float32), Collector(torch.int64)]  # the second of those that take no floats
    for operator in load_operators():
        names = operator.aten_name, operator.name.rpartition(".")[2]
        for name in () if operator.name.startswith("masked.") else names:
            on_cuda[base_name(name)] |= operator.supported_dtypes("cuda")
        for collector in collectors:
            if collector.dtype in operator.supported_dtypes("cpu"):
                _collect(collector, operator)
                break
    found: dict[str, tuple[str, str]] = {}
    for collector in reversed(collectors):
        for name, calls in collector.calls.items():
            short = name.removeprefix("aten::")
            cpu = "".join(letter for dtype, letter in LETTERS.items() if dtype is not collector.dtype
                          and is_refused(calls, collector.dtype, dtype))
            kinds = on_cuda.get(base_name(short), set(LETTERS))
            # the database asks the machine whether it has bfloat16, which all supported devices have
            kinds = kinds | {torch.bfloat16} if torch.float16 in kinds else kinds
            if cpu and short not in _NOT_BY_INPUT:
                found[short] = cpu, "".join(x for dtype, x in LETTERS.items() if x in cpu and dtype not in kinds)
    return found


def _collect(collector: Collector, operator: Any) -> None:
    torch.manual_seed(0)
    with collector:
        for _, sample in zip(range(6), operator.sample_inputs("cpu", collector.dtype)):
            try:
                operator(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # a sample of an error
                continue


def is_refused(calls: list[tuple[Any, Any, Any]], given: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the CPU refuses all calls in a dtype for its sake, and kernels on meta take some."""
    told = [refusal(cast(call, given, dtype)) for call in calls]
    if not all(t is not None and _ABOUT_DTYPE.search(t) for t in told):
        return False
    with MetaTensorMode():
        return any(refusal(cast(call, given, dtype)) is None for call in calls)


def tell(_: argparse.Namespace) -> bool:
    """Print the table."""
    grouped = defaultdict(list)
    for name, letters in sorted(find_refused().items()):
        grouped[letters].append(name)
    for letters, names in sorted(grouped.items()):
        print(letters, " ".join(names))
    return True
