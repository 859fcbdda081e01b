"""Layouts and dtypes of what operators return, on a simulated CPU as its own kernels give them."""
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from analyzer import MetaTensorMode

aten = torch.ops.aten
BF16 = torch.bfloat16
STRIDED: dict[str, Callable[[torch.dtype], Tensor]] = {
    "transposed": lambda dtype: torch.ones(4, 8, 6, dtype=dtype).mT,
    "with gaps": lambda dtype: torch.ones(4, 6, 16, dtype=dtype)[..., ::2],
    "channels last": lambda dtype: torch.ones(4, 6, 8, 8, dtype=dtype).to(memory_format=torch.channels_last),
    "batch second": lambda dtype: torch.ones(6, 4, 8, dtype=dtype).transpose(0, 1),
}


def loss_gradient(name: str, *options: Any) -> Callable[..., Any]:
    return lambda x, w: getattr(aten, name)(torch.ones((), dtype=x.dtype), x, x, 1, *options)


def batch_norm_gradients(*mask: bool) -> Callable[..., Any]:
    def run(x: Tensor, w: Tensor) -> Any:
        moments = torch.ones(6, dtype=w.dtype)
        return aten.native_batch_norm_backward(x.contiguous(), x, w, w, w, moments, moments, True, 1e-5, list(mask))
    return run


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "batch norm": lambda x, w: aten.native_batch_norm(x, w, w, w, w, True, 0.1, 1e-5),
    "batch norm, evaluation": lambda x, w: aten.native_batch_norm(x, w, w, w, w, False, 0.1, 1e-5),
    "batch norm without statistics": lambda x, w: aten._native_batch_norm_legit.no_stats(x, w, w, True, 0.1, 1e-5),
    "gradients of batch norm": batch_norm_gradients(True, True, True),
    "gradients of batch norm of an input without one": batch_norm_gradients(False, True, True),
    "group norm": lambda x, w: aten.native_group_norm(x.contiguous(), w, w, 4, 6, x.numel() // 24, 2, 1e-5),
    "layer norm": lambda x, w: F.layer_norm(x, x.shape[-1:]),
    "moments of a layer": lambda x, w: aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5),
    "gradient of mse_loss": loss_gradient("mse_loss_backward"),
    "gradient of huber_loss": loss_gradient("huber_loss_backward", 1.0),
    "mse_loss of each element": lambda x, w: F.mse_loss(x, x, reduction="none"),
    "gradient of glu": lambda x, w: aten.glu_backward(F.glu(x, -1), x, -1),
    "log_sigmoid": lambda x, w: aten.log_sigmoid_forward(x),
    "roll": lambda x, w: (x.roll(1, 1), x.roll(-1, -1), x.roll((1, 1), (0, 1)), x.roll(3)),
    "an expanded tensor first": lambda x, w: (torch.ones((), dtype=x.dtype).expand(x.shape) * x,
                                              torch.ones(x.shape[-1], dtype=x.dtype).expand(x.shape) + x.float()),
    "an expanded gradient of silu": lambda x, w: aten.silu_backward(torch.ones((), dtype=x.dtype).expand(x.shape), x),
    "an expanded gradient": lambda x, w: aten.threshold_backward(torch.ones((), dtype=x.dtype).expand(x.shape), x, 0),
}


def list_layouts(case: Callable[[Tensor, Tensor], Any], make: Callable[[torch.dtype], Tensor], dtype: torch.dtype,
                 weight_dtype: torch.dtype) -> list[Any]:
    results = case(make(dtype), torch.ones(6, dtype=weight_dtype))
    return [None if t is None else (tuple(t.shape), t.stride() if t.numel() else (), t.dtype)
            for t in (results if isinstance(results, (list, tuple)) else (results,))]


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_those_of_the_kernels(name: str) -> None:
    tried = 0
    for order, make in STRIDED.items():
        for dtypes in ((torch.float32, torch.float32), (BF16, BF16), (BF16, torch.float32)):
            try:
                real = list_layouts(CASES[name], make, *dtypes)
            except RuntimeError:  # no kernel takes these together
                continue
            with MetaTensorMode():
                assert list_layouts(CASES[name], make, *dtypes) == real, (order, dtypes)
            tried += 1
    assert tried >= 8


GRADIENTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "elu": lambda g, x: aten.elu_backward(g, 1, 1, 1, False, x),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, 0, 6),
    "logit": lambda g, x: aten.logit_backward(g, x, 0.1),
    "leaky_relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "rrelu": lambda g, x: aten.rrelu_with_noise_backward(g, x, torch.ones(4, 6, 8, dtype=x.dtype), 0, 1, True, False),
    "rrelu, evaluation": lambda g, x: aten.rrelu_with_noise_backward(g, x, x, 0, 1, False, False),
    "rrelu itself": lambda g, x: aten.rrelu_with_noise(x, torch.ones(4, 6, 8, dtype=x.dtype), 0, 1, True),
    "prelu": lambda g, x: aten._prelu_kernel_backward(g, x, torch.ones(6, 1, dtype=x.dtype)),
    "logsigmoid": lambda g, x: aten.log_sigmoid_backward(g, x, torch.ones(4, 6, 8, dtype=x.dtype)),
    "dropout": lambda g, x: aten.native_dropout_backward(g, x > 0, 2),
    "index_fill": lambda g, x: x.index_fill(1, torch.zeros(1, dtype=torch.long), 2),
}
ORDERED: tuple[Callable[[torch.dtype], Tensor], ...] = (
    lambda dtype: torch.ones(4, 6, 8, dtype=dtype), lambda dtype: torch.ones(4, 8, 6, dtype=dtype).mT,
    lambda dtype: torch.ones((), dtype=dtype).expand(4, 6, 8), lambda dtype: torch.ones(8, dtype=dtype).expand(4, 6, 8),
    lambda dtype: torch.ones(4, 13, dtype=dtype).unfold(1, 6, 1).mT,  # elements that lie one over another
)


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_is_ordered_by_the_operand_that_the_kernel_names_first(name: str) -> None:
    def find(dtype: torch.dtype) -> list[Any]:
        found = [GRADIENTS[name](gradient(dtype), x(dtype)) for gradient in ORDERED for x in ORDERED]
        return [[one.stride() for one in (r if isinstance(r, tuple) else (r,))] for r in found]

    for dtype in (torch.float32, BF16):
        real = find(dtype)
        with MetaTensorMode():
            assert find(dtype) == real


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_convolution_and_its_gradients_lie_as_in_the_kernels(dimensions: int) -> None:
    def arrange(*sizes: int, dtype: torch.dtype, is_last: bool) -> Tensor:
        t = torch.ones(sizes, dtype=dtype)
        return t.movedim(1, -1).contiguous().movedim(-1, 1) if is_last else t

    def find(dtype: torch.dtype, images: bool, weights: bool, window: int, batch: int) -> list[Any]:
        x = arrange(batch, 4, *[5] * dimensions, dtype=dtype, is_last=images)
        w = arrange(2, 4, *[window] * dimensions, dtype=dtype, is_last=weights)
        settings = [1] * dimensions, [0] * dimensions, [1] * dimensions, False, [0] * dimensions, 1
        out = aten.convolution(x, w, None, *settings)
        found = aten.convolution_backward(out, x, w, [2], *settings, [True] * 3)
        return [[step for size, step in zip(t.shape, t.stride()) if size > 1] for t in (out, *found)]

    cases = list(itertools.product((torch.float32, torch.float64), (False, True), (False, True), (1, 2), (1, 2)))
    real = [find(*case) for case in cases]
    with MetaTensorMode():
        assert [find(*case) for case in cases] == real


def test_a_layer_norm_of_a_transposed_matrix_has_contiguous_gradients_on_cuda() -> None:
    with MetaTensorMode():
        x = torch.ones(8, 4, device="cuda").mT
        moments = torch.ones(4, 1, device="cuda")
        found = aten.native_layer_norm_backward(x, x, [8], moments, moments, None, None, [True, False, False])
    assert found[0].stride() == (8, 1)


def test_a_half_precision_product_with_an_expanded_gradient_keeps_the_order_on_cuda() -> None:
    with MetaTensorMode():
        x = torch.ones(8, 4, device="cuda", dtype=BF16).mT
        gradient = torch.ones((), device="cuda", dtype=BF16).expand(4, 8)
        assert (gradient * x).stride() == x.stride() == (1, 4)


def test_losses_of_two_dtypes_fail_in_the_backward_pass_as_on_a_device() -> None:
    def train(x: Tensor) -> None:
        F.huber_loss(x.to(BF16).requires_grad_(), torch.ones(4)).backward()

    with pytest.raises(RuntimeError, match="dtype"):
        train(torch.ones(4))
    with MetaTensorMode(), pytest.raises(RuntimeError, match="expected its tensors to have the same dtype"):
        train(torch.ones(4))


def test_a_recurrent_layer_gives_no_view_on_the_host() -> None:
    def run() -> bool:
        return torch.nn.GRU(4, 2, batch_first=True)(torch.ones(3, 5, 4))[0]._is_view()

    real = run()
    with MetaTensorMode():
        assert run() is real is False


def test_bags_of_embeddings_on_the_host_keep_what_the_kernel_makes() -> None:
    def run() -> list[tuple[tuple[int, ...], int]]:
        out = aten._embedding_bag(torch.ones(8, 4), torch.zeros(6, dtype=torch.long), torch.tensor([0, 3]), False, 1)
        return [(tuple(t.shape), t.untyped_storage().nbytes()) for t in out]

    real = run()
    with MetaTensorMode():
        assert run() == real
