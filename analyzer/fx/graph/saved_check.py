"""What cannot be of ``node.meta["saved"]`` and the checkpoint regions around it."""
from __future__ import annotations

from torch import fx

from analyzer.errors import InputError

from .alias import makers, written_by
from .region import CheckpointRegion
from .statement import SAVED, region_of, statements_of


def checkpoint_of(node: fx.Node) -> CheckpointRegion | None:
    """The innermost checkpoint region of a node."""
    return next((r for r in reversed(region_of(node)) if isinstance(r, CheckpointRegion)), None)


def check_saved(gm: fx.GraphModule) -> None:
    """Raises InputError where a checkpoint cannot keep results, or a node that runs again reads one changed later."""
    statements_of(list(gm.graph.nodes))
    changed: dict[fx.Node, fx.Node] = {}  # a node and the last that writes to its result
    for writer in gm.graph.nodes:
        for value in written_by(writer):
            for maker in (m for m in makers(value) if m.meta.get("saved") in SAVED):
                region = checkpoint_of(maker)
                if region is None:
                    continue
                changed[maker] = writer
                if checkpoint_of(writer) != region:
                    raise InputError(
                        f"{maker.name} cannot be kept: {writer.name} writes to it in place, after checkpoint "
                        f"{region.id}; take {writer.name} into it, or recompute {maker.name}")
    position = {n: i for i, n in enumerate(gm.graph.nodes)} if changed else {}
    for node in position:
        if checkpoint_of(node) is None or node.meta.get("saved") in SAVED:
            continue
        for maker in (m for value in node.all_input_nodes for m in makers(value) if m in changed):
            if position[changed[maker]] > position[node]:
                raise InputError(f"{maker.name} cannot be kept: {changed[maker].name} writes to it in place after "
                                 f"{node.name}, which would run again, has read it; keep {node.name} as well, or "
                                 f"recompute {maker.name}")
