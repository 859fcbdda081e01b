"""What stands for what while a module is borrowed."""
from __future__ import annotations

import weakref

import torch
from torch import nn

from .fake_tensor import FakeTensors

Tensor = torch.Tensor
Triple = tuple[str, Tensor, Tensor]


class Borrowed:
    """What stands for what while a module is borrowed.

    ``parameters`` and ``buffers`` list (path, fake tensor, original) as ``named_parameters()`` and ``named_buffers()``:
    a tensor of several names once, under the first. ``modules`` maps id(module) to its first path, registered modules
    only, ``by_path`` the other way; ``walked`` has them in order, ``every`` also those that are held without being
    registered. ``root`` is the module to call: what a compiled one wraps. A buffer or another attribute is listed until
    the forward replaces it, which frees its memory.
    """

    def __init__(self, root: nn.Module, fakes: FakeTensors) -> None:
        self.root = root
        self.parameters: list[Triple] = []
        self._buffers: list[tuple[str, weakref.ref[Tensor], Tensor]] = []
        self.modules: dict[int, str] = {}
        self.by_path: dict[str, nn.Module] = {}
        self.walked: list[tuple[str, nn.Module]] = []
        self.every: list[nn.Module] = []
        self.fakes = fakes

    @property
    def buffers(self) -> list[Triple]:
        """(path, fake tensor, original) of each buffer, as long as nothing replaced it."""
        return [(entry[0], fake, entry[2]) for entry in self._buffers
                if (fake := entry[1]()) is not None]

    def add(self, item: Triple, is_buffer: bool) -> None:
        """List a parameter or buffer."""
        if is_buffer:
            self._buffers.append((item[0], weakref.ref(item[1]), item[2]))
        else:
            self.parameters.append(item)

    @property
    def attributes(self) -> list[tuple[Tensor, Tensor]]:
        """Fake tensors and originals of tensors that are not registered, as long as nothing replaced them."""
        named = {id(fake) for group in (self.parameters, self.buffers) for _, fake, _ in group}
        return [(fake, original) for original, fake in self.fakes if id(fake) not in named]

    def original_of(self, fake: Tensor) -> Tensor | None:
        """The tensor whose place ``fake`` takes, or None."""
        return self.fakes.original_of(fake)

