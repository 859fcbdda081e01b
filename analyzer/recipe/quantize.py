"""`quantize`: puts quantized linear layers in the place of those of a model."""
from __future__ import annotations

from typing import Literal

from torch import nn

from analyzer.errors import InputError
from analyzer.meta.state import active
from analyzer.units import format_bytes

from .layer import find_linear, list_heads, replace_layers
from .quantized_linear import Fp8Linear, Int4Linear, Int8Linear, Nf4Linear, QuantizedLinear

Quantization = Literal["int8", "int4", "nf4", "fp8"]
LAYERS: dict[str, type[QuantizedLinear]] = {
    "int8": Int8Linear, "int4": Int4Linear, "nf4": Nf4Linear, "fp8": Fp8Linear}


def find_layer(quantization: str) -> type[QuantizedLinear]:
    """The layer of that name. Raises InputError for an unknown one."""
    if quantization not in LAYERS:
        raise InputError(f"quantize={quantization!r}: not one of {', '.join(LAYERS)}")
    return LAYERS[quantization]


def quantize(model: nn.Module, quantization: str) -> None:
    """Hold the weights of all linear layers but the output head quantized, as transformers does; no parameter of
    ``model`` requires a gradient afterwards, for quantized weights cannot be trained. Raises InputError for an unknown
    name, and where the model has no linear layers besides its head.

    >>> model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> quantize(model, "nf4")
    >>> model[0].weight.dtype, model[0].weight.numel()
    (torch.uint8, 4096)
    """
    kind = find_layer(quantization)
    model.requires_grad_(False)
    if not replace_layers(model, lambda path, module: None if (linear := find_linear(module)) is None
                          else kind(linear)):
        raise InputError(f"quantize={quantization!r}: {type(model).__name__} has no linear layers besides its head")
    if active.state is not None and (left := _left_whole(model)):
        nbytes = sum(p.numel() * p.element_size() for p in left.values())
        active.state.assume(
            f"{quantization} weights: {format_bytes(nbytes)} of {len(left)} parameters that no linear layer holds "
            f"({next(iter(left))}, ...) are not quantized, as no library does")


def _left_whole(model: nn.Module) -> dict[str, nn.Parameter]:
    """Matrices in modules of the model's own, by path: experts that are one parameter. bitsandbytes and torchao replace
    `nn.Linear` layers alone (transformers/integrations/bitsandbytes.py, `replace_with_bnb_linear`).
    """
    heads = list_heads(model)
    return {f"{path}.{name}" if path else name: parameter for path, module in model.named_modules()
            if module not in heads and not isinstance(module, QuantizedLinear)
            and not type(module).__module__.startswith("torch.nn.")
            for name, parameter in module._parameters.items() if parameter is not None and parameter.ndim > 2}

