"""Buffers of reductions, against ``setReduceConfig`` of Reduce.cuh followed by hand."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from analyzer.cuda.workspaces.reduction import reduction_blocks
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import simulating
from analyzer.meta.spec import TensorSpec


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(shape, torch.empty(shape, device="meta").stride(), dtype, "cuda:0")


@pytest.mark.parametrize(("x", "dims", "expected"), [
    # 4 outputs a thread, blocks of 32x4: 392 values a thread, 24 blocks; ceil(392/16) = 25 blocks an output: 4*3072*25
    # * 32*4, 4*24
    (spec(1568, 3072), (0,), (39_321_600, 96)),
    # bfloat16 is summed in float32: 1024 values a thread, 24 blocks; min(ceil(2112/24), ceil(1024/16)) = 64
    (spec(4096, 3072, dtype=torch.bfloat16), (0,), (4 * 3072 * 64 * 128, 96)),
    (spec(32, 1000), (0,), ()),       # 32 rows: a warp each
    (spec(32, 64, 7, 7), (2, 3), ()),  # 49 values an output
    # all of a vector of 2**20: vectors of 4, blocks of 512 threads: 2048 values a thread, one output; min(132*4,
    # 2048/16) = 128
    (spec(1 << 20), (), (4 * 128, 4)),
    (spec(8, 0), (1,), ()),
])
def test_blocks(x: TensorSpec, dims: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert reduction_blocks(x, dims, 4) == expected


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=3), st.integers(0, 2))
def test_order_of_equal_dimensions_does_not_matter(shape: list[int], position: int) -> None:
    """A dimension of size 1 anywhere changes nothing."""
    dims = (0,)
    wider = [*shape]
    wider.insert(1 + position % len(shape), 1)
    assert reduction_blocks(spec(*wider), dims, 4) == reduction_blocks(spec(*shape), dims, 4)


def test_unknown_multiprocessors_give_no_buffers() -> None:
    import dataclasses

    with simulating(dataclasses.replace(find_device("h200"), name="unknown", multiprocessors=None, aliases=())):
        assert reduction_blocks(spec(1568, 3072), (0,), 4) == ()
