"""Compiled and data-parallel wrapped models: their modules go by their own names, wrappers are levels of the tree."""
import pytest
import torch
import torch.distributed as dist
from torch import nn

from analyzer import compare, profile
from analyzer.tools.runtime import FlopsProfiler, measure
from tests import small_model


class Net(small_model.Net):
    def forward(self, x):
        return super().forward(x).sum()


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group') / 'store'}", rank=0,
                            world_size=1)
    yield
    dist.destroy_process_group()


def parts(p, prefix):
    """What the modules below a wrapper cost, by their own names."""
    return {
        m.path.removeprefix(prefix).lstrip("."): (m.type, m.calls, m.fwd_flops, m.bwd_flops) for m in p.modules.walk()
        if m.path.startswith(prefix)
    }


X = torch.rand(4, 8)


def loss(output):
    return output


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_runs_as_written_and_says_so(in_place):
    model = Net()
    plain = measure(model, (X,), loss_fn=loss)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    model(X)
    p = measure(model, (X,), loss_fn=loss)
    prefix = "" if in_place else "_orig_mod"
    assert parts(p, prefix) == parts(plain, "")
    assert (p.modules.calls, p.modules.outputs, p.modules.fwd_flops) == (1, plain.modules.outputs, plain.fwd_flops)
    assert [
        text for text in p.assumptions
        if text.startswith("compiled, measured as written: Net; as compiled, a forward pass takes ")
    ]
    assert p.name == "Net"


def test_part_of_a_model_may_be_compiled():
    model = Net()
    model.b = torch.compile(model.b, backend="eager")
    with FlopsProfiler(model) as prof:
        model(X)
    assert [(m.path, m.calls) for m in prof.profile.modules.walk()] == [
        ("", 1), ("a", 1), ("b", 1), ("b._orig_mod", 1), ("b._orig_mod.0", 1), ("b._orig_mod.1", 1)]


def test_distributed_data_parallel_is_a_level_and_its_collectives_are_seen(group):
    model = nn.parallel.DistributedDataParallel(Net())
    p = measure(model, (X,), loss_fn=loss, optimizer="sgd")
    plain = measure(model.module, (X,), loss_fn=loss)
    assert {name: row[2]
            for name, row in parts(p, "module").items()} == {name: row[2] for name, row in parts(plain, "").items()}
    assert (p.modules.type, p.modules.children[0].type, p.modules.params) == ("DistributedDataParallel", "Net", 144)
    assert p.modules.bwd_comm_bytes == 4 * 144
    assert (p.world_size, p.data_parallel_size, p.model_parallel_size) == (1, 1, 1)


def test_fully_sharded_models_are_measured_in_their_local_shapes(group):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = Net()
    fsdp.fully_shard(model.b)
    fsdp.fully_shard(model)
    p, plain = measure(model, (X,), loss_fn=loss, optimizer="sgd"), measure(Net(), (X,), loss_fn=loss)
    assert [(m.path, m.fwd_flops) for m in p.modules.walk()] == [(m.path, m.fwd_flops) for m in plain.modules.walk()]
    assert p.modules.params == 144
    wrapped = measure(fsdp.FullyShardedDataParallel(Net(), device_id=torch.device("cpu")), (X,), loss_fn=loss)
    assert {name: row[2] for name, row in parts(wrapped, "_fsdp_wrapped_module").items()} == {
        name: row[2] for name, row in parts(plain, "").items()
    }


def test_predicted_beside_measured_leaves_wrappers_out():
    predicted = profile(Net(), (X,), device="h200")
    measured = measure(torch.compile(Net(), backend="eager"), (X,))
    change = compare(predicted, measured)
    assert change.structure == () and not [row for row in change.modules if row.quantity == "hardware_flops"]
