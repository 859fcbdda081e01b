"""Operators that `torch.library.custom_op` made of Python functions: what they do inside is seen, where it can run."""
import pytest
import torch
from torch import Tensor, nn

from analyzer import MetaTensorMode, profile, register_flop_impl

ROWS, WIDE, WIDTH = 64, 512, 256
WORKSPACE = 32 * 2**20  # of cuBLAS on Hopper: aten/src/ATen/cuda/CublasHandlePool.cpp


def define(name: str, function):
    op = torch.library.custom_op(f"custom_operator::{name}", function, mutates_args=())
    op.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[0]))
    op.register_autograd(lambda ctx, g: (g @ ctx.saved_tensors[1], g.T @ ctx.saved_tensors[0]),
                         setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


def compiled_product(x: Tensor, w: Tensor) -> Tensor:
    @torch.compile
    def inside(x, w):
        return x @ w.T

    return inside(x, w)


def product_on_host(x: Tensor, w: Tensor) -> Tensor:
    return torch.from_numpy(x.cpu().numpy() @ w.cpu().numpy().T).to(x.device)


PRODUCT, COMPILED, ON_HOST, KNOWN = (define(name, function) for name, function in (
    ("product", product), ("compiled", compiled_product), ("on_host", product_on_host), ("known", product)))
register_flop_impl(KNOWN, lambda x, w, out: 7)


class Applied(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op, self.weight = op, nn.Parameter(torch.empty(WIDE, WIDTH))

    def forward(self, x):
        return self.op(x, self.weight)


def measure(op, compiles: bool):
    model = Applied(op)
    return profile(torch.compile(model) if compiles else model, args=(torch.empty(ROWS, WIDTH),), device="h100",
                   mode="infer")


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("op", [PRODUCT, COMPILED])
def test_what_a_function_of_operators_does_is_seen(op, compiles):
    p = measure(op, compiles)
    assert not p.uncounted and p.fwd_flops == 2 * ROWS * WIDE * WIDTH
    assert p.peak_allocated_bytes > WORKSPACE


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(("op", "flops"), [(ON_HOST, 0), (KNOWN, 7)])
def test_one_that_needs_data_or_is_described_stays_whole(op, flops, compiles):
    p = measure(op, compiles)
    assert [row.operator for row in p.uncounted] == ["custom_operator.on_host.default"] * (op is ON_HOST)
    assert p.fwd_flops == flops and p.peak_allocated_bytes < WORKSPACE


def test_trying_leaves_nothing_behind():
    with MetaTensorMode() as mode:
        x, w = torch.empty(ROWS, WIDTH, device="cuda"), torch.empty(WIDE, WIDTH, device="cuda")
        assert ON_HOST(x, w).shape == (ROWS, WIDE)
        assert torch.cuda.max_memory_allocated() == 4 * (ROWS * WIDTH + WIDE * WIDTH + ROWS * WIDE)
        assert not mode.state.assumptions
