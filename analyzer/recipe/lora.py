"""Low-rank adapters (LoRA), with the memory of peft's."""
from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from analyzer.errors import InputError, is_count
from analyzer.meta.state import active

from .layer import find_linear, replace_layers
from .quantize import DTYPES, QuantizedLinear

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LoraSpec:
    """Which adapters a model gets: of rank ``r``, beside each linear layer whose path ends in one of ``targets``
    (empty: all but the output head), with ``dropout`` before them. ``dtype`` of half precision layers' adapters is
    float32, as peft makes them, unless it says otherwise. Raises InputError for values that no adapter could have.

    >>> LoraSpec.parse("r=16,dropout=0.1,targets=q_proj+v_proj")
    LoraSpec(r=16, targets=('q_proj', 'v_proj'), dropout=0.1, dtype=None)
    """

    r: int = 8
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    dtype: str | None = None

    def __post_init__(self) -> None:
        if not is_count(self.r, 1):
            raise InputError(f"lora: r={self.r!r}: must be a whole number of at least 1")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise InputError(f"lora: dropout={self.dropout!r}: must be at least 0 and below 1")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"lora: dtype={self.dtype!r}: not one of {', '.join(DTYPES)}")

    @classmethod
    def parse(cls, text: str) -> LoraSpec:
        """What ``--lora`` gives: ``r=16``, ``16``, or more settings after commas. Raises InputError for others."""
        settings: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals:
                name, value = "r", name
            try:
                settings[name] = _READERS[name](value)
            except (KeyError, ValueError):
                raise InputError(f"--lora {text}: {part!r} is not one of r=16, targets=q_proj+v_proj (or all-linear), "
                                 "dropout=0.05, dtype=bf16") from None
        return cls(**settings)


_READERS: dict[str, Any] = {"r": int, "dropout": float, "dtype": str,
                            "targets": lambda text: () if text == "all-linear" else tuple(text.split("+"))}


class LoraLinear(nn.Module):
    """A linear layer and an adapter: y = layer(x) + B A dropout(x) (peft/tuners/lora/layer.py, `Linear.forward`)."""

    def __init__(self, base: nn.Module, spec: LoraSpec) -> None:
        super().__init__()
        dtype = base.dtype if isinstance(base, QuantizedLinear) else base.weight.dtype
        if spec.dtype is not None:
            dtype = DTYPES[spec.dtype]
        elif dtype in _HALF:
            dtype = torch.float32  # peft/tuners/tuners_utils.py, cast_adapter_dtype
        linear = base if isinstance(base, QuantizedLinear) else find_linear(base)
        assert linear is not None
        settings: dict[str, Any] = {"bias": False, "dtype": dtype, "device": base.weight.device}
        self.base_layer = base
        self.lora_A = nn.Linear(linear.in_features, spec.r, **settings)
        self.lora_B = nn.Linear(spec.r, linear.out_features, **settings)
        self.lora_dropout = nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()
        self.scaling = 1.0
        nn.init.zeros_(self.lora_B.weight)  # a new adapter changes nothing

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own, which code may read (peft/tuners/tuners_utils.py, `BaseTunerLayer.weight`). Code that
        computes with it passes by the adapter: `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` in inference.
        """
        caller = sys._getframe(1)
        reader = caller.f_locals.get("self") if caller.f_code.co_name == "forward" else None
        if isinstance(reader, nn.Module) and active.state is not None:
            active.state.assume(
                f"lora: forward of {type(reader).__name__} reads the weight of a layer with an adapter; where it "
                "computes with that, the adapter is passed by and not trained, as peft's is")
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's own, as in peft."""
        return getattr(self.base_layer, "bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output in its own dtype; the adapter computes in that of its weights."""
        result: torch.Tensor = self.base_layer(x)
        dtype = result.dtype
        result = result + self.lora_B(self.lora_A(self.lora_dropout(x.to(self.lora_A.weight.dtype)))) * self.scaling
        return result.to(dtype)


def add_lora(model: nn.Module, spec: LoraSpec) -> None:
    """Freeze ``model`` and give its linear layers adapters. Raises InputError where none is a target."""
    model.requires_grad_(False)
    seen: list[str] = []

    def make(path: str, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, QuantizedLinear) and find_linear(module) is None:
            return None
        seen.append(path)
        is_target = not spec.targets or f".{path}".endswith(tuple(f".{name}" for name in spec.targets))
        return LoraLinear(module, spec) if is_target else None

    if not replace_layers(model, make):
        names = sorted({path.rpartition(".")[2] for path in seen})
        raise InputError(f"lora: {type(model).__name__} has no linear layer named {' or '.join(spec.targets)}; it has "
                         f"{', '.join(names)}" if seen else
                         f"lora: {type(model).__name__} has no linear layers besides its head")
