"""Compiled ``flex_attention``: one kernel a pass, which holds no matrix of scores. Sizes are derived by hand."""
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from analyzer import profile

HEADS, KEY_HEADS, TOKENS, WIDTH, BLOCK = 4, 2, 512, 64, 128
QUERY, KEY = HEADS * TOKENS * WIDTH * 4, KEY_HEADS * TOKENS * WIDTH * 4
STATISTICS = HEADS * TOKENS * 4
TILES = TOKENS // BLOCK


class Attention(nn.Module):
    def __init__(self, mask_mod):
        super().__init__()
        self.query = nn.Parameter(torch.rand(1, HEADS, TOKENS, WIDTH))
        self.key, self.value = (nn.Parameter(torch.rand(1, KEY_HEADS, TOKENS, WIDTH)) for _ in range(2))
        self.mask_mod, self.attend = mask_mod, [torch.compile(flex_attention)]

    def forward(self, x):
        mask = None if self.mask_mod is None else create_block_mask(
            self.mask_mod, None, None, TOKENS, TOKENS, device=str(x.device))
        return 2.0 * self.attend[0](self.query, self.key, self.value, lambda score, b, h, i, j: score + (i - j) * 0.1,
                                    mask, enable_gqa=True)


def run(mask_mod):
    return profile(Attention(mask_mod), args=(torch.rand(1),), device="h100")


def is_near(b, h, i, j):
    return (i >= j) & (i - j < BLOCK)


def is_causal(b, h, i, j):
    return i >= j


def test_what_is_saved():
    p = run(is_causal)
    assert p.compiled[0].saved_bytes == QUERY + STATISTICS  # the output, and the logarithms of the sums
    assert p.compiled[0].graphs == 1 and not p.compiled[0].breaks and not p.uncounted


def test_what_a_step_holds():
    p = run(None)
    parameters = QUERY + 2 * KEY
    # in the backward kernel: gradients of all parameters and the output, the sums' logarithms, and a sum for each row
    expected = 2 * parameters + QUERY + 2 * STATISTICS
    assert 0 <= p.peak_allocated_bytes - expected < 16 * 512
    assert not any("matrix of scores" in a for a in p.assumptions)


@pytest.mark.parametrize(("mask_mod", "tiles"), [(None, TILES ** 2), (is_causal, 4 + 3 + 2 + 1), (is_near, 4 + 3)])
def test_flops_are_of_the_blocks_that_are_seen(mask_mod, tiles):
    p = run(mask_mod)
    forward, backward = 2 * 2 * WIDTH, 5 * 2 * WIDTH  # of a pair of a query and a key
    pairs = HEADS * TOKENS ** 2
    assert p.hardware_flops - p.executed_flops == (forward + backward) * pairs * (TILES ** 2 - tiles) // TILES ** 2
    found = {o.operator: o for o in p.operators if "flex_attention" in o.operator}
    assert found["analyzer.flex_attention.into"].flops == forward * pairs
    assert found["analyzer.flex_attention_backward.into"].flops == backward * pairs


def test_a_hidden_block_takes_no_time():
    dense, near = ({o.operator: o.seconds for o in run(mask).operators} for mask in (None, is_near))
    for name in ("analyzer.flex_attention.into", "analyzer.flex_attention_backward.into"):
        assert 0 < near[name] < dense[name]


def test_a_mask_that_reads_a_tensor_hides_nothing():
    class Documents(Attention):
        def forward(self, x):
            documents = torch.zeros(TOKENS, dtype=torch.int32, device=x.device)
            self.mask_mod = lambda b, h, i, j: documents[i] == documents[j]
            return super().forward(x)

    p = profile(Documents(None), args=(torch.rand(1),), device="h100")
    assert p.hardware_flops == p.executed_flops and any("depends on data" in a for a in p.assumptions)


def test_a_mask_is_asked_as_torch_asks_it_for_one_pair_at_a_time():
    near, stacked = (run(mask) for mask in (is_near, lambda b, h, i, j: torch.stack([i >= j, i - j < BLOCK]).all()))
    assert stacked.hardware_flops == near.hardware_flops and not any("block mask" in a for a in stacked.assumptions)


def test_a_mask_of_very_many_pairs_is_not_asked(monkeypatch):
    monkeypatch.setattr("analyzer.cuda.kernels.flex_attention._MOST_PAIRS", TOKENS ** 2 - 1)
    p = run(lambda b, h, i, j: i >= j)
    assert p.hardware_flops == p.executed_flops
    assert any(f"of more than {TOKENS ** 2 - 1:,} pairs" in a for a in p.assumptions)


def test_what_a_mask_raises_is_not_taken_for_a_mask_of_data():
    class Wrong(Attention):
        def forward(self, x):
            mask = create_block_mask(is_causal, None, None, TOKENS, TOKENS, device=str(x.device))
            mask.mask_mod = lambda b, h, i, j: i.view(3) >= j
            return self.attend[0](self.query, self.key, self.value, block_mask=mask, enable_gqa=True)

    with pytest.raises(RuntimeError, match="shape .* is invalid"):
        profile(Wrong(None), args=(torch.rand(1),), device="h100")


def test_a_whole_model_compiled_has_it_as_one_call():
    p = profile(torch.compile(Attention(is_causal)), args=(torch.rand(1),), device="h100")
    assert [o.calls for o in p.operators if "flex_attention" in o.operator] == [1, 1]
    assert p.compiled[0].graphs == 1


def test_a_bias_that_is_learned_has_a_gradient():
    class Biased(Attention):
        def __init__(self):
            super().__init__(None)
            self.bias = nn.Parameter(torch.rand(HEADS, TOKENS))

        def forward(self, x):
            bias = self.bias * 2
            return self.attend[0](self.query, self.key, self.value,
                                  lambda score, b, h, i, j: score + bias[h, j] + self.bias[h, i], enable_gqa=True)

    model = Biased()
    p, plain = (profile(m, args=(torch.rand(1),), device="h100") for m in (model, Attention(None)))
    assert p.compiled[0].graphs == 1
    kept = [q.phases["backward"].allocated_bytes for q in (p, plain)]
    assert kept[0] - kept[1] == 2 * STATISTICS, kept  # the parameter and its gradient


def test_buffers_that_the_backward_kernel_writes_count_in_the_order_that_holds_least():
    class Block(Attention):
        def __init__(self):
            super().__init__(None)
            width = HEADS * WIDTH
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x):
            mixed = super().forward(x).transpose(1, 2).reshape(TOKENS, -1)
            return self.down(nn.functional.gelu(self.up(mixed))).square().sum()

    phases = profile(torch.compile(Block()), args=(torch.rand(1),), device="h100").phases
    # with all that is saved there are, in the order in which autograd has them, the gradient of what gelu gives and the
    # second weight's, of 2 and 1 times the size of a query. The other order would free what gelu gave before; but it
    # begins with the buffers to which the kernel writes the gradients of query and value, and holds more
    assert 0 <= phases["backward"].peak_allocated_bytes - phases["forward"].allocated_bytes - 3 * QUERY < 8 * 512
