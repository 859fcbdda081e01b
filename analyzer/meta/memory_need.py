"""Memory that a kernel needs while it runs."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from analyzer.hardware.current_spec import simulated_spec
from analyzer.registry import Registry

from .operator_info import OperatorInfo
from .signature import Signature
from .spec import TensorSpec
from .state import MetaState


class MemoryNeed(NamedTuple):
    """What an operator takes besides its inputs and outputs, in bytes."""

    workspace_bytes: int = 0  #: held while the kernel runs
    saved_bytes: int = 0      #: held from forward until backward, besides saved inputs and outputs


register_memory_impl: Registry[Any, Callable[..., MemoryNeed]] = Registry("register_memory_impl")
"""Register what an operator needs while it runs and saves: a function of its arguments' specs and ``out`` (the spec of
the output, or a tuple of them) that returns a `MemoryNeed`. The key is a ``torch.ops`` operator, one overload or all.
"""


class Stage(NamedTuple):
    """A part of an operator's run: blocks of these sizes are held together, then given back.

    ``before`` is the number, in the order of allocation, of the output that is allocated only after this stage, None
    where all outputs are there by then. A stage before an output whose blocks are ``kept`` gives them back only when
    the operator ends.
    """

    blocks: tuple[int, ...]
    before: int | None = None
    kept: bool = False


StageRule = Callable[[Signature], "tuple[Stage, ...]"]
_rules: dict[Any, StageRule] = {}


def kernel_stages(*operators: Any) -> Callable[[StageRule], StageRule]:
    """Decorator: what CUDA kernels of ``operators`` (overload packets) hold while they run, from the specs of a call."""
    def add(rule: StageRule) -> StageRule:
        for operator in operators:
            assert operator not in _rules, operator
            _rules[operator] = rule
        return rule
    return add


_orders: dict[Any, tuple[int, ...]] = {}


def allocated_in(order: tuple[int, ...], *operators: Any) -> None:
    """Say that the CUDA kernels of ``operators`` (overload packets) allocate their outputs in this order, not in that
    of the result.

    It decides which of the allocator's free blocks each of them gets, and so how many bytes are held beyond those asked
    for.
    """
    for operator in operators:
        assert operator not in _orders, operator
        _orders[operator] = order


def allocation_order(packet: Any) -> tuple[int, ...] | None:
    """The numbers of an operator's outputs in the order in which they are allocated, None where it is that of the
    result.
    """
    return _orders.get(packet)


def has_rule(info: OperatorInfo) -> bool:
    """Whether anything is known of what an operator holds while it runs."""
    rules = len(_rules) + register_memory_impl.version  # neither ever shrinks
    if info.rules_seen != rules:
        info.rules_seen = rules
        info.has_rule = info.packet in _rules or info.op in register_memory_impl or info.packet in register_memory_impl
    return info.has_rule


def stages_of(signature: Signature) -> tuple[Stage, ...]:
    """What the call holds while it runs, by the rule registered for it, else by PyTorch's own kernel's."""
    packet = signature.op.overloadpacket
    impl = register_memory_impl.find(signature.op) or register_memory_impl.find(packet)
    if impl is not None:
        outputs = signature.outputs
        need = impl(*signature.args, out=outputs[0] if len(outputs) == 1 else outputs, **signature.kwargs)
        return (Stage((need.workspace_bytes,)),) if need.workspace_bytes else ()
    key = ("stages", simulated_spec().name)  # rules may ask for the device's generation
    stages: tuple[Stage, ...] | None = signature.memo.get(key)
    if stages is None:
        stages = signature.memo[key] = _rules[packet](signature) if _runs_on_cuda(signature) else ()
    return stages


def _runs_on_cuda(signature: Signature) -> bool:
    specs: tuple[TensorSpec, ...] = (*signature.inputs, *signature.outputs)
    return any(s.device.startswith("cuda") for s in specs)


def hold_blocks(state: MetaState, claim: torch.device, blocks: tuple[int, ...]) -> None:
    """Allocate ``blocks`` one after the other, then free them: what an allocator sees of a kernel's temporaries."""
    space = state.space
    regions = []
    try:
        for nbytes in blocks:
            regions.append(space.reserve(claim, nbytes))
        if state.recorder is not None:
            state.recorder.took_workspace(sum(r.bytes for r in regions), claim, blocks)
    finally:  # also where memory runs out midway
        for region in regions:
            space.give_back(claim, region)
