"""Models of which each rank holds a part are refused with the wrapper's name; of replicas communication is unknown."""
import pytest
import torch
import torch.distributed as dist
from torch import nn

from analyzer import Profile, profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.tools.generation import profile_generate
from tests.small_model import Net

X = torch.empty(4, 8)
pytestmark = pytest.mark.usefixtures("group")


def mesh():
    return dist.device_mesh.init_device_mesh("cpu", (4,))


def fully_sharded():
    from torch.distributed.fsdp import fully_shard
    return fully_shard(Net(), mesh=mesh())


def partly_sharded():
    from torch.distributed.fsdp import fully_shard
    model = Net()
    fully_shard(model.b, mesh=mesh())
    return model


def fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel
    return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))


def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    return parallelize_module(Net(), mesh(), {"a": ColwiseParallel(), "b.0": RowwiseParallel()})


ADVICE = ("so it runs with other ranks alone: build it in the function that `profile` is given, inside "
          "`with analyzer.parallel.world(ranks)`, or profile the module as it is before it is wrapped")
CASES = [(fully_sharded, f"the model (FSDPNet) is sharded over ranks by fully_shard, {ADVICE}"),
         (partly_sharded, f"b (FSDPSequential) is sharded over ranks by fully_shard, {ADVICE}"),
         (fsdp, "the model (FullyShardedDataParallel) is sharded over ranks by FullyShardedDataParallel, " + ADVICE),
         (tensor_parallel, "a (Linear) is sharded over ranks by tensor parallelism (parallelize_module: weight is a "
                           f"DTensor), {ADVICE}")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "sentence"), CASES)
def test_sharded_models_are_refused_by_the_name_of_their_wrapper(make, sentence):
    """But for what the factory of a model says, which may wrap it."""
    outside = ("aten.detach.default of a DTensor outside a world of ranks: run this inside "
               "`with analyzer.parallel.world(...)`, or profile the module as it is before it is wrapped")
    for run, told in ((lambda: profile(make(), args=(X,)), sentence),
                      (lambda: profile(make(), args=(X,), mode="infer"), sentence),
                      (lambda: symbolic_trace(make(), meta_args={"x": X}), sentence),
                      (lambda: profile_generate(make(), prompt_tokens=4, new_tokens=2), sentence),
                      (lambda: profile(make, args=(X,)), sentence if make is fsdp else outside)):
        with pytest.raises(InputError) as caught:
            run()
        assert str(caught.value) == told


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: nn.Sequential(m), lambda m: torch.compile(m, backend="eager")])
def test_what_replicas_communicate_is_unknown(wrap):
    p = profile(wrap(nn.parallel.DistributedDataParallel(Net())), args=(X,), optimizer="sgd")
    assert {name: info.comm_bytes for name, info in p.phases.items()} == dict.fromkeys(
        ("forward", "backward", "optimizer", "zero_grad"))
    assert {info.comm_bytes for info in p.first_step.values()} == {None}
    assert {(m.fwd_comm_bytes, m.bwd_comm_bytes) for m in p.modules.walk()} == {(None, None)}
    assert {(n.fwd_comm_bytes, n.bwd_comm_bytes) for n in p.nodes} == {(None, None)}
    (text,) = [a for a in p.assumptions if "DistributedDataParallel" in a]
    assert text == (f"{'0' if isinstance(wrap(nn.ReLU()), nn.Sequential) else 'the model'}: DistributedDataParallel is "
                    "run as one rank alone; the bytes that ranks exchange are unknown, and the seconds of the exchange "
                    "and the memory of its buckets are in no figure")
    assert Profile.from_json(p.to_json()) == p


def test_a_traced_replica_says_that_its_graph_exchanges_nothing():
    gm = symbolic_trace(nn.parallel.DistributedDataParallel(Net()), meta_args={"inputs": (X,)})
    assert gm.meta["assumptions"] == ["the model: DistributedDataParallel is traced as the module that it wraps; what "
                                      "ranks exchange is not in the graph"]


def test_a_model_that_is_no_replica_communicates_what_its_collectives_say():
    p = profile(Net(), args=(X,))
    assert {info.comm_bytes for info in p.phases.values()} == {0} and p.assumptions == ()
