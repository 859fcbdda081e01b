"""``ptflops.get_model_complexity_info``: multiply-adds and trained parameters of one sample."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.tools.runtime.measure import input_device

from .forward import observe_forward
from .layer_count import PTFLOPS_FUNCTIONS, PTFLOPS_LAYERS, LayerCosts

__all__ = ["flops_to_string", "get_model_complexity_info", "params_to_string"]
_HINT = "this counts layers and functions by ptflops' rules alone; `analyzer.profile` counts every operator, by module"


def get_model_complexity_info(
        model: nn.Module, input_res: tuple[int, ...], print_per_layer_stat: bool = False, as_strings: bool = True,
        input_constructor: Callable[[tuple[int, ...]], Any] | None = None, ost: Any = None, verbose: bool = False,
        ignore_modules: Collection[type[nn.Module]] = (), custom_modules_hooks: Mapping[Any, Any] | None = None,
        backend: str = "pytorch", flops_units: str | None = None, param_units: str | None = None,
        output_precision: int = 2, backend_specific_config: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Multiply-adds and trained parameters of one sample of the size ``input_res``, in evaluation mode, as the backend
    ``"pytorch"`` of ptflops counts them. Nothing is printed.

    ``input_constructor(input_res)`` gives a tensor or a dictionary of keyword arguments. Raises InputError for
    arguments that cannot be used, among them another backend and hooks, and whatever the model itself raises.

    >>> get_model_complexity_info(nn.Conv2d(3, 8, 3), (3, 32, 32))
    ('201.6 KMac', '224')
    """
    if not isinstance(model, nn.Module) or type(input_res) is not tuple or not input_res:
        raise InputError(f"get_model_complexity_info({type(model).__name__}, {input_res!r}): must be a torch.nn.Module "
                         "and a tuple of at least one size")
    if backend != "pytorch" or custom_modules_hooks:
        raise InputError(f"get_model_complexity_info(backend={backend!r}, custom_modules_hooks="
                         f"{custom_modules_hooks!r}): {_HINT}")
    rules = {kind: rule if kind not in ignore_modules else lambda m, x, y: 0 for kind, rule in PTFLOPS_LAYERS.items()}
    functions = PTFLOPS_FUNCTIONS if (backend_specific_config or {}).get("count_functional", True) else {}
    args, kwargs = _make_input(model, input_res, input_constructor)
    costs = observe_forward(lambda: LayerCosts(model, rules, functions), model, args, kwargs)
    macs = int(_sum(model, costs) / costs.samples + costs.of_functions)
    params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not as_strings:
        return macs, params
    return flops_to_string(macs, flops_units, output_precision), params_to_string(params, param_units, output_precision)


def _make_input(model: nn.Module, input_res: tuple[int, ...],
                constructor: Callable[[tuple[int, ...]], Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if constructor is not None:
        made = constructor(input_res)
        return ((), made) if isinstance(made, dict) else ((made, ), {})
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    return (torch.empty((1, *input_res), dtype=dtype, device=input_device(model)), ), {}


def _sum(module: nn.Module, costs: LayerCosts) -> float:
    """Of a layer with a rule, else of its children; one that stands in several places counts in each, as there."""
    if type(module) in PTFLOPS_LAYERS:
        return costs.macs[module]
    return sum(_sum(child, costs) for child in module.children())


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-adds with a unit: ``GMac``, ``MMac`` or ``KMac``.

    >>> flops_to_string(1_819_066_368), flops_to_string(999), flops_to_string(5e6, "GMac", 4)
    ('1.82 GMac', '999 Mac', '0.005 GMac')
    """
    return _scale(flops, units, {"GMac": 10**9, "MMac": 10**6, "KMac": 10**3}, precision) or f"{flops} Mac"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters with a unit: ``M`` or ``k`` by themselves, ``M``, ``K`` or ``B`` where asked.

    >>> params_to_string(11_689_512), params_to_string(1500), params_to_string(7e9, "B")
    ('11.69 M', '1.5 k', '7.0 B')
    """
    sizes = {"M": 10**6, "k": 10**3} if units is None else {"M": 10**6, "K": 10**3, "B": 10**9}
    return _scale(params_num, units, sizes, precision) or str(params_num)


def _scale(number: float, units: str | None, sizes: Mapping[str, int], precision: int) -> str | None:
    """None where there is no unit for it."""
    unit = units if units is not None else next((name for name, size in sizes.items() if number // size > 0), None)
    return None if unit is None or unit not in sizes else f"{round(number / sizes[unit], precision)} {unit}"
