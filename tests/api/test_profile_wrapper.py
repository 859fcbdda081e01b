"""Compiled and data-parallel wrapped models report under their own modules' names; wrappers are levels of the tree."""
import pytest
import torch
import torch.distributed as dist
from torch import nn

from analyzer import Profile, compare, profile
from analyzer.results.world import find_parallel_sizes
from tests.small_model import Net

X = torch.empty(4, 8, device="meta")


@pytest.fixture(scope="module")
def plain():
    return profile(Net(), args=(X,), optimizer="adamw")


def rows(p, prefix=""):
    return [(m.path.removeprefix(prefix).lstrip("."), m.type, m.params, m.fwd_flops, m.bwd_flops, m.activation_bytes,
             m.fwd_seconds) for m in p.modules.walk() if m.path.startswith(prefix)]


def test_a_compiled_model_is_its_own_below_its_wrapper(plain):
    model = torch.compile(Net(), backend="eager")
    p = profile(model, args=(X,), optimizer="adamw")
    prefix = "_orig_mod"
    assert rows(p, prefix) == rows(plain) and p.name == "Net"
    assert (p.modules.type, p.modules.own.fwd_flops, p.modules.fwd_flops) == ("OptimizedModule", 0, plain.fwd_flops)
    assert [n.module_path for n in p.nodes if n.name == "a"] == [f"{prefix}.a"]
    assert {(m.path, m.type) for m in p.modules.walk()} == {(path, type(m).__name__)
                                                            for path, m in model.named_modules()}
    assert [call.path for call in p.module_calls] == [path for path, _ in model.named_modules()]
    assert all(call.parent is None or call.path.startswith(p.module_calls[call.parent].path) for call in p.module_calls)
    assert "├─Net: 1-1" in p.report("torchinfo")
    assert Profile.from_json(p.to_json()) == p


def test_a_part_of_a_model_may_be_compiled(plain):
    model = Net()
    model.b[0] = torch.compile(model.b[0], backend="eager")
    p = profile(model, args=(X,), optimizer="adamw")
    assert [(m.path, m.type, m.depth) for m in p.modules.walk()] == [("", "Net", 0), ("a", "Linear", 1),
                                                                     ("b", "Sequential", 1),
                                                                     ("b.0", "OptimizedModule", 2),
                                                                     ("b.0._orig_mod", "Linear", 3), ("b.1", "ReLU", 2)]
    change = compare(p, plain)
    assert change.structure == () and not [row for row in change.modules if row.quantity == "hardware_flops"]


def test_compiled_in_place_there_is_no_wrapper(plain):
    model = Net()
    model.compile(backend="eager")
    assert rows(profile(model, args=(X,), optimizer="adamw")) == rows(plain)


def test_a_backend_that_is_not_known_is_named():
    def mine(graph, inputs):
        return graph.forward
    sentence = ("torch.compile(backend='mine'): compiled code runs as it is written, because it is not known "
                "what this backend does")
    part, place, listed = Net(), Net(), Net()
    part.b[0] = torch.compile(part.b[0], backend=mine)
    place.b.compile(backend=mine)
    listed.others = [torch.compile(nn.ReLU(), backend=mine)]  # which is not called
    for model, said in [(torch.compile(Net(), backend=mine), [sentence]), (part, [sentence]), (place, [sentence]),
                        (listed, []), (Net(), []), (torch.compile(Net(), backend="eager"), [])]:
        for mode in ("train", "infer"):
            assert profile(model, args=(X,), mode=mode).assumptions == tuple(said)


def test_distributed_data_parallel_is_a_level(plain, group):
    model = nn.parallel.DistributedDataParallel(Net())
    p = profile(model, args=(X,), optimizer="adamw")
    assert [row[:3] for row in rows(p, "module")] == [row[:3] for row in rows(plain)]
    assert rows(p, "module")[1:] == rows(plain)[1:]  # the loss is the wrapper's
    assert (p.modules.type, p.modules.params, p.world_size, p.data_parallel_size,
            p.model_parallel_size) == ("DistributedDataParallel", 144, 4, 4, 1)
    assert p.samples_per_second == pytest.approx(4 * 4 / p.step_seconds)
    assert "(module): Net(" in p.report("deepspeed")


def test_data_parallel_of_one_device_is_a_level(plain):
    p = profile(nn.DataParallel(Net()), args=(X,), optimizer="adamw")
    assert rows(p, "module")[1:] == rows(plain)[1:] and p.modules.type == "DataParallel"


def test_sizes_of_a_group_that_nothing_wraps_are_unknown(group):
    assert find_parallel_sizes(Net()) == {"world_size": 4, "data_parallel_size": None, "model_parallel_size": None}
    half = dist.new_group([0, 1])
    model = nn.parallel.DistributedDataParallel(Net(), process_group=half)
    assert find_parallel_sizes(model) == {"world_size": 4, "data_parallel_size": 2, "model_parallel_size": 2}


def test_sizes_of_fully_sharded_models(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    assert find_parallel_sizes(model) == {"world_size": 4, "data_parallel_size": 4, "model_parallel_size": 1}
    wrapped = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    assert find_parallel_sizes(wrapped)["data_parallel_size"] == 4


def test_every_dimension_that_is_given_to_a_wrapper_is_data_parallel(group):
    """What is copied between groups of ranks that share (HSDP) takes batches of its own; tensor parallelism does not.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = {"world_size": 4, "data_parallel_size": 4, "model_parallel_size": 1}
    half = {"world_size": 4, "data_parallel_size": 2, "model_parallel_size": 2}
    hybrid = Net()
    fully_shard(hybrid, mesh=mesh)
    assert find_parallel_sizes(hybrid) == whole
    split = parallelize_module(Net(), mesh["inner"], {"a": ColwiseParallel()})
    fully_shard(split, mesh=mesh["outer"])
    assert find_parallel_sizes(split) == half
    inner = Net()
    fully_shard(inner.a, mesh=mesh)  # the root has no wrapper
    assert find_parallel_sizes(inner) == whole
    for strategy, sizes in ((ShardingStrategy.HYBRID_SHARD, whole), (ShardingStrategy._HYBRID_SHARD_ZERO2, whole)):
        wrapped = FullyShardedDataParallel(Net(), device_mesh=mesh, sharding_strategy=strategy,
                                           device_id=torch.device("cpu"))
        assert find_parallel_sizes(wrapped) == sizes
    shared = FullyShardedDataParallel(Net(), process_group=mesh.get_group("inner"), device_id=torch.device("cpu"))
    assert find_parallel_sizes(shared) == half
