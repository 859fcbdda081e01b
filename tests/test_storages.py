"""Storages are born and die on a CPU as predicted: its own allocator says so, in the order and to the byte."""
from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.coverage import list_cases
from benchmarks.coverage_case import Candidate
from benchmarks.storage_events import Block, Trail, storages_of
from benchmarks.trust_storages import (
    DEATHS,
    DIFFERENT,
    EQUAL,
    MODELS,
    Comparison,
    choose_candidate,
    compare_step,
    list_differences,
    sort_deaths,
    temporaries_at_peak,
)


class Runs(nn.Module):
    """A model that calls a function with a layer behind it, so that the input of the function has a gradient."""

    def __init__(self, function, width=8, kind=nn.Linear):
        super().__init__()
        self.before, self.inner = nn.Linear(width, width), kind(width, width)
        self.function = function

    def forward(self, x):
        return self.function(self.inner, self.before(x))


def add_bias_to_a_product(layer, x):
    return layer(x.transpose(0, 1))  # Linear.cpp: not contiguous, so the bias is added in place


def attend_with_mask(layer, x):
    q = layer(x).unsqueeze(0)
    return F.scaled_dot_product_attention(q, q, q, torch.ones(6, 6), dropout_p=0.5)  # by plain products on a CPU


def attend_to_earlier(layer, x):
    q = layer(x).unsqueeze(0)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True)


def gather(layer, x):
    return layer(x).gather(1, torch.zeros(4, 1, 8, dtype=torch.long)) + x.index_select(1, torch.tensor([1]))


def normalize(layer, x):
    y = layer(x)
    return F.normalize(y, dim=-1) @ F.normalize(x, dim=-1).transpose(1, 2)


def divide_a_size(layer, x):
    half = torch.div(x.shape[1], 2, rounding_mode="trunc")  # a tensor of two numbers, which dies here
    return layer(x).view(4, half, -1)


def largest(layer, x):
    return layer(x).max(1)[0] + x.sort(1)[0][:, 0]


def fold(layer, x):
    return F.fold(layer(x), (7, 8), (2, 3)) * 2  # Col2Im.cpp: a storage as large as the input


def fold_to_more(layer, x):
    return F.fold(layer(x)[0].mT, (10, 12), (2, 3), stride=(8, 3)) * 2


def unfold(layer, x):
    return F.unfold(layer(x).unsqueeze(1), 2) * 2 + F.unfold(x.unsqueeze(1).mT.contiguous(), 2)


def unfold_to_less(layer, x):
    return F.unfold(layer(x), 1, stride=2) * 2  # not a batch


class Images(nn.Module):
    """Convolutions and norms on images."""

    def __init__(self, layout, **options):
        super().__init__()
        self.layout = layout
        self.first, self.second = nn.Conv2d(3, 8, 3, **options), nn.Conv2d(8, 8, 1, groups=2)
        self.batch, self.group = nn.BatchNorm2d(8), nn.GroupNorm(2, 8)

    def forward(self, x):
        x = self.group(self.first(x.to(memory_format=self.layout)))
        return self.batch(self.second(F.silu(x)) + x)


TOKENS, PIXELS = (4, 6, 8), (2, 3, 9, 9)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize(("build", "shape"), [
    (lambda: Runs(add_bias_to_a_product), TOKENS),
    (lambda: Runs(attend_with_mask), TOKENS),
    (lambda: Runs(attend_to_earlier), TOKENS),
    (lambda: Runs(gather), TOKENS),
    (lambda: Runs(normalize), TOKENS),
    (lambda: Runs(divide_a_size), TOKENS),
    (lambda: Runs(largest), TOKENS),
    (lambda: Runs(fold, 36), (2, 24, 36)),
    (lambda: Runs(fold_to_more, 24), (1, 8, 24)),
    (lambda: Runs(unfold), TOKENS),
    (lambda: Runs(unfold_to_less), TOKENS),
    (lambda: Images(torch.contiguous_format), PIXELS),
    (lambda: Images(torch.channels_last, bias=False), PIXELS),
    (lambda: nn.Sequential(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)), (2, 3, 4, 4, 4)),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)).double(), PIXELS),
], ids=("bias mask causal gather normalize size largest fold fold-more unfold unfold-less images channels-last volumes "
        "double").split())
def test_operators_allocate_and_release_in_the_order_of_the_processor(build, shape, mode):
    def make_inputs(model, trains):
        return (torch.rand(shape, dtype=next(model.parameters()).dtype),), {}

    found = compare_step("small", Candidate("small", build, make_inputs), mode)
    assert found.verdict in (EQUAL, DEATHS), list_differences(found)
    assert found.has_equal_ends


@pytest.mark.parametrize("name", ["timm:resnet10t", "transformers:LlamaForCausalLM", "torch.nn:LSTM"])
def test_models_allocate_and_release_in_the_order_of_the_processor(name):
    assert name in MODELS
    case = next(case for case in list_cases([name.partition(":")[0]]) if case.name == name)
    with warnings.catch_warnings(action="ignore"):
        found = compare_step(name, choose_candidate(case), "train")
    assert found.verdict in (EQUAL, DEATHS), list_differences(found)
    assert found.has_equal_ends and len(found.measured.births()) > 50


def make_trail(*events):
    """A trail of births (bytes, call) and of deaths (number of the birth, call)."""
    blocks, found = [], []
    for kind, value, call in events:
        if kind == "+":
            blocks.append(Block(value, len(found), "op", call))
            found.append((True, blocks[-1]))
        else:
            blocks[value].died, blocks[value].died_call = len(found), call
            found.append((False, blocks[value]))
    return Trail(found, {(0, "forward"): len(found)}, 100)


ONE = (("+", 64, 0), ("+", 32, 1), ("-", 0, 2), ("-", 1, 2), ("+", 8, 3))


@pytest.mark.parametrize(("events", "expected"), [
    (ONE, EQUAL),
    ((*ONE[:2], ("-", 1, 2), ("-", 0, 2), ONE[4]), DEATHS),
    ((*ONE[:3], ONE[4], ("-", 1, 3)), DIFFERENT),          # the second lives on while another is born
    ((("+", 32, 0), ("+", 64, 1), ("-", 1, 2), ("-", 0, 2), ONE[4]), DIFFERENT),  # born the other way round
    ((*ONE[:4], ("+", 16, 3)), DIFFERENT),
    (ONE[:4], DIFFERENT),
])
def test_an_order_or_a_size_that_differs_is_told(events, expected):
    assert Comparison("", "", make_trail(*ONE), make_trail(*events), 0, 0).verdict == expected


def test_temporaries_are_what_one_operator_allocates_and_releases():
    trail = make_trail(("+", 640, 0), ("+", 64, 0), ("-", 0, 0), ("+", 32, 1), ("-", 1, 2), ("+", 8, -1), ("-", 3, -1))
    assert [block.nbytes for block in storages_of(trail).births()] == [64, 32]  # eight bytes in no operator: a number
    assert storages_of(trail).bytes_at_ends() == {(0, "forward"): 132}
    assert temporaries_at_peak(trail) == {"op": 640}


def test_deaths_that_follow_each_other_have_no_order():
    assert sort_deaths([("born", 0, 8), ("died", 2, 4), ("died", 1, 4)]) == [("born", 0, 8), ("died", 1, 4),
                                                                            ("died", 2, 4)]
