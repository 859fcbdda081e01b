"""What is kept from the forward pass for the backward pass: chosen for single nodes of a traced graph."""
from __future__ import annotations

from torch import fx

from analyzer.errors import InputError

from .alias import makers, written_by
from .region_edit import Nodes, find_nodes
from .saved_check import check_saved, checkpoint_of

CHOICES = ("keep", "recompute", "offload")


def set_saved(gm: fx.GraphModule, nodes: Nodes, choice: str, *, recompile: bool = True) -> list[fx.Node]:
    """Choose what becomes of the results of ``nodes`` between forward and backward; return all nodes it was set for.

    ``"keep"``: in a checkpoint region, the operators of the node are not run again, and what they return stays (outside
        of one, autograd saves what it needs anyway). ``"recompute"``: run again with the rest, as by default.
    ``"offload"``: as keep, but the result waits on the host: copied there once in the forward pass and back where the
        backward pass needs it. The choice is kept in ``node.meta["saved"]``, absent for the default.

    All nodes that write to a result in place are chosen with it: it is kept as the last leaves it. What a view shows
    belongs to the node that computed it.

    Raises InputError for another choice, for nodes that are not in the graph, to recompute a node in no checkpoint
    region, to keep or offload one whose region cannot (``use_reentrant=True``, a ``context_fn`` of its own), and where
    a node that is recomputed reads a result before it is written to in place.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> from analyzer.fx import set_region
    >>> def f(x):
    ...     return x.sin().exp().tanh().sum()
    >>> gm = symbolic_trace(f, meta_args={"x": torch.empty(2, 4)})
    >>> _ = set_region(gm, ["sin", "exp", "tanh"])
    >>> set_saved(gm, ["exp"], "keep")
    [exp]
    >>> code = gm.code[gm.code.index("def checkpoint_0"):]
    >>> print(code[:code.index("return")].rstrip())
    def checkpoint_0(x):
            sin = x.sin();  x = None
            with kept_0:
                exp = sin.exp();  sin = None
            tanh = exp.tanh();  exp = None
    """
    caller = f"set_saved(..., {choice!r})"
    if choice not in CHOICES:
        raise InputError(f"{caller}: choose one of {', '.join(CHOICES)}")
    chosen = find_nodes(gm, nodes, caller)
    for node in chosen:
        if node.op == "output" or node.op == "get_attr":
            what = "the output" if node.op == "output" else "a parameter or buffer"
            raise InputError(f"{caller}: {node.name} is {what}, which is held anyway")
        if choice == "recompute" and checkpoint_of(node) is None:
            raise InputError(
                f"{caller}: {node.name} is in no checkpoint region, so nothing would run it again; set_region first")
    together = _written_together(gm, chosen)
    before = {n: n.meta.get("saved") for n in together}
    for node in together:
        node.meta["saved"] = choice
        if choice == "recompute" or choice == "keep" and checkpoint_of(node) is None:
            del node.meta["saved"]
    try:
        check_saved(gm)
    except InputError:
        for node, saved in before.items():
            node.meta.pop("saved", None)
            if saved is not None:
                node.meta["saved"] = saved
        raise
    if recompile:
        gm.recompile()
    return together


def _written_together(gm: fx.GraphModule, chosen: list[fx.Node]) -> list[fx.Node]:
    """``chosen``, with the nodes that write to their results in place and those that made what these write to."""
    together = set(chosen)
    for writer in gm.graph.nodes:
        made = {m for value in written_by(writer) for m in makers(value)}
        if writer in together or not made.isdisjoint(together):
            together |= {m for m in (writer, *made) if m.op not in ("get_attr", "placeholder") or m in chosen}
    return [n for n in gm.graph.nodes if n in together]
