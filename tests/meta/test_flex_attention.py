"""``flex_attention`` without data: what it computes uncompiled, forward and backward."""
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from analyzer import profile, symbolic_trace

B, H, S, D = 2, 2, 128, 8
PRODUCT = B * H * S * S * D  # multiply-adds of one product of queries with keys

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


class Attention(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.linear, self.masked, self.bias = nn.Linear(H * D, H * D), masked, 0.1

    def forward(self, x):
        q = self.linear(x).unflatten(-1, (H, D)).transpose(1, 2)
        if self.masked:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=str(x.device))
            return flex_attention(q, q, q, block_mask=mask)
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 2 + (i - j) * self.bias)


@pytest.mark.parametrize("masked", [False, True])
def test_products_are_counted_forward_and_backward(masked):
    x, linear = torch.rand(B, S, H * D), B * S * (H * D) ** 2
    inference = profile(Attention(masked), args=(x,), mode="infer")
    assert inference.fwd_macs == linear + 2 * PRODUCT and not inference.uncounted
    training = profile(Attention(masked), args=(x,), mode="train")
    # sdpa_dense_backward: the scores again, then one product each for dV, dP, dQ and dK; the linear layer's weight
    assert (training.fwd_macs, training.bwd_macs) == (linear + 2 * PRODUCT, linear + 5 * PRODUCT)
    assert any("the whole matrix of scores" in a for a in training.assumptions)
    assert training.fwd_flops > inference.fwd_flops  # by the sum that is the loss


def test_what_is_saved_is_not_the_matrix_of_scores():
    p = profile(Attention(False), args=(torch.rand(B, S, H * D),), mode="train")
    one = B * S * H * D * 4
    statistics = 2 * B * H * S * 4  # logarithm of the sum, and the maximum
    blocks = p.nodes[-1].accumulate_bytes - 3 * one - statistics  # besides input, projection and output
    assert 0 < blocks < 100


@pytest.mark.parametrize("masked", [False, True])
def test_a_trace_holds_it_as_one_node_and_gives_its_results(masked):
    model, x = Attention(masked), torch.rand(B, S, H * D)
    graph = symbolic_trace(model, meta_args={"x": x})
    assert [n.target for n in graph.graph.nodes].count(flex_attention) == 1
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x))


def test_a_compiled_one_is_the_operator_itself():
    compiled = torch.compile(flex_attention)

    class Compiled(Attention):
        def forward(self, x):
            q = self.linear(x).unflatten(-1, (H, D)).transpose(1, 2)
            return compiled(q, q, q)

    model, x = Compiled(False), torch.rand(B, S, H * D)
    with torch.no_grad():
        graph = symbolic_trace(model, meta_args={"x": x})
        q = model.linear(x).unflatten(-1, (H, D)).transpose(1, 2)
        torch.testing.assert_close(graph(x), flex_attention(q, q, q))
