"""Models whose tensors are unusual: each runs as it would, and what it does is counted in its modules."""
import copy
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from analyzer import profile
from analyzer.dropins.torchinfo import summary
from analyzer.tools.runtime import FlopsProfiler, measure
from tests.small_model import Calls


def calls(function):
    """A model that calls a function of its layer and its input."""
    return Calls(lambda m, x: function(m.layer, x), layer=nn.Linear(4, 4))


X = torch.rand(2, 3, 4)
PRODUCT = 4 * 4  # multiply-adds of one row of four


@pytest.mark.parametrize(("function", "x", "expected"), [
    (lambda layer, x: torch.vmap(layer)(x), X, 6 * PRODUCT),
    (lambda layer, x: torch.func.grad(lambda y: layer(y).sum())(x), X[0], 3 * PRODUCT),
    (lambda layer, x: layer(x), torch.nested.nested_tensor([X[0], X[1][:1]], layout=torch.jagged), 4 * PRODUCT),
    (lambda layer, x: layer(x), torch.empty(0, 4), 0),
    (lambda layer, x: layer(x[x > 0.0][:4]), X, PRODUCT),  # of a size that data decide
])
def test_what_a_layer_does_is_counted_in_the_layer(function, x, expected):
    model = calls(function)
    with warnings.catch_warnings(), FlopsProfiler(model, convention="own") as prof:
        warnings.simplefilter("ignore")
        model(x)
    layer = prof.profile.modules.children[0]
    assert (layer.path, layer.calls, layer.fwd_macs) == ("layer", 1, expected)


def test_predicted_modules_may_be_called_under_vmap_too():
    model = calls(lambda layer, x: torch.vmap(layer)(x))
    assert [p.modules.children[0].fwd_macs
            for p in (profile(model, (X, )), measure(model, (X, )))] == [6 * PRODUCT, 6 * PRODUCT]


def test_an_encoder_that_packs_its_padding_away_is_counted_as_predicted():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, padding = torch.rand(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = model(x, src_key_padding_mask=padding)
        with FlopsProfiler(model, convention="own") as prof:
            assert torch.equal(model(x, src_key_padding_mask=padding), expected)
    assert prof.profile.operators[0].operator == "aten._transformer_encoder_layer_fwd.default"
    assert prof.profile.uncounted == ()
    assert prof.get_total_macs() == profile(model, (x,), {"src_key_padding_mask": padding}, mode="infer").fwd_macs
    layer = prof.profile.modules.children[0].children[0]
    assert [t.shape for t in layer.outputs] == [(2, 5, 16)]  # as if padded


def test_sparse_inputs_are_described_and_their_stored_elements_counted():
    model = calls(lambda layer, x: layer(torch.sparse.mm(x, torch.ones(4, 4))))
    with FlopsProfiler(model, convention="own") as prof:
        model(torch.eye(4).to_sparse())
    assert prof.profile.modules.inputs[0].shape == (4, 4)
    assert prof.profile.uncounted == ()
    assert next(o.macs for o in prof.profile.operators if "sparse" in o.operator) == 4 * 4  # elements by columns


def test_a_higher_order_operator_is_one_call():
    model = calls(lambda layer, x: flex_attention(*(layer(x)[None],) * 3))
    with warnings.catch_warnings(), FlopsProfiler(model, convention="own") as prof, torch.no_grad():
        warnings.simplefilter("ignore")
        model(torch.rand(2, 8, 4))
    assert "flex_attention" in [row.operator for row in prof.profile.operators]
    assert prof.profile.modules.own.fwd_macs == 2 * 2 * 8 * 8 * 4


def test_lazy_modules_take_their_shape_and_are_counted():
    def lazy():
        return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())

    p = measure(lazy(), (torch.rand(3, 8),))
    assert (p.params, p.fwd_macs, p.modules.children[0].type) == (44, 96, "Linear")
    assert summary(lazy(), (3, 8), verbose=0).total_params == 44


def test_a_scripted_model_is_one_module():
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with FlopsProfiler(model, convention="own") as prof:
        model(X)
    assert prof.get_total_macs() == 6 * PRODUCT


def test_an_outer_autocast_keeps_casts_from_step_to_step():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.rand(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = measure(model, (x,))
    inside = measure(model, (x,), autocast=torch.bfloat16)
    assert (p.autocast, p.fwd_flops, p.bwd_flops) == ("bfloat16", inside.fwd_flops, inside.bwd_flops)
    assert p.modules.bwd_read_bytes == p.phases["backward"].read_bytes == inside.modules.bwd_read_bytes
    casts = sum(parameter.numel() for parameter in model.parameters()) * (4 + 2)
    assert inside.modules.fwd_read_bytes + inside.modules.fwd_written_bytes == (
        p.modules.fwd_read_bytes + p.modules.fwd_written_bytes + casts)


class Copies(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.storages = nn.Linear(64, 8), []

    def forward(self, x):
        y = copy.deepcopy(x)
        self.storages.append(weakref.ref(y.untyped_storage()))
        return self.layer(y)


def test_a_tensor_that_forward_copies_deeply_is_freed():
    model, x = Copies(), torch.rand(1024, 64)
    p = measure(model, (x,), mode="infer", steps=4)
    assert [storage() for storage in model.storages] == [None] * 5
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert p.peak_allocated_bytes == weights + 2 * x.nbytes + 1024 * 8 * 4
