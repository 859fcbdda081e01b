"""What users register for tracing: leaf modules, functions traced in a way of their own, and biases split off."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from analyzer.errors import InputError
from analyzer.meta.tensor import device_of
from analyzer.registry import Form, Registry


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
        super().__call__(key, impl or key, override=override)
        return key


leaves = LeafRegistry("leaves")
"""What tracing leaves whole or traces into, of each kind below an entry."""

register_leaf_function = leaves.beside("register_leaf_function", check_function)
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


Impl = Callable[..., Any]


def check_module_class(key: Any, caller: str) -> Any:
    """The key, if it is a class of modules. Raises InputError, which begins with ``caller``, else."""
    if isinstance(key, type) and issubclass(key, nn.Module):
        return key
    raise InputError(f"{caller}: must be a class that derives from torch.nn.Module")


register_leaf_module = leaves.beside("register_leaf_module", check_module_class)
"""Make every module of a class one ``call_module`` node, as those of torch.nn are, except containers.

>>> @register_leaf_module
... class Block(nn.Module):
...     pass
>>> Block in register_leaf_module
True
"""

register_non_leaf_module = leaves.beside("register_non_leaf_module", check_module_class)
"""Trace into the modules of a class that would be leaves."""

register_leaf_module_impl = register_tracer_impl.beside(
    "register_leaf_module_impl", check_module_class, Form("impl(module, *args, **kwargs)", 1))
"""Give a leaf module what to run while tracing, in place of its forward: ``impl(module, *args, **kwargs)`` returns
tensors of the right shapes. For modules that cannot run without data; the traced graph calls the module itself.
"""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


#: and how much was registered when that was found; weak, as a class may hold tensors of the user's
_leaf_classes: weakref.WeakKeyDictionary[type, tuple[int, bool]] = weakref.WeakKeyDictionary()


def is_leaf(module: nn.Module) -> bool:
    """Whether ``module`` becomes one node: its most derived registered class decides, else whether it is torch.nn's."""
    registered = leaves.version + register_leaf_module_impl.version  # neither ever shrinks
    found = _leaf_classes.get(type(module))
    if found is None or found[0] != registered:
        found = _leaf_classes[type(module)] = registered, _is_leaf_class(type(module))
    return found[1]


def _is_leaf_class(kind: type[nn.Module]) -> bool:
    for cls in kind.__mro__:
        if cls in register_non_leaf_module:
            return False
        if cls in register_leaf_module or cls in register_leaf_module_impl:
            return True
    if issubclass(kind, torch.jit.ScriptModule):
        return True
    name = kind.__module__
    if name in ("torch.ao.quantization.fake_quantize", "torch.ao.quantization.observer"):  # which ask for their state
        return True
    return (name.startswith(("torch.nn.", "torch.ao.nn.")) and not name.startswith("torch.nn.parallel")
            and kind is not nn.Module and not issubclass(kind, _CONTAINERS))


def find_leaf_impl(module: nn.Module) -> Impl | None:
    return next((impl for cls in type(module).__mro__
                 if (impl := register_leaf_module_impl.find(cls)) is not None), None)


# Biases added by a node of their own, so that what can be cut before the addition shows in the graph.

#: functions of torch, each with a form that adds the bias in a call of its own
BIAS_SPLITS: dict[Any, Callable[..., Any]] = {}
_BIASED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
                  nn.ConvTranspose3d)


def splits(module: nn.Module) -> bool:
    return type(module) in _BIASED_LAYERS and getattr(module, "bias", None) is not None


def _add(product: Tensor, bias: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        bias = bias.type_as(product)  # the fused form casts its bias as its other arguments
    return product + bias


def _split(function: Callable[..., Tensor], spatial_dims: int) -> None:
    """``function`` takes (input, weight, bias, ...); a convolution's bias is one number per output channel."""

    def apart(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        product = function(input, weight, None, *args, **kwargs)
        if bias is not None and spatial_dims:
            bias = bias.reshape(-1, *[1] * spatial_dims)
        return product if bias is None else _add(product, bias)

    BIAS_SPLITS[function] = apart


_split(functional.linear, 0)
for _dims in (1, 2, 3):
    _split(getattr(functional, f"conv{_dims}d"), _dims)
    _split(getattr(functional, f"conv_transpose{_dims}d"), _dims)


def _split_sum(function: Any, multiply: Callable[[Tensor, Tensor], Tensor], names: tuple[str, str]) -> None:
    def apart(input: Tensor, *factors: Tensor, beta: float = 1, alpha: float = 1, **rest: Any) -> Any:
        factors = (*factors, *[rest.pop(name) for name in names if name in rest])
        if rest:  # out, out_dtype: one call decides
            return function(input, *factors, beta=beta, alpha=alpha, **rest)
        product = multiply(*factors)
        product = product if alpha == 1 else product * alpha
        if beta == 0:  # input is not read, as addmm documents: it may hold NaN
            return product
        return _add(product, input if beta == 1 else input * beta)

    BIAS_SPLITS[function] = apart


for _owner in (torch, Tensor):
    _split_sum(_owner.addmm, torch.mm, ("mat1", "mat2"))
    _split_sum(_owner.baddbmm, torch.bmm, ("batch1", "batch2"))
