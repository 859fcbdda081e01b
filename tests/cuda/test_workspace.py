"""Workspaces that cuBLAS and cuBLASLt keep, and what a kernel holds while it runs."""
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from analyzer import MetaTensorMode, profile
from analyzer.cuda.workspaces import library
from analyzer.cuda.workspaces.library import cublas_workspace_bytes, cublaslt_workspace_bytes
from analyzer.cuda.workspaces.reduction import reduction_blocks
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import simulating
from analyzer.meta.operator_info import kernel_memory
from analyzer.meta.spec import Signature, TensorSpec

MIB = 1 << 20
Program = Callable[[], object]


def bytes_kept(program: Program) -> int:
    """What is still allocated on cuda:0 when all tensors of ``program`` are gone."""
    mode = MetaTensorMode()
    with mode:
        program()
    return mode.space.allocator().allocated_bytes


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


def train(module: torch.nn.Module, x: torch.Tensor) -> None:
    module(x).sum().backward()
    module.zero_grad()


@pytest.mark.parametrize(("program", "expected"), [
    pytest.param(lambda: rand(4, 4) + 1, 0, id="no-product"),
    pytest.param(lambda: rand(4, 4) @ rand(4, 4), 32 * MIB, id="mm"),
    pytest.param(lambda: [rand(4, 4) @ rand(4, 4), rand(2, 4, 4) @ rand(2, 4, 4)], 32 * MIB,
                 id="once-for-all-products"),
    pytest.param(lambda: torch.addmm(rand(4), rand(4, 4), rand(4, 4)), 33 * MIB, id="bias-through-cublaslt"),
    pytest.param(lambda: torch.addmm(rand(4, 4), rand(4, 4), rand(4, 4)), 32 * MIB, id="no-bias-vector"),
    pytest.param(lambda: torch.addmm(rand(4), rand(4, 4), rand(4, 4), beta=2), 32 * MIB, id="beta"),
    pytest.param(lambda: torch.rand(4, 4) @ torch.rand(4, 4), 0, id="host"),
    pytest.param(lambda: torch.nn.functional.conv2d(rand(1, 4, 8, 8), rand(4, 4, 3, 3)), 0, id="convolution"),
    pytest.param(lambda: train(torch.nn.Linear(8, 8, bias=False).cuda(), rand(4, 8)), 64 * MIB,
                 id="autograd-has-a-handle-of-its-own"),
    pytest.param(lambda: train(torch.nn.Linear(8, 8).cuda(), rand(4, 8)), 65 * MIB, id="no-bias-in-backward"),
])
def test_workspaces_stay(program: Program, expected: int) -> None:
    assert bytes_kept(program) == expected


@pytest.mark.parametrize(("device", "expected"),
                         [("h200", 32 * MIB), ("h100", 32 * MIB), ("a100", 8519680), ("l4", 8519680),
                          ("gb200", 32 * MIB if torch.__version__ >= "2.12" else 8519680)])
def test_size_follows_the_generation(device: str, expected: int) -> None:
    with simulating(find_device(device)):
        assert cublas_workspace_bytes() == expected


@pytest.mark.parametrize(("device", "hipblas"), [("mi300x", 128), ("mi355x", 128), ("mi250x", 32)])
def test_rocm_has_workspaces_of_its_own(monkeypatch: pytest.MonkeyPatch, device: str, hipblas: int) -> None:
    """Matrices of up to 32 bits go through hipBLASLt alone, vectors and doubles through hipBLAS alone."""
    def linear() -> torch.Tensor:
        return torch.nn.functional.linear(rand(4, 8), rand(16, 8), rand(16))

    def double() -> torch.Tensor:
        return rand(8, 8).double() @ rand(8, 8).double()

    with simulating(find_device(device)):
        assert bytes_kept(linear) == bytes_kept(lambda: [rand(4, 4) @ rand(4, 4), linear()]) == 76 * MIB
        assert bytes_kept(lambda: rand(8, 8) @ rand(8)) == bytes_kept(double) == hipblas * MIB
        monkeypatch.setattr(library, "TORCH", torch.torch_version.TorchVersion("2.15.0"))
        monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
        assert bytes_kept(linear) == 80 * MIB
        monkeypatch.setenv("HIPBLASLT_WORKSPACE_SIZE", "1024")
        monkeypatch.setenv("HIPBLAS_WORKSPACE_CONFIG", ":1024:2")
        assert bytes_kept(linear) == MIB and bytes_kept(double) == 2 * MIB


def test_environment_is_read_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    assert (cublas_workspace_bytes(), cublaslt_workspace_bytes()) == ((2 * 4096 + 8 * 16) * 1024, 2 * MIB)
    assert bytes_kept(lambda: torch.addmm(rand(4), rand(4, 4), rand(4, 4))) == (2 * 4096 + 8 * 16) * 1024 + 2 * MIB


def test_unified_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    assert bytes_kept(lambda: torch.addmm(rand(5), rand(5, 5), rand(5, 5))) == 32 * MIB


@pytest.mark.parametrize(("device", "program", "kept", "passing"), [
    ("h200", lambda: rand(7, 3) @ rand(3, 7), 0, 32 * MIB),
    ("l4", lambda: rand(7, 3) @ rand(3, 7), 0, 8519680),
    ("h200", lambda: torch.addmm(rand(7), rand(7, 3), rand(3, 7)), 0, MIB),  # through cuBLASLt
    ("h200", lambda: train(torch.nn.Linear(3, 7).cuda(), rand(5, 3)), 0, 32 * MIB),
    ("h200", lambda: torch.dot(rand(7), rand(7)), 0, 32 * MIB),
], ids=["mm", "l4", "bias", "linear", "dot"])
def test_workspaces_pass_from_2_15_on(monkeypatch, device, program, kept, passing) -> None:
    monkeypatch.setattr(library, "TORCH", torch.torch_version.TorchVersion("2.15.0"))
    with simulating(find_device(device)), MetaTensorMode() as mode:
        program()
        peak = torch.cuda.max_memory_allocated()
        assert mode.space.allocator().allocated_bytes == kept
        assert passing <= peak < passing + 8192
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert library.keeps_workspaces()


@pytest.mark.parametrize(("version", "keeps", "majors"), [
    ("2.9.1", True, (9,)), ("2.11.0", True, (9,)), ("2.12.0+cu130", True, (9, 10, 12)), ("2.14.1", True, (9, 10, 12)),
    ("2.15.0.dev20261101", False, (9, 10, 11, 12)), ("2.15.0+cu130", False, (9, 10, 11, 12)),
    ("2.16.0", False, (9, 10, 11, 12))])
def test_rules_follow_the_version(monkeypatch, version, keeps, majors) -> None:
    monkeypatch.setattr(library, "TORCH", torch.torch_version.TorchVersion(version))
    assert (library.keeps_workspaces(), library._majors_of_32_mib()) == (keeps, majors)


def test_categories_add_up_to_the_peak() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7), torch.nn.Flatten(), torch.nn.Linear(64 * 18 * 18, 10))
    p = profile(model, args=(torch.rand(4, 3, 24, 24),), optimizer="adamw")
    assert p.peak_by_category["workspace"] >= 64 * MIB
    assert sum(p.peak_by_category.values()) == p.peak_allocated_bytes
    assert p.modules is not None and p.modules.activation_bytes is not None and p.modules.activation_bytes < MIB


def test_the_mask_of_dropout_is_allocated_before_the_result():
    with MetaTensorMode():
        x = torch.empty(24 << 18, device="cuda")  # 24 MiB, a segment of its own
        for _ in range(2):  # run, then from the cache
            y, mask = torch.native_dropout(x, 0.5, True)
            # 6 MiB begin a segment of 20; 24 get one of their own below it
            assert (mask.nbytes, y.nbytes, torch.cuda.memory_reserved()) == (6 << 20, 24 << 20, 68 << 20)
            assert y.data_ptr() < mask.data_ptr() < x.data_ptr()
            del y, mask
            torch.cuda.empty_cache()


def test_what_a_kernel_takes_before_its_outputs_lies_before_them():
    """Layer norm makes its input contiguous first: the copy gets the free block that the output would have got."""
    with MetaTensorMode():
        x = torch.empty(1024, 6144, device="cuda").t()  # 24 MiB
        weight = torch.empty(1024, device="cuda")
        cached = torch.empty(6144, 1024, device="cuda")
        place = cached.data_ptr()
        del cached
        for _ in range(2):
            y = torch.nn.functional.layer_norm(x, (1024,), weight)
            assert y.data_ptr() != place
            assert torch.cuda.memory_allocated() == 2 * (24 << 20) + 4096  # the copy is gone
            del y
            torch.cuda.empty_cache()
            cached = torch.empty(6144, 1024, device="cuda")
            place = cached.data_ptr()
            del cached


aten = torch.ops.aten


def of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32,
           stride: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec.of(shape, stride or torch.empty(shape, device="meta").stride(), dtype, "cuda:0")


def blocks(op: Any, args: tuple[Any, ...], *outputs: TensorSpec) -> tuple[int, ...]:
    flat = [t for a in args for t in (a if isinstance(a, list) else [a])]
    inputs = tuple(t for t in flat if isinstance(t, TensorSpec))
    return tuple(b for s in kernel_memory(Signature(op, args, {}, inputs, outputs))[0] for b in s.blocks)


# Buffers of reductions, against ``setReduceConfig`` of Reduce.cuh followed by hand.

def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return of(shape, dtype)


@pytest.mark.parametrize(("x", "dims", "expected"), [
    # 4 outputs a thread, blocks of 32x4: 392 values a thread, 24 blocks; ceil(392/16) = 25 blocks an output: 4*3072*25
    # * 32*4, 4*24
    (spec(1568, 3072), (0,), (39_321_600, 96)),
    # bfloat16 is summed in float32: 1024 values a thread, 24 blocks; min(ceil(2112/24), ceil(1024/16)) = 64
    (spec(4096, 3072, dtype=torch.bfloat16), (0,), (4 * 3072 * 64 * 128, 96)),
    (spec(32, 64, 7, 7), (2, 3), ()),  # 49 values an output
    # all of a vector of 2**20: vectors of 4, blocks of 512 threads: 2048 values a thread, one output; min(132*4,
    # 2048/16) = 128
    (spec(1 << 20), (), (4 * 128, 4)),
    (spec(8, 0), (1,), ()),
])
def test_blocks(x: TensorSpec, dims: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert reduction_blocks(x, dims, 4) == expected
    with simulating(dataclasses.replace(find_device("h200"), name="unknown", multiprocessors=None, aliases=())):
        assert reduction_blocks(x, dims, 4) == ()


# What kernels of PyTorch allocate inside one operator.

INT = torch.int64
TRANSPOSED = of((64, 32), stride=(1, 64))
GRID = of((64, 64), stride=(256, 2))


@pytest.mark.parametrize(("op", "args", "outputs", "expected"), [
    (aten._softmax.default, (of((64, 32)), -1, False), [of((64, 32))], ()),
    (aten._softmax.default, (TRANSPOSED, -1, False), [of((64, 32))], (8192,)),
    (aten._safe_softmax.default, (of((2, 8, 8)), -1), [of((2, 8, 8))], (128, 16, 4)),
    # the gradient times the output; that in order, and the output in order
    (aten._softmax_backward_data.default, (of((64, 32)), of((64, 32)), -1, torch.float32), [of((64, 32))], (8192,)),
    (aten._softmax_backward_data.default, (TRANSPOSED, TRANSPOSED, -1, torch.float32), [of((64, 32))],
     (8192, 8192, 8192)),
    (aten._log_softmax_backward_data.default, (of((64, 32)), of((64, 32)), -1, torch.float32), [of((64, 32))], ()),
    (aten.native_layer_norm.default, (TRANSPOSED, [32], None, None, 1e-5),
     [of((64, 32)), of((64, 1)), of((64, 1))], (8192,)),
    # up to 4096 elements in place; one row: indices, and both once more for radix sort; below 128 rows: (index, row)
    # twice, keys, radix sort; from then on: indices, radix sort
    (aten.sort.default, (of((8, 4096)),), [], ()),
    (aten.sort.default, (of((1, 5000)),), [], (40000, 60000)),
    (aten.sort.default, (of((8, 5000)),), [], (320000, 320000, 160000, 480000)),
    (aten.sort.default, (of((128, 5000), torch.int64),), [], (5120000, 10240000)),
    # copied there, and results back
    (aten.sort.default, (of((5000, 128)), 0), [], (2560000, 2560000, 5120000, 5120000, 7680000)),
    (aten.topk.default, (of((8, 5000)), 10), [of((8, 10)), of((8, 10), INT)], ()),
    # 20 rows of 20000 are shared by blocks of 1024 items: 20 each. Four arrays for rows, counts of 256 digits and two
    # sums for blocks
    (aten.topk.default, (of((20, 20000)), 10), [of((20, 10)), of((20, 10), INT)],
     (80, 80, 80, 80, 204800, 1600, 1600)),
    (aten.topk.default, (of((500, 2500)), 2000), [of((500, 2000)), of((500, 2000), INT)], ()),
    (aten.topk.default, (of((1, 9000)), 5000), [of((1, 5000)), of((1, 5000), INT)], (40000, 20000, 40000, 60000)),
    (aten.cumsum.default, (TRANSPOSED, 0), [of((64, 32))], (8192,)),
    (aten.nonzero.default, (TRANSPOSED,), [], (8192,)),
    # sorted keys and radix sort; with the inverse also where they were and come from, then a mask and its sums
    (aten._unique2.default, (of((1000,)),), [], (4000, 4000)),
    (aten._unique2.default, (of((1000,)), True, True), [], (4000, 8000, 8000, 12000, 4000, 8000, 8000, 8000, 8000)),
    (aten.unique_consecutive.default, (of((1000,)),), [], ()),
    # cuDNN: the query's gradient and a sum for each of its rows in float32
    (aten._scaled_dot_product_cudnn_attention_backward.default,
     tuple(of((2, 4, 8, 64), torch.bfloat16) for _ in range(4)), [],
     (2 * 4 * 8 * 65 * 4,)),
    (aten.mm.default, (TRANSPOSED, of((32, 8))), [of((64, 8))], ()),
    (aten.mm.default, (GRID, of((64, 8))), [of((64, 8))], (16384,)),
    (aten.bmm.default, (of((2, 4, 4), stride=(1, 8, 2)), of((2, 4, 4))), [of((2, 4, 4))], (128,)),
    # 4096 indices of 1000 rows: sorted, where from; a range and CUB's storage, as all 64 bits are sorted; the keys that
    # unique_by_key leaves; 409 + 1000 pieces of 8 floats, and arrays of indices beside two counters
    (aten.embedding_dense_backward.default, (of((8, 512, 8)), of((8, 512), INT), 1000, -1, False),
     [of((1000, 8))],
     (32768, 32768, 32768, 8 * 256 * 8 + 1 * 1024 + 2 * 32768 + 256 + 255, 32768, 8, 32768,
      32768, 8, 8000, 8000, 8, 8 * 1409, 1409 * 8 * 4)),
    # of int32 one block sorts 4864 pairs, and each of more takes 6528; how often each comes is told apart
    (aten.embedding_dense_backward.default, (of((8, 512, 8)), of((8, 512), torch.int32), 1000, -1, True),
     [of((1000, 8))], (16384, 16384, 16384, 1, 16384, 16384, 8, 16384,
                       16384, 8, 4000, 4000, 8, 4 * 1409, 1409 * 8 * 4)),
    (aten.embedding_dense_backward.default, (of((16, 512, 8)), of((16, 512), torch.int32), 1000, -1, False),
     [of((1000, 8))], (32768, 32768, 32768, 4 * 256 * 8 + 2 * 1024 + 2 * 32768 + 256 + 255, 32768, 8, 32768,
                       32768, 8, 4000, 4000, 8, 4 * 1819, 1819 * 8 * 4)),
    (aten.embedding_dense_backward.default, (of((4, 512, 8)), of((4, 512), INT), 1000, -1, False),
     [of((1000, 8))], ()),
    # bags sort any number of indices, unless they take the largest
    (aten._embedding_bag_dense_backward.default,
     (of((4, 8)), of((512,), INT), of((512,), INT), of((4,), INT), of((0,), INT), 1000, False, 0, None),
     [of((1000, 8))], (4096, 4096, 4096, 1, 4096, 8, 4096, 4096, 8, 4096, 4096, 8, 8 * 563, 563 * 8 * 4)),
    (aten._embedding_bag_backward.default,
     (of((4, 8)), of((512,), INT), of((4,), INT), of((512,), INT), of((4,), INT), of((0,), INT), 1000, True, 1, False,
      None), [of((1000, 8))],
     (4096, 4096, 4096, 1, 4096, 4096, 8, 4096, 4096, 8, 4096, 4096, 8, 8 * 563, 563 * 8 * 4)),
    (aten._embedding_bag_backward.default,
     (of((4, 8)), of((512,), INT), of((4,), INT), of((512,), INT), of((4,), INT), of((4, 8), INT), 1000, False, 2,
      False, None), [of((1000, 8))], ()),
    # 100352 rows of 96: 3136 blocks of 32 rows for each of the two gradients, then their sum
    (aten.native_layer_norm_backward.default,
     (of((100352, 96)), of((100352, 96)), [96], of((100352, 1)), of((100352, 1)), None, None, [True] * 3),
     [of((100352, 96)), of((96,)), of((96,))], (3136 * 96 * 4, 3136 * 96 * 4)),
    (aten.index_put.default, (of((100, 4)), [of((10,), INT)], of((10, 4)), True), [of((100, 4))],
     (80, 80, 80, 80, 1)),
    # 90,000 sums of pairs over 20 blocks and a second digit of the row; one digit is enough for 256 rows
    (aten.index_put.default, (of((1000, 4)), [of((90000,), INT)], of((90000, 4)), True), [of((1000, 4))],
     (720000, 720000, 720000, 720000, 2 * 256 * 8 + 20 * 1024 + 2 * 720128 + 256 + 255)),  # parts of 256 bytes
    (aten.index_put.default, (of((256, 4)), [of((90000,), INT)], of((90000, 4)), True), [of((256, 4))],
     (720000, 720000, 720000, 720000, 256 * 8 + 20 * 1024 + 256 + 255)),
    # rows of the last dimension by pairs of the first two; indices apart are moved to the front
    (aten.index_put.default, (of((100, 4, 8)), [of((9000,), INT), of((9000,), INT)], of((9000, 8)), True),
     [of((100, 4, 8))], (72000, 72000, 72000, 72000, 2 * 256 * 8 + 2 * 1024 + 2 * 72192 + 256 + 255)),
    # a factor and a summand for each channel, in float32; then sums, two factors for each group and one for a channel
    (aten.native_group_norm.default, (of((2, 8, 16)), of((8,)), of((8,)), 2, 8, 16, 4, 1e-5), [], (64, 64)),
    (aten.native_group_norm.default, (of((2, 8, 16)), None, None, 2, 8, 16, 4, 1e-5), [], ()),
    (aten.native_group_norm_backward.default, (*[of((2, 8, 16))] * 2, of((2, 4)), of((2, 4)), of((8,)), 2, 8, 16, 4,
                                               [True, True, True]), [], (64, 64, 32, 32, 64)),
    (aten.native_group_norm_backward.default, (*[of((2, 8, 16), torch.bfloat16)] * 2, *[of((2, 4), torch.bfloat16)] * 2,
                                               None, 2, 8, 16, 4, [True, False, False]), [], (64, 64, 32, 32)),
    (aten.native_group_norm_backward.default, (*[of((2, 8))] * 2, of((2, 4)), of((2, 4)), of((8,)), 2, 8, 1, 4,
                                               [True, True, True]), [], (32, 32)),
    (aten.native_group_norm_backward.default, (*[of((2, 8, 16))] * 2, of((2, 4)), of((2, 4)), of((8,)), 2, 8, 16, 4,
                                               [False, True, True]), [], (64, 64)),
    (aten.index_put.default, (of((100, 4)), [of((10,), INT)], of((10, 4)), False), [of((100, 4))], ()),
    (aten._foreach_norm.Scalar, ([of((65537,)), of((3,))], 2), [of(()), of(())], (2 * 2 * 4,)),
])
def test_blocks_of_kernels(op: Any, args: tuple[Any, ...], outputs: Any, expected: tuple[int, ...]) -> None:
    found = blocks(op, args, *outputs)
    assert found[:len(expected)] == expected if op is aten.native_layer_norm_backward.default else found == expected


def test_rules_are_asked_for_the_claimed_device() -> None:
    """Also of a call that was seen before: blocks share a row where it is known how many there are."""
    x, outputs = of((20, 20000)), (of((20, 10)), of((20, 10), INT))
    call = Signature(aten.topk.default, (x, 10), {}, (x,), outputs)
    assert kernel_memory(call)[0]
    with simulating(dataclasses.replace(find_device("h200"), name="unknown", multiprocessors=None, aliases=())):
        assert not kernel_memory(call)[0]


def test_nothing_on_the_host() -> None:
    x = TensorSpec.of((64, 32), (1, 64), torch.float32, "cpu")
    assert blocks(aten._softmax.default, (x, -1, False), TensorSpec.of((64, 32), (32, 1), torch.float32, "cpu")) == ()
