"""Multiply-adds of layers as thop and ptflops count them: a table of layers and functions, with the rule of each tool.

Sources: thop 0.1.1, ``thop/vision/calc_func.py`` and ``thop/rnn_hooks.py``; ptflops 0.7.5, ``ptflops/pytorch_ops.py``.
"""
from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from analyzer.fx.module_borrow import uncompiled
from analyzer.meta.intercept.replacement import SharedReplacements, Undo, replace

from .forward import watching_modules

#: Counts a call of a module, from its first positional argument and its result.
Rule = Callable[[Any, Any, Any], float]


def count_convolution(m: Any, x: Tensor, y: Tensor) -> float:
    """Ptflops: products and biases."""
    positions = x.shape[0] * prod((x if m.transposed else y).shape[2:])
    products = prod(m.kernel_size) * m.in_channels * (m.out_channels // m.groups) * positions
    return int(products) + (y.numel() if m.bias is not None else 0)


def count_rnn(m: Any, x: Any, y: Any) -> Any:
    """Thop: products, additions and gates of a cell, and of a layer at every position; a packed sequence counts as if
    all were of the longest.
    """
    kind = type(m).__name__.removesuffix("Cell")
    gates, besides = {"RNN": (1, 0), "GRU": (3, 4), "LSTM": (4, 4)}[kind]

    def count_cell(inputs: int) -> Any:
        return gates * m.hidden_size * (inputs + m.hidden_size + (3 if m.bias else 1)) + besides * m.hidden_size

    if kind != type(m).__name__:
        return x.shape[0] * count_cell(m.input_size)
    is_packed = isinstance(x, nn.utils.rnn.PackedSequence)
    positions = x.batch_sizes.numel() * int(x.batch_sizes.max()) if is_packed else x.shape[0] * x.shape[1]
    ways = 2 if m.bidirectional else 1
    cells = [count_cell(ways * m.hidden_size if i else m.input_size) for i in range(m.num_layers)]
    return ways * sum(cells) * positions


def count_recurrent(m: Any, x: Tensor, y: Any) -> float:
    """Ptflops: each weight and bias once a position, and what is added and multiplied besides. A layer of two
    directions is twice the first.
    """
    kind = type(m).__name__.removesuffix("Cell")
    is_cell = kind != type(m).__name__
    suffixes = [""] if is_cell else [f"_l{i}" for i in range(m.num_layers)]
    names = [f"{name}_{side}{suffix}" for suffix in suffixes for side in ("ih", "hh")
             for name in ("weight", *(["bias"] if m.bias else []))]
    once = sum(getattr(m, name).numel() for name in names)
    once += len(suffixes) * {"RNN": 1, "GRU": 7, "LSTM": 10}[kind] * m.hidden_size
    positions = x.shape[0] if is_cell else x.shape[0] * x.shape[1]
    return int(once * positions) * (2 if not is_cell and m.bidirectional else 1)


def count_attention(m: nn.MultiheadAttention, x: tuple[Tensor, Tensor, Tensor], y: Any) -> float:
    """Ptflops: projections, scaling, products of attention and softmax."""
    batch, length = (0, 1) if m.batch_first else (1, 0)
    (q_len, k_len, v_len), (q_dim, k_dim, v_dim) = ([t.shape[at] for t in x[:3]] for at in (length, 2))
    projected = q_len * q_dim * (1 + q_dim) + k_len * k_dim**2 + v_len * v_dim**2
    if m.in_proj_bias is not None:
        projected += (q_len + k_len + v_len) * q_dim
    attended = m.num_heads * q_len * k_len * (q_dim // m.num_heads + 1 + v_dim // m.num_heads)
    return int(x[0].shape[batch] * (projected + attended + q_len * v_dim * (v_dim + 1)))


_UPSAMPLED = {"nearest": 1, "linear": 5, "bilinear": 11, "bicubic": 224 + 35}
#: What each tool counts of a layer; ``{}d`` stands for one, two and three dimensions. What has no rule is the sum of
#: its children.
_THOP: dict[str, Rule] = {
    # products, of a transposed convolution as if it were none, without a bias
    "Conv{}d ConvTranspose{}d": lambda m, x, y: y.numel() * (x.shape[1] // m.groups) * prod(m.kernel_size),
    "Linear": lambda m, x, y: m.in_features * y.numel(),
    "BatchNorm{}d InstanceNorm{}d SyncBatchNorm": lambda m, x, y: x.numel() * (4 if m.affine else 2),
    "LayerNorm": lambda m, x, y: x.numel() * (4 if m.elementwise_affine else 2),
    "AvgPool{}d": lambda m, x, y: y.numel(),
    "AdaptiveAvgPool{}d": lambda m, x, y: int(
        (prod(a / b for a, b in zip(x.shape[2:], y.shape[2:])) + 1) * y.numel()),
    "Softmax": lambda m, x, y: x.numel() // x.shape[m.dim] * (3 * x.shape[m.dim] - 1),
    "PReLU": lambda m, x, y: 0 if m.training else x.numel(),
    "Upsample UpsamplingBilinear2d UpsamplingNearest2d": lambda m, x, y: _UPSAMPLED.get(m.mode, 0) * y.numel(),
    "RNNCell GRUCell LSTMCell RNN GRU LSTM": count_rnn,
    "MaxPool{}d AdaptiveMaxPool{}d ZeroPad2d ReLU ReLU6 LeakyReLU Dropout Sequential PixelShuffle": lambda m, x, y: 0}
_PTFLOPS: dict[str, Rule] = {
    "Conv{}d ConvTranspose{}d": count_convolution,
    "Linear": lambda m, x, y: y.numel() * (x.shape[-1] + (m.bias is not None)),
    "BatchNorm{}d InstanceNorm{}d GroupNorm LayerNorm": lambda m, x, y: x.numel() * (
        2 if getattr(m, "affine", False) else 1),
    "MaxPool{}d AvgPool{}d AdaptiveMaxPool{}d AdaptiveAvgPool{}d": lambda m, x, y: x.numel(),
    "ReLU PReLU ELU LeakyReLU ReLU6 GELU": lambda m, x, y: y.numel(),
    "Upsample": lambda m, x, y: y[0].numel(),
    "RNNCell GRUCell LSTMCell RNN GRU LSTM": count_recurrent,
    "MultiheadAttention": count_attention}
THOP_LAYERS, PTFLOPS_LAYERS = ({getattr(nn, name.format(d)): rule for names, rule in table.items()
                                for name in names.split() for d in (1, 2, 3)} for table in (_THOP, _PTFLOPS))


def _count_matmul(input: Tensor, other: Tensor, **_: Any) -> int:
    return input.numel() * other.shape[-1]


def _count_addmm(input: Tensor, one: Tensor, other: Tensor, **_: Any) -> int:
    return _count_matmul(one, other) + input.numel()


def _count_pair(input: Any, other: Any, **_: Any) -> int:
    """One for each element of two arguments made one shape, which ptflops aligns at the first dimension."""
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else () for value in (input, other)]
    first, second = (shape + (1, ) * (max(map(len, shapes)) - len(shape)) for shape in shapes)
    return prod(map(max, first, second))


def _count_interpolation(input: Tensor, size: Any = None, scale_factor: Any = None, *_: Any, **__: Any) -> int:
    factors = scale_factor if size is None else size
    each = prod(factors) if isinstance(factors, (tuple, list)) else factors ** (input.dim() - 2)
    return int(input.numel() * each) if size is None else int(prod(input.shape[:2]) * each)


_POOLS = [f"{adaptive}{kind}_pool{d}d" for adaptive in ("", "adaptive_") for kind in ("avg", "max") for d in (1, 2, 3)]
_Functions = Mapping[tuple[Any, str], Callable[..., int]]
#: What ptflops counts of a call of a function, besides the layer that calls it.
PTFLOPS_FUNCTIONS: _Functions = {
    **{(functional, name): lambda input, *_, **__: input.numel()
       for name in ("relu", "prelu", "elu", "relu6", "silu", "gelu", "softmax", *_POOLS)},
    **{(functional, name): _count_interpolation for name in ("upsample", "interpolate")},
    **{(owner, name): _count_matmul for owner in (torch, Tensor) for name in ("matmul", "mm", "bmm")},
    **{(owner, name): _count_pair for owner in (torch, Tensor) for name in ("add", "mul")},
    (torch, "addmm"): _count_addmm, (Tensor, "addmm"): _count_addmm, (torch, "baddbmm"): _count_addmm}


class LayerCosts:
    """What the rules of one tool count in a forward pass: by module, and of functions that the model calls by name."""

    def __init__(self, model: nn.Module, rules: Mapping[type[nn.Module], Rule], functions: _Functions) -> None:
        self.macs: dict[nn.Module, float] = defaultdict(int)
        self.of_functions, self.samples, self.ran = 0, 0, set[nn.Module]()
        self._model, self._rules, self._functions = uncompiled(model), rules, functions

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Listen for the length of a block."""
        with watching_modules(lambda module: None, self._leave), self._counting_functions():
            yield

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        with torch._C.DisableTorchFunction():
            if module is self._model:
                self.samples += len(args[0]) if args else 1
            if (rule := self._rules.get(type(module))) is not None:
                self.ran.add(module)
                self.macs[module] += rule(module, args if rule is count_attention else args[0], result)

    @contextmanager
    def _counting_functions(self) -> Iterator[None]:
        """A call counts where code looks the function up by its name (``a @ b`` is no call of ``matmul``), in this
        thread, and outside of another such call.
        """
        thread, depth = threading.get_ident(), 0

        def make(rule: Callable[..., int], original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal depth
                caller = str(sys._getframe(1).f_globals.get("__name__")).replace("analyzer.zoo.", "")
                if depth or threading.get_ident() != thread or caller.startswith(("torch._", "analyzer.")):
                    return original(*args, **kwargs)
                with torch._C.DisableTorchFunction():
                    self.of_functions += rule(*args, **kwargs)
                depth += 1
                try:
                    return original(*args, **kwargs)
                finally:
                    depth -= 1

            return call

        def replacements() -> Iterator[Undo]:
            for (owner, name), rule in self._functions.items():
                yield replace(owner, name, partial(make, rule))

        with SharedReplacements(replacements).installed():
            yield
