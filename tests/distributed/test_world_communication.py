"""Rows of communication of a rank of a world: as many as torch counts, by groups of its mesh, on its hosts."""
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.debug._comm_mode import NATIVE_TO_PY_MAPPING
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from analyzer import ProfileOptions, profile
from analyzer.hardware import find_cluster
from analyzer.hardware.kernel_time.collective import collective_time
from analyzer.parallel import world
from analyzer.results.run_cost import CommInfo

pytestmark = pytest.mark.filterwarnings("ignore")


class Uneven(nn.Module):
    """Parts of 1 to 8 rows, and what the coalescing manager puts together; rank 5 of the group has six rows."""

    def __init__(self, mesh):
        super().__init__()
        self.tp = mesh.get_group("tp")

    def forward(self, x):
        parts = [torch.empty(i + 1, device=x.device) for i in range(8)]
        dist.all_gather(parts, parts[5], group=self.tp)
        dist.reduce_scatter(torch.empty_like(parts[5]), parts, group=self.tp)
        dist.all_to_all([torch.empty_like(part) for part in parts], parts, group=self.tp)
        rows = torch.empty(36, 4, device=x.device)
        dist.all_to_all_single(torch.empty(10, 4, device=x.device), rows, [1] * 7 + [3], list(range(1, 9)), self.tp)
        with _coalescing_manager(self.tp):
            dist.all_reduce(x, group=self.tp)
            dist.all_reduce(rows, group=self.tp)
        with _coalescing_manager(self.tp):
            for _ in range(3):
                dist.all_gather_into_tensor(torch.empty(8 * len(x), device=x.device), x, group=self.tp)
        return x


def test_parts_of_any_size():
    with world(16, rank=5):
        p = profile(lambda: Uneven(init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp"))),
                    args=(torch.zeros(64),), mode="infer", device="h100")
    assert [(r.kind, r.group, r.bytes, r.wire_bytes) for r in p.comm] == [
        ("all_gather", "tp", 144, 116),      # all of 36 rows but the seven of the next rank
        ("reduce_scatter", "tp", 144, 120),  # all but its own six
        ("all_to_all", "tp", 144, 120), ("all_to_all", "tp", 576, 480),
        ("all_reduce", "tp", 832, 1456),     # 2 * 7/8 of 256 + 576 bytes
        ("all_gather", "tp", 6144, 5376)]    # 7/8 of three times eight times 256 bytes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def sharded():
    """Two dimensions of a mesh: each block's parameters are shared out over eight ranks, copied over two."""
    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(Block() for _ in range(3))).cuda()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallel():
    """Megatron's cut: columns of the first product, rows of the second."""
    mesh = init_device_mesh("cuda", (16,), mesh_dim_names=("tp",))
    model = nn.Sequential(*(Block() for _ in range(3))).cuda()
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def copied():
    return nn.parallel.DistributedDataParallel(nn.Sequential(*(Block() for _ in range(3))).cuda())


@pytest.mark.parametrize("build", [sharded, parallel, copied])
def test_as_many_calls_as_torch_counts(build):
    counted = []

    def step(model, optimizer, x):
        with CommDebugMode() as mode:
            model(x).sum().backward()
        counted.append(mode.get_comm_counts())
        optimizer.step()
        optimizer.zero_grad()

    with world(16, rank=3):
        p = profile(build, args=(torch.rand(4, 512),), step=step, optimizer="sgd")
    counts: Counter[object] = Counter()
    for row in p.comm:
        namespace, name, _ = row.operator.split(".")
        packet = getattr(getattr(torch.ops, namespace), name)
        counts[NATIVE_TO_PY_MAPPING.get(packet, packet)] += 1
    assert counts == counted[-1] and counts


# A block has 525,312 parameters of float32: 2,101,248 bytes, which eight divide. The tensor-parallel blocks add up
# an activation of 4 x 512 float32 (8,192 bytes) forward, and its gradient where the input has one (not in the first).
WHOLE = 2_101_248


def kinds(rows: tuple[CommInfo, ...]) -> Counter[tuple[object, ...]]:
    return Counter((r.kind, r.group, r.ranks, r.phase, r.bytes, r.wire_bytes) for r in rows)


def test_a_sharded_model_gathers_in_one_dimension_and_reduces_in_two():
    with world(16, rank=11, cluster="dgx_h100"):
        p = profile(sharded, args=(torch.rand(4, 512),), optimizer="sgd", device="h100")
    part = WHOLE // 8
    assert kinds(p.comm) == {("all_gather", "shard", 8, "forward", WHOLE, 7 * part): 3,
                             ("all_gather", "shard", 8, "backward", WHOLE, 7 * part): 3,
                             ("reduce_scatter", "shard", 8, "backward", WHOLE, 7 * part): 3,
                             ("all_reduce", "replicate", 2, "backward", part, part): 3}
    assert p.world.mesh == {"replicate": 2, "shard": 8}
    assert (p.world.size, p.world.rank, p.world.devices_per_host, p.world.cluster) == (16, 11, 8, "dgx_h100")
    assert {g.name: g.ranks for g in p.world.groups if g.name != "world"} == {
        "replicate": (3, 11), "shard": tuple(range(8, 16))}
    dgx = find_cluster("dgx_h100")
    expected = {"shard": collective_time("all_gather", WHOLE, 8, dgx, dtype="float32"),
                "replicate": collective_time("all_reduce", part, 2, dgx, ranks_per_host=1, dtype="float32")}
    for row in p.comm:
        if row.kind != "reduce_scatter":
            assert row.seconds == pytest.approx(expected[row.group].seconds, rel=1e-6)


def wrapped():
    """The same with flat parameters, one a block."""
    model = nn.Sequential(*(Block() for _ in range(3))).cuda()
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)


@pytest.mark.parametrize(("build", "path"), [
    (sharded, "{}"), (wrapped, "_fsdp_wrapped_module.{}._fsdp_wrapped_module")])
def test_what_is_communicated_for_a_block_belongs_to_it_in_whichever_hook(build, path):
    """Backward gathers a block's parameters in the hook of the one behind it, and reduces their gradients at last."""
    with world(16):
        p = profile(build, args=(torch.rand(4, 512),), optimizer="sgd")
    places = {(r.module_path, r.node): set() for r in p.comm}
    for r in p.comm:
        places[r.module_path, r.node].add((r.kind, r.phase))
    assert len(places) == 3 and {module for module, _ in places} == {path.format(i) for i in range(3)}
    expected = {("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")}
    assert all(kinds - {("all_reduce", "backward")} == expected for kinds in places.values())
    nodes = [n for n in p.nodes if n.fwd_comm_bytes or n.bwd_comm_bytes]
    assert len(nodes) == 3 and sum(n.bwd_comm_bytes for n in nodes) == p.phases["backward"].comm_bytes


def test_gradients_of_copies_are_reduced_at_nodes_of_their_modules():
    """A bucket is ready when the gradient of its first layer is: the last layer's 262,656 float32 are more than the
    1 MiB of the first bucket, all others are less than the 25 MiB of the second.
    """
    with world(16):
        p = profile(copied, args=(torch.rand(4, 512),), optimizer="sgd")
    last, others = WHOLE // 2, 5 * WHOLE // 2
    assert [(r.kind, r.phase, r.module_path, r.bytes, r.wire_bytes) for r in p.comm] == [
        ("all_reduce", "backward", "module.2.down", last, 2 * 15 * last // 16),
        ("all_reduce", "backward", "module.0.up", others, 2 * 15 * others // 16)]
    assert [(n.name, n.module_path, n.bwd_comm_bytes) for n in p.nodes if n.bwd_comm_bytes] == [
        (r.node, r.module_path, r.bytes) for r in reversed(p.comm)]


def pipelined(model, optimizer, x):
    """The second of four stages, four micro-batches of two samples, one forward and one backward in turns."""
    sample = torch.empty(2, 512, device="cuda", requires_grad=True)
    stage = PipelineStage(model, 1, 4, torch.device("cuda"), input_args=(sample,), output_args=(sample,))
    Schedule1F1B(stage, 4, loss_fn=lambda output, target: output.sum()).step()
    optimizer.step()
    optimizer.zero_grad()


def test_a_message_is_for_what_it_brings():
    """A schedule sends and receives between modules, outside of the backward pass. Before torch 2.12 a stage greets
    both neighbours in its first step, by a number, which torch 2.9 sends in int64.
    """
    with world(4, rank=1):
        p = profile(lambda: nn.Sequential(Block(), Block()).cuda(), args=(torch.rand(2, 512),), step=pipelined,
                    optimizer="sgd")
    sent = 8 if torch.__version__ < (2, 10) else 4
    greetings = {("recv", "forward", 0, "", 4, 0): 1, ("recv", "forward", 2, "", 4, 0): 1,
                 ("send", "forward", 0, "", sent, sent): 1, ("send", "forward", 2, "", sent, sent): 1}
    greetings = greetings if torch.__version__ < (2, 12) else {}
    assert Counter((r.kind, r.phase, r.peer, r.module_path, r.bytes, r.wire_bytes) for r in p.comm) == greetings | {
        ("recv", "forward", 0, "0.up", 4096, 0): 4, ("send", "forward", 2, "1", 4096, 4096): 4,
        ("recv", "backward", 2, "1.down", 4096, 0): 4, ("send", "backward", 0, "0.up", 4096, 4096): 4}
    assert {phase: p.phases[phase].comm_bytes for phase in ("forward", "backward")} == {
        "forward": 8 * 4096 + len(greetings) * (4 + sent) // 2, "backward": 8 * 4096}
    assert sum(n.bwd_comm_bytes for n in p.nodes) == p.modules.bwd_comm_bytes == 8 * 4096


def test_a_dimension_over_all_ranks_has_its_name():
    with world(8):
        p = profile(lambda: nn.parallel.DistributedDataParallel(Block().cuda(), device_mesh=init_device_mesh(
            "cuda", (8,), mesh_dim_names=("dp",))), args=(torch.rand(2, 512),), optimizer="sgd")
    assert {r.group for r in p.comm} == {"dp"} and p.world.mesh == {"dp": 8}


def test_the_same_shapes_in_another_world():
    """What a collective gives depends on how many ranks its group has, which its name does not say."""
    class Moved(nn.Module):
        def forward(self, x):
            mesh = init_device_mesh("cuda", (dist.get_world_size(),))
            return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)]).to_local()

    for size in (2, 4):
        with world(size):
            p = profile(Moved, args=(torch.zeros(16, 16),), mode="infer")
        assert [(r.kind, r.bytes, r.wire_bytes) for r in p.comm] == [("all_to_all", 1024, 1024 - 1024 // size)]
        moved = next(n for n in p.nodes if n.fwd_comm_bytes)
        assert moved.outputs[0].shape == (16 * size, 16 // size)


# of the first step the gradient, the eight gathered parts and the flat tensor that they were copied from
@pytest.mark.parametrize(("waits", "kept"), [(True, 0), (False, 1 + 8 + 8)])
def test_a_collective_of_which_only_the_future_is_waited_for_keeps_tensors_until_the_next_one(waits, kept):
    def step(model, optimizer, x):
        model(x).sum().backward()
        gradient, = (p.grad for p in model.parameters())
        seen.append(torch.cuda.memory_allocated())
        parts = [torch.empty_like(gradient) for _ in range(8)]
        for work in (dist.all_reduce(gradient, async_op=True), dist.all_gather(parts, gradient, async_op=True)):
            work.wait() if waits else work.get_future().wait()
        del parts
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seen: list[int] = []
    with world(8):
        profile(lambda: nn.Linear(512, 512, bias=False).cuda(), args=(torch.empty(1, 512),), step=step, device="h100",
                optimizer="sgd", options=ProfileOptions(steps=2))
    assert seen[1] - seen[0] == kept * 512 * 512 * 4
