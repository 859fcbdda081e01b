"""Layers quantized before a step, as bitsandbytes and torchao make them."""
from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from analyzer.errors import InputError
from analyzer.meta.state import current
from analyzer.units import format_bytes

from .layer import INT8_MAX, NESTED_BLOCK, NF4_VALUES, find_linear, list_heads, ops, replace_layers

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
          "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


# Linear layers whose weight is held quantized, with the memory of the libraries that people train and serve with.
#
# =======  =======================================  ==================================================================
# name     what is held of a weight of n × k        as in
# =======  =======================================  ==================================================================
# `nf4`    n k / 2 bytes, a byte for each 64        bitsandbytes 0.50 `Linear4bit`, double quantization (QLoRA)
#          elements, 4 for each 16,384
# `int8`   n k bytes, 4 for each row                bitsandbytes 0.50 `Linear8bitLt` (LLM.int8())
# `fp8`    n k bytes, 4 for each row                torchao 0.18 `Float8DynamicActivationFloat8WeightConfig(PerRow())`
# `int4`   n k / 2 bytes, 4 for each 128 elements   PyTorch's `_weight_int4pack_mm`, group 128 (torchao, gpt-fast)
# =======  =======================================  ==================================================================
#
# Weights with data are quantized; those without stay without.

Tensor = torch.Tensor


class Packed(NamedTuple):
    """What a quantized parameter stands for, as `analyzer.record.tensor_walk` reads it."""

    shape: tuple[int, ...]


class QuantizedLinear(nn.Module):
    """A linear layer whose weight, ``shape`` (out, in), is held quantized and gets no gradient."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        self.out_features, self.in_features = self.shape
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.quantize(weight)

    def quantize(self, weight: Tensor) -> None:
        raise NotImplementedError

    def hold(self, codes: Tensor, **buffers: Tensor) -> None:
        self.weight = nn.Parameter(codes, requires_grad=False)
        setattr(self.weight, "quant_state", Packed(self.shape))  # noqa: B010  # no attribute that nn.Parameter declares
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Nf4Linear(QuantizedLinear):
    """A weight in blocks of 64 four-bit codes, whose scales are quantized again in blocks of 256."""

    BLOCK = 64

    absmax: Tensor
    values: Tensor
    offset: Tensor
    nested_absmax: Tensor
    nested_values: Tensor

    def quantize(self, weight: Tensor) -> None:
        """bitsandbytes/functional.py, `quantize_4bit` with ``compress_statistics``."""
        values = torch.tensor(NF4_VALUES, dtype=torch.float32, device=weight.device)
        blocks = _split(weight, self.BLOCK)
        absmax = blocks.abs().amax(dim=1)
        middle = (values[1:] + values[:-1]) / 2
        codes = torch.bucketize(blocks / absmax.unsqueeze(1), middle).to(torch.uint8).reshape(-1)[:weight.numel()]
        codes = functional.pad(codes, (0, codes.numel() % 2)).reshape(-1, 2)
        offset = absmax.mean()
        nested = _split(absmax - offset, NESTED_BLOCK)
        nested_absmax = nested.abs().amax(dim=1)
        steps = torch.linspace(-1.0, 1.0, 256, device=weight.device)
        scales = torch.bucketize(nested / nested_absmax.unsqueeze(1), (steps[1:] + steps[:-1]) / 2).to(torch.uint8)
        self.hold((codes[:, 0] << 4 | codes[:, 1]).reshape(-1, 1), absmax=scales.reshape(-1)[:absmax.numel()].clone(),
                  values=values, offset=offset, nested_absmax=nested_absmax, nested_values=steps)

    def codes(self) -> Tensor:
        """Two elements a byte, in whatever dtype they are held (bitsandbytes' ``quant_storage``)."""
        return self.weight if self.weight.dtype is torch.uint8 else self.weight.view(torch.uint8)

    def scales(self) -> Tensor:
        """Of each block of elements, in float32."""
        scales: Tensor = ops.dequantize_blockwise(self.absmax, self.nested_absmax, self.nested_values, NESTED_BLOCK)
        return scales + self.offset

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        weight: Tensor = ops.dequantize_4bit(self.codes(), self.scales(), self.values, self.BLOCK, self.shape, dtype)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        # in autocast's dtype where there is one, else in that of the weight it was made from
        kind = x.device.type
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # there is none on meta
        compute = torch.get_autocast_dtype(kind) if is_cast else self.dtype
        output: Tensor = _Nf4Product.apply(x.to(compute), self)  # type: ignore[no-untyped-call]
        return output.to(x.dtype)


class _Nf4Product(torch.autograd.Function):
    """bitsandbytes/autograd/_functions.py, `MatMul4Bit`: nothing but the codes is kept for the backward pass. Up to 4
    rows are multiplied by one kernel, more by a dequantized weight (backends/cuda/ops.py; between 5 and 1,536 rows
    bitsandbytes chooses by the device and the shape).
    """

    FUSED_ROWS = 4

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        if x.numel() <= _Nf4Product.FUSED_ROWS * x.shape[-1] and x.shape[-1] % layer.BLOCK == 0:
            fused: Tensor = ops.linear_4bit(x, layer.codes(), layer.absmax, layer.values, layer.nested_absmax,
                                            layer.nested_values, layer.offset, layer.BLOCK, layer.shape, bias)
            return fused
        return functional.linear(x, layer.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.matmul(gradient, ctx.layer.dequantize(gradient.dtype)), None


class Int8Linear(QuantizedLinear):
    """A weight of a byte an element and a scale for each row; inputs are quantized row by row as they come. LLM.int8()
    multiplies columns with outliers (above 6.0) in half precision; which they are depends on data, so none are assumed,
    and a profile says so.
    """

    THRESHOLD = 6.0  # of transformers' BitsAndBytesConfig

    absmax: Tensor

    def quantize(self, weight: Tensor) -> None:
        """bitsandbytes/functional.py, `int8_vectorwise_quant`."""
        absmax = weight.abs().amax(dim=1).float()
        self.hold((weight * (INT8_MAX / absmax.unsqueeze(1))).round().to(torch.int8), absmax=absmax)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Int8Product.apply(x, self)  # type: ignore[no-untyped-call]
        return output


class _Int8Product(torch.autograd.Function):
    """bitsandbytes/autograd/_functions.py, `MatMul8bitLt`, without outliers; of the input, backward reads its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Int8Linear) -> Tensor:
        if (state := current()) is not None:
            state.assume("int8 weights: no input has columns with outliers, which LLM.int8() would multiply in "
                         "half precision")
        rows = x.reshape(-1, x.shape[-1])
        # backends/cuda/ops.py, `int8_vectorwise_quant`: the search for outliers comes between allocation and kernel
        half = rows.to(torch.float16)
        absmax = half.new_empty(half.shape[0], dtype=torch.float32)
        codes = torch.empty_like(half, dtype=torch.int8)
        outliers = half.abs() >= layer.THRESHOLD
        outliers.any()
        ops.quantize_rows_int8(half, codes, absmax)
        del half, outliers
        product = torch._int_mm(codes, layer.weight.t())
        output: Tensor = ops.dequantize_product_int8(product, absmax, layer.absmax)
        if layer.bias is not None:
            output.add_(layer.bias)
        ctx.layer, ctx.rows, ctx.input_shape = layer, rows, x.shape
        return output.to(x.dtype).reshape(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layer, dtype = ctx.layer, ctx.rows.dtype
        weight = layer.weight.to(dtype, copy=True).mul_(layer.absmax.unsqueeze(1).mul(1.0 / INT8_MAX))
        rows = gradient.reshape(-1, gradient.shape[-1]).to(dtype)
        return torch.matmul(rows, weight).view(ctx.input_shape), None


class Fp8Linear(QuantizedLinear):
    """A weight of float8 (e4m3) and a scale for each row. Inputs are brought to float8 as they come where the device
    multiplies it (compute capability 8.9), else the weight to the dtype of the input.
    """

    CAPABILITY = (8, 9)

    scale: Tensor

    def quantize(self, weight: Tensor) -> None:
        """torchao/quantization/quant_primitives.py, `_choose_scale_float8` and `_quantize_affine_float8`."""
        codes, scale = _to_float8(weight)
        self.hold(codes, scale=scale)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Fp8Product.apply(x, self)  # type: ignore[no-untyped-call]
        return output


class _Fp8Product(torch.autograd.Function):
    """The product by `torch._scaled_mm` with a scale for each row; backward with the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Fp8Linear) -> Tensor:
        ctx.layer = layer
        if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < layer.CAPABILITY:
            return functional.linear(x, _dequantize_fp8(layer, x.dtype), layer.bias)
        codes, scale = _to_float8(x.reshape(-1, x.shape[-1]))
        # bfloat16 is what row-wise scales give (aten/src/ATen/native/cuda/ScaledBlas.cpp)
        product = torch._scaled_mm(codes, layer.weight.t(), scale_a=scale, scale_b=layer.scale.t(),
                                   out_dtype=torch.bfloat16, use_fast_accum=True)
        output = product.to(x.dtype).reshape(*x.shape[:-1], layer.out_features)
        return output if layer.bias is None else output + layer.bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.matmul(gradient, _dequantize_fp8(ctx.layer, gradient.dtype)), None


def _to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale = (rows.abs().amax(dim=-1, keepdim=True).float() / largest).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn), scale


def _dequantize_fp8(layer: Fp8Linear, dtype: torch.dtype) -> Tensor:
    return layer.weight.to(dtype) * layer.scale.to(dtype)


class Int4Linear(QuantizedLinear):
    """A weight in groups of 128 four-bit codes, each with a scale and a zero in bfloat16, for inference."""

    GROUP = 128
    _INNER_TILES, _ROWS, _COLUMNS = 8, 8, 128  # aten/src/ATen/native/cuda/int4mm.cu: tiles of 8 rows and 8 × 16 columns

    scales: Tensor

    def quantize(self, weight: Tensor) -> None:
        """Columns are padded to whole tiles, as `_convert_weight_to_int4pack` needs them."""
        rows = -(-self.out_features // self._ROWS) * self._ROWS
        columns = -(-self.in_features // self._COLUMNS) * self._COLUMNS
        self.padding = columns - self.in_features
        packed = (rows // self._ROWS, columns // self._COLUMNS, 32, self._INNER_TILES // 2)
        codes = torch.empty(packed, dtype=torch.int32, device=weight.device)
        scales = torch.empty(columns // self.GROUP, rows, 2, dtype=torch.bfloat16, device=weight.device)
        self.hold(codes, scales=scales)

    def forward(self, x: Tensor) -> Tensor:
        """The output of a linear layer, in the dtype of ``x``. Raises InputError where ``x`` needs a gradient."""
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError("quantize='int4': its product has no backward pass; train with 'nf4', 'int8' or 'fp8'")
        rows = functional.pad(x.reshape(-1, x.shape[-1]).to(torch.bfloat16), (0, self.padding))
        product = torch._weight_int4pack_mm(rows, self.weight, self.GROUP, self.scales)[:, :self.out_features]
        output = product.to(x.dtype).reshape(*x.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def _split(values: Tensor, block: int) -> Tensor:
    flat = values.reshape(-1).float()
    return functional.pad(flat, (0, -flat.numel() % block)).reshape(-1, block)


Quantization = Literal["int8", "int4", "nf4", "fp8"]
LAYERS: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "int4": Int4Linear, "nf4": Nf4Linear, "fp8": Fp8Linear}


def find_layer(quantization: str) -> type[QuantizedLinear]:
    """The layer of that name. Raises InputError for an unknown one."""
    if quantization not in LAYERS:
        raise InputError(f"quantize={quantization!r}: not one of {', '.join(LAYERS)}")
    return LAYERS[quantization]


def quantize(model: nn.Module, quantization: str) -> None:
    """Hold the weights of all linear layers but the output head quantized, as transformers does; no parameter of
    ``model`` requires a gradient afterwards, for quantized weights cannot be trained. Raises InputError for an unknown
    name, and where the model has no linear layers besides its head.
    """
    kind = find_layer(quantization)
    model.requires_grad_(False)
    # attention computes with the weight of its out_proj itself
    whole: set[nn.Linear] = {m.out_proj for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    if not replace_layers(model, lambda path, module: None if module in whole or (linear := find_linear(module)) is None
                          else kind(linear)):
        raise InputError(f"quantize={quantization!r}: {type(model).__name__} has no linear layers besides its head")
    state = current()
    if state is not None and (left := _left_whole(model, whole)):
        nbytes = sum(p.numel() * p.element_size() for p in left.values())
        state.assume(
            f"{quantization} weights: {format_bytes(nbytes)} of {len(left)} parameters that are in no nn.Linear or "
            f"Conv1D ({max(left, key=lambda path: left[path].numel())}, ...) are not quantized")


def quantize_experts(model: nn.Module) -> int:
    """Hold the weights of experts that are one parameter for all of them in `nf4`; how many there are. They are whole
    while their module runs, and its backward pass needs them so (bitsandbytes 0.50, nn/parametrize.py,
    `replace_parameter_4bit`).
    """
    count = 0
    for module in [module for module in model.modules() if isinstance(getattr(module, "num_experts", None), int)]:
        held = {name: parameter for name, parameter in module.named_parameters(recurse=False)
                if parameter.ndim == 3 and parameter.shape[0] == module.num_experts}
        for name, parameter in held.items():
            linear = nn.Linear(parameter.shape[2], parameter.shape[0] * parameter.shape[1], False, device="meta")
            linear.weight = nn.Parameter(parameter.detach().flatten(0, 1), requires_grad=False)
            delattr(module, name)
            module.add_module(f"{name}_nf4", Nf4Linear(linear))
            module.register_forward_pre_hook(functools.partial(_make_whole, name, tuple(parameter.shape)))
            module.register_forward_hook(functools.partial(_drop_whole, name), always_call=True)
        count += len(held)
    return count


def _make_whole(name: str, shape: tuple[int, ...], module: nn.Module, _args: Any) -> None:
    layer: Any = getattr(module, f"{name}_nf4")
    vars(module)[name] = layer.dequantize(layer.dtype).view(shape)


def _drop_whole(name: str, module: nn.Module, _args: Any, _output: Any) -> None:
    vars(module).pop(name, None)


_HOLDERS = (nn.MultiheadAttention, nn.ParameterList, nn.ParameterDict)  # of torch.nn: of matrices, no layers


def _left_whole(model: nn.Module, whole: Collection[nn.Module]) -> dict[str, nn.Parameter]:
    """Matrices in no quantized layer, by path, such as experts that are one parameter; others replace `nn.Linear`
    layers alone (transformers/integrations/bitsandbytes.py, `replace_with_bnb_linear`).
    """
    heads = list_heads(model)
    return {f"{path}.{name}" if path else name: parameter for path, module in model.named_modules()
            if module not in heads and not isinstance(module, QuantizedLinear)
            and (module in whole or isinstance(module, _HOLDERS)
                 or not type(module).__module__.startswith("torch.nn.modules."))
            for name, parameter in module._parameters.items() if parameter is not None and parameter.ndim > 1}
