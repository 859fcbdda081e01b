"""``calflops.calculate_flops``: FLOPs, MACs and trained parameters, as calflops counts and prints them."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.output import drawing_plainly
from analyzer.report.compat.number import (
    bytes_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from analyzer.runtime.flops_profiler import make_call

from .forward import observe_forward, watching_modules
from .function_call import counting_functions
from .function_rule import CALFLOPS_RULES, RECURRENT, count_recurrent
from .module_text import print_with

__all__ = ["bytes_to_string", "calculate_flops", "flops_to_string", "generate_transformer_input", "macs_to_string",
           "number_to_string", "params_to_string"]


class FunctionCosts:
    """FLOPs and MACs of each module's own calls of functions, and of recurrent layers, in one forward pass. Calls in a
    module of the types ``ignored`` are those of the module that calls it.
    """

    def __init__(self, ignored: Collection[type] = ()) -> None:
        self.flops: dict[nn.Module, int] = defaultdict(int)
        self.macs: dict[nn.Module, int] = defaultdict(int)
        self._ignored, self._open = tuple(ignored), list[nn.Module]()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Listen for the length of a block."""
        with watching_modules(self._enter, self._leave), counting_functions(CALFLOPS_RULES, self._count):
            yield

    def _is_told_apart(self, module: nn.Module) -> bool:
        return type(module) not in (*self._ignored, *RECURRENT)

    def _enter(self, module: nn.Module) -> None:
        if self._is_told_apart(module):
            self._open.append(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if self._is_told_apart(module):
            self._open.pop()
        elif type(module) not in self._ignored:
            self.flops[module] += count_recurrent(module, args[0])

    def _count(self, name: str, flops: int, macs: int) -> None:
        if self._open:
            self.flops[self._open[-1]] += flops
            self.macs[self._open[-1]] += macs

    def sum(self, module: nn.Module) -> tuple[int, int]:
        """FLOPs and MACs of a module and all below it; what stands in several places counts in each, as there."""
        parts = [(self.flops[module], self.macs[module]), *map(self.sum, module.children())]
        return sum(flops for flops, _ in parts), sum(macs for _, macs in parts)


def calculate_flops(model: nn.Module, input_shape: tuple[int, ...] | None = None, transformer_tokenizer: Any = None,
                    args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, forward_mode: str = "forward",
                    include_backPropagation: bool = False, compute_bp_factor: float = 2.0, print_results: bool = True,
                    print_detailed: bool = True, output_as_string: bool = True, output_precision: int = 2,
                    output_unit: str | None = None,
                    ignore_modules: Collection[type] | None = None) -> tuple[Any, Any, Any]:
    """FLOPs, MACs and parameters of a forward pass in evaluation mode, which are printed by module.

    The arguments are those of calflops. ``include_backPropagation`` returns the forward pass and ``compute_bp_factor``
    times as much. With a tokenizer of transformers ``input_shape`` is a batch size and a length, (1, 128) unless given.
    Raises InputError for arguments that cannot be used, and whatever the model itself raises.

    >>> calculate_flops(nn.Linear(1000, 1000), input_shape=(8, 1000), print_results=False)
    ('16 MFLOPS', '8 MMACs', '1 M')
    """
    if transformer_tokenizer is not None:
        args, kwargs = (), generate_transformer_input(transformer_tokenizer, input_shape, _device_of(model))
    elif input_shape is not None and (len(args) or kwargs):
        raise InputError(f"calculate_flops(input_shape={input_shape!r}, args=..., kwargs=...): give one of them")
    shape = None if transformer_tokenizer is not None else input_shape
    _, call_args, call_kwargs = make_call(model, forward_mode, shape, args or None,
                                          dict(kwargs or {}), caller="calculate_flops")
    costs = observe_forward(lambda: FunctionCosts(ignore_modules or ()), model, call_args, call_kwargs,
                            method=forward_mode)
    flops, macs = costs.sum(model)
    params = _count_trained(model)
    if print_results:
        write: tuple[Callable[..., str], ...] = flops_to_string, macs_to_string
        rows = [("Total Training Params", params_to_string(params))]
        for way, factor in (("fwd", 1.0), ("fwd+bwd", 1 + compute_bp_factor)):
            rows += [(f"{way} {name}", form(factor * count, units=output_unit, precision=output_precision))
                     for name, form, count in (("MACs", write[1], macs), ("FLOPs", write[0], flops))]
        with drawing_plainly():
            print(_print_report(model, costs, rows, compute_bp_factor, output_precision if print_detailed else None))
    if include_backPropagation:
        flops, macs = (count * (1 + compute_bp_factor) for count in (flops, macs))  # type: ignore[assignment]
    if not output_as_string:
        return flops, macs, params
    return (flops_to_string(flops, output_unit, output_precision), macs_to_string(macs, output_unit, output_precision),
            params_to_string(params, output_unit, output_precision))


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _count_trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


_WIDTH = 99


def _print_report(model: nn.Module, costs: FunctionCosts, rows: Sequence[tuple[str, str]], factor: float,
                  precision: int | None) -> str:
    lines = ["", " Calculate Flops Results ".center(_WIDTH, "-"), "Notations:",
             "number of parameters (Params), number of multiply-accumulate operations(MACs),",
             "number of floating-point operations (FLOPs), floating-point operations per second (FLOPS),",
             "fwd FLOPs (model forward propagation FLOPs), bwd FLOPs (model backward propagation FLOPs),",
             f"default model backpropagation takes {factor:.2f} times as much computation as forward propagation.", "",
             *(f"{label + ': ':<70}  {value:<8}" for label, value in rows)]
    if precision is not None:
        totals = _count_trained(model), *costs.sum(model)
        lines += ["", " Detailed Calculated FLOPs Results ".center(_WIDTH, "-"),
                  "Behind the name of each module: its parameters, MACs and FLOPs, each with its share of all.", "",
                  print_with(model, lambda module, said: _tell(module, said, costs, totals, precision))]
    return "\n".join([*lines, "-" * _WIDTH])


def _tell(module: nn.Module, said: str, costs: FunctionCosts, totals: tuple[int, int, int], precision: int) -> str:
    params, (flops, macs) = _count_trained(module), costs.sum(module)
    all_params, all_flops, all_macs = totals

    def share(part: int, whole: int) -> str:
        return f"{round(100 * part / whole, precision) if whole else 0:g}%"

    told = [f"{params_to_string(params)} = {share(params, all_params)} Params",
            f"{macs_to_string(macs)} = {share(macs, all_macs)} MACs",
            f"{flops_to_string(flops)} = {share(flops, all_flops)} FLOPs"]
    return ", ".join([*told, *([said] if said else [])])


def generate_transformer_input(model_tokenizer: Any, input_shape: Sequence[int] | None,
                               device: torch.device | str) -> dict[str, torch.Tensor]:
    """An empty text, padded, for each of ``input_shape``'s first size, to the length that is its second."""
    batch, length = (1, 128) if input_shape is None else input_shape
    found = {}
    for name, begin in model_tokenizer("", add_special_tokens=True).items():
        pad = (model_tokenizer.pad_token_id or 0) if name == "input_ids" else 0
        found[name] = torch.tensor([[*begin, *[pad] * (length - len(begin))]] * batch, dtype=torch.int64, device=device)
    return found
