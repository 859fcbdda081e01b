"""The regions that are open while a forward is traced."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx

from analyzer.errors import InputError
from analyzer.fx.graph.statement import AutocastRegion, CheckpointRegion, GradRegion, Region
from analyzer.meta.source_line import user_line


def _grad_mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@dataclass
class Frame:
    """The root of the graph, or one checkpointed function in it."""

    prefix: tuple[Region, ...]
    autocasts: int  #: how many autocast blocks were open outside
    grad_mode: tuple[bool, bool] = field(default_factory=_grad_mode)
    sets_grad: bool = False  #: whether code inside has set the grad mode that is in force
    leaves_inference: bool = False  #: whether it did so by ``inference_mode(False)``
    kept: bool | None = None  #: ``sets_grad`` before code that sets a mode without a block, to put it back
    attributes: dict[int, fx.Node] = field(default_factory=dict)  #: id(tensor or object) -> its get_attr node
    #: tensors that a call inside gave back unchanged, with their nodes outside
    renamed: list[tuple[torch.Tensor, fx.Node]] = field(default_factory=list)


class RegionStack:
    """What surrounds the next node. The grad mode is asked, as code may set it without a block; the others are told."""

    def __init__(self, replays_checkpoints: bool) -> None:
        self.replays_checkpoints = replays_checkpoints
        self.frames = [Frame((), 0)]
        self._autocasts: list[AutocastRegion] = []
        #: by id of a block that sets the grad mode: the block, ``sets_grad`` and ``leaves_inference`` before it
        self._grads: dict[int, tuple[Any, bool, bool]] = {}
        self.names_set: set[str] = set()  #: functions that set other modes without a block, which are nodes
        #: what Python code asked of the modes around forward, and was told, where: see `Asked`
        self.asked: dict[tuple[str, tuple[Any, ...]], tuple[Any, str | None]] = {}
        self._autocast_ids, self._checkpoint_ids = count(), count()

    @property
    def frame(self) -> Frame:
        """The innermost function."""
        return self.frames[-1]

    def current(self) -> tuple[Region, ...]:
        """The regions of a node made now, outermost first."""
        frame = self.frame
        region = (*frame.prefix, *self._autocasts[frame.autocasts:])
        mode = _grad_mode()
        sets = mode != frame.grad_mode or frame.sets_grad and ("is_grad_enabled", ()) not in self.asked
        if frame.leaves_inference:
            region, sets = (*region, GradRegion(True, leaves_inference=True)), not mode[0]
        return (*region, GradRegion(*mode)) if sets else region

    def set_grad(self, block: Any) -> None:
        """A block that sets the grad mode is made, which may set it, or begins."""
        frame = self.frame
        self._grads.setdefault(id(block), (block, frame.sets_grad, frame.leaves_inference))
        frame.sets_grad = True
        if isinstance(block, torch.inference_mode):
            frame.leaves_inference = not block.mode

    def exchange_grad(self) -> None:
        """Code that sets the grad mode without a block does so, or puts back what there was."""
        frame = self.frame
        frame.sets_grad, frame.kept = (True, frame.sets_grad) if frame.kept is None else (frame.kept, None)

    def reset_grad(self, block: Any) -> None:
        """Such a block ends."""
        _, self.frame.sets_grad, self.frame.leaves_inference = self._grads.pop(id(block), (block, False, False))

    def ask_autocast(self) -> None:
        """What is written down is as autocast, if there is some around forward, makes it."""
        for device in ("cpu", "cuda"):
            names = ("is_autocast_enabled", *(["get_autocast_dtype"] if torch.is_autocast_enabled(device) else []))
            for name in names if (names[0], (device,)) not in self.asked else ():
                if not self.is_set(name, (device,)):
                    self.asked[name, (device,)] = getattr(torch, name)(device), user_line()

    def check_end(self) -> None:
        """Raise InputError where forward leaves another grad mode than it found."""
        if _grad_mode() != self.frame.grad_mode:
            raise InputError(f"forward leaves gradients {'on' if torch.is_grad_enabled() else 'off'}, which a graph "
                             "does not do to its caller. Set the grad mode in a `with` block, or put it back")

    def is_set(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether forward itself has set the mode that ``torch.<name>(*args)`` asks for."""
        topics = ("autocast", "default_dtype", "deterministic", "matmul_precision")
        if any(topic in name and any(topic in other for other in self.names_set) for topic in topics):
            return True
        if "autocast" in name:
            device = torch.device(args[0]).type if args else "cpu" if "cpu" in name else "cuda"
            return any(block.device_type == device for block in self._autocasts)
        return name in ("is_grad_enabled", "is_inference_mode_enabled") and any(f.sets_grad for f in self.frames)

    @contextmanager
    def checkpoint(self, **options: Any) -> Iterator[Frame]:
        """A checkpointed function runs."""
        region = CheckpointRegion(id=next(self._checkpoint_ids), replay=self.replays_checkpoints,
                                  restores_buffers=False, **options)
        self.frames.append(Frame((*self.current(), region), len(self._autocasts)))
        try:
            yield self.frame
        finally:
            self.frames.pop()

    def enter_autocast(self, device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
        """An autocast block begins."""
        self._autocasts.append(AutocastRegion(next(self._autocast_ids), device_type, dtype, enabled, cache_enabled))

    def exit_autocast(self) -> None:
        """The innermost autocast block ends."""
        if self._autocasts:
            self._autocasts.pop()
