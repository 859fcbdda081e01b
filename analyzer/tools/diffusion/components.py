"""What a pipeline runs: modules, how often each is called, and with what."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Component:
    """A module that a pipeline calls ``calls`` times with these arguments, on the meta device."""

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 1


@dataclass(frozen=True)
class Pipeline:
    """What a batch runs. ``tokens``: of the latents, as the denoiser sees them; None where it has several sizes."""

    name: str
    text: tuple[Component, ...]
    denoiser: Component
    decoder: Component | None
    batch: int
    height: int
    width: int
    frames: int | None
    steps: int
    tokens: int | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def components(self) -> tuple[Component, ...]:
        return (*self.text, self.denoiser, *([] if self.decoder is None else [self.decoder]))


class ImageDecoder(nn.Module):
    """An autoencoder of which a pipeline calls the decoder; its encoder lies on the device too."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, latents: Tensor) -> Any:
        return self.vae.decode(latents, return_dict=False)[0]


class Experts(nn.Module):
    """A denoiser of the first, noisy steps, and one of the same kind for the others, which lies on the device too."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, **inputs: Any) -> Any:
        return self.first(**inputs)
