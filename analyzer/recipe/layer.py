"""The blocks of a model, the layers that a name or pattern selects, kernels that replace their code."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from analyzer.errors import InputError
from analyzer.profilers.flop_registry import FlopCount, register_flop_impl
from analyzer.record.tensor_walk import list_blocks


def blocks_of(model: nn.Module, caller: str) -> list[nn.Module]:
    """Those of `list_blocks`. Raises InputError, which begins with ``caller``, where there are none."""
    blocks = list(list_blocks(model))
    if not blocks:
        raise InputError(f"{caller}: {type(model).__name__} has no repeated blocks (two or more modules of one class "
                         "in a ModuleList or Sequential, with modules of their own)")
    return blocks


def find_linear(module: nn.Module) -> nn.Linear | None:
    """``module`` as a linear layer: itself, or what transformers' `Conv1D` (GPT-2), a transposed one, is; else None."""
    if type(module) is nn.Linear or type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return module if isinstance(module, nn.Linear) else None
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and isinstance(weight, nn.Parameter):
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.weight = nn.Parameter(weight.detach().t(), requires_grad=False)
        linear.register_parameter("bias", bias)
        linear.out_features, linear.in_features = linear.weight.shape
        return linear
    return None


def list_heads(model: nn.Module) -> set[nn.Module]:
    """What neither is quantized nor gets an adapter: the output head, the last module that has a parameter, and layers
    whose weight is another module's too (transformers/quantizers/base.py, `get_keys_to_not_convert`).
    """
    get = getattr(model, "get_output_embeddings", None)
    owners: dict[int, set[nn.Module]] = {}
    last = None
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(module)
                last = module
    heads = {module for modules in owners.values() if len(modules) > 1 for module in modules}
    return heads | {head for head in (last, get() if callable(get) else None) if head is not None}


def replace_layers(model: nn.Module, make: Callable[[str, nn.Module], nn.Module | None]) -> int:
    """Put ``make(path, module)``, where it gives one, in the place of each module but heads; how many it gave."""
    heads, made = list_heads(model), {}
    for parent, name, path, module in [
            (owner, key, f"{path}.{key}" if path else key, child) for path, owner in model.named_modules()
            for key, child in owner._modules.items() if child is not None]:
        if module in heads:
            continue
        if module not in made:
            made[module] = make(path, module)
        found = made[module]
        if found is not None:
            setattr(parent, name, found)
    return sum(found is not None for found in made.values())


# Kernels of quantized weights and states, as operators of their own: bitsandbytes' CUDA kernels each write one result
# and take no memory besides, which sequences of PyTorch's operators cannot say. Each runs on data too.

Tensor = torch.Tensor

# "4-bit NormalFloat": quantiles of a normal distribution, from QLoRA (Dettmers et al. 2023), appendix E.
NF4_VALUES = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
              -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
              0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
              0.7229568362236023, 1.0)

_library = torch.library.Library("analyzer", "DEF")
_library.define("dequantize_blockwise(Tensor codes, Tensor absmax, Tensor values, int block) -> Tensor")
_library.define("dequantize_4bit(Tensor codes, Tensor absmax, Tensor values, int block, SymInt[] shape, ScalarType "
                "dtype) -> Tensor")
_library.define("linear_4bit(Tensor x, Tensor codes, Tensor absmax, Tensor values, Tensor nested_absmax, Tensor "
                "nested_values, Tensor offset, int block, SymInt[] shape, Tensor? bias) -> Tensor")
_library.define("quantize_rows_int8(Tensor x, Tensor(a!) codes, Tensor(b!) absmax) -> ()")
_library.define("dequantize_product_int8(Tensor product, Tensor row_absmax, Tensor column_absmax) -> Tensor")

ops: Any = torch.ops.analyzer
INT8_MAX = 127.0


def _dequantize_blockwise(codes: Tensor, absmax: Tensor, values: Tensor, block: int) -> Tensor:
    flat = values[codes.reshape(-1).long()] * absmax.repeat_interleave(block)[:codes.numel()]
    return flat.reshape(codes.shape)


def _dequantize_4bit(codes: Tensor, absmax: Tensor, values: Tensor, block: int, shape: list[int],
                     dtype: torch.dtype) -> Tensor:
    numel = shape[0] * shape[1]
    both = torch.stack([codes.reshape(-1) >> 4, codes.reshape(-1) & 15], dim=1).reshape(-1)[:numel]
    return (values[both.long()] * absmax.repeat_interleave(block)[:numel]).to(dtype).reshape(shape)


def _linear_4bit(x: Tensor, codes: Tensor, absmax: Tensor, values: Tensor, nested_absmax: Tensor,
                 nested_values: Tensor, offset: Tensor, block: int, shape: list[int], bias: Tensor | None) -> Tensor:
    scales = _dequantize_blockwise(absmax, nested_absmax, nested_values, NESTED_BLOCK) + offset
    return torch.nn.functional.linear(x, _dequantize_4bit(codes, scales, values, block, shape, x.dtype), bias)


def _quantize_rows_int8(x: Tensor, codes: Tensor, absmax: Tensor) -> None:
    absmax.copy_(x.abs().amax(dim=-1))
    codes.copy_((x * (INT8_MAX / absmax.unsqueeze(-1))).round())


def _dequantize_product_int8(product: Tensor, row_absmax: Tensor, column_absmax: Tensor) -> Tensor:
    return (product * (row_absmax.unsqueeze(-1) * column_absmax / INT8_MAX**2)).to(torch.float16)


NESTED_BLOCK = 256  # of the second quantization: bitsandbytes/functional.py, quantize_4bit with compress_statistics

for _name, _kernel in (("dequantize_blockwise", _dequantize_blockwise), ("dequantize_4bit", _dequantize_4bit),
                       ("linear_4bit", _linear_4bit), ("quantize_rows_int8", _quantize_rows_int8),
                       ("dequantize_product_int8", _dequantize_product_int8)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)

_library.impl("dequantize_blockwise", lambda codes, absmax, *_: torch.empty_like(codes, dtype=absmax.dtype), "Meta")
_library.impl("dequantize_4bit", lambda codes, absmax, values, block, shape, dtype: codes.new_empty(shape, dtype=dtype),
              "Meta")
_library.impl("linear_4bit", lambda x, codes, absmax, values, nested_absmax, nested_values, offset, block, shape, bias:
              x.new_empty((*x.shape[:-1], shape[0])), "Meta")
_library.impl("quantize_rows_int8", lambda x, codes, absmax: None, "Meta")
_library.impl("dequantize_product_int8", lambda product, *_: torch.empty_like(product, dtype=torch.float16), "Meta")


def _count_linear_4bit(x: Any, codes: Any, absmax: Any, *others: Any, out: Any, **__: Any) -> FlopCount:
    """The product, a multiplication an element of the weight, and two operations for each of its scales."""
    rows, columns = others[-2]
    macs = x.numel * rows
    return FlopCount(2 * macs + rows * columns + 2 * absmax.numel, macs)


def _count_elements(operations: int) -> Any:
    """A number of operations for each element of the first argument's result."""
    return lambda first, *_, out, **__: operations * int((first if out is None else out).numel)


# To look a value up is none.
register_flop_impl(ops.dequantize_blockwise, _count_elements(1))  # × scale
register_flop_impl(ops.dequantize_4bit, _count_elements(1))
register_flop_impl(ops.linear_4bit, _count_linear_4bit)
register_flop_impl(ops.quantize_rows_int8, _count_elements(1))  # × scale, as of bitsandbytes' own operator
register_flop_impl(ops.dequantize_product_int8, _count_elements(2))  # × the row's and the column's scale
