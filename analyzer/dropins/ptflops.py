"""``ptflops.get_model_complexity_info``: multiply-adds and trained parameters of one sample."""
from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, TextIO

import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.fx.module_borrow import uncompiled
from analyzer.meta.intercept.mode_stack import DirectDispatchMode, without_modes
from analyzer.output import drawing_plainly
from analyzer.runtime.measure import input_device

from .forward import children_first, observe_forward, watching_modules
from .function_call import counting_functions
from .module_text import print_with
from .ptflops_rule import ATEN_RULES, FUNCTION_RULES, list_module_rules

__all__ = ["FLOPS_BACKEND", "flops_to_string", "get_model_complexity_info", "params_to_string"]
_GLOBAL = "Global"


class FLOPS_BACKEND(Enum):
    """What is counted: calls of modules and functions, or ATen operators."""

    PYTORCH = "pytorch"
    ATEN = "aten"


class LayerCosts:
    """Multiply-adds of each module that has a rule, and of functions, in one forward pass. A hook of the user's finds
    ``__flops__`` and ``__params__`` on the module as long as it listens.
    """

    def __init__(self, model: nn.Module, hooks: Mapping[Any, Any], ignored: Collection[Any],
                 counts_functions: bool) -> None:
        self.macs: dict[nn.Module, float] = defaultdict(int)
        self.of_functions, self.samples, self.has_samples = 0, 0, True
        self._model, self._hooks, self._ignored = model, hooks, tuple(ignored)
        self._called = uncompiled(model)
        self._counts_functions, self._rules = counts_functions, list_module_rules()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Listen for the length of a block."""
        with ExitStack() as undo:
            hooked = [module for module in self._model.modules() if type(module) in self._hooks]
            for module in hooked:
                for name, value in (("__flops__", 0), ("__params__", count_trained(module))):
                    module.__dict__[name] = value
                    undo.callback(module.__dict__.pop, name, None)
            undo.enter_context(watching_modules(lambda module: None, self._leave))
            if self._counts_functions:
                undo.enter_context(counting_functions(FUNCTION_RULES, self._count))
            yield
            for module in hooked:
                self.macs[module] += module.__dict__["__flops__"]

    def _count(self, name: str, flops: int, macs: int) -> None:
        self.of_functions += flops - macs

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        with torch._C.DisableTorchFunction():
            if module is self._called:
                self.samples += len(args[0]) if args else 1
                self.has_samples = bool(args)
            if type(module) in self._ignored or not self.is_known(module):
                return
            if type(module) in self._hooks:
                with without_modes():
                    self._hooks[type(module)](module, args, result)
            else:
                self.macs[module] += self._rules[type(module)](module, args, result)

    def is_known(self, module: nn.Module) -> bool:
        """Whether there is a rule for it; then it stands for all that is below it."""
        return type(module) in self._rules or type(module) in self._hooks

    def sum(self, module: nn.Module) -> float:
        """Multiply-adds of a module with a rule, else of its children."""
        return self.macs[module] if self.is_known(module) else sum(map(self.sum, module.children()))

    def sum_params(self, module: nn.Module) -> int:
        """Trained parameters of the layers with a rule."""
        if self.is_known(module):
            return 0 if type(module) in self._ignored else count_trained(module)
        return sum(map(self.sum_params, module.children()))


class OperatorCosts:
    """Multiply-adds of ATen operators, by the child of the model that runs and by operator."""

    def __init__(self, model: nn.Module, hooks: Mapping[Any, Any], ignored: Collection[Any], verbose: bool,
                 ost: TextIO) -> None:
        self.macs: dict[str, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
        self._names = {module: name for name, module in model.named_children()}
        self._rules, self._hooks, self._ignored = {**ATEN_RULES, **hooks}, hooks, tuple(ignored)
        self._verbose, self._ost, self._open = verbose, ost, [_GLOBAL]

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Listen for the length of a block."""
        with watching_modules(self._enter, self._leave), _OperatorMode(self._ran):
            yield

    def _enter(self, module: nn.Module) -> None:
        if module in self._names:
            self._open.append(self._names[module])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if module in self._names:
            self._open.pop()

    def _ran(self, operator: Any, args: tuple[Any, ...], result: Any) -> None:
        if operator in self._ignored:
            print(f"Warning: {operator} operation is ignored", file=self._ost)
        elif operator in self._rules:
            macs = self._rules[operator](args, result if isinstance(result, tuple) else (result, ))
            for name in self._open:
                self.macs[name][operator] += macs
        elif self._verbose:
            print(f"Warning: {operator} operation is treated as a zero-op", file=self._ost)


class _OperatorMode(DirectDispatchMode):
    """Tells of each ATen operator that ran."""

    def __init__(self, listener: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().__init__()
        self.listener = listener

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self.listener(func.overloadpacket, args, result)
        return result


def get_model_complexity_info(
        model: nn.Module, input_res: tuple[int, ...], print_per_layer_stat: bool = True, as_strings: bool = True,
        input_constructor: Callable[[tuple[int, ...]], Any] | None = None, ost: TextIO | None = None,
        verbose: bool = False, ignore_modules: Collection[Any] = (),
        custom_modules_hooks: Mapping[Any, Any] | None = None, backend: str | FLOPS_BACKEND = FLOPS_BACKEND.PYTORCH,
        flops_units: str | None = None, param_units: str | None = None, output_precision: int = 2,
        backend_specific_config: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Multiply-adds and trained parameters of one sample of the size ``input_res``, in evaluation mode.

    The arguments are those of ptflops. ``input_constructor(input_res)`` gives a tensor or a dictionary of keyword
    arguments. ``custom_modules_hooks`` are functions by class of a module, its inputs and its result, which add to the
    module's ``__flops__``; with the ``"aten"`` backend of an operator's arguments and results, which give a number.
    Raises InputError for arguments that cannot be used, and whatever the model itself raises.

    >>> get_model_complexity_info(nn.Conv2d(3, 8, 3), (3, 32, 32), print_per_layer_stat=False)
    ('201.6 KMac', '224')
    """
    if not isinstance(model, nn.Module) or type(input_res) is not tuple or not input_res:
        raise InputError(f"get_model_complexity_info({type(model).__name__}, {input_res!r}): must be a torch.nn.Module "
                         "and a tuple of at least one size")
    if backend not in (*FLOPS_BACKEND, *(b.value for b in FLOPS_BACKEND)):
        raise InputError(f"get_model_complexity_info(backend={backend!r}): must be 'pytorch' or 'aten'")
    hooks, ost = dict(custom_modules_hooks or {}), ost or sys.stdout
    args, kwargs = _make_input(model, input_res, input_constructor)
    units: dict[str, Any] = {"precision": output_precision}
    params = count_trained(model)
    if FLOPS_BACKEND(backend) is FLOPS_BACKEND.ATEN:
        operators = observe_forward(lambda: OperatorCosts(model, hooks, ignore_modules, verbose, ost), model, args,
                                    kwargs)
        macs = sum(operators.macs[_GLOBAL].values())
        if print_per_layer_stat:
            _print_operators(operators, lambda n: flops_to_string(n, flops_units, **units), ost)
    else:
        counts_functions = (backend_specific_config or {}).get("count_functional", True)
        layers = observe_forward(lambda: LayerCosts(model, hooks, ignore_modules, counts_functions), model, args,
                                 kwargs)
        if verbose:
            _print_unknown(model, layers, ignore_modules, ost)
        if not layers.has_samples:
            print("Warning! No positional inputs found for a module, assuming batch size is 1.")
        exact = layers.sum(model) / layers.samples + layers.of_functions
        macs = int(exact)
        if print_per_layer_stat:
            with drawing_plainly():
                print(_print_layers(model, layers, exact, params, flops_units, param_units, output_precision), file=ost)
    if not as_strings:
        return macs, params
    return flops_to_string(macs, flops_units, **units), params_to_string(params, param_units, **units)


def _make_input(model: nn.Module, input_res: tuple[int, ...],
                constructor: Callable[[tuple[int, ...]], Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if constructor is not None:
        made = constructor(input_res)
        return ((), made) if isinstance(made, dict) else ((made, ), {})
    dtype = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    return (torch.empty((1, *input_res), dtype=dtype, device=input_device(model)), ), {}


def count_trained(module: nn.Module) -> int:
    """Its parameters that require a gradient, each once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def _print_unknown(model: nn.Module, costs: LayerCosts, ignored: Collection[Any], ost: TextIO) -> None:
    kinds = dict.fromkeys(type(m) for m in children_first(model) if not costs.is_known(m) and type(m) not in (
        nn.Sequential, nn.ModuleList, *ignored))
    for kind in kinds:
        print(f"Warning: module {kind.__name__} is treated as a zero-op.", file=ost)


def _print_layers(model: nn.Module, costs: LayerCosts, macs: float, params: int, flops_units: str | None,
                  param_units: str | None, precision: int) -> str:
    def tell(module: nn.Module, said: str) -> str:
        own_params, own_macs = costs.sum_params(module), costs.sum(module) / costs.samples
        return ", ".join([params_to_string(own_params, param_units, precision),
                          f"{own_params / max(params, 1):.3%} Params",
                          flops_to_string(own_macs, flops_units, precision),
                          f"{own_macs / max(macs, 1):.3%} MACs", said])

    return print_with(model, tell)


def _print_operators(costs: OperatorCosts, write: Callable[[int], str], ost: TextIO) -> None:
    print(f"Total:{write(sum(costs.macs[_GLOBAL].values()))}", file=ost)
    for name, by_operator in costs.macs.items():
        print("Module: ", name, file=ost)
        for operator, macs in by_operator.items():
            print(f"{operator}: {write(macs)}", file=ost)
        print(file=ost)


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-adds with a unit: ``GMac``, ``MMac`` or ``KMac``.

    >>> flops_to_string(1_819_066_368), flops_to_string(999), flops_to_string(5e6, "GMac", 4)
    ('1.82 GMac', '999 Mac', '0.005 GMac')
    """
    sizes = {"GMac": 10**9, "MMac": 10**6, "KMac": 10**3}
    return _scale(flops, units, sizes, precision) or f"{flops} Mac"


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
