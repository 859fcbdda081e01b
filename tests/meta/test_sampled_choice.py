"""Routers that compute with what they chose, or choose by thresholds: each expert gets about what it really gets."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from analyzer import MetaTensorMode, ProfileOptions, profile
from analyzer.meta.state import MetaOptions
from tests.call import Call

TOKENS, EXPERTS = 64, 8
X = torch.rand(TOKENS, 16)
RANK_OF = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
INFINITY = float("inf")


def chosen(s, k=2):
    return s.topk(k).indices


def scattered(s):
    values, indices = s.topk(2)
    return torch.zeros(TOKENS, EXPERTS).scatter_(1, indices, values)


def masked(s):
    return s.masked_fill(s < s.topk(2).values[..., -1:], -INFINITY).softmax(-1)


def within_groups(s):
    """As DeepSeek-V3's: two groups of four, of which one is left."""
    group = s.view(TOKENS, 2, 4).topk(2).values.sum(-1).topk(1).indices
    left = torch.zeros(TOKENS, 2).scatter_(1, group, 1)[:, :, None].expand(-1, -1, 4).reshape(TOKENS, EXPERTS)
    return s.masked_fill(~left.bool(), 0.0).topk(2).indices


def lengths(parts):
    return [len(part) for part in parts]


def each(mark):
    """How many rows of X have a mark in each column."""
    return lambda s: lengths(X[mark(s)[:, e]] for e in range(EXPERTS))


def ranks(name):
    """How many choices have each of four values."""
    return lambda s: lengths((name(s) == r).nonzero() for r in range(4))


EVEN, BY_RANK, ONE = [16] * EXPERTS, [32] * 4, [8] * EXPERTS
#: what a router does with scores of 64 tokens, and how many choices, two a token, fall on each expert or rank
WAYS = {
    "modulo": (ranks(lambda s: chosen(s) % 4), BY_RANK),
    "modulo in place": (ranks(lambda s: chosen(s).remainder_(4)), BY_RANK),
    "fmod": (ranks(lambda s: torch.fmod(chosen(s), 4)), BY_RANK),
    "a quotient": (ranks(lambda s: chosen(s) // 2), BY_RANK),
    "a floored quotient": (ranks(lambda s: (chosen(s).float() / 2).floor()), BY_RANK),
    "a difference": (ranks(lambda s: chosen(s) - 4), [16] * 4),
    "a choice of two": (ranks(lambda s: torch.where(chosen(s) < 4, chosen(s), chosen(s) - 4)), BY_RANK),
    "a table": (ranks(lambda s: RANK_OF.take(chosen(s))), BY_RANK),
    "a table that is embedded": (ranks(lambda s: F.embedding(chosen(s), RANK_OF.float()[:, None])[..., 0]), BY_RANK),
    "a table of booleans": (lambda s: [len((RANK_OF < 1)[chosen(s)].nonzero())], [32]),
    "node and place": (lambda s: lengths(
        ((chosen(s) // 4 == n) & (chosen(s) % 4 == p)).nonzero() for n in range(2) for p in range(4)), EVEN),
    "isin": (lambda s: [len(torch.isin(chosen(s), torch.tensor([1, 3])).nonzero())], [32]),
    "isin one": (lambda s: lengths(torch.isin(chosen(s), e).nonzero() for e in range(EXPERTS)), EVEN),
    "one of a list": (lambda s: [len((chosen(s)[..., None] == torch.tensor([1, 2])).any(-1).nonzero())], [32]),
    "exclusive or": (lambda s: [len(((chosen(s) < 2) ^ (chosen(s) < 4)).nonzero())], [32]),
    "those that there are": (lambda s: lengths((chosen(s) % 4 == r).nonzero() for r in (chosen(s) % 4).unique()),
                             BY_RANK),
    "counted": (lambda s: torch.bincount((chosen(s) % 4).flatten(), minlength=4).tolist(), BY_RANK),
    "a histogram": (lambda s: torch.histc((chosen(s) % 4).float(), bins=4, min=0, max=3).long().tolist(), BY_RANK),
    "counted behind a bound": (lambda s: torch.bincount(chosen(s).clamp(max=5).flatten(), minlength=8).tolist(),
                               [16] * 5 + [48, 0, 0]),
    "marked behind a bound": (lambda s: F.one_hot(chosen(s).clamp(max=5), 8).sum((0, 1)).tolist(),
                              [16] * 5 + [48, 0, 0]),
    "a threshold": (each(lambda s: s >= s.topk(2).values[..., -1:]), EVEN),
    "below a threshold": (each(lambda s: ~(s < s.topk(2).values.amin(-1, keepdim=True))), EVEN),
    "kthvalue": (each(lambda s: s >= s.kthvalue(7, dim=-1, keepdim=True).values), EVEN),
    "the largest itself": (each(lambda s: s == s.amax(-1, keepdim=True)), ONE),
    "a masked softmax": (each(lambda s: masked(s) > 0), EVEN),
    "scattered weights": (each(lambda s: scattered(s) > 0), EVEN),
    "scattered weights as booleans": (each(lambda s: scattered(s).bool()), EVEN),
    "scattered weights of the sum one": (each(lambda s: scattered(s) / scattered(s).sum(-1, keepdim=True) != 0), EVEN),
    "scattered weights in zeros like the scores": (
        each(lambda s: torch.zeros_like(s).scatter(1, chosen(s), torch.ones(TOKENS, 2)).bool()), EVEN),
    "added weights": (each(lambda s: torch.zeros(TOKENS, EXPERTS).scatter_add_(1, *reversed(s.topk(2))) > 0), EVEN),
    "rows of scattered weights": (lambda s: lengths(row.nonzero() for row in scattered(s).t()), EVEN),
    "numbers of scattered weights": (lambda s: (scattered(s) > 0).sum(0).tolist(), EVEN),
    "an assignment": (each(lambda s: torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).index_put_(
        (torch.arange(TOKENS)[:, None], chosen(s)), torch.tensor(True))), EVEN),
    "groups": (lambda s: lengths((within_groups(s) == e).nonzero() for e in range(EXPERTS)), EVEN),
}


@pytest.mark.parametrize("name", WAYS)
def test_choices_that_are_computed_with_fall_as_they_really_do(name):
    route, expected = WAYS[name]
    real, times = [0] * len(expected), 100
    torch.manual_seed(0)
    for _ in range(times):
        found = route(torch.rand(TOKENS, EXPERTS))
        real = [total + count for total, count in zip(real, found, strict=True)]
    assert [count / times for count in real] == pytest.approx(expected, rel=0.1)
    with MetaTensorMode() as mode:
        assert route(torch.rand(TOKENS, EXPERTS)) == expected
        assert all("worst case" not in text for text in mode.state.assumptions)


@pytest.mark.parametrize("mark", [lambda s: s > 0.5, lambda s: s.topk(2).values > 0.5,
                                  lambda s: s.topk(1).indices.squeeze(-1) == torch.rand(64).mul(8).long()])
def test_what_only_the_numbers_of_scores_would_tell_is_the_worst_case(mark):
    with MetaTensorMode():
        marks = mark(torch.rand(TOKENS, EXPERTS))
        assert len(marks.nonzero()) == marks.numel()


@pytest.mark.parametrize("options", [{"unknown_size": "worst"}, {"skew": 1.0}])
def test_other_policies_take_no_sample(options):
    with MetaTensorMode(MetaOptions(**options)):
        assert len((chosen(torch.rand(TOKENS, EXPERTS)) % 4 == 0).nonzero()) == 128


class OnRanks(nn.Module):
    """Experts of which every fourth is on one rank, as the one of this module."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, EXPERTS)
        self.experts = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(EXPERTS // 4)])

    def forward(self, x):
        weights, indices = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        local = indices % 4 == 1
        for number, expert in enumerate(self.experts):
            token, place = torch.where(local & (indices // 4 == number))
            if token.numel():
                out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out


@pytest.mark.parametrize("reuse", [True, False])
def test_a_profile_counts_the_products_of_the_tokens_that_arrive(reuse):
    p = profile(Call(lambda m, x: m.layers(x), layers=nn.Sequential(*[OnRanks() for _ in range(12)])), (X,),
                mode="infer", device="h100", reuse=reuse)
    assert p.fwd_macs == 12 * (TOKENS * 16 * EXPERTS + 2 * 16 * 16 * 16)
    assert any("for choices that fall evenly (balanced)" in text for text in p.assumptions)
    worst = profile(OnRanks(), (X,), mode="infer", options=ProfileOptions(unknown_size="worst"))
    assert worst.fwd_macs == TOKENS * 16 * EXPERTS + 2 * 128 * 16 * 16
