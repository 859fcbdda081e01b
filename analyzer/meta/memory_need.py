"""Memory that a kernel needs while it runs."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from analyzer.errors import InputError, is_count
from analyzer.hardware.catalogue import simulated_spec
from analyzer.registry import Call, Registry

from .operator_info import OperatorInfo, check_loaded_operator
from .spec import Signature
from .state import MetaState

_AT_LEAST_0 = "a whole number of bytes, at least 0"


class Stage(NamedTuple):
    """A part of an operator's run: blocks of these sizes are held together, then given back. ``before`` is the number,
    in the order of allocation, of the output that is allocated only after this stage, None where all outputs are there
    by then. A stage before an output whose blocks are ``kept`` gives them back only when the operator ends.
    """

    blocks: tuple[int, ...]
    before: int | None = None
    kept: bool = False


class MemoryNeed(NamedTuple):
    """What an operator takes besides its inputs and outputs, in bytes, and when."""

    workspace_bytes: int = 0  #: held once the outputs are there: a stage of its own, after all others
    #: held from forward until backward, besides saved inputs and outputs, by an operator with `register_shape_impl`;
    #: one with an autograd formula of its own holds what that saves
    saved_bytes: int = 0
    stages: tuple[Stage, ...] = ()  #: what is held while the kernel runs, where one block at its end does not say it
    output_order: tuple[int, ...] | None = None
    """The numbers of the outputs in the order in which the kernel allocates them, None where it is that of the result.
    It decides which of the allocator's free blocks each of them gets."""


register_memory_impl: Registry[Any, Callable[..., MemoryNeed]] = Registry(
    "register_memory_impl", check_loaded_operator, Call("f(*args, out=..., **kwargs)", keywords=("out",)))
"""Register what an operator needs while it runs and saves: a function of its arguments' specs and ``out`` (the spec of
the output, or a tuple of them) that returns a `MemoryNeed`. The key is a ``torch.ops`` operator, one overload or all,
what ``@torch.library.custom_op`` made, or a Python function with a registered shape. Raises InputError for another key.
A rule that depends on the device's generation reads `analyzer.hardware.catalogue.simulated_spec`."""

_Rule = TypeVar("_Rule")
StageRule = Callable[[Signature], "tuple[Stage, ...]"]
_rules: dict[Any, StageRule] = {}


def kernel_stages(*operators: Any) -> Callable[[StageRule], StageRule]:
    """Decorator: what CUDA kernels of ``operators`` (overload packets) hold while they run, from the specs of a call.
    For PyTorch's own; `register_memory_impl` says as much from outside, and goes before it.
    """
    return _adder(_rules, operators)


KernelMemory = tuple[tuple[Stage, ...], "tuple[int, ...] | None"]
"""What a call holds while it runs, and the order in which its outputs are allocated (None: that of the result)."""
HostRule = Callable[[Signature], KernelMemory]
_host_rules: dict[Any, HostRule] = {}


def host_memory(*operators: Any) -> Callable[[HostRule], HostRule]:
    """Decorator: the same of the CPU's kernels of ``operators``, with the order of outputs."""
    return _adder(_host_rules, operators)


def _adder(rules: dict[Any, _Rule], operators: Iterable[Any]) -> Callable[[_Rule], _Rule]:
    """Decorator: one of ``rules`` for each of ``operators``, which have none."""
    def add(rule: _Rule) -> _Rule:
        for operator in operators:
            assert operator not in rules, operator
            rules[operator] = rule
        return rule
    return add


# As `MemoryNeed.output_order`, of CUDA's kernels: Dropout.cu, dropout_cuda.
_ORDERS: dict[Any, tuple[int, ...]] = {torch.ops.aten.native_dropout: (1, 0)}  # the mask first


def has_rule(info: OperatorInfo) -> bool:
    """Whether anything is known of what an operator holds while it runs, or of the order of its outputs."""
    rules = len(_rules) + len(_host_rules) + register_memory_impl.version  # none of which ever shrinks
    if info.rules_seen != rules:
        info.rules_seen = rules
        info.has_rule = (info.packet in _rules or info.packet in _ORDERS or info.packet in _host_rules
                         or info.op in register_memory_impl or info.packet in register_memory_impl)
    return info.has_rule


def registered_need(signature: Signature) -> MemoryNeed | None:
    """What the rule that is registered for the operator says of a call, None where there is none. Raises InputError for
    what no rule may return.
    """
    op, outputs = signature.op, signature.outputs
    rule = register_memory_impl.find(op) or register_memory_impl.find(getattr(op, "overloadpacket", None))
    if rule is None:
        return None
    need = rule(*signature.args, out=outputs[0] if len(outputs) == 1 else outputs, **signature.kwargs)
    _check_need(need, signature)
    return need


def _check_need(need: Any, signature: Signature) -> None:
    def refuse(found: str, problem: str) -> InputError:
        return InputError(f"register_memory_impl({signature.op}): {found}: {problem}")

    if not isinstance(need, MemoryNeed):
        raise refuse(f"returned {need!r}", "return a MemoryNeed, as in MemoryNeed(workspace_bytes=x.nbytes)")
    for name in ("workspace_bytes", "saved_bytes"):
        if not is_count(getattr(need, name)):
            raise refuse(f"{name}={getattr(need, name)!r}", f"must be {_AT_LEAST_0}")
    # where some returns are None, they are counted too; a list of tensors is one return
    schema = getattr(signature.op, "_schema", None)  # a Python function has none
    count = max(len(signature.outputs), len(schema.returns) if schema else 0)
    if not isinstance(need.stages, tuple) or not all(isinstance(stage, Stage) for stage in need.stages):
        raise refuse(f"stages={need.stages!r}", "must be a tuple of Stage, as in (Stage((x.nbytes,), before=0),)")
    for stage in need.stages:
        if not isinstance(stage.blocks, tuple) or not all(map(is_count, stage.blocks)):
            raise refuse(f"{stage!r}", f"its blocks must be a tuple, of each block {_AT_LEAST_0}")
        if stage.before is not None and not (is_count(stage.before) and stage.before < count):
            raise refuse(f"{stage!r}", f"this call has outputs 0 to {count - 1}; None: after the last one")
    order = need.output_order
    if order is not None and not (isinstance(order, tuple) and all(map(is_count, order))
                                  and sorted(order) == list(range(count))):
        raise refuse(f"output_order={order!r}", f"must be a tuple that holds each of 0 to {count - 1} once")


def kernel_memory(signature: Signature) -> KernelMemory:
    """The memory of a call, by the rule registered for the operator, else by PyTorch's own kernel's."""
    packet = getattr(signature.op, "overloadpacket", None)
    need = registered_need(signature)
    if need is not None:
        return need.stages + ((Stage((need.workspace_bytes,)),) if need.workspace_bytes else ()), need.output_order
    key = ("kernel memory", simulated_spec().name)  # rules may ask for the device's generation
    found: KernelMemory | None = signature.memo.get(key)
    if found is None:
        if signature.is_sparse:
            found = (), None
        elif any(s.device.startswith("cuda") for s in (*signature.inputs, *signature.outputs)):
            rule = _rules.get(packet)
            found = rule(signature) if rule else (), _ORDERS.get(packet)
        else:
            found = _host_rules[packet](signature) if packet in _host_rules else ((), None)
        signature.memo[key] = found
    return found


def stages_of(signature: Signature) -> tuple[Stage, ...]:
    """What the call holds while it runs."""
    return kernel_memory(signature)[0]


def hold_blocks(state: MetaState, device: torch.device, blocks: tuple[int, ...]) -> None:
    """Allocate ``blocks`` one after the other, then free them: what an allocator sees of a kernel's temporaries."""
    space = state.space
    regions = []
    try:
        for nbytes in blocks:
            regions.append(space.reserve(device, nbytes))
        if state.recorder is not None:
            state.recorder.took_workspace(sum(r.bytes for r in regions), device, blocks)
    finally:  # also where memory runs out midway
        for region in regions:
            space.give_back(device, region)
