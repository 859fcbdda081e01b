"""Megatron's distributed optimizer: weights of 16 bits in one buffer, gradients whole in float32 in another, and of
master weights and states, in float32, the part of each rank.

Sources of Megatron-LM: core/distributed/param_and_grad_buffer.py (the buffers, and one sum over each), core/
distributed/distributed_data_parallel.py, `_make_backward_post_hook` (gradients are added there as they come), core/
optimizer/distrib_optimizer.py (a rank's part of the buffer is updated, without regard to where parameters begin).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

#: bytes at multiples of which a buffer is divided among ranks: param_and_grad_buffer.py, `_pad_end_if_needed`
_ALIGNED = 128


class ParamBuffer:
    """Parameters of modules that train, not those of modules in them, as views of one tensor. Ranks of ``group`` update
    a part of it each, ranks of ``copies`` the same one; None for one rank.
    """

    def __init__(self, modules: Sequence[nn.Module], group: Any, copies: Any = None) -> None:
        self.copies = copies
        self.group, self.ranks = group, 1 if group is None else distributed.get_world_size(group)
        places = [(module, name, parameter) for module in modules
                  for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
        alike: dict[int, list[tuple[nn.Module, str]]] = {}
        found = {id(parameter): parameter for _, _, parameter in places}
        for module, name, parameter in places:
            alike.setdefault(id(parameter), []).append((module, name))
        numel = sum(_local(parameter).numel() for parameter in found.values())
        size = -(-numel // (self.ranks * _ALIGNED)) * self.ranks * _ALIGNED
        self.weights = torch.empty(size, dtype=next(iter(found.values())).dtype, device="cuda") if found else None
        self.parameters: list[tuple[nn.Parameter, int]] = []  #: each, and where it begins
        begin = 0
        for key, parameter in found.items():
            changed = self._move(parameter, begin)
            begin += _local(changed).numel()
            for module, name in alike[key]:
                module.register_parameter(name, changed)

    def _move(self, parameter: nn.Parameter, begin: int) -> nn.Parameter:
        assert self.weights is not None
        local = _local(parameter)
        view = self.weights[begin:begin + local.numel()].view(local.shape)
        held: Any = parameter
        moved = nn.Parameter(DTensor.from_local(view, held.device_mesh, held.placements, run_check=False)
                             if isinstance(held, DTensor) else view)
        self.parameters.append((moved, begin))
        return moved

    def part(self, whole: Tensor) -> Tensor:
        """The part of a buffer that this rank updates."""
        rank = 0 if self.group is None else distributed.get_rank(self.group)
        return whole.chunk(self.ranks)[rank]


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


class DistributedOptimizer(torch.optim.Optimizer):
    """Updates this rank's part of each buffer by an optimizer that ``make`` makes; ``offloads``: master weights and
    states are on the host (core/optimizer/cpu_offloading/hybrid_optimizer.py).
    """

    def __init__(self, buffers: Sequence[ParamBuffer], make: Callable[[list[Tensor]], torch.optim.Optimizer],
                 offloads: bool = False) -> None:
        self.buffers = [buffer for buffer in buffers if buffer.weights is not None]
        super().__init__([parameter for buffer in self.buffers for parameter, _ in buffer.parameters], {})
        self.gradients: list[Tensor] = []
        self.masters: list[nn.Parameter] = []
        for buffer in self.buffers:
            assert buffer.weights is not None
            whole = torch.zeros(buffer.weights.shape, dtype=torch.float32, device="cuda")
            for parameter, begin in buffer.parameters:
                size = _local(parameter).numel()
                parameter.register_post_accumulate_grad_hook(partial(_add, whole[begin:begin + size]))
            self.gradients.append(whole)
            part = buffer.part(buffer.weights)
            self.masters.append(nn.Parameter((part.cpu() if offloads else part).float()))
        self.inner = make(list(self.masters))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum gradients over ranks, update this rank's part, and gather the weights of all."""
        for buffer, whole, master in zip(self.buffers, self.gradients, self.masters):
            part = buffer.part(whole)
            if buffer.ranks > 1:
                distributed.reduce_scatter_tensor(part, whole, group=buffer.group)
            if buffer.copies is not None:
                distributed.all_reduce(part, group=buffer.copies)
            master.grad = part.to(master.device)
        self.inner.step()
        for buffer, master in zip(self.buffers, self.masters):
            assert buffer.weights is not None
            master.grad = None
            part = buffer.part(buffer.weights)
            part.copy_(master)
            if buffer.ranks > 1:
                distributed.all_gather_into_tensor(buffer.weights, part, group=buffer.group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill the buffers of gradients with zeros; they stay."""
        for whole in self.gradients:
            whole.zero_()


def _add(whole: Tensor, parameter: Tensor) -> None:
    """A parameter's gradient, added to its place in the buffer as soon as it is there, and freed. That of a divided
    embedding is a sum of whole ones in torch.
    """
    gradient: Any = parameter.grad
    if _local(gradient).numel() != whole.numel():
        held: Any = parameter
        gradient = gradient.redistribute(placements=held.placements)
    whole.add_(_local(gradient).reshape(-1))
    parameter.grad = None
