"""The regions that are open while a forward is traced."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from analyzer.fx.graph.statement import AutocastRegion, CheckpointRegion, GradRegion, Region


class Frame:
    """The root of the graph, or one checkpointed function in it."""

    def __init__(self, prefix: tuple[Region, ...], autocasts: int) -> None:
        self.prefix = prefix
        self.grad_mode = _grad_mode()
        self.autocasts = autocasts  #: how many autocast blocks were open outside
        self.attributes: dict[int, fx.Node] = {}  #: id(tensor or object) -> its get_attr node
        #: tensors that a call inside gave back unchanged, with their nodes outside
        self.renamed: list[tuple[torch.Tensor, fx.Node]] = []


def _grad_mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


class RegionStack:
    """What surrounds the next node. The grad mode is asked, as code may set it without a block; the others are told."""

    def __init__(self, replays_checkpoints: bool) -> None:
        self.replays_checkpoints = replays_checkpoints
        self.frames = [Frame((), 0)]
        self._autocasts: list[AutocastRegion] = []
        self.numbers = {"autocast": 0, "checkpoint": 0}  #: how many of each there were

    @property
    def frame(self) -> Frame:
        """The innermost function."""
        return self.frames[-1]

    def current(self) -> tuple[Region, ...]:
        """The regions of a node made now, outermost first."""
        frame = self.frame
        region = (*frame.prefix, *self._autocasts[frame.autocasts:])
        mode = _grad_mode()
        return region if mode == frame.grad_mode else (*region, GradRegion(*mode))

    @contextmanager
    def checkpoint(self, **options: Any) -> Iterator[Frame]:
        """A checkpointed function runs."""
        region = CheckpointRegion(id=self._number("checkpoint"), replay=self.replays_checkpoints,
                                  restores_buffers=False, **options)
        self.frames.append(Frame((*self.current(), region), len(self._autocasts)))
        try:
            yield self.frame
        finally:
            self.frames.pop()

    def enter_autocast(self, device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
        """An autocast block begins."""
        self._autocasts.append(AutocastRegion(self._number("autocast"), device_type, dtype, enabled, cache_enabled))

    def exit_autocast(self) -> None:
        """The innermost autocast block ends."""
        if self._autocasts:
            self._autocasts.pop()

    def _number(self, kind: str) -> int:
        self.numbers[kind] += 1
        return self.numbers[kind] - 1
