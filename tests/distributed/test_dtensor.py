"""Operators of DTensors without data give what they give beside data: the same operators run by torch itself, on the
CPU in a group that moves nothing, are the oracle for layouts, shapes of parts, and how often ranks communicate.
"""
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from analyzer.distributed.dtensor import forget_shardings
from analyzer.parallel import world


def whole(mesh, *shape, at, requires_grad=True):
    return dt.zeros(*shape, device_mesh=mesh, placements=at).requires_grad_(requires_grad)


def products(mesh, device):
    a, b = whole(mesh, 13, 32, at=[Replicate()]), whole(mesh, 32, 64, at=[Shard(1)])
    c = whole(mesh, 64, 9, at=[Shard(0)])
    out = (a @ b @ c).redistribute(placements=[Replicate()])
    out.sum().backward()
    return out, a.grad, b.grad, c.grad


def uneven_shards(mesh, device):
    a, b = whole(mesh, 13, 32, at=[Shard(0)]), whole(mesh, 14, 32, at=[Shard(0)])
    out = F.relu(a).full_tensor(), b.full_tensor()
    (out[0].sum() + out[1].sum()).backward()
    return *out, a, b, a.grad, b.grad


def embedding_of_a_split_vocabulary(mesh, device):
    weight = whole(mesh, 100, 16, at=[Shard(0)])
    ids = DTensor.from_local(torch.zeros(4, 8, dtype=torch.int64, device=device), mesh, [Replicate()])
    out = F.embedding(ids, weight).redistribute(placements=[Replicate()])
    out.sum().backward()
    return out, weight.grad


def norms(mesh, device):
    x, weight = whole(mesh, 4, 16, 32, at=[Shard(1)]), whole(mesh, 32, at=[Replicate()])
    out = F.layer_norm(x, (32,), weight, weight), F.rms_norm(x, (32,), weight), F.rms_norm(x, (32,))
    sum(o.sum() for o in out).backward()
    return *out, x.grad, weight.grad


def activations(mesh, device):
    x = whole(mesh, 16, 32, at=[Shard(1)])
    out = F.gelu(x) * F.silu(x) + F.mish(x) - F.leaky_relu(x), F.softmax(x, -1), F.dropout(x, 0.3)
    sum(o.sum() for o in out).backward()
    return *out, x.grad


def losses(mesh, device):
    x, target = whole(mesh, 16, 64, at=[Shard(1)]), torch.zeros(16, dtype=torch.int64, device=device)
    with loss_parallel():
        loss = F.cross_entropy(x, DTensor.from_local(target, mesh, [Replicate()]))
        loss.backward()
    return loss, x.grad


def clipped_and_stepped(mesh, device):
    weights = [nn.Parameter(whole(mesh, 16, 32, at=[at], requires_grad=False)) for at in (Shard(0), Replicate())]
    out = []
    for settings in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        sum(w.sum() for w in weights).backward()
        out.append(nn.utils.clip_grad_norm_(weights, 1.0))
        optimizer = torch.optim.AdamW(weights, **settings)
        optimizer.step()
        out += [optimizer.state[w][name] for w in weights for name in ("exp_avg", "step")]
    return out


def views(mesh, device):
    x = whole(mesh, 4, 16, 64, at=[Shard(2)])
    out = (x.view(4, 16, 8, 8).transpose(1, 2), torch.cat([x, x], 0), torch.stack([x, x]), x[:, 1:],
           x.unsqueeze(0).expand(3, -1, -1, -1), torch.where(x > 0, x, 0.0))
    sum(o.sum() for o in out).backward()
    return *out, x.grad


def layouts(mesh, device):
    x, y = (DTensor.from_local(torch.ones(16, 32, device=device), mesh, [Partial()]) for _ in range(2))
    z = distribute_tensor(torch.ones(13, 32, device=device), mesh, [Shard(0)])
    scattered, reduced = x.redistribute(placements=[Shard(0)]), y.redistribute(placements=[Replicate()])
    return scattered, reduced, z, z.to_local(), x.full_tensor()


def two_dimensions(mesh, device):
    mesh = init_device_mesh(device, (2, 4), mesh_dim_names=("a", "b"))
    x, w = whole(mesh, 16, 32, at=[Shard(0), Shard(1)]), whole(mesh, 32, 24, at=[Replicate(), Shard(0)])
    out = (x @ w).redistribute(placements=[Shard(0), Replicate()])
    out.sum().backward()
    return out, x.grad, w.grad, whole(mesh, 13, 32, at=[Shard(0), Shard(0)])


def sequence_parallel(mesh, device):
    module = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.1))
    return parallelize_module(module.to(device), mesh, {
        "0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)), "4": SequenceParallel()})


def modules(mesh, device):
    module, x = sequence_parallel(mesh, device), torch.ones(4, 2, 32, device=device, requires_grad=True)
    module(x).sum().backward()
    return x.grad, *[p.grad for p in module.parameters()]


def checkpointed(mesh, device, use_reentrant=False):
    module, x = sequence_parallel(mesh, device), torch.ones(4, 2, 32, device=device, requires_grad=True)
    checkpoint(module, x, use_reentrant=use_reentrant).sum().backward()
    return x.grad, *[p.grad for p in module.parameters()]


def checkpointed_by_a_backward_pass_of_its_own(mesh, device):
    return checkpointed(mesh, device, use_reentrant=True)


CASES = {function.__name__: function for function in (
    products, uneven_shards, embedding_of_a_split_vocabulary, norms, activations, losses, clipped_and_stepped,
    views, layouts, two_dimensions, modules, checkpointed, checkpointed_by_a_backward_pass_of_its_own)}


@pytest.mark.parametrize("rank, row", [(0, 0), (1, 16), (5, 24), (7, 28)])
def test_a_part_of_a_part_knows_where_it_is(rank, row):
    """Tensor parallelism cuts 32 rows in 2 of 16, and FSDP each of them in 4."""
    with world(8, rank):
        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(nn.Sequential(nn.Linear(16, 32)).cuda(), mesh["tp"], {"0": ColwiseParallel()})
        weight = fully_shard(model, mesh=mesh["dp"])[0].weight
        found = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    assert found == ((4, 16), (row, 0))


def describe(tensor):
    if isinstance(tensor, DTensor):
        part = tensor._local_tensor
        return str(tensor.placements), tuple(tensor.shape), tuple(part.shape), part.stride(), tensor.dtype
    return tuple(tensor.shape), tensor.dtype


def run(function, device):
    with CommDebugMode() as counted:
        out = function(init_device_mesh(device, (8,), mesh_dim_names=("tp",)), device)
    return [describe(t) for t in out], {str(op): n for op, n in counted.get_comm_counts().items()}


def run_all(device):
    """What each case gives; where an older torch does not shard an operator, or not its gradient, what torch says."""
    found = {}
    for name, function in CASES.items():
        try:
            found[name] = run(function, device)
        except RuntimeError as error:
            if torch.__version__ >= (2, 12):
                raise
            found[name] = str(error).partition("\n")[0]
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rank", [0, 6])
def test_operators_of_sharded_tensors_are_those_of_torch(rank):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        expected = run_all("cpu")
    finally:
        dist.destroy_process_group()
        forget_shardings()  # with groups that are gone
    if (2, 11) <= torch.__version__ < (2, 12):  # it shards mish by reading a mesh: refused here
        expected["activations"] = "Operator aten.mish.default does not have a sharding strategy registered."
    with world(8, rank):
        assert run_all("cuda") == expected
