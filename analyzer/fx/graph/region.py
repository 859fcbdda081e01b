"""What surrounds a node: grad mode, autocast and checkpointing, outermost first in ``node.meta["region"]``."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint

Description = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class GradRegion:
    """A part of the forward pass whose grad mode is not that around it.

    >>> GradRegion(enabled=False).header()
    'torch.no_grad()'
    """

    enabled: bool
    inference: bool = False  #: torch.inference_mode()

    def header(self) -> str:
        """The context manager as source text."""
        if self.inference:
            return "torch.inference_mode()"
        return "torch.enable_grad()" if self.enabled else "torch.no_grad()"

    def context(self) -> Any:
        """The context manager."""
        return torch.inference_mode() if self.inference else torch.enable_grad() if self.enabled else torch.no_grad()

    def describe(self) -> Description:
        """The region as plain data."""
        return {"kind": "grad", "enabled": self.enabled, "inference": self.inference}


@dataclass(frozen=True)
class AutocastRegion:
    """A ``with torch.autocast(...)`` block of the forward pass; each ``id`` has its own cache of casts.

    >>> AutocastRegion(0, "cuda", torch.bfloat16).header()
    "torch.autocast('cuda', dtype=torch.bfloat16)"
    """

    id: int
    device_type: str
    dtype: torch.dtype | None = None
    enabled: bool = True
    cache_enabled: bool | None = None

    def header(self) -> str:
        """The context manager as source text."""
        parts = [repr(self.device_type)]
        if self.dtype is not None:
            parts.append(f"dtype={self.dtype}")
        if not self.enabled:
            parts.append("enabled=False")
        if self.cache_enabled is False:
            parts.append("cache_enabled=False")
        return f"torch.autocast({', '.join(parts)})"

    def context(self) -> Any:
        """The context manager."""
        return torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)

    def describe(self) -> Description:
        """The region as plain data."""
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return {"kind": "autocast", "id": self.id, "device_type": self.device_type, "dtype": dtype,
                "enabled": self.enabled}


@dataclass(frozen=True)
class CheckpointRegion:
    """One call of ``torch.utils.checkpoint.checkpoint``; consecutive nodes with an equal region make up its function.

    With ``replay`` false the region is a note only: the generated code runs its nodes without checkpointing. With
    ``restores_buffers`` (not with ``use_reentrant`` or a ``context_fn``), the second run leaves buffers of modules as
    they were; torch's own checkpoint updates running statistics twice, and so does a region that was traced.
    """

    id: int
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    context_fn: Callable[[], Any] | None = None
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    replay: bool = True
    restores_buffers: bool = True

    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``checkpoint`` that are not its defaults, and ``use_reentrant``."""
        names = ["preserve_rng_state"]
        if not self.use_reentrant:
            names += ["context_fn", "determinism_check", "debug", "early_stop"]
        changed = {n: value for n in names if (value := getattr(self, n)) != getattr(CheckpointRegion, n)}
        return {"use_reentrant": self.use_reentrant, **changed}

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function`` as the region says."""
        if not self.replay:
            return function(*args)
        return torch.utils.checkpoint.checkpoint(function, *args, **self.options())

    def describe(self) -> Description:
        """The region as plain data."""
        return {"kind": "checkpoint", "id": self.id, "use_reentrant": self.use_reentrant,
                "preserve_rng_state": self.preserve_rng_state, "selective": self.context_fn is not None,
                "replay": self.replay}


Region = GradRegion | AutocastRegion | CheckpointRegion
