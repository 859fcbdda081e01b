"""Kernels of Triton and of FlashAttention 3 as operators of the memory that they read, write and hold, for scripts that
run where neither is: this module stands in for ``triton``, ``kernels`` and ``flash_attn_interface``.
"""
from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__version__ = "none"


class Anything:  # takes every call and has every attribute, as what stands in a kernel's source alone
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        return self


language = Config = Anything()


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def autotune(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


class TensorDescriptor:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def from_tensor(cls, tensor: Tensor, block: list[int]) -> TensorDescriptor:
        return cls(tensor)


@cache
def operator_of(writes: tuple[bool, ...]) -> Any:
    """An operator on as many tensors, which writes to some: what else a kernel does is not known, and the compiler
    keeps what it reads.
    """
    names = [f"t{i}" for i in range(len(writes))]
    schema = ", ".join([f"Tensor(a{i}!) {name}" if written else f"Tensor {name}"
                        for i, (name, written) in enumerate(zip(names, writes))])
    made = torch.library.custom_op(
        "kernel_launch::launch_" + "".join("rw"[written] for written in writes), lambda *tensors: None,
        mutates_args=[name for name, written in zip(names, writes) if written], schema=f"({schema}) -> ()")
    made.register_fake(lambda *tensors: None)
    return made


class Kernel:
    """What ``triton.jit`` makes of a function: ``kernel[grid](...)`` launches it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.names = list(inspect.signature(function).parameters)
        self.stored = find_stored(textwrap.dedent(inspect.getsource(function)))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        given = {name: value.tensor if isinstance(value, TensorDescriptor) else value
                 for name, value in (dict(zip(self.names, args)) | kwargs).items()}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        operator_of(tuple([name in self.stored for name in tensors]))(*tensors.values())


jit = Kernel


def find_stored(source: str) -> set[str]:
    """The names from which pointers follow that a kernel stores to.

    >>> sorted(find_stored("def f(a, b, c):\\n    at = b + 1\\n    tl.store(at, tl.load(a))\\n    c.store([0], 1)"))
    ['at', 'b', 'c']
    """
    made_of: dict[str, set[str]] = {}
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Assign, ast.AugAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    made_of.setdefault(target.id, set()).update(_pointers(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "store":
            is_function = isinstance(node.func.value, ast.Name) and node.func.value.id == "tl"
            found |= _pointers(node.args[0] if is_function else node.func.value)
    while (more := {name for one in found for name in made_of.get(one, ())} - found):
        found |= more
    return found


def _pointers(value: ast.expr) -> set[str]:  # the first of a sum of a pointer and offsets
    while isinstance(value, ast.BinOp):
        value = value.left
    return {value.id} if isinstance(value, ast.Name) else set()


# what looks for Triton when it is imported, and must see that there is none
_BEFORE = ("torch._functorch.partitioners", "torch._inductor.codecache", "torch._inductor.compile_fx",
           "torch.nn.attention.flex_attention", "torch.distributed.tensor")


@contextmanager
def triton_stand_in() -> Iterator[None]:
    """A block in which ``import triton`` works; one that is installed is left."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    for name in _BEFORE:
        importlib.import_module(name)
    stand_ins: dict[str, Any] = {"triton": sys.modules[__name__], "triton.language": language}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


# FlashAttention 3 of sequences that lie one behind another: hopper/flash_attn_interface.py and flash_api.cpp of
# Dao-AILab/flash-attention.

ROWS = 64  #: of a block of the backward kernel on Hopper, with heads of 128 and a causal or local mask: `kBlockM_sm90`


@torch.library.custom_op("kernel_launch::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("kernel_launch::attend_backward", mutates_args=("dq", "dk", "dv"))
def attend_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor,
                    dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    rows = cdiv(q.shape[0] + (starts.shape[0] - 1) * ROWS, ROWS) * ROWS
    products, _logarithms = (q.new_empty(q.shape[1], rows, dtype=torch.float32) for _ in range(2))
    _total = q.new_empty(q.shape[1], rows * q.shape[2], dtype=torch.float32)  # of the gradient of q
    return products


attend.register_fake(attend._init_fn)
attend_backward.register_fake(attend_backward._init_fn)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        out, sums = attend(q, k, v, starts)
        ctx.save_for_backward(q, k, v, out, sums, starts)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, starts = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        attend_backward(gradient, q, k, v, out, sums, starts, dq, dk, dv)
        return dq, dk, dv, None


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = Attention.apply(q, k, v, cu_seqlens_q)  # type: ignore[no-untyped-call]
    return out


def get_kernel(name: str) -> Any:
    return SimpleNamespace(flash_attn_interface=SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
