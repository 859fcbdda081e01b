"""Equal, to the integer, to torch.utils.flop_counter on the operators that it counts correctly."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from analyzer.profilers.flop_registry import count_call

from .conftest import SignatureLog

aten = torch.ops.aten
size = st.integers(1, 7)


def compare(f):
    """Run f under both counters; compare operator by operator. Returns the total."""
    with FlopCounterMode(display=False) as reference, SignatureLog() as log:
        f()
    ours = {}
    for signature in log.signatures:
        if signature.op.overloadpacket in flop_registry:
            packet = signature.op.overloadpacket
            ours[packet] = ours.get(packet, 0) + count_call(signature).flops
    assert ours == reference.get_flop_counts().get("Global", {})
    return sum(ours.values())


def meta(*shape, dtype=torch.float32, requires_grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


@settings(max_examples=25)
@given(size, size, size, size)
def test_matrix_products(b, m, k, n):
    def products():
        aten.mm(meta(m, k), meta(k, n))
        aten.addmm(meta(n), meta(m, k), meta(k, n))
        aten.bmm(meta(b, m, k), meta(b, k, n))
        aten.baddbmm(meta(b, m, n), meta(b, m, k), meta(b, k, n))

    assert compare(products) == 4 * m * k * n * (1 + b)


@settings(max_examples=25)
@given(dims=st.integers(1, 3), n=st.integers(1, 3), c_in=size, c_out=size, kernel=st.integers(1, 3),
       stride=st.integers(1, 2), padding=st.integers(0, 2), dilation=st.integers(1, 2), transposed=st.booleans(),
       mask=st.tuples(st.booleans(), st.booleans()))
def test_convolutions(dims, n, c_in, c_out, kernel, stride, padding, dilation, transposed, mask):
    x = meta(n, c_in, *[8] * dims, requires_grad=mask[0])
    weight = meta(*((c_in, c_out) if transposed else (c_out, c_in)), *[kernel] * dims, requires_grad=mask[1])
    bias = meta(c_out)

    def run():
        out = aten.convolution(x, weight, bias, [stride] * dims, [padding] * dims, [dilation] * dims, transposed,
                               [0] * dims, 1)
        if out.requires_grad:
            out.sum().backward()

    try:
        compare(run)
    except RuntimeError as error:  # a kernel larger than its padded input
        assert "size" in str(error)


SDPA = {
    "flash": lambda q, k, v, causal: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0],
    "efficient": lambda q, k, v, causal: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)[
        0],
    "cudnn": lambda q, k, v, causal: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[0],
}


@pytest.mark.parametrize("kernel", SDPA)
@settings(max_examples=25)
@given(b=st.integers(1, 3), h=st.integers(1, 3), s_q=st.integers(1, 40), s_k=st.integers(1, 40), d=st.integers(1, 4),
       d_v=st.integers(1, 4), causal=st.booleans())
def test_attention_kernels(kernel, b, h, s_q, s_k, d, d_v, causal):
    if kernel == "flash":  # its forward on meta tensors takes one head dimension
        d_v = d
    q, k, v = (meta(b, h, s, 8 * dim, dtype=torch.float16, requires_grad=True)
               for s, dim in ((s_q, d), (s_k, d), (s_k, d_v)))
    total = compare(lambda: SDPA[kernel](q, k, v, causal).sum().backward())
    assert total == 2 * b * h * s_q * s_k * 8 * (d + d_v + 3 * d + 2 * d_v)
