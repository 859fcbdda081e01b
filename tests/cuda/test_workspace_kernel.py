"""What kernels of PyTorch allocate inside one operator."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import analyzer.cuda.workspaces.kernel_temporary  # noqa: F401  registers its rules
from analyzer.meta.operator_info import kernel_memory
from analyzer.meta.spec import Signature, TensorSpec

aten = torch.ops.aten


def spec(shape: tuple[int, ...], dtype: torch.dtype = torch.float32,
         stride: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec.of(shape, stride or torch.empty(shape, device="meta").stride(), dtype, "cuda:0")


def blocks(op: Any, args: tuple[Any, ...], *outputs: TensorSpec) -> tuple[int, ...]:
    flat = [t for a in args for t in (a if isinstance(a, list) else [a])]
    inputs = tuple(t for t in flat if isinstance(t, TensorSpec))
    return tuple(b for s in kernel_memory(Signature(op, args, {}, inputs, outputs))[0] for b in s.blocks)


INT = torch.int64
TRANSPOSED = spec((64, 32), stride=(1, 64))
GRID = spec((64, 64), stride=(256, 2))


@pytest.mark.parametrize(("op", "args", "outputs", "expected"), [
    (aten._softmax.default, (spec((64, 32)), -1, False), [spec((64, 32))], ()),
    (aten._softmax.default, (TRANSPOSED, -1, False), [spec((64, 32))], (8192,)),
    (aten._safe_softmax.default, (spec((2, 8, 8)), -1), [spec((2, 8, 8))], (128, 16, 4)),
    (aten.native_layer_norm.default, (TRANSPOSED, [32], None, None, 1e-5),
     [spec((64, 32)), spec((64, 1)), spec((64, 1))], (8192,)),
    # up to 4096 elements in place; one row: indices, and both once more for radix sort; below 128 rows: (index, row)
    # twice, keys, radix sort; from then on: indices, radix sort
    (aten.sort.default, (spec((8, 4096)),), [], ()),
    (aten.sort.default, (spec((1, 5000)),), [], (40000, 60000)),
    (aten.sort.default, (spec((8, 5000)),), [], (320000, 320000, 160000, 480000)),
    (aten.sort.default, (spec((128, 5000), torch.int64),), [], (5120000, 10240000)),
    # copied there, and results back
    (aten.sort.default, (spec((5000, 128)), 0), [], (2560000, 2560000, 5120000, 5120000, 7680000)),
    (aten.topk.default, (spec((8, 5000)), 10), [spec((8, 10)), spec((8, 10), INT)], ()),
    # 20 rows of 20000 are shared by blocks of 1024 items: 20 each. Four arrays for rows, counts of 256 digits and two
    # sums for blocks
    (aten.topk.default, (spec((20, 20000)), 10), [spec((20, 10)), spec((20, 10), INT)],
     (80, 80, 80, 80, 204800, 1600, 1600)),
    (aten.topk.default, (spec((500, 2500)), 2000), [spec((500, 2000)), spec((500, 2000), INT)], ()),
    (aten.topk.default, (spec((1, 9000)), 5000), [spec((1, 5000)), spec((1, 5000), INT)], (40000, 20000, 40000, 60000)),
    (aten.cumsum.default, (TRANSPOSED, 0), [spec((64, 32))], (8192,)),
    (aten.nonzero.default, (TRANSPOSED,), [], (8192,)),
    # sorted keys and radix sort; with the inverse also where they were and come from, then a mask and its sums
    (aten._unique2.default, (spec((1000,)),), [], (4000, 4000)),
    (aten._unique2.default, (spec((1000,)), True, True), [], (4000, 8000, 8000, 12000, 4000, 8000, 8000, 8000, 8000)),
    (aten.unique_consecutive.default, (spec((1000,)),), [], ()),
    # cuDNN: the query's gradient and a sum for each of its rows in float32
    (aten._scaled_dot_product_cudnn_attention_backward.default,
     tuple(spec((2, 4, 8, 64), torch.bfloat16) for _ in range(4)), [],
     (2 * 4 * 8 * 65 * 4,)),
    (aten.mm.default, (TRANSPOSED, spec((32, 8))), [spec((64, 8))], ()),
    (aten.mm.default, (GRID, spec((64, 8))), [spec((64, 8))], (16384,)),
    (aten.bmm.default, (spec((2, 4, 4), stride=(1, 8, 2)), spec((2, 4, 4))), [spec((2, 4, 4))], (128,)),
    # 4096 indices of 1000 rows: 409 + 1000 pieces of 8 floats, and six arrays of indices beside two counters
    (aten.embedding_dense_backward.default, (spec((8, 512, 8)), spec((8, 512), INT), 1000, -1, False),
     [spec((1000, 8))],
     (32768, 32768, 32768, 8, 8000, 8000, 8, 8 * 1409, 1409 * 8 * 4)),
    (aten.embedding_dense_backward.default, (spec((4, 512, 8)), spec((4, 512), INT), 1000, -1, False),
     [spec((1000, 8))], ()),
    # 100352 rows of 96: 3136 blocks of 32 rows for each of the two gradients, then their sum
    (aten.native_layer_norm_backward.default,
     (spec((100352, 96)), spec((100352, 96)), [96], spec((100352, 1)), spec((100352, 1)), None, None, [True] * 3),
     [spec((100352, 96)), spec((96,)), spec((96,))], (3136 * 96 * 4, 3136 * 96 * 4)),
    (aten.index_put.default, (spec((100, 4)), [spec((10,), INT)], spec((10, 4)), True), [spec((100, 4))],
     (80, 80, 80, 80, 160)),
    (aten.index_put.default, (spec((100, 4)), [spec((10,), INT)], spec((10, 4)), False), [spec((100, 4))], ()),
    (aten._foreach_norm.Scalar, ([spec((65537,)), spec((3,))], 2), [spec(()), spec(())], (2 * 2 * 4,)),
])
def test_blocks(op: Any, args: tuple[Any, ...], outputs: list[TensorSpec], expected: tuple[int, ...]) -> None:
    found = blocks(op, args, *outputs)
    assert found[:len(expected)] == expected if op is aten.native_layer_norm_backward.default else found == expected


def test_nothing_on_the_host() -> None:
    x = TensorSpec.of((64, 32), (1, 64), torch.float32, "cpu")
    assert blocks(aten._softmax.default, (x, -1, False), TensorSpec.of((64, 32), (32, 1), torch.float32, "cpu")) == ()
