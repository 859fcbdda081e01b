"""What a rank of thousands looks at: its own part of a parameter, its own groups, one mesh."""
import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common

from analyzer.distributed.fsdp import Chunks
from analyzer.meta.mode import MetaTensorMode
from analyzer.parallel import world


@pytest.mark.parametrize(("shape", "count", "dim"), [((10, 3), 4, 0), ((3, 8), 2, 1), ((2,), 5, 0), ((0, 4), 3, 0),
                                                     ((7, 2), 7, 0), ((9, 2), 4, 0)])
def test_chunks_are_those_of_torch(shape, count, dim):
    with MetaTensorMode():
        tensor = torch.empty(shape)
        expected = _fsdp_common._chunk_with_empty(tensor, count, dim)
        found = Chunks(tensor, count, dim)
        assert len(found) == len(expected) == count
        assert [t.shape for t in found] == [t.shape for t in expected]
        assert [t.storage_offset() for t in found if t.numel()] == [t.storage_offset() for t in expected if t.numel()]
        assert found[-1].shape == expected[-1].shape and len(found[1:]) == count - 1
        with pytest.raises(IndexError):
            found[count]


def test_a_mesh_of_sixteen_thousand_ranks_has_the_groups_of_its_rank():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    with world(16384, rank=1000):
        mesh = init_device_mesh("cuda", (16, 128, 8), mesh_dim_names=("pp", "dp", "tp"))
        # rank 1000 is (0, 125, 0): ranks count along the last dimension first
        assert list(mesh.get_coordinate()) == [0, 125, 0]
        ranks = [torch.distributed.get_process_group_ranks(mesh.get_group(name)) for name in ("pp", "dp", "tp")]
        assert ranks == [list(range(1000, 16384, 1024)), list(range(0, 1024, 8)), list(range(1000, 1008))]
        if torch.__version__ < (2, 10):  # which has no meshes of several dimensions put together
            return
        joined = DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
        assert joined is DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
        assert joined.mesh_dim_names == ("dp", "tp") and tuple(joined.mesh.shape) == (128, 8)
        assert DeviceMesh._concatenate([mesh["pp"], mesh["tp"]]).mesh_dim_names == ("pp", "tp")
