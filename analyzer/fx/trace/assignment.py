"""What a forward puts in the place of tensors that its modules hold, found by comparing before and after."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from analyzer.fx.module_borrow import Borrowed
from analyzer.meta.structure import tensors_of

from .tape import Tape

Tensor = torch.Tensor


class Assignments:
    """What the modules of ``borrowed`` and the arguments of forward, by name, hold when it begins, for `write` when it
    ends.
    """

    def __init__(self, borrowed: Borrowed, arguments: Mapping[str, Any]) -> None:
        self.borrowed, self.arguments = borrowed, arguments
        self.before = self._list_held()
        self.given = {name: list(tensors_of(value)) for name, value in arguments.items()}

    def _list_held(self) -> dict[tuple[str, str], Any]:
        """Tensors and modules by (path of the module, name), attributes first, without those of TorchScript."""
        return {(path, name): value for path, module in self.borrowed.walked
                if not isinstance(module, torch.jit.ScriptModule)
                for held in (vars(module), module._parameters, module._buffers, module._modules)
                for name, value in held.items() if isinstance(value, (Tensor, nn.Module))}

    def write(self, tape: Tape, result: Any) -> frozenset[int]:
        """Let the graph give the buffers that were replaced their new contents; the ids of the old ones.

        It sets nothing else, and the assumptions say so. ``result`` is what the forward returns.
        """
        now, named = self._list_held(), {path: fake for path, fake, _ in self.borrowed.buffers}
        replaced: list[tuple[Tensor, Tensor]] = []
        for place in {**self.before, **now}:
            value = now.get(place)
            is_new = isinstance(value, Tensor) and self.borrowed.original_of(value) is None
            if value is self.before.get(place) or is_new and tape.find(value) is None:
                continue  # as it was, or set by what is one node
            name = ".".join(filter(None, place))
            fake = named.get(name)
            is_recorded = is_new or not tape.outlined
            if (isinstance(value, Tensor) and fake is not None and is_recorded
                    and sum(held is fake for held in self.before.values()) == 1):
                replaced.append((fake, value))
            else:
                tape.state.assume(f"forward sets {name} to {_describe(value)}: the graph does not set it")
        for name, given in self.given.items():
            if list(map(id, tensors_of(self.arguments[name]))) != list(map(id, given)):
                tape.state.assume(f"forward puts other tensors into {name}, a container or an object that it is given: "
                                  "the graph does not")
        old = frozenset(id(fake) for fake, _ in replaced)
        targets = [tape.node_of(fake) for fake, _ in replaced]
        for tensor in tensors_of(([value for _, value in replaced], result)):
            if id(tensor) in old:  # the buffer itself, which is about to have other contents
                tape.map(tensor, tape.call_method("view_as", *[tape.node_of(tensor)] * 2))
        for target, value in zip(targets, [tape.node_of(value) for _, value in replaced]):
            tape.call(assign_buffer, target, value)
        return old


def assign_buffer(buffer: Tensor, value: Tensor) -> None:
    """Give ``buffer`` the contents of ``value``, whatever its shape, keeping its identity."""
    buffer.data = value.detach()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor, which is not a registered buffer of that name alone"
    return "another module" if isinstance(value, nn.Module) else "None"
