"""The statements of a generated function, and the regions around them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
import torch.utils.checkpoint
from torch.fx import Node

from analyzer.errors import InputError

from .alias import makers

# What surrounds a node: grad mode, autocast and checkpointing, outermost first in ``node.meta["region"]``.

Description = dict[str, str | int | float | bool | None]


@dataclass(frozen=True)
class GradRegion:
    """A part of the forward pass whose grad mode is not that around it."""

    enabled: bool
    inference: bool = False  #: torch.inference_mode()
    leaves_inference: bool = False  #: torch.inference_mode(False)

    def header(self) -> str:
        if self.inference or self.leaves_inference:
            return "torch.inference_mode()" if self.inference else "torch.inference_mode(False)"
        return "torch.enable_grad()" if self.enabled else "torch.no_grad()"

    def context(self) -> Any:
        if self.inference or self.leaves_inference:
            return torch.inference_mode(self.inference)
        return torch.enable_grad() if self.enabled else torch.no_grad()

    def describe(self) -> Description:
        return {"kind": "grad", "enabled": self.enabled, "inference": self.inference}


@dataclass(frozen=True)
class AutocastRegion:
    """A ``with torch.autocast(...)`` block of the forward pass; each ``id`` has its own cache of casts."""

    id: int
    device_type: str
    dtype: torch.dtype | None = None
    enabled: bool = True
    cache_enabled: bool | None = None

    def header(self) -> str:
        parts = [repr(self.device_type)]
        if self.dtype is not None:
            parts.append(f"dtype={self.dtype}")
        if not self.enabled:
            parts.append("enabled=False")
        if self.cache_enabled is False:
            parts.append("cache_enabled=False")
        return f"torch.autocast({', '.join(parts)})"

    def context(self) -> Any:
        return torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)

    def describe(self) -> Description:
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return {"kind": "autocast", "id": self.id, "device_type": self.device_type, "dtype": dtype,
                "enabled": self.enabled}


@dataclass(frozen=True)
class CheckpointRegion:
    """One call of ``torch.utils.checkpoint.checkpoint``; consecutive nodes with an equal region make up its function.

    With ``replay`` false the region is a note only: the generated code runs its nodes without checkpointing. With
    ``restores_buffers`` (not with ``use_reentrant`` or a ``context_fn``), the second run leaves buffers of modules as
    they were; torch's own checkpoint updates running statistics twice, and so does a region that was traced.
    """

    id: int
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    context_fn: Callable[[], Any] | None = None
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    replay: bool = True
    restores_buffers: bool = True

    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``checkpoint`` that are not its defaults, and ``use_reentrant``."""
        names = ["preserve_rng_state"]
        if not self.use_reentrant:
            names += ["context_fn", "determinism_check", "debug", "early_stop"]
        changed = {n: value for n in names if (value := getattr(self, n)) != getattr(CheckpointRegion, n)}
        return {"use_reentrant": self.use_reentrant, **changed}

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self.replay:
            return function(*args)
        return torch.utils.checkpoint.checkpoint(function, *args, **self.options())

    def describe(self) -> Description:
        return {"kind": "checkpoint", "id": self.id, "use_reentrant": self.use_reentrant,
                "preserve_rng_state": self.preserve_rng_state, "selective": self.context_fn is not None,
                "replay": self.replay}


Region = GradRegion | AutocastRegion | CheckpointRegion


# The statements of a generated function: nodes and checkpointed functions, in the blocks that annotations ask for.
# Generated code and the interpreter both follow them, so that a recorded run does what the code would do.

SAVED = ("keep", "offload")
"""What ``node.meta["saved"]`` can be (see `set_saved`); by default, only nodes outside of checkpoints are kept."""


@dataclass(frozen=True, eq=False)
class Keeping:
    """A block in which results are kept for the recomputation of ``checkpoint``; on the host if ``offloads``."""

    checkpoint: Statement
    offloads: bool


class Offloading:
    """A block around a statement of the root: what autograd saves of offloaded values goes to the host."""


Block = AutocastRegion | GradRegion | Keeping | Offloading


@dataclass(eq=False)
class Statement:
    """A node, or the call of a checkpointed function with the statements ``body``."""

    blocks: tuple[Block, ...]
    node: Node | None
    checkpoint: CheckpointRegion | None = None
    body: list[Statement] = field(default_factory=list)
    keeps: bool = False  #: whether some of its nodes are not recomputed
    buffered: list[str] = field(default_factory=list)  #: paths of modules whose buffers a recomputation leaves alone
    offloaded: list[Node] = field(default_factory=list)  #: of its results, those that live on the host

    def nodes(self) -> list[Node]:
        return [self.node] if self.node is not None else [n for s in self.body for n in s.nodes()]

    def inputs(self) -> list[Node]:
        inside = dict.fromkeys(self.nodes())
        return list(dict.fromkeys(i for n in inside for i in n.all_input_nodes if i not in inside))

    def results(self) -> list[Node]:
        inside = dict.fromkeys(self.nodes())
        return [n for n in inside if any(u not in inside for u in n.users)]


def region_of(node: Node) -> tuple[Region, ...]:
    """The regions that the code of ``node`` runs in: those of its annotation that are to be replayed."""
    if node.op in ("placeholder", "output"):
        return ()
    region = node.meta.get("region") or ()
    return tuple(r for r in region if not (isinstance(r, CheckpointRegion) and not r.replay))


def statements_of(nodes: Sequence[Node]) -> list[Statement]:
    """The statements of ``forward``; consecutive nodes that share a region share its block."""
    found = _nest([(n, region_of(n)) for n in nodes], None)
    offloaded = {n for n in nodes if n.meta.get("saved") == "offload"}
    if not offloaded:
        return found
    waiting: set[Node] = set()
    for statement in found:
        chosen = offloaded.intersection(statement.nodes())
        if chosen:
            results = [statement.node] if statement.node is not None else statement.results()
            statement.offloaded = [n for n in results if not chosen.isdisjoint(makers(n))]
            waiting.update(statement.offloaded)
        runs = statement.node is None or statement.node.op not in ("placeholder", "output")
        if runs and (statement.offloaded or any(not waiting.isdisjoint(makers(i)) for i in statement.inputs())):
            statement.blocks = (*statement.blocks, Offloading())
    return found


def _nest(items: Sequence[tuple[Node, tuple[Region, ...]]], around: Statement | None) -> list[Statement]:
    statements: list[Statement] = []
    i = 0
    while i < len(items):
        node, region = items[i]
        at = next((k for k, r in enumerate(region) if isinstance(r, CheckpointRegion)), None)
        blocks: tuple[Block, ...] = tuple(r for r in region[:at] if not isinstance(r, CheckpointRegion))
        if at is None:
            saved = node.meta.get("saved")
            if saved in SAVED and around is not None and node.op != "get_attr":
                whole = around.checkpoint
                assert whole is not None
                if whole.use_reentrant or whole.context_fn is not None or whole.debug:
                    why = "debug=True" if whole.debug else f"context_fn={whole.context_fn!r}"
                    why = "use_reentrant=True" if whole.use_reentrant else why
                    raise InputError(f"{saved} {node.name}: checkpoint {whole.id}, which it is in, has {why}; "
                                     "results of single nodes can be kept in a checkpoint with use_reentrant=False, no "
                                     "context_fn and no debug")
                around.keeps = True
                blocks = (*blocks, Keeping(around, offloads=saved == "offload"))
            statements.append(Statement(blocks, node))
            i += 1
            continue
        end = i
        while end < len(items) and items[end][1][:at + 1] == region[:at + 1]:
            end += 1
        checkpoint = region[at]
        assert isinstance(checkpoint, CheckpointRegion)
        statement = Statement(blocks, None, checkpoint)
        statement.body = _nest([(n, r[at + 1:]) for n, r in items[i:end]], statement)
        root = node.graph.owning_module
        if root is not None and checkpoint.restores_buffers and not (
                checkpoint.use_reentrant or checkpoint.context_fn or checkpoint.debug):
            paths = dict.fromkeys(str(n.target) for n, _ in items[i:end] if n.op == "call_module")
            statement.buffered = [p for p in paths if next(root.get_submodule(p).buffers(), None) is not None]
        statements.append(statement)
        i = end
    return statements


def last_uses(statements: Sequence[Statement], local: set[Node]) -> dict[int, list[Node]]:
    seen: set[Node] = set()
    last: dict[int, list[Node]] = {}
    for i in range(len(statements) - 1, -1, -1):
        members = statements[i].nodes()
        read = dict.fromkeys([*(n for m in members for n in m.all_input_nodes), *members])
        last[i] = [n for n in read if n in local and n not in seen]
        seen.update(last[i])
    return last


def shared_blocks(before: Sequence[Block], after: Sequence[Block]) -> int:
    """How many of the blocks that are open after one statement stay open for the next."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, after))))
