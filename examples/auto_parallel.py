"""Intra-operator parallelism by an integer program: which tensors of a block to shard over a device mesh, and how.

All that the program knows is the saved profile: the graph with its costs (`Profile.to_networkx`), the classes of
modules, and what collectives cost on a cluster of the catalogue (`MeshSpec`). As in Alpa (Zheng et al., OSDI 2022),
each node has a few ways to run, an edge costs what it takes to turn the layout that its source gives into the one that
its reader wants, and HiGHS finds the cheapest choice within the memory limit. Nothing overlaps: seconds of kernels and
collectives are added.

    pip install -e '.[solver]'
    python examples/auto_parallel.py
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import networkx
import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix
from torch import Tensor, fx, nn

from analyzer import symbolic_profile, symbolic_trace
from analyzer.api.result import Profile
from analyzer.parallel import MeshSpec
from analyzer.parallel.mesh_spec import PARTIAL as P
from analyzer.parallel.mesh_spec import REPLICATE as R
from analyzer.parallel.mesh_spec import sharded_dim as dim_of

STATE_COPIES = 4  # a parameter, its gradient, and two states of Adam


def shard(dim: int) -> str:
    return f"Shard({dim})"


class Way(NamedTuple):
    """One way to run a node over one dimension of the mesh: what it wants of its inputs, and what it gives."""

    name: str
    inputs: tuple[str, ...]   #: a placement for each input
    output: str
    splits_params: bool = False
    sums_params: bool = False #: gradients of its parameters are summed over the devices
    sums_inputs: bool = False #: the gradient of its input is


class Choice(NamedTuple):
    """One way for each dimension of the mesh, with what it costs."""

    ways: tuple[Way, ...]
    seconds: float
    memory_bytes: float


class Plan(NamedTuple):
    """The cheapest choice for every node."""

    choices: dict[str, Choice]
    seconds: float
    memory_bytes: float

    def sharding(self, node: str) -> tuple[str, ...]:
        """The placement of a node's output on each dimension of the mesh, as `NodeInfo.sharding` holds it."""
        return tuple(way.output for way in self.choices[node].ways)


# -- what nodes can do ---------------------------------------------------------------------------------------------

Shape = tuple[int, ...]


def list_ways(kind: str, shapes: Sequence[Shape], out: Shape, size: int) -> list[Way]:
    """The ways of a node of ``kind`` (a module's class or a function's name), its inputs and its output of these
    shapes, over ``size`` devices.
    """
    n = len(shapes)
    if kind == "placeholder":
        return [Way("replicate", (), R), *(Way(f"shard {d}", (), shard(d)) for d in dims(out, size))]
    if kind == "output":
        return [Way("replicate", (R,) * n, R), *(Way(f"shard {d}", (shard(d),) * n, shard(d)) for d in dims(out, size))]
    ways = [Way("replicate", (R,) * n, R)]
    last = len(out) - 1
    if kind in ("Linear", "linear"):
        ways += [Way(f"shard {d}", (shard(d),), shard(d), sums_params=True) for d in dims(out, size) if d != last]
        if out[last] % size == 0:
            ways.append(Way("column", (R,), shard(last), splits_params=True, sums_inputs=True))
        if shapes[0][-1] % size == 0:
            ways.append(Way("row", (shard(last),), P, splits_params=True))
    elif kind in ("LayerNorm", "RMSNorm", "softmax"):
        ways += [Way(f"shard {d}", (shard(d),), shard(d), sums_params=True) for d in dims(out, size) if d != last]
    elif kind == "scaled_dot_product_attention":
        ways += [Way(f"shard {d}", (shard(d),) * n, shard(d)) for d in dims(out, size) if d < len(out) - 2]
    elif all(s == out for s in shapes):  # elementwise
        ways += [Way(f"shard {d}", (shard(d),) * n, shard(d)) for d in dims(out, size)]
    elif n == 1:  # a view: a dimension of the input is one of the output
        ways += [
            Way(f"shard {d}", (shard(d), ), shard(e)) for d, e in moved_dims(shapes[0], out)
            if shapes[0][d] % size == out[e] % size == 0
        ]
    return ways


def dims(shape: Shape, size: int) -> list[int]:
    return [d for d, s in enumerate(shape) if s % size == 0]


def moved_dims(before: Shape, after: Shape) -> Iterator[tuple[int, int]]:
    """Pairs of a dimension before and after a view whose blocks hold the same elements.

    Of a permutation, dimensions of a size that occurs once; of a reshape, the first factor of each group with equal
    products.

    >>> list(moved_dims((2, 128, 768), (2, 128, 12, 64))), list(moved_dims((2, 128, 12, 64), (2, 12, 128, 64)))
    ([(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 2), (2, 1), (3, 3)])
    """
    if sorted(before) == sorted(after):
        yield from ((d, after.index(s)) for d, s in enumerate(before) if before.count(s) == 1)
        return
    i = j = 0
    while i < len(before) and j < len(after):
        yield i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1


# -- what it costs ------------------------------------------------------------------------------------------------

def list_choices(node: dict[str, Any], kind: str, shapes: Sequence[Shape], nbytes: Sequence[int],
                 mesh: MeshSpec) -> list[Choice]:
    """The ways of a node on the whole mesh, each with its seconds and bytes on one device."""
    out = tuple(node["outputs"][0].shape) if node["outputs"] else shapes[0]
    found = []
    for ways in itertools.product(*(list_ways(kind, shapes, out, size) for size in mesh.sizes)):
        split = [way.name != "replicate" for way in ways]
        work = math.prod(size for size, s in zip(mesh.sizes, split) if s)
        kept = mesh.parts([R if way.output == P else way.output for way in ways])
        params = math.prod(size for size, way in zip(mesh.sizes, ways) if way.splits_params)
        if any(sum(dim_of(w.output) == d for w in ways) > 1 and out[d] % work for d in range(len(out))):
            continue
        param_bytes = (node["param_bytes"] or 0) / params
        seconds = ((node["fwd_seconds"] or 0.0) + (node["bwd_seconds"] or 0.0)) / work
        for axis, way in enumerate(ways):
            if way.sums_params:
                seconds += mesh.collective_seconds("all_reduce", int(param_bytes), axis)
            if way.sums_inputs:
                shared = mesh.parts([R if i == axis else w.inputs[0] for i, w in enumerate(ways)])
                seconds += mesh.collective_seconds("all_reduce", nbytes[0] // shared, axis)
        found.append(Choice(ways, seconds, STATE_COPIES * param_bytes + (node["incremental_bytes"] or 0) / kept))
    return found


# -- the program ---------------------------------------------------------------------------------------------------

def solve(profile: Profile, mesh: MeshSpec, memory_bytes: float = math.inf,
          fixed: dict[str, str] | None = None) -> Plan:
    """The choice of ways with the fewest seconds of a step; ``fixed`` names nodes whose output has a given placement on
    every dimension.

    Raises ValueError where no choice fits.
    """
    graph: networkx.DiGraph = profile.to_networkx()
    order = list(graph)
    graph.remove_nodes_from(order[order.index("output") + 1:])  # the loss
    types = {} if profile.modules is None else {m.path: m.type for m in profile.modules.walk()}
    choices: dict[str, list[Choice]] = {}
    for name, node in graph.nodes(data=True):
        kind = node["op"] if node["op"] in ("placeholder",
                                            "output") else types.get(node["target"], node["target"].rpartition(".")[2])
        sources = [graph.nodes[i]["outputs"][0] for i in node["inputs"]]
        choices[name] = list_choices(node, kind, [tuple(s.shape) for s in sources], [s.nbytes for s in sources], mesh)
        wanted = (fixed or {}).get(name)
        if wanted is not None:
            choices[name] = [c for c in choices[name] if all(way.output == wanted for way in c.ways)]

    first: dict[str, int] = {}  # variables: one for each choice of each node, then one for each pair of an edge
    cost: list[float] = []
    for name, options in choices.items():
        first[name] = len(cost)
        cost += [c.seconds for c in options]
    binary = len(cost)
    upper = [1.0] * binary
    rows: list[tuple[dict[int, float],
                     float]] = [({first[n] + i: 1.0 for i in range(len(o))}, 1.0) for n, o in choices.items()]
    for name, node in graph.nodes(data=True):
        for position, source in enumerate(node["inputs"]):
            nbytes = graph.nodes[source]["outputs"][0].nbytes
            by_source: dict[int, dict[int, float]] = {}
            by_reader: dict[int, dict[int, float]] = {}
            for (i, a), (j, b) in itertools.product(enumerate(choices[source]), enumerate(choices[name])):
                moved = mesh.redistribute(nbytes, [w.output for w in a.ways], [w.inputs[position] for w in b.ways])
                by_source.setdefault(i, {first[source] + i: -1.0})[len(cost)] = 1.0
                by_reader.setdefault(j, {first[name] + j: -1.0})[len(cost)] = 1.0
                cost.append(0.0 if moved is None else moved.seconds)
                upper.append(0.0 if moved is None else 1.0)
            rows += [(row, 0.0) for row in (*by_source.values(), *by_reader.values())]
    memory = np.zeros(len(cost))
    for name, options in choices.items():
        memory[first[name]:first[name] + len(options)] = [c.memory_bytes for c in options]
    entries = [(r, column, value) for r, (row, _) in enumerate(rows) for column, value in row.items()]
    r, c, v = zip(*entries)
    equal = csr_matrix((v, (r, c)), shape=(len(rows), len(cost)))
    right = np.array([value for _, value in rows])
    constraints = [LinearConstraint(equal, right, right)]
    if memory_bytes < math.inf:
        constraints.append(LinearConstraint(memory[None] / 2**20, -np.inf, memory_bytes / 2**20))
    # microseconds: HiGHS stops at 1e-7
    found = milp(np.array(cost) * 1e6, constraints=constraints, bounds=Bounds(0, upper),
                 integrality=[1] * binary + [0] * (len(cost) - binary))
    if found.x is None:
        raise ValueError(f"no sharding over {mesh.sizes} of {mesh.cluster.name} fits: {found.message}")
    chosen = {
        name: options[int(np.argmax(found.x[first[name]:first[name] + len(options)]))]
        for name, options in choices.items()
    }
    return Plan(chosen, float(found.fun) * 1e-6, float(memory @ np.round(found.x)))


# -- a transformer block -------------------------------------------------------------------------------------------

class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """As in GPT-2, with queries, keys and values from a layer each."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2, self.mlp = nn.LayerNorm(dim), nn.LayerNorm(dim), MLP(dim, 4 * dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        return x + self.mlp(self.norm_2(x))


def annotate(gm: fx.GraphModule, plan: Plan) -> None:
    """Note the plan on the nodes, where `NodeInfo.sharding` takes it from."""
    for node in gm.graph.nodes:
        node.meta["sharding"] = plan.sharding(node.name)


def profile_block(model: nn.Module, x: Tensor, device: str = "h100") -> Profile:
    """The profile as it is saved and read back."""
    gm = symbolic_profile(symbolic_trace(model, meta_args={"x": x}), x, device=device)
    return Profile.from_json(gm.meta["profile"].to_json())


def main() -> None:
    profile = profile_block(Block(4096, 32), torch.empty(1, 1024, 4096, device="meta", requires_grad=True))
    mesh = MeshSpec.of((8,), "dgx_h100")
    alone = solve(profile, MeshSpec.of((1,), "dgx_h100"))
    plan = solve(profile, mesh, memory_bytes=2 * 2**30, fixed={"x": R, "output": R})
    print(f"{'node':<32}{'way':<12}{'output':<16}{'us':>8}{'MiB':>8}")
    for name, choice in plan.choices.items():
        print(
            f"{name:<32}{', '.join(w.name for w in choice.ways):<12}{', '.join(plan.sharding(name)):<16}"
            f"{choice.seconds * 1e6:>8.1f}"
            f"{choice.memory_bytes / 2**20:>8.1f}")
    print(
        f"a step on {mesh.sizes} of {mesh.cluster.name}: {plan.seconds * 1e3:.3f} ms, {plan.memory_bytes / 2**20:.0f} "
        f"MiB a device; on one: {alone.seconds * 1e3:.3f} ms, {alone.memory_bytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
