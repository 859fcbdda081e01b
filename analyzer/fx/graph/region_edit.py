"""Regions put around nodes of a traced graph, and results kept or offloaded."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from analyzer.errors import InputError

from .alias import makers, written_by
from .statement import SAVED, CheckpointRegion, GradRegion, Region, region_of, statements_of


def checkpoint_of(node: fx.Node) -> CheckpointRegion | None:
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


Nodes = Iterable[fx.Node | str]


def set_region(gm: fx.GraphModule, nodes: Nodes, region: Region | None = None, *, recompile: bool = True) -> Region:
    """Put ``region`` (by default a `CheckpointRegion`) around consecutive ``nodes``; return it as it was set.

    It becomes the innermost of the regions that all these nodes share; regions that some of them are in stay inside it.
    An id that is used already is replaced by the next free one. ``nodes`` are nodes or their names, in any order;
    ``get_attr`` nodes between them need no mention. With ``recompile=False``, call ``gm.recompile()`` after all edits.

    Raises InputError where ``nodes`` is empty, names what is no node of the graph, or an input or output, leaves out a
    node between them, or cuts another region in two; for a checkpoint with ``use_reentrant=True``, or one that writes
    in place to a value made outside it; where a choice of `set_saved` cannot be met.

    >>> import torch
    >>> from analyzer import symbolic_trace
    >>> def f(x):
    ...     return x.sin().exp().sum()
    >>> gm = symbolic_trace(f, meta_args={"x": torch.empty(2, 4)})
    >>> set_region(gm, ["sin", "exp"]).id
    0
    >>> print(gm.code[gm.code.index("def forward"):].strip())
    def forward(self, x):
        def checkpoint_0(x):
            sin = x.sin();  x = None
            exp = sin.exp();  sin = None
            return exp
        exp = torch.utils.checkpoint.checkpoint(checkpoint_0, x, use_reentrant = False);  x = checkpoint_0 = None
        sum_1 = exp.sum();  exp = None
        return sum_1
    """
    region = CheckpointRegion(0) if region is None else region
    chosen = _contiguous(gm, nodes, region)
    depth = _shared_depth(chosen, region)
    if isinstance(region, CheckpointRegion):
        _check_checkpoint(chosen, region)
    if not isinstance(region, GradRegion):
        taken = {r.id for n in gm.graph.nodes for r in n.meta.get("region") or () if isinstance(r, type(region))}
        if region.id in taken:
            region = replace(region, id=max(taken) + 1)
    inside = set(chosen)
    # read by others too: they come from outside
    given = [n for n in chosen if n.op == "get_attr" and any(u not in inside for u in n.users)]
    stacks = {}
    for node in chosen:
        own, replayed = node.meta.get("region") or (), region_of(node)
        around = own.index(replayed[depth - 1]) + 1 if depth else 0
        stacks[node] = own[:around] if node in given else (*own[:around], region, *own[around:])
    _annotate(gm, stacks)
    for node in given:
        if node is not chosen[0]:
            chosen[0].prepend(node)
    if recompile:
        gm.recompile()
    return region


def clear_region(gm: fx.GraphModule, region: Region | None = None, *, recompile: bool = True) -> None:
    """Take ``region``, or every checkpoint region, away from the nodes that are in it. What is inside it stays.

    Raises InputError where no node is in ``region``, and where a choice of `set_saved` cannot be met without it.
    """
    if region is not None and not nodes_in(gm, region):
        regions = list(dict.fromkeys(r for n in gm.graph.nodes for r in n.meta.get("region") or ()))
        raise InputError(
            f"clear_region({region!r}): no node of the graph is in it; its regions are {regions or 'none'}")

    def stays(r: Region) -> bool:
        return not isinstance(r, CheckpointRegion) if region is None else r != region

    _annotate(gm, {n: tuple(filter(stays, n.meta.get("region") or ())) for n in gm.graph.nodes})
    if recompile:
        gm.recompile()


def nodes_in(gm: fx.GraphModule, region: Region) -> list[fx.Node]:
    """The nodes that are in ``region``, in the order of the graph."""
    return [n for n in gm.graph.nodes if region in (n.meta.get("region") or ())]


def find_nodes(gm: fx.GraphModule, nodes: Nodes, caller: str) -> list[fx.Node]:
    """The nodes, given themselves or by name, in the graph's order. Raises InputError for others, and for none."""
    by_name = {n.name: n for n in gm.graph.nodes}
    chosen = set()
    for node in nodes:
        found = by_name.get(node if isinstance(node, str) else node.name)
        if found is None or not isinstance(node, str) and found is not node:
            raise InputError(f"{node} is no node of this graph; take one of gm.graph.nodes, or its name ({caller})")
        chosen.add(found)
    if not chosen:
        raise InputError(f"no nodes given ({caller})")
    return [n for n in gm.graph.nodes if n in chosen]


def _annotate(gm: fx.GraphModule, stacks: dict[fx.Node, tuple[Region, ...]]) -> None:
    """Set the regions of nodes; where a choice of `set_saved` cannot be met then, they stay as they were."""
    before = {n: n.meta.get("region") or () for n in stacks}
    for node, stack in stacks.items():
        node.meta["region"] = stack
    if any("saved" in n.meta for n in stacks):
        try:
            check_saved(gm)
        except InputError:
            for node, stack in before.items():
                node.meta["region"] = stack
            raise


def _contiguous(gm: fx.GraphModule, nodes: Nodes, region: Region) -> list[fx.Node]:
    caller = f"set_region(..., {region!r})"
    named = find_nodes(gm, nodes, caller)
    order = list(gm.graph.nodes)
    run = order[order.index(named[0]):order.index(named[-1]) + 1]
    for node in run:
        if node.op in ("placeholder", "output"):
            raise InputError(
                f"{node.name} is the graph's {node.op}; a region holds nodes between inputs and output ({caller})")
        if node.op != "get_attr" and node not in named:
            raise InputError(f"the nodes must follow each other in the graph; {node.name} lies between "
                             f"{named[0].name} and {named[-1].name}: name it too, or make two regions ({caller})")
    return run


def _shared_depth(run: list[fx.Node], region: Region) -> int:
    stacks = [region_of(n) for n in run]
    depth = 0
    while all(len(s) > depth and s[depth] == stacks[0][depth] for s in stacks):
        depth += 1
    for edge, neighbour in ((run[0], run[0].prev), (run[-1], run[-1].next)):
        inside, outside = region_of(edge), region_of(neighbour)
        for r, other in zip(inside[depth:], outside[depth:]):
            if inside[:depth] != outside[:depth] or r != other:
                break
            if not isinstance(r, GradRegion):  # which is the same when cut in two
                raise InputError(f"{edge.name} and {neighbour.name} are both in {r!r}, which would be cut in two; take "
                                 f"all of its nodes or none (set_region(..., {region!r}))")
    return depth


def _check_checkpoint(run: list[fx.Node], region: CheckpointRegion) -> None:
    if region.use_reentrant:
        raise InputError("set_region() puts no checkpoint with use_reentrant=True around nodes, whose gradients it "
                         "would lose in containers and views: set use_reentrant=False")
    inside = set(run)
    for node in run:
        for maker in (m for value in written_by(node) for m in makers(value)):
            if maker.op == "get_attr":
                raise InputError(f"a checkpoint cannot hold {node.name}: it writes in place to {maker.target}, and "
                                 "would write again when it is run again; leave it out")
            if maker not in inside:
                raise InputError(f"a checkpoint cannot hold {node.name} without {maker.name}: {node.name} writes in "
                                 f"place to what {maker.name} made, and would write again when it is run again; take "
                                 "both in or leave both out")


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
    >>> set_saved(gm, ["exp"], "keep"), gm.code.count("with kept_0:")
    ([exp], 1)
    """
    caller = f"set_saved(..., {choice!r})"
    if choice not in CHOICES:
        raise InputError(f"{caller}: choose one of {', '.join(CHOICES)}")
    chosen = find_nodes(gm, nodes, caller)
    for node in chosen:
        if node.op in ("output", "get_attr"):
            what = "the output" if node.op == "output" else "a parameter or buffer"
            raise InputError(f"{caller}: {node.name} is {what}, which is held anyway")
        if choice == "recompute" and checkpoint_of(node) is None:
            raise InputError(
                f"{caller}: {node.name} is in no checkpoint region, so nothing would run it again; set_region first")
    together = set(chosen)
    for writer in gm.graph.nodes:  # what writes to a result in place, and what made that, are chosen with it
        made = {m for value in written_by(writer) for m in makers(value)}
        if writer in together or not made.isdisjoint(together):
            together |= {m for m in (writer, *made) if m.op not in ("get_attr", "placeholder") or m in chosen}
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
    return [n for n in gm.graph.nodes if n in together]
