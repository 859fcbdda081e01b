"""What it costs on a mesh to change how a tensor lies, and how sharded tensors are told of in a profile."""
import pytest
import torch

from analyzer import Profile, profile
from analyzer.errors import InputError
from analyzer.hardware.kernel_time.collective import collective_time
from analyzer.parallel import MeshSpec, world
from examples.auto_parallel import MLP

R, P, ROWS, COLUMNS = "Replicate()", "Partial()", "Shard(0)", "Shard(1)"
MIB = 2**20


# 4 hosts of 8 devices, a tensor of 64 MiB: what is divided over one dimension moves that share over the other.
@pytest.mark.parametrize(("given", "wanted", "forward", "backward"), [
    ((R, R), (R, R), [], []), ((R, ROWS), (R, R), [("all_gather", 1, 64 * MIB)], []),
    ((ROWS, COLUMNS), (ROWS, R), [("all_gather", 1, 16 * MIB)], []),
    ((R, R), (ROWS, R), [], [("all_gather", 0, 64 * MIB)]),
    ((R, ROWS), (R, COLUMNS), [("all_to_all", 1, 64 * MIB)], [("all_to_all", 1, 64 * MIB)]),
    ((R, P), (R, R), [("all_reduce", 1, 64 * MIB)], []),
    ((ROWS, P), (ROWS, COLUMNS), [("reduce_scatter", 1, 16 * MIB)], [("all_gather", 1, 16 * MIB)])])
def test_what_moves_by_hand(given, wanted, forward, backward):
    mesh = MeshSpec.of((4, 8), "dgx_h100")
    found = mesh.redistribute(64 * MIB, given, wanted)
    assert [step[:3] for step in found.forward] == forward and [step[:3] for step in found.backward] == backward
    assert found.comm_bytes == sum(nbytes for *_, nbytes in forward + backward)
    hosts = {0: 1, 1: 8}  # devices of a group in one host: the last dimension is a host, the first joins four
    assert found.seconds == pytest.approx(sum(
        collective_time(kind, nbytes, mesh.sizes[axis], mesh.cluster, ranks_per_host=hosts[axis]).seconds
        for kind, axis, nbytes in forward + backward))


def test_nothing_makes_a_sum_unfinished():
    assert MeshSpec.of((8,), "dgx_h100").redistribute(MIB, (R,), (P,)) is None


def test_a_mesh_without_devices_is_refused():
    with pytest.raises(InputError) as error:
        MeshSpec.of((8, 0), "dgx_h100")
    assert str(error.value) == "MeshSpec(sizes=(8, 0)): each dimension must be a whole number of 1 or more"


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    return parallelize_module(MLP(1024, 4096).cuda(), init_device_mesh("cuda", (8,), mesh_dim_names=("tp",)),
                              {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})


@pytest.mark.filterwarnings("ignore")
def test_nodes_and_parameters_say_how_they_lie_and_what_they_communicate():
    """As a solver reads it: Megatron's way, one all-reduce of the output and one of the input's gradient."""
    with world(8):
        p = profile(tensor_parallel, args=(torch.rand(4, 128, 1024, requires_grad=True),), optimizer="sgd")
    assert Profile.from_json(p.to_json()) == p
    rows = {node.name: node for node in p.nodes}
    assert (rows["up"].sharding, rows["act"].sharding) == (("Shard(2)",), ("Shard(2)",))
    assert rows["up"].outputs[0].shape == (4, 128, 512)  # this rank's part
    assert [module.sharding for module in p.modules.children if module.sharding] == [
        {"weight": ("Shard(0)",), "bias": ("Shard(0)",)}, {"weight": ("Shard(1)",), "bias": ("Replicate()",)}]
    message = 4 * 128 * 1024 * 4
    assert (rows["down"].fwd_comm_bytes, rows["up"].bwd_comm_bytes) == (message, message)
    mesh = MeshSpec.of((8,), "dgx_h100")
    assert mesh.redistribute(message, (P,), (R,)).comm_bytes == message
