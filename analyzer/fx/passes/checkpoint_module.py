"""Checkpoints around modules."""
from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from analyzer.errors import InputError
from analyzer.fx.graph.region import CheckpointRegion
from analyzer.fx.graph.region_edit import set_region


def checkpoint_modules(*paths: str, **options: object) -> Callable[[fx.GraphModule], None]:
    """A pass that puts a checkpoint around each call of the modules at ``paths``; ``options`` are those of
    `CheckpointRegion`.

    The pass raises InputError for a path where no node runs, and what `set_region` raises.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    >>> gm = symbolic_trace(torch.nn.Sequential(block), meta_args={"input": torch.ones(2, 4)})
    >>> checkpoint_modules("0")(gm)
    >>> gm.code.count("checkpoint.checkpoint(")
    1
    """
    def checkpoint(gm: fx.GraphModule) -> None:
        for path in paths:
            runs = list(_runs(gm.graph.nodes, path))
            if not runs:
                known = sorted({str(n.meta.get("module_path", "")) for n in gm.graph.nodes} - {""})
                raise InputError(f"checkpoint_modules({path!r}): no node runs in that module; nodes run in "
                                 f"{', '.join(known[:8])}, ...")
            for run in runs:
                set_region(gm, run, CheckpointRegion(0, **options), recompile=False)  # type: ignore[arg-type]
        gm.recompile()

    return checkpoint


def _runs(nodes: Iterable[fx.Node], path: str) -> Iterable[list[fx.Node]]:
    """The nodes of each call of a module, as far as other nodes lie between them."""
    run: list[fx.Node] = []
    for node in nodes:
        if f"{node.meta.get('module_path', '')}.".startswith(f"{path}."):
            run.append(node)
        elif run and node.op != "get_attr":
            yield run
            run = []
