"""Nested tensors in the jagged layout, without data and on a device that is not there."""
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as watch

from analyzer import MetaTensorMode, profile, symbolic_trace
from analyzer.errors import UnsupportedOperatorError
from tests.call import Call

LENGTHS, WIDTH, HEADS = (3, 7), 16, 2
ROWS = sum(LENGTHS)


def nest(x):
    return torch.nested.nested_tensor_from_jagged(x, offsets=torch.tensor([0, LENGTHS[0], ROWS], device=x.device))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(nest(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2).values()


def test_it_claims_the_device_of_its_values():
    with MetaTensorMode():
        nested = nest(torch.rand(ROWS, WIDTH, device="cuda"))
        assert str(nested.device) == "cuda:0" and nested.is_nested and nested.layout is torch.jagged
        assert [t.shape[0] for t in nested.unbind()] == list(LENGTHS)
        # torch's bound, where nobody asked for the longest
        assert torch.nested.to_padded_tensor(nested, 0.0).shape == (2, ROWS, WIDTH)


@pytest.mark.parametrize(("dtype", "kernel"),
                         [(torch.float16, "_flash_attention_forward"), (torch.float32, "_efficient_attention_forward")])
def test_attention_takes_the_kernel_of_the_claimed_device(dtype, kernel, make_recorder):
    with MetaTensorMode() as mode, torch.no_grad():
        model, x = Attention().to("cuda", dtype), torch.rand(ROWS, WIDTH, device="cuda", dtype=dtype)
        mode.state.recorder = make_recorder()
        assert model(x).shape == (ROWS, WIDTH)
        assert len(mode.state.recorder.find(kernel)) == 1


LAYERS = 3 * ROWS * WIDTH * WIDTH
PAIRS = sum(length ** 2 for length in LENGTHS)  # each sequence attends to itself alone


def test_training_counts_layers_and_attention():
    p = profile(Attention(), args=(torch.rand(ROWS, WIDTH),), mode="train", device="h100")
    # the input needs no gradient; backward makes the scores again, then four gradients
    assert (p.fwd_macs, p.bwd_macs) == (LAYERS + 2 * PAIRS * WIDTH, LAYERS + 5 * PAIRS * WIDTH)
    assert not p.uncounted


def test_a_nested_tensor_is_an_input():
    class Given(Attention):
        def forward(self, x):
            return super().forward(x.values())

    p = profile(Given(), args=(nest(torch.rand(ROWS, WIDTH)),), mode="infer", device="h100")
    assert (p.fwd_macs, p.uncounted) == (LAYERS + 2 * PAIRS * WIDTH, ())
    assert p.peak_by_category["input"] >= ROWS * WIDTH * 4


@pytest.mark.parametrize(("window", "pairs"), [((-1, -1), PAIRS), ((-1, 0), 6 + 28), ((1, 0), 5 + 13)])
def test_sequences_of_varlen_attention_attend_to_themselves(window, pairs):
    varlen = pytest.importorskip("torch.nn.attention.varlen")  # torch 2.10

    def attend(m, x, starts):
        return varlen.varlen_attn(x, x, x, starts, starts, max(LENGTHS), max(LENGTHS), window_size=window)

    x, starts = torch.rand(ROWS, HEADS, 8).bfloat16(), torch.tensor([0, LENGTHS[0], ROWS], dtype=torch.int32)
    p = profile(Call(attend), args=(x, starts), mode="infer", device="h100")
    assert (p.fwd_macs, p.uncounted) == (2 * PAIRS * HEADS * 8, ())
    assert p.executed_flops == 2 * 2 * pairs * HEADS * 8


def test_the_gradient_of_padding_has_a_shape():
    model = Call(lambda m, x: torch.nested.to_padded_tensor(nest(m.linear(x)), 0.0), linear=nn.Linear(WIDTH, WIDTH))
    x = torch.rand(ROWS, WIDTH)
    assert profile(model, args=(x,), mode="train").bwd_macs == ROWS * WIDTH * WIDTH
    graph = symbolic_trace(model, meta_args={"args": (x,)})
    torch.testing.assert_close(graph(x), model(x))


class Host(Attention):
    """Sequences that are padded to the longest for each product, as the host's kernels do."""

    def forward(self, *rows):
        x = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_attention_on_the_host_is_that_of_pytorch(mode):
    model, rows = Host(), [torch.rand(length, WIDTH) for length in (50, 150)]

    def run():
        with torch.set_grad_enabled(mode == "train"):
            out = model(*rows)
            if mode == "train":
                out.sum().backward()

    run()
    model.zero_grad()
    with watch(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    changes = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    right = sum(t.nbytes for t in (*model.parameters(), *rows)) + max(itertools.accumulate(changes))
    found = profile(model, tuple(rows), mode=mode, device="cpu")
    layers, products = 3 * 200 * WIDTH * WIDTH, 2 * 2 * 150 * 150 * WIDTH  # both of two sequences of 150
    assert (found.fwd_macs, found.bwd_macs) == (layers + products, (layers + 2 * products) * (mode == "train"))
    assert found.peak_allocated_bytes == pytest.approx(right, rel=0.02)


def test_the_strided_layout_is_refused_with_the_way_out():
    with MetaTensorMode(), pytest.raises(UnsupportedOperatorError, match=rf"(?s){__file__}.*layout=torch.jagged"):
        torch.nested.nested_tensor([torch.rand(3, 4), torch.rand(7, 4)])
