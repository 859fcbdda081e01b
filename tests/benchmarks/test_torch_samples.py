"""Samples of torch's databases of operators and modules: what a run without data gives is what one on data gives."""
import random
import warnings

import pytest
import torch

from analyzer import MetaTensorMode
from benchmarks.fuzz.torch_samples import (
    BOTH_REFUSE,
    DIFFERS,
    EQUAL,
    PRICED,
    list_operators,
    try_modules,
    try_operators,
)


@pytest.mark.parametrize("seed", range(2))
def test_operators_give_what_they_give_on_data(seed):
    for operator in random.Random(seed).sample(list_operators(), 8):
        for one in try_operators([operator.formatted_name], 2, ["cpu"]):
            assert one.verdict not in (DIFFERS, PRICED), one


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["Lazy", "MultiLabelMarginLoss", "FractionalMaxPool3d", "GRU", "BatchNorm1d"])
def test_modules_give_what_they_give_with_data(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(try_modules([name], None, ["cpu", "cuda"]))
    assert found and not [one for one in found if one.verdict not in (EQUAL, BOTH_REFUSE)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lazy_layer_moves_before_it_has_a_shape(device):
    with MetaTensorMode():
        layer = torch.nn.LazyConv2d(3, 3).to(device)
        assert layer(torch.rand(1, 2, 8, 8, device=device)).shape == (1, 3, 6, 6)
        assert layer.weight.device.type == device and type(layer.weight) is torch.nn.Parameter
