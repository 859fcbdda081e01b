"""Shapes and strides of grouped products, held to the CPU kernel."""
from __future__ import annotations

import pytest
import torch

from analyzer import MetaTensorMode

CASES = {
    "ragged rows": ((10, 8), (2, 8, 12), [4, 10]),
    "ragged columns": ((2, 4, 8), (8, 10), [4, 10]),
    "ragged inner": ((4, 8), (8, 12), [4, 8]),
    "batched": ((2, 4, 8), (2, 8, 12), None),
}


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="newer than this torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_like_the_kernel(case: str, dtype: torch.dtype) -> None:
    a_shape, b_shape, groups = CASES[case]

    def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        # each row must start at a multiple of 16 bytes: a view of rows padded to 16 elements
        padded = [torch.zeros(*shape[:-1], 16, dtype=dtype)[..., :shape[-1]] for shape in (a_shape, b_shape)]
        return padded[0], padded[1], None if groups is None else torch.tensor(groups, dtype=torch.int32)

    a, b, offs = make()
    expected = torch._grouped_mm(a, b, offs=offs)
    with MetaTensorMode():
        a, b, offs = make()
        got = torch._grouped_mm(a, b, offs=offs)
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="newer than this torch")
def test_refused() -> None:
    with MetaTensorMode(), pytest.raises(RuntimeError, match="cannot multiply"):
        torch._grouped_mm(torch.zeros(4, 8), torch.zeros(2, 16, 8), offs=torch.zeros(2, dtype=torch.int32))
