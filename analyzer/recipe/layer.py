"""The linear layers of a model that a recipe may replace."""
from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn


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
    """Put ``make(path, module)`` in the place of each module but heads, where it gives one; how many it gave. What is
    used in two places is replaced in both by one.
    """
    heads, made = list_heads(model), {}
    for parent, name, path, module in list(_walk(model)):
        if module in heads:
            continue
        if module not in made:
            made[module] = make(path, module)
        found = made[module]
        if found is not None:
            setattr(parent, name, found)
    return sum(found is not None for found in made.values())


def _walk(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """Parent, name, path and module of all modules below ``model``."""
    for path, parent in model.named_modules():
        for name, module in parent._modules.items():
            if module is not None:
                yield parent, name, f"{path}.{name}" if path else name, module
