"""From an operator call to the product that it runs."""
from typing import Any

import pytest
import torch

from analyzer.hardware import find_device
from analyzer.hardware.kernel_time.matmul import matmul_time
from analyzer.meta.spec import Signature, TensorSpec
from analyzer.profilers.kernel_time import find_rule
from analyzer.profilers.operator.matmul import row_elements

H200 = find_device("h200")
aten = torch.ops.aten


def spec(*shape: int, dtype: torch.dtype = torch.float32, stride: "tuple[int, ...] | None" = None) -> TensorSpec:
    if stride is None:
        stride = tuple(torch.empty(shape, device="meta").stride())
    return TensorSpec.of(shape, stride, dtype, "cuda:0")


def time_of(op: Any, out: TensorSpec, *args: Any, **kwargs: Any) -> Any:
    inputs = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, TensorSpec))
    rule = find_rule(op)
    assert rule is not None
    return rule(Signature(op, args, kwargs, inputs, (out,)), H200)


HALF = torch.bfloat16
CASES = [
    (aten.mm.default, (64, 256), [(64, 128), (128, 256)], (1, 64, 256, 128)),
    (aten.bmm.default, (6, 64, 256), [(6, 64, 128), (6, 128, 256)], (6, 64, 256, 128)),
    (aten.addmm.default, (64, 256), [(256,), (64, 128), (128, 256)], (1, 64, 256, 128)),
    (aten.linear.default, (3, 64, 256), [(3, 64, 128), (256, 128)], (1, 192, 256, 128)),
    (aten.matmul.default, (3, 64, 256), [(3, 64, 128), (128, 256)], (1, 192, 256, 128)),
    (aten.matmul.default, (3, 64, 256), [(3, 64, 128), (3, 128, 256)], (3, 64, 256, 128)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op,out,args,product", CASES)
def test_sizes(op: Any, out: Any, args: Any, product: Any, dtype: torch.dtype) -> None:
    time = time_of(op, spec(*out, dtype=dtype), *(spec(*shape, dtype=dtype) for shape in args))
    dtype_name = str(dtype).removeprefix("torch.")
    assert time == matmul_time(*product, dtype_name, H200, has_weights=product[0] == 1)  # a batch has no parameters


def test_an_added_matrix_is_copied_first() -> None:
    a, b, added = spec(4, 64, 128), spec(4, 128, 256), spec(4, 64, 256)
    plain = time_of(aten.bmm.default, added, a, b)
    assert time_of(aten.baddbmm.default, added, added, a, b).kernels == plain.kernels + 1
    assert time_of(aten.baddbmm.default, added, added, a, b, beta=0) == plain
    assert time_of(aten.baddbmm_.default, added, added, a, b) == plain


@pytest.mark.parametrize("shape,stride,expected", [
    ((64, 128), (128, 1), 128), ((64, 128), (1, 64), 64), ((3, 64, 50), (3200, 50, 1), 50), ((64, 50), (200, 1), 200),
    ((1, 50), (50, 1), 0), ((7,), (1,), 0)])
def test_row_elements(shape: Any, stride: Any, expected: int) -> None:
    assert row_elements(spec(*shape, stride=stride)) == expected


def test_complex_numbers_take_the_time_of_their_parts() -> None:
    a = spec(512, 512, dtype=torch.complex64)
    assert time_of(aten.mm.default, a, a, a) == matmul_time(1, 512, 1024, 1024, "float32", H200)


def test_groups_share_the_rows() -> None:
    a, b = spec(1024, 512, dtype=HALF), spec(8, 512, 256, dtype=HALF)
    time = time_of(aten._grouped_mm.default, spec(1024, 256, dtype=HALF), a, b, spec(8, dtype=torch.int32))
    assert time == matmul_time(8, 128, 256, 512, "bfloat16", H200)


def test_a_weight_of_fewer_bits_is_read_sooner() -> None:
    x, out = spec(1, 8192, dtype=HALF), spec(1, 8192, dtype=HALF)
    whole = time_of(aten.mm.default, out, x, spec(8192, 8192, dtype=HALF))
    eighth = time_of(aten._weight_int8pack_mm.default, out, x, spec(8192, 8192, dtype=torch.int8),
                     spec(8192, dtype=HALF))
    assert 0.4 < eighth.seconds / whole.seconds < 0.75 and eighth.spread >= 0.5


def test_gradients_of_a_linear_layer_are_those_asked_for() -> None:
    x, grad, weight = spec(64, 128), spec(64, 256), spec(256, 128)
    only = [time_of(aten.linear_backward.default, x, x, grad, weight, mask)
            for mask in ([True, False, False], [False, True, False], [True, True, False])]
    assert only[2].seconds == pytest.approx(only[0].seconds + only[1].seconds)


def test_recurrent_layers_step_through_time() -> None:
    weights = [spec(2048, 512), spec(2048, 512), spec(2048), spec(2048)]

    def lstm(steps: int, both_ways: bool = False, packed: bool = False) -> float:
        x, h = spec(steps * 32, 512) if packed else spec(steps, 32, 512), spec(1 + both_ways, 32, 512)
        args = (x, weights * (1 + both_ways), 4, None, h, h, 2, 512, 0, 1, False, 0.0, True, both_ways,
                [32] * steps if packed else [], None)
        return time_of(aten._cudnn_rnn.default, x, *args).seconds  # type: ignore[no-any-return]

    assert 1.7 < lstm(400) / lstm(200) < 2.1
    assert lstm(200, both_ways=True) == pytest.approx(2 * lstm(200))
    assert lstm(200, packed=True) == lstm(200)
