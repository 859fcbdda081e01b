"""Exchanges between the devices of one process, and `torch.nn.DataParallel`, which is made of them."""
import pytest
import torch
from torch import nn
from torch.nn.parallel import comm, parallel_apply, replicate

from analyzer import MetaTensorMode, profile
from analyzer.meta.state import MetaOptions

MIB = 2**20


@pytest.fixture
def mode():
    with MetaTensorMode(MetaOptions(devices=3)) as mode:
        yield mode


def place(tensors):
    return [(str(tensor.device), *tensor.shape) for tensor in tensors]


def test_tensors_are_handed_out_and_collected(mode):
    x = torch.rand(6, 4, device="cuda:0")
    assert place(comm.broadcast(x, [0, 2])) == [("cuda:0", 6, 4), ("cuda:2", 6, 4)]
    assert comm.broadcast(x, [0, 2])[0] is x
    assert place(comm.scatter(x, [0, 1, 2], [1, 2, 3])) == [("cuda:0", 1, 4), ("cuda:1", 2, 4), ("cuda:2", 3, 4)]
    parts = comm.scatter(x, [1, 2], dim=1)
    assert place([comm.gather(parts, 1, 0), comm.gather(parts, 0, "cpu"), comm.gather(parts)]) == [
        ("cuda:0", 6, 4), ("cpu", 12, 2), ("cuda:0", 12, 2)]
    assert place([comm.reduce_add(comm.broadcast(x, [0, 1]), 1)]) == [("cuda:1", 6, 4)]
    into = [torch.empty(6, 4, device="cuda:1"), torch.empty(6, 4, device="cuda:2")]
    assert comm.broadcast(x, out=into)[1] is into[1]
    assert place([comm.gather(into, out=torch.empty(12, 4, device="cuda"))]) == [("cuda:0", 12, 4)]


def test_copies_of_many_tensors_share_a_buffer(mode):
    tensors = [torch.rand(256, 256, device="cuda:0") for _ in range(4)]  # of 256 KiB each
    found = comm.broadcast_coalesced(tensors, [0, 1], 512 * 1024)
    assert all(a is b for a, b in zip(found[0], tensors))
    assert place(found[1]) == [("cuda:1", 256, 256)] * 4
    assert len({copy.untyped_storage()._cdata for copy in found[1]}) == 2
    assert torch.cuda.memory_allocated(1) == MIB and torch.cuda.memory_allocated(0) == MIB
    summed = comm.reduce_add_coalesced(found, 0)
    assert place(summed) == [("cuda:0", 256, 256)] * 4
    with pytest.raises(RuntimeError, match=r"All tensors must be on devices\[0\]: 1"):
        comm.broadcast_coalesced(tensors, [1, 0])


def test_replicas_run_one_after_another(mode):
    layer = nn.Linear(4, 2).cuda()
    out = parallel_apply(replicate(layer, [0, 1]), comm.scatter(torch.rand(6, 4), [0, 1]))
    assert place(out) == [("cuda:0", 3, 2), ("cuda:1", 3, 2)]
    torch.cat([one.cpu() for one in out]).sum().backward()
    assert place([layer.weight.grad]) == [("cuda:0", 2, 4)]
    with pytest.raises(RuntimeError, match="(?s)in replica 1 .*same reduction dim"):
        parallel_apply(replicate(layer, [0, 1]), [torch.rand(1, 4).cuda(), torch.rand(1, 5).cuda(1)])


def build():
    return nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).cuda()


@pytest.mark.parametrize("devices", [2, 4])
def test_a_model_that_is_replicated_has_the_work_of_one_and_copies_on_each_device(devices):
    x = torch.rand(8, 1024)
    alone = profile(build, (x,), optimizer="sgd", device="l4")
    found = profile(lambda: nn.DataParallel(build()), (x,), optimizer="sgd", device="l4", devices=devices)
    assert found.fwd_macs == alone.fwd_macs and found.bwd_macs == alone.bwd_macs and found.params == alone.params
    first, *others = [(one.param_bytes, one.peak_allocated_bytes - one.peak_by_category["workspace"])
                      for one in found.devices]
    assert first[0] == 8 * MIB and [held for held, _ in others] == [0] * (devices - 1)
    # At the end of backward: gradients of the replica, and the buffer in which they are sent. The first device has the
    # weights and the sums beside them.
    assert all(16 * MIB <= peak < 16 * MIB + 64 * 1024 for _, peak in others)
    assert 32 * MIB <= first[1] < 32 * MIB + 128 * 1024
