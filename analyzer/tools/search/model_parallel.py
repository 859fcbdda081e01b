"""A stage divided over ranks: by tensor parallelism, with or without sequence parallelism, or by experts.

Tensors are divided by torch's own code (`torch.distributed.tensor.parallel`) and the plan of the model: blocks are as
torchtitan divides them (torchtitan/models/llama3/infra/parallelize.py, `apply_tp`); what holds experts is whole. Code
around the blocks sees whole sequences, as it may make positions of their length: in the place of the embedding's part
it is shown a view of that size, without memory. Experts are divided over ranks that share the data, and tokens go there
and come back, as of torchtitan/distributed/expert_parallel.py, `ExpertParallel`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .stage import LINEAR_WAYS, StageNet, Template, find_way, list_experts

_TOKENS = Shard(1)  # (batch, tokens, channels): the dimension that sequence parallelism divides


def divide_stage(template: Template, stage: StageNet, blocks: Sequence[nn.Module], mesh: Any, by_tokens: bool) -> None:
    """Divide a stage's blocks, and its embedding and head where it has them."""
    residual: Any = _TOKENS if by_tokens else Replicate()
    for i, block in enumerate(blocks):
        _divide_block(template, f"{template.path}.{i}", block, mesh, residual)
    entry = _ResidualEntry(mesh.size()) if by_tokens and blocks else None
    if stage.part.first:
        embedding = stage.model.get_submodule(template.before[0])
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=residual))
        if entry is not None:
            embedding.register_forward_hook(lambda _module, _args, out: entry.show(out))
    elif entry is not None:
        owner = stage.model.get_submodule(template.before[0].rpartition(".")[0])
        owner.register_forward_pre_hook(entry.show_given, with_kwargs=True)
    if entry is not None:
        blocks[0].register_forward_pre_hook(entry.give_back, with_kwargs=True)
    if stage.part.last:
        *norms, head = [stage.model.get_submodule(path) for path in template.behind]
        for norm in norms if by_tokens else ():
            parallelize_module(norm, mesh, SequenceParallel(use_local_output=True))
        parallelize_module(head, mesh, ColwiseParallel(
            input_layouts=residual, output_layouts=Shard(-1), use_local_output=False))


def _divide_block(template: Template, path: str, block: nn.Module, mesh: Any, residual: Any) -> None:
    divided: dict[str, Any] = {}
    whole = {name.partition(".")[0] for name, _ in list_experts(block)}  # each rank has its own tokens there
    for inner, module in block.named_modules():
        way = find_way(template.plan, f"{path}.{inner}")
        if way not in LINEAR_WAYS or inner.partition(".")[0] in whole:
            continue
        if hasattr(module, "lora_A"):
            divided.update(_divide_adapter(inner, way, residual))
        else:
            divided[inner] = ColwiseParallel() if way == "colwise" else RowwiseParallel(output_layouts=residual)
    for name, child in block.named_children():
        if name in whole:
            continue
        if any(inner == name or inner.startswith(f"{name}.") for inner in divided):
            child.register_forward_pre_hook(partial(_gather, mesh, residual), with_kwargs=True)
        elif residual == _TOKENS and next(child.parameters(), None) is not None:
            divided[name] = SequenceParallel(use_local_output=True)
    parallelize_module(block, mesh, divided)


def _divide_adapter(inner: str, way: str, residual: Any) -> dict[str, Any]:
    """A layer with an adapter (`analyzer.recipe`): the factor that is as wide as the layer is divided as it is, as of
    Megatron-Bridge, peft/lora.py; the other one is whole.
    """
    if way == "colwise":
        return {f"{inner}.base_layer": ColwiseParallel(), f"{inner}.lora_A": _Whole(), f"{inner}.lora_B":
                ColwiseParallel()}
    return {f"{inner}.{name}": RowwiseParallel(output_layouts=residual) for name in ("base_layer", "lora_A")}


class _Whole(ParallelStyle):
    """Parameters that each rank has, of a module whose input is a DTensor."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh)


def _put(change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments of a module, of which the first floating tensor is changed."""
    values = [*args, *kwargs.values()]
    place = next(i for i, value in enumerate(values) if isinstance(value, Tensor) and value.is_floating_point())
    values[place] = change(values[place])
    return tuple(values[:len(args)]), dict(zip(kwargs, values[len(args):]))


def _gather(mesh: Any, layout: Any, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook before a module: its first floating argument is whole on all ranks, gathered once for all its products."""
    return _put(lambda part: DTensor.from_local(part, mesh, [layout], run_check=False).redistribute(
        mesh, [Replicate()]), args, kwargs)


class _ResidualEntry:
    """Holds a rank's part of the residual between the embedding and the first block."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.held: list[Tensor] = []

    def show(self, part: Tensor) -> Tensor:
        """A view of the size of the whole, with the memory of one number; the first block is given the part itself."""
        self.held.append(part)
        batch, tokens, width = part.shape
        return part.detach().new_empty(1).expand(batch, tokens * self.ranks, width)

    def show_given(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the module whose embedding another stage holds."""
        return _put(self.show, args, kwargs)

    def give_back(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.held:  # the block is run again
            return None
        return _put(lambda _: self.held.pop(), args, kwargs)


# Experts.

def divide_experts(blocks: Sequence[nn.Module], mesh: Any) -> list[nn.Module]:
    """Leave each rank of a mesh its part of the experts; the modules that hold them."""
    divided = []
    for block in blocks:
        for _, module in list_experts(block):
            for name, parameter in [*module.named_parameters(recurse=False)]:
                part = parameter.detach()[:module.num_experts // mesh.size()]
                module.register_parameter(name, nn.Parameter(torch.empty_like(part), parameter.requires_grad))
            module.forward = partial(_exchange, module.forward, mesh.get_group(), mesh.size(), module.num_experts)
            module.num_experts //= mesh.size()
            divided.append(module)
    return divided


def _exchange(inner: Callable[..., Tensor], group: Any, ranks: int, experts: int, tokens: Tensor, chosen: Tensor,
              weights: Tensor) -> Tensor:
    """In the place of the forward pass of a module of experts: of all of them before, of this rank's within."""
    each, places = chosen.shape[-1], chosen.reshape(-1)
    order = torch.argsort(places, stable=True)
    with torch.no_grad():
        counts = torch.histc(places, bins=experts, min=0, max=experts)
        theirs = all_to_all_single(counts, None, None, group)
        sent, got = (n.view(ranks, -1).sum(1).tolist() for n in (counts, theirs))
        own = torch.arange(experts // ranks, device=tokens.device).repeat(ranks)
        own = torch.repeat_interleave(own, theirs, output_size=sum(got))
    here = all_to_all_single_autograd(tokens[order // each], got, sent, group)
    out = inner(here, own[:, None], here.new_ones(len(own), 1))
    back = all_to_all_single_autograd(out, sent, got, group) * weights.reshape(-1)[order, None]
    return torch.zeros_like(tokens).index_add(0, order // each, back.to(tokens.dtype))
