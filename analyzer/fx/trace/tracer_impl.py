"""Functions that are traced in a way of their own."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from analyzer.errors import InputError
from analyzer.meta.tensor import device_of
from analyzer.registry import Registry


def check_function(key: Any, caller: str) -> Any:
    """The key, if it can be called. Raises InputError, which begins with ``caller``, else."""
    if callable(key):
        return key
    raise InputError(f"{caller}: must be the function that is called, as torch.nn.functional.softplus")


register_tracer_impl: Registry[Callable[..., Any], Callable[..., Any]] = Registry(
    "register_tracer_impl", check_function)
"""Trace ``impl`` wherever the model calls a function: a torch function, or any Python function that is held by a module
under a name.

>>> import torch
>>> from analyzer import symbolic_trace
>>> with register_tracer_impl.scope():
...     @register_tracer_impl(torch.nn.functional.softplus)
...     def softplus(x, beta=1.0, threshold=20.0):
...         return torch.log1p(torch.exp(x * beta)) / beta
...     gm = symbolic_trace(lambda x: torch.nn.functional.softplus(x), meta_args={"x": torch.empty(3)})
>>> [node.name for node in gm.graph.nodes]
['x', 'mul', 'exp', 'log1p', 'truediv', 'output']
"""


class LeafRegistry(Registry[Any, Callable[..., Any]]):
    """Registers functions, or classes with their subclasses, by plain call or as a decorator."""

    def __call__(self, key: Any, impl: Callable[..., Any] | None = None, *, override: bool = False) -> Any:
        """Register ``key``, which runs ``impl`` or itself, and return it."""
        super().__call__(key, impl or key, override=override)
        return key


register_leaf_function = LeafRegistry("register_leaf_function", check_function)
"""Make calls of a Python function one ``call_function`` node: ``register_leaf_function(f)``, or as a decorator. With
``register_leaf_function(f, impl)``, ``impl`` is what runs while tracing, for functions that cannot run without data."""


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """One node, whose score and mask functions are arguments; a block mask is another."""
    if device_of(query).type != "cpu":
        return flex_attention(query, key, value, *args, **kwargs)
    with torch.no_grad():  # which has no backward on the host: the graph is asked for a gradient, or it is not
        return flex_attention(query.detach(), key.detach(), value.detach(), *args, **kwargs)


register_leaf_function(flex_attention, _attend)
register_leaf_function(create_block_mask)
