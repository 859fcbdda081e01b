"""Subgraphs of a graph: the consecutive nodes of a module's run, and what tells that two of them do the same."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from .statement import region_of

_NODE = object()  # stands for a node among arguments
_CONTAINERS = (tuple, list)


class SubgraphModule(nn.Module):
    """Holds what the module of a subgraph holds, in the same containers."""

    def __init__(self, held: nn.Module) -> None:
        self.__dict__.update(held.__dict__)


class Subgraph(NamedTuple):
    """The nodes of one run of the module at ``path``, one after another, without regions.

    ``inputs`` are the nodes that they read of those before them, in order; ``last_read`` the positions of those whose
    values are not used afterwards, ``read_later`` of those that nodes after them read; ``results`` are the
    nodes that others read. Subgraphs with the same ``key`` run the same code, as far as nodes tell.
    """

    path: str
    held: nn.Module
    module: SubgraphModule
    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    last_read: Sequence[int]
    read_later: Sequence[int]
    results: Sequence[fx.Node]
    key: Hashable


class _Call(NamedTuple):
    """What a node does, save for which nodes it reads."""

    kind: Hashable  #: None where nothing can be said of it
    target: str     #: of modules and attributes
    reads: list[int]


def find_subgraphs(gm: fx.GraphModule, fewest: int) -> list[Subgraph]:
    """The subgraphs of which there may be at least ``fewest`` of a kind, inner ones as well."""
    nodes = list(gm.graph.nodes)
    spans: dict[str, list[int]] = {}    # path: first, last and number of its nodes
    targets: Counter[str] = Counter()  # by path, how many nodes name what is below it
    for i, node in enumerate(nodes):
        path = node.meta.get("module_path", "")
        while path:
            span = spans.setdefault(path, [i, i, 0])
            span[1] = i
            span[2] += 1
            path = path.rpartition(".")[0]
        if node.op in ("call_module", "get_attr"):
            path = str(node.target).rpartition(".")[0]
            while path:
                targets[path] += 1
                path = path.rpartition(".")[0]
    alike: defaultdict[Any, list[str]] = defaultdict(list)
    for path, (first, last, count) in spans.items():
        if 1 < count == last - first + 1:
            alike[count, nodes[first].op, nodes[last].op].append(path)
    position = {node: i for i, node in enumerate(nodes)}
    calls: dict[int, _Call] = {}
    found = []
    for paths in alike.values():
        for path in paths if len(paths) >= fewest else ():
            subgraph = _make_subgraph(gm, path, nodes, range(spans[path][0], spans[path][1] + 1), position, calls,
                                    targets[path])
            if subgraph is not None:
                found.append(subgraph)
    return found


def _make_subgraph(gm: fx.GraphModule, path: str, nodes: Sequence[fx.Node], span: range, position: dict[fx.Node, int],
                  calls: dict[int, _Call], named: int) -> Subgraph | None:
    prefix = f"{path}."
    key: list[Hashable] = []
    external: dict[int, int] = {}
    for i in span:
        call = calls.get(i) or calls.setdefault(i, _describe(nodes[i], position))
        if call.kind is None:
            return None
        if call.target:
            if not call.target.startswith(prefix):
                return None
            named -= 1
        key.append(
            (call.kind, call.target[len(prefix):],
             tuple([
                 j - span.start if j >= span.start else -1 - external.setdefault(j, len(external)) for j in call.reads
             ])))
    held = _find_module(gm, path)
    if named or held is None:  # others use what it holds
        return None
    read_later = tuple(k for k, j in enumerate(external) if any(position[u] >= span.stop for u in nodes[j].users))
    last_read = tuple(
        k for k, j in enumerate(external) if k not in read_later and nodes[j].op not in ("placeholder", "get_attr"))
    results = tuple(i for i in span if any(position[u] >= span.stop for u in nodes[i].users))
    key.append((last_read, read_later, tuple(i - span.start for i in results)))
    return Subgraph(path, held, SubgraphModule(held), nodes[span.start:span.stop], [nodes[j] for j in external],
                   last_read, read_later, [nodes[i] for i in results], tuple(key))


def _find_module(root: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = root
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found


def _describe(node: fx.Node, position: dict[fx.Node, int]) -> _Call:
    reads: list[int] = []
    named = node.op in ("call_module", "get_attr")
    if node.op in ("placeholder", "output") or region_of(node) or node.meta.get("saved") is not None:
        return _Call(None, "", reads)
    try:
        kind = node.op, None if named else node.target, _freeze(node.args, position, reads), _freeze(
            node.kwargs, position, reads)
        hash(kind)
    except TypeError:  # an argument that cannot be compared
        return _Call(None, "", reads)
    return _Call(kind, str(node.target) if named else "", reads)


def _freeze(value: Any, position: dict[fx.Node, int], reads: list[int]) -> Hashable:
    """``value`` as something hashable that equals what does the same, with a mark in the place of each node."""
    if isinstance(value, fx.Node):
        reads.append(position[value])
        return _NODE
    if isinstance(value, _CONTAINERS):
        return (type(value), *[_freeze(x, position, reads) for x in value])
    if isinstance(value, dict):
        return (dict, *[(k, _freeze(x, position, reads)) for k, x in value.items()])
    if isinstance(value, slice):
        return (slice, _freeze(value.start, position, reads), _freeze(value.stop, position,
                                                                      reads), _freeze(value.step, position, reads))
    return type(value), value
