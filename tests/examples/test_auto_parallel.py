"""The example that chooses shardings: known answers, and the best of all choices."""
import itertools

import pytest
import torch
from torch import nn

pytest.importorskip("scipy")
pytest.importorskip("networkx")

from analyzer import symbolic_profile, symbolic_trace  # noqa: E402
from examples import auto_parallel as example  # noqa: E402
from examples.auto_parallel import MLP, MeshSpec, P, R, moved_dims, profile_block, shard, solve  # noqa: E402
from tests.small_model import Calls  # noqa: E402

ENDS = {"x": R, "output": R}
BATCH = {"x": shard(0), "output": shard(0)}


def ways(plan: example.Plan) -> dict[str, str]:
    return {name: ", ".join(way.name for way in choice.ways) for name, choice in plan.choices.items()}


def test_an_mlp_with_large_weights_is_split_by_columns_and_then_by_rows() -> None:
    """Megatron-LM (Shoeybi et al., 2019): two all-reduces of the activations, against sums of all weight gradients."""
    x = torch.empty(1, 512, 4096, device="meta", requires_grad=True)
    profile = profile_block(MLP(4096, 16384), x)
    mesh = MeshSpec.of((8,), "dgx_h100")
    plan = solve(profile, mesh, fixed=ENDS)
    assert ways(plan) == {"x": "replicate", "up": "column", "act": "shard 2", "down": "row", "output": "replicate"}
    assert [plan.sharding(n) for n in ("up", "act", "down")] == [(shard(2),), (shard(2),), (P,)]
    kernels = sum(n.fwd_seconds + n.bwd_seconds for n in profile.nodes if n.name in ("up", "act", "down"))
    summed = mesh.collective_seconds("all_reduce", 512 * 4096 * 4, 0)
    assert plan.seconds == pytest.approx(kernels / 8 + 2 * summed, rel=1e-6)


def test_an_mlp_with_large_activations_is_split_by_data() -> None:
    """The weights' gradients are smaller than the activations, so these stay where they are."""
    plan = solve(profile_block(MLP(512, 2048), torch.empty(256, 1024, 512, device="meta", requires_grad=True)),
                 MeshSpec.of((8, ), "dgx_h100"), fixed=BATCH)
    assert ways(plan) == {"x": "shard 0", "up": "shard 0", "act": "shard 0", "down": "shard 0", "output": "shard 0"}


def test_a_memory_limit_splits_what_would_be_replicated() -> None:
    profile = profile_block(MLP(1024, 4096), torch.empty(16384, 1024, device="meta", requires_grad=True))
    mesh = MeshSpec.of((8,), "dgx_h100")
    free = solve(profile, mesh, fixed=BATCH)
    tight = solve(profile, mesh, memory_bytes=0.6 * free.memory_bytes, fixed=BATCH)
    assert ways(free)["up"] == ways(free)["down"] == "shard 0" and (ways(tight)["up"],
                                                                    ways(tight)["down"]) == ("column", "row")
    assert tight.memory_bytes <= 0.6 * free.memory_bytes and tight.seconds > free.seconds
    with pytest.raises(ValueError, match=r"no sharding over \(8,\) of dgx_h100.* fits"):
        solve(profile, mesh, memory_bytes=1000, fixed=BATCH)


def test_no_choice_is_cheaper() -> None:
    """Against all choices one by one, on a mesh of two dimensions."""
    x = torch.empty(4, 64, 256, device="meta", requires_grad=True)
    profile = profile_block(Calls(lambda m, x: m.act(m.up(x)), up=nn.Linear(256, 512), act=nn.GELU()), x)
    mesh = MeshSpec.of((2, 2), "dgx_h100")
    graph = profile.to_networkx()
    types = {m.path: m.type for m in profile.modules.walk()}
    names = ["x", "up", "act"]
    options = []
    for name in names:
        node = graph.nodes[name]
        sources = [graph.nodes[i]["outputs"][0] for i in node["inputs"]]
        kind = types.get(node["target"], "placeholder")
        options.append(
            example.list_choices(node, kind, [tuple(s.shape) for s in sources], [s.nbytes for s in sources], mesh))
    best = float("inf")
    for given, linear, act in itertools.product(*options):
        moves = [
            mesh.redistribute(graph.nodes[n]["outputs"][0].nbytes, [w.output for w in a.ways],
                              [w.inputs[0] for w in b.ways])
            for n, a, b in (("x", given, linear), ("up", linear, act))
        ]
        if None not in moves:
            best = min(best, sum(move.seconds for move in moves) + given.seconds + linear.seconds + act.seconds)
    assert solve(profile, mesh).seconds == pytest.approx(best, rel=1e-6) and len(options[1]) > 20


def test_the_plan_is_noted_on_the_graph() -> None:
    x = torch.empty(1, 512, 4096, device="meta", requires_grad=True)
    gm = symbolic_profile(symbolic_trace(MLP(4096, 16384), meta_args={"x": x}), x, device="h100")
    example.annotate(gm, solve(gm.meta["profile"], MeshSpec.of((8,), "dgx_h100"), fixed=ENDS))
    symbolic_profile(gm, x, device="h100")
    assert {n.name: n.meta["info"].sharding for n in gm.graph.nodes} == {
        "x": (R,), "up": (shard(2),), "act": (shard(2),), "down": (P,), "output": (R,)}


@pytest.mark.parametrize(("before", "after", "pairs"), [
    ((2, 3, 8), (2, 3, 2, 4), [(0, 0), (1, 1), (2, 2)]), ((2, 3, 2, 4), (2, 3, 8), [(0, 0), (1, 1), (2, 2)]),
    ((6, 4), (24,), [(0, 0)]), ((2, 3, 5), (5, 3, 2), [(0, 2), (1, 1), (2, 0)]), ((2, 2, 5), (2, 5, 2), [(2, 1)])])
def test_dimensions_through_views(before: tuple[int, ...], after: tuple[int, ...], pairs: list[tuple[int,
                                                                                                     int]]) -> None:
    assert list(moved_dims(before, after)) == pairs
