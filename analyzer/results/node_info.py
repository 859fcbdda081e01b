"""What is known of one graph node: the record in ``node.meta["info"]`` and the row of the node table."""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from .deferred import DeferredFields

Scalar = str | int | float | bool | None

#: A fact about a region, for instance ``{"kind": "checkpoint", "id": 2}``; flat, so that it is saved as it is.
Region = str | dict[str, Scalar]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as plain data; ``dtype`` is torch's name without the prefix, ``device`` where it is taken to be.

    >>> TensorInfo((2, 3), "float16", "cuda:0").nbytes
    12
    """

    shape: tuple[int, ...]
    dtype: str
    device: str

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Elements times item size, which torch's dtype names give in bits; below a byte, as of ``bool``, it is one."""
        bits = re.search(r"\d+", self.dtype)
        return self.numel * max(1, int(bits[0]) // 8 if bits else 1)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def describe_spec(spec: Any) -> TensorInfo:
    """A tensor's spec as plain data."""
    return TensorInfo(tuple(spec), str(spec.dtype).removeprefix("torch."), spec.device)


@dataclass(slots=True)
class NodeInfo(DeferredFields):
    """Costs of one node. None is unknown; bytes are exact; one multiply-add is 2 FLOPs and 1 MAC. Each storage counts
    once, at the node that made it; views count nothing; parameters and buffers are in ``param_bytes`` and
    ``buffer_bytes``, at the first node that uses them, and never in the activations.

    >>> NodeInfo("call_module", "fc", "fc", fwd_macs=8_192_000, fwd_flops=16_384_000).bwd_flops is None
    True
    """

    #: Of the fields below, whose meaning docs/node_info.md gives; a change of any raises it.
    schema_version: ClassVar[int] = 1

    op: str                                #: kind of node: placeholder, call_module, call_function, ...
    name: str                              #: unique in its graph
    target: str = ""
    module_path: str = ""                  #: module that the node runs in, "" for the root
    source: str | None = None              #: "file.py:123"
    accumulate_bytes: int | None = None    #: all bytes saved for backward so far, this node's included
    incremental_bytes: int | None = None   #: growth of accumulate_bytes at this node
    output_bytes: int | None = None        #: bytes of its output that stay saved
    temp_bytes: int | None = None          #: bytes of its output that do not
    param_bytes: int | None = None
    buffer_bytes: int | None = None
    backward_bytes: int | None = None      #: gradients of its distinct inputs that require one
    fwd_flops: int | None = None
    bwd_flops: int | None = None
    fwd_macs: int | None = None
    bwd_macs: int | None = None
    recompute_flops: int | None = None     #: run again in backward; not in bwd_flops
    fwd_read_bytes: int | None = None      #: by its operators, from memory
    fwd_written_bytes: int | None = None
    bwd_read_bytes: int | None = None
    bwd_written_bytes: int | None = None
    fwd_comm_bytes: int | None = None
    bwd_comm_bytes: int | None = None
    fwd_seconds: float | None = None
    bwd_seconds: float | None = None       #: recompute_seconds included
    recompute_seconds: float | None = None #: of what is run again in backward
    inputs: tuple[str, ...] = ()           #: names of the nodes it reads
    outputs: tuple[TensorInfo, ...] = ()
    aliases: tuple[str, ...] = ()          #: names of the nodes whose storage its output shares
    region: tuple[Region, ...] = ()        #: checkpoint, autocast and no_grad regions around it, outermost first
    saved: str | None = None               #: "keep" or "offload" where `set_saved` chose it
    #: for solvers to fill: a placement for each mesh dimension, such as "Shard(0)"
    sharding: tuple[str, ...] | None = None
    extra: dict[str, Scalar] = field(default_factory=dict)  #: quantities of profilers that the user added

    @classmethod
    def blank(cls, make: Callable[[], Mapping[str, Any]], **known: Any) -> NodeInfo:
        """A record of which ``known`` fields are set, others when one is read: by ``make`` or from what it returns."""
        info = object.__new__(cls)
        for name, value in known.items():
            setattr(info, name, value)
        object.__setattr__(info, "_groups", {make: _FIELDS})
        return info

    def fill(self, info: NodeInfo) -> None:
        """Take the fields that are not set from ``info``."""
        for name in _FIELDS:
            try:
                object.__getattribute__(self, name)
            except AttributeError:
                setattr(self, name, getattr(info, name))


_FIELDS = tuple(f.name for f in fields(NodeInfo))
