"""What is known of a graph node, and of the storages that it keeps for backward."""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

from analyzer.profilers.annotation import SavedRow
from analyzer.record.log import Log

from .view import DeferredFields

Scalar = str | int | float | bool | None

#: A fact about a region, for instance ``{"kind": "checkpoint", "id": 2}``; flat, so that it is saved as it is.
Region = str | dict[str, Scalar]


class PeakNode(NamedTuple):
    """Where most is allocated: the operator that runs, and what is known of the node and module that it is a part of,
    of an operator outside of all nodes nothing.
    """

    allocated_bytes: int
    phase: str
    operator: str
    op: str | None = None
    name: str | None = None
    target: str | None = None
    module_path: str | None = None


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


@dataclass(frozen=True, slots=True)
class SavedTensorInfo(TensorInfo):
    """A tensor that a node holds for backward, of a storage that is alive when the backward pass begins."""

    storage: str        #: the same for all tensors in one memory: ``"relu:0"`` is the first that node ``relu`` keeps
    storage_bytes: int
    made_by: str        #: name of the node that made it; path of a parameter or buffer; name of an input
    kind: str           #: "activation", "input", "parameter" or "buffer"
    is_read: bool       #: by the gradient of this node, or by what is run again for it


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
    schema_version: ClassVar[int] = 4

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
    exposed_comm_seconds: float | None = None  #: in which its communication is under way and nothing is computed
    #: what most of its time is: "launch", "arithmetic", "memory", "latency" or "communication"
    bound: str | None = None
    #: how far off nine in ten measured times of its kernels are, at most, forward and backward
    error_seconds: float | None = None
    inputs: tuple[str, ...] = ()           #: names of the nodes it reads
    outputs: tuple[TensorInfo, ...] = ()
    aliases: tuple[str, ...] = ()          #: names of the nodes whose storage its output shares
    region: tuple[Region, ...] = ()        #: checkpoint, autocast and no_grad regions around it, outermost first
    saved: str | None = None               #: "keep" or "offload" where `set_saved` chose it
    #: of its output, a placement for each mesh dimension, such as "Shard(0)": as it ran, or filled by a solver
    sharding: tuple[str, ...] | None = None
    extra: dict[str, Scalar] = field(default_factory=dict)  #: quantities of profilers that the user added
    #: what it keeps for backward and what its gradient reads; None is unknown
    saved_tensors: tuple[SavedTensorInfo, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def kept_tensors(self) -> tuple[SavedTensorInfo, ...] | None:
        """Of `saved_tensors`, those that the node made itself: their storages add up to `incremental_bytes`."""
        saved = self.saved_tensors
        return None if saved is None else tuple([t for t in saved if t.made_by == self.name
                                                 and t.kind in ("activation", "input")])

    @classmethod
    def blank(cls, make: Callable[[], Mapping[str, Any]], **known: Any) -> NodeInfo:
        """A record of which ``known`` fields are set, others when one is read: by ``make`` or from what it returns."""
        info = object.__new__(cls)
        for name, value in known.items():
            setattr(info, name, value)
        info._defer({make: _FIELDS})
        return info

    def fill(self, info: NodeInfo) -> None:
        """Take the fields that are not set from ``info``."""
        for name in _FIELDS:
            try:
                object.__getattribute__(self, name)
            except AttributeError:
                setattr(self, name, getattr(info, name))


_FIELDS = tuple(f.name for f in fields(NodeInfo))


def describe_saved(log: Log, rows: Mapping[int, Sequence[SavedRow]]) -> dict[int, tuple[SavedTensorInfo, ...]]:
    """The records of what each node keeps and reads, by its index in the log, with names for the storages."""
    names: dict[int, tuple[str, str, str]] = {}  # by number: name of the storage, who made it, kind
    for index, saved in rows.items():
        node, is_input = log.nodes[index], log.nodes[index].op == "placeholder"
        given = {number for number, _ in node.outputs} if is_input else set()
        own = []
        for number in [row.number for row in saved if row.number not in names]:
            lifetime = log.storages[number]
            is_own = number in given if lifetime.category == "input" else (
                lifetime.node == index and not lifetime.category)
            if is_own:
                own.append(number)
        names |= {number: (f"{node.name}:{i}", node.name, "input" if is_input else "activation")
                  for i, number in enumerate(own)}
    for number in (row.number for saved in rows.values() for row in saved if row.number not in names):
        lifetime = log.storages[number]
        if lifetime.category in ("parameter", "buffer", "input"):
            names[number] = lifetime.label, lifetime.label, lifetime.category
        else:  # of a storage from outside of the step
            made_by = log.nodes[lifetime.node].name if lifetime.node >= 0 else "(outside the model)"
            count = sum(maker == made_by for _, maker, _ in names.values())
            names[number] = f"{made_by}:{count}", made_by, "activation"
    return {index: tuple([_describe_row(log, row, *names[row.number]) for row in saved])
            for index, saved in rows.items()}


def _describe_row(log: Log, row: SavedRow, storage: str, made_by: str, kind: str) -> SavedTensorInfo:
    spec = describe_spec(row.spec)
    return SavedTensorInfo(spec.shape, spec.dtype, spec.device, storage, log.storages[row.number].nbytes, made_by, kind,
                           row.is_read)
