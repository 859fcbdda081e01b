"""Memory that a kernel needs while it runs."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from analyzer.registry import Registry

from .signature import Signature


class MemoryNeed(NamedTuple):
    """What an operator takes besides its inputs and outputs, in bytes."""

    workspace_bytes: int = 0  #: held while the kernel runs
    saved_bytes: int = 0      #: held from forward until backward, besides saved inputs and outputs


register_memory_impl: Registry[Any, Callable[..., MemoryNeed]] = Registry("register_memory_impl")
"""Register what an operator needs while it runs and saves: a function of its arguments' specs and ``out`` (the spec of the output,
or a tuple of them) that returns a `MemoryNeed`. The key is a ``torch.ops`` operator, one overload or all.
"""


def memory_need(signature: Signature) -> MemoryNeed:
    """What the call needs, by its registered rule; nothing where there is none."""
    need = signature.memo.get("memory_need")
    if need is None:
        impl = register_memory_impl.find(signature.op) or register_memory_impl.find(signature.op.overloadpacket)
        outputs = signature.outputs
        need = MemoryNeed() if impl is None else impl(*signature.args, out=outputs[0] if len(outputs) == 1 else outputs, **signature.kwargs)
        signature.memo["memory_need"] = need
    return need


def workspace_bytes(signature: Signature) -> int:
    return memory_need(signature).workspace_bytes
