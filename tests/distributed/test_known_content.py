"""What small tensors hold after a collective of ranks that all hold the same."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from analyzer.parallel import world


@pytest.mark.parametrize("name, expected", [("SUM", 24), ("MAX", 3), ("MIN", 3), ("AVG", 3), ("PRODUCT", 3**8)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_all_reduce_of_known_contents(name, expected, dtype):
    with world(8):
        t = torch.full((1,), 3, dtype=dtype, device="cuda")
        dist.all_reduce(t, op=getattr(dist.ReduceOp, name))
        assert t.item() == expected
