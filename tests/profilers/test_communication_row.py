"""A row for each call that communicates: its group by mesh dimension, its place in the step, and totals."""
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn

from analyzer import Profile, profile
from analyzer.results.run_cost import CommTotal, sum_communication
from analyzer.results.world import GroupInfo, RankRun
from tests.call import Call

GOLDEN = Path(__file__).parents[1] / "report" / "golden"
ROWS = 8 * 32 * 64 * 4  # bytes of the activation of eight ranks: 8 x 32 x 64 float32


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def mesh():
    """Rank 5 of sixteen that move no data, two times eight of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=16, store=FakeStore())
    yield init_device_mesh("cpu", (2, 8), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


class Block(nn.Module):
    """A feed-forward layer between an all-gather and a reduce-scatter, as sequence parallelism has it."""

    def __init__(self, group):
        super().__init__()
        self.up, self.down, self.group = nn.Linear(64, 64), nn.Linear(64, 64), group

    def forward(self, x):
        y = collectives.all_gather_tensor_autograd(x, 0, self.group)
        return x + collectives.reduce_scatter_tensor_autograd(self.down(self.up(y).relu()), "sum", 0, self.group)


class Net(nn.Module):
    def __init__(self, group, blocks):
        super().__init__()
        self.blocks = nn.ModuleList([Block(group) for _ in range(blocks)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Averaged(torch.optim.SGD):
    """All gradients are averaged over the group before the update."""

    def __init__(self, params, group):
        super().__init__(params, lr=0.1)
        self.averaged_over = group

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad, group=self.averaged_over)
        return super().step(closure)


def step(mesh, blocks=3, **options) -> Profile:
    return profile(Net(mesh.get_group("tp"), blocks), args=(torch.empty(32, 64),), device="h100",
                   optimizer=lambda params: Averaged(params, mesh.get_group("dp")), **options)


@pytest.fixture(scope="module")
def stepped(mesh) -> Profile:
    return step(mesh)


def test_each_call_has_a_row_at_its_place(stepped):
    rows = [(r.kind, r.group, r.ranks, r.bytes, r.wire_bytes, r.phase, r.module_path, r.node) for r in stepped.comm]
    sent = ROWS // 8 * 7
    assert rows[:2] == [
        ("all_gather", "tp", 8, ROWS, sent, "forward", "blocks.0", "all_gather_into_tensor"),
        ("reduce_scatter", "tp", 8, ROWS, sent, "forward", "blocks.0", "reduce_scatter_tensor")]
    # of a reduce-scatter the gradient is an all-gather, at the same node; the first block's input needs none
    assert rows[6:8] == [
        ("all_gather", "tp", 8, ROWS, sent, "backward", "blocks.2", "reduce_scatter_tensor_2"),
        ("reduce_scatter", "tp", 8, ROWS, sent, "backward", "blocks.2", "all_gather_into_tensor_2")]
    assert rows[10] == ("all_gather", "tp", 8, ROWS, sent, "backward", "blocks.0", "reduce_scatter_tensor")
    # of two ranks each sends 2 * 1/2 of what is reduced
    assert rows[11:13] == [("all_reduce", "dp", 2, 16384, 16384, "optimizer", "", None),
                           ("all_reduce", "dp", 2, 256, 256, "optimizer", "", None)]
    assert len(rows) == 6 + 5 + 12


def test_rows_nodes_modules_and_phases_say_the_same(stepped):
    for phase, way in (("forward", "fwd"), ("backward", "bwd")):
        rows = [r for r in stepped.comm if r.phase == phase]
        assert sum(r.bytes for r in rows) == stepped.phases[phase].comm_bytes
        assert sum(getattr(n, f"{way}_comm_bytes") for n in stepped.nodes) == stepped.phases[phase].comm_bytes
        assert getattr(stepped.modules, f"{way}_comm_bytes") == stepped.phases[phase].comm_bytes
    assert stepped.phases["optimizer"].comm_bytes == 6 * (16384 + 256)
    seconds = sum(r.seconds for r in stepped.comm)
    parts = [p.communication_seconds + p.latency_seconds for p in stepped.phases.values()]
    assert 0 < seconds <= sum(parts)


def test_the_world_is_plain_data(stepped):
    world = stepped.world
    assert (world.size, world.rank, world.mesh) == (16, 5, {"dp": 2, "tp": 8})
    assert world.groups == (
        GroupInfo("world", 16, (RankRun(0, 15),)), GroupInfo("dp", 2, (RankRun(5, 5), RankRun(13, 13))),
        GroupInfo("tp", 8, (RankRun(0, 7),)))
    again = Profile.from_json(stepped.to_json())
    assert (again.world, again.comm) == (world, stepped.comm)
    assert again.comm_table() == stepped.comm_table()


def test_the_table_adds_up(stepped):
    timed = replace(stepped, comm=tuple([replace(r, seconds=1e-5, exposed_seconds=4e-6) for r in stepped.comm]))
    assert timed.comm_table() + "\n" == (GOLDEN / "communication.txt").read_text()
    totals = sum_communication(stepped.comm)
    assert [(t.kind, t.phase, t.calls) for t in totals] == [
        ("all_gather", "forward", 3), ("reduce_scatter", "forward", 3), ("all_gather", "backward", 3),
        ("reduce_scatter", "backward", 2), ("all_reduce", "optimizer", 12)]
    for name in ("bytes", "wire_bytes", "calls"):
        rows = len(stepped.comm) if name == "calls" else sum(getattr(r, name) for r in stepped.comm)
        assert sum(getattr(t, name) for t in totals) == rows
    over_all = sum_communication(stepped.comm, by_phase=False)
    assert over_all[0] == CommTotal("all_gather", "tp", 8, None, 6, 6 * ROWS, 6 * ROWS // 8 * 7, over_all[0].seconds,
                                      over_all[0].exposed_seconds)
    assert 0 < over_all[0].exposed_seconds <= over_all[0].seconds
    assert stepped.summary().splitlines()[1] == "rank 5 of 16, mesh dp=2 tp=8"
    assert "Communication" in stepped.summary() and "all_reduce" in stepped.summary()
    assert len(stepped.to_dataframe("comm")) == len(stepped.comm)


@pytest.mark.usefixtures("replaying_torch")
def test_replayed_blocks_have_the_same_rows(mesh):
    replayed, run = step(mesh, blocks=40), step(mesh, blocks=40, reuse=False)
    assert any(part.kind == "block" and part.replayed for part in replayed.replay)
    assert replayed.comm == run.comm and len(run.comm) == 40 * 8 - 1
    assert replayed.phases["backward"].comm_bytes == run.phases["backward"].comm_bytes == 79 * ROWS


def test_rows_outlive_the_group_that_they_are_of(mesh):
    group = dist.new_group([4, 5], group_desc="pair")
    unnamed = dist.new_group([1, 5, 9, 13])

    model = Call(lambda m, x: collectives.all_reduce(collectives.all_reduce(x, "sum", group), "sum", unnamed))
    p = profile(model, args=(torch.empty(8),), mode="infer", device="h100")
    dist.destroy_process_group(group)
    dist.destroy_process_group(unnamed)
    assert [(r.group, r.ranks, r.wire_bytes) for r in p.comm] == [("pair", 2, 32), ("ranks 1-13 by 4", 4, 48)]
    assert all(r.seconds for r in p.comm)
    ranks = {g.name: g.ranks for g in p.world.groups}
    assert (ranks["pair"], ranks["ranks 1-13 by 4"]) == ((4, 5), (1, 5, 9, 13))


def test_groups_of_one_name_are_told_apart(mesh):
    other = dist.new_group([5, 6], group_desc="mesh_tp")

    model = Call(lambda m, x: collectives.all_reduce(
        collectives.all_reduce(x, "sum", mesh.get_group("tp")), "sum", other))
    try:
        p = profile(model, args=(torch.empty(8),), mode="infer")
    finally:
        dist.destroy_process_group(other)
    assert [(r.group, r.ranks) for r in p.comm] == [("tp", 8), ("tp (ranks 5-6)", 2)]
    assert p.world.mesh == {"dp": 2, "tp": 8, "tp (ranks 5-6)": 2}


def test_a_dimension_over_all_ranks_is_known_by_what_is_sharded_on_it():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from analyzer.record.log import Log
    from analyzer.record.process_group import read_world
    from analyzer.results.world import describe_world

    flat = init_device_mesh("cpu", (16,), mesh_dim_names=("fsdp",))
    weight = distribute_tensor(torch.empty(16, 4), flat, [Shard(0)])
    world, _ = describe_world(Log(world=read_world()), [weight])
    assert [g.name for g in world.groups] == ["fsdp", "dp", "tp"]
    assert world.mesh == {"fsdp": 16, "dp": 2, "tp": 8}


@torch.library.custom_op("comm_row::exchange", mutates_args=())
def exchange(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """A library's own communication."""
    return x.clone()


@exchange.register_fake
def _(x, group_name):
    return torch.empty_like(x)


def test_an_operator_that_is_not_understood_is_unknown_and_said():
    p = profile(Call(lambda m, x: collectives.all_reduce(exchange(x, dist.group.WORLD.group_name), "sum",
                                                         dist.group.WORLD)), args=(torch.empty(8),), mode="infer")
    assert [(r.kind, r.bytes, r.wire_bytes, r.operator) for r in p.comm] == [
        (None, None, None, "comm_row.exchange.default"),
        ("all_reduce", 32, 60, "_c10d_functional.all_reduce.default")]
    assert p.phases["forward"].comm_bytes is None and p.communicates is None
    assert p.modules.fwd_comm_bytes is None
    text, = (line for line in p.assumptions if "comm_row.exchange" in line)
    assert "its bytes are unknown" in text and "1 calls" in text
    assert ">= 60 B" in p.comm_table()
