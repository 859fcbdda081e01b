"""Modules of torch's database, a sample of `fuzz.module_samples`: results and gradients have the right shapes."""
import warnings

import pytest
import torch

from analyzer import MetaTensorMode
from benchmarks.fuzz.module_samples import BOTH_REFUSE, EQUAL, compare_all


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["Lazy", "MultiLabelMarginLoss", "FractionalMaxPool3d", "GRU", "BatchNorm1d"])
def test_modules_give_what_they_give_with_data(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {sample: (verdict, told) for sample, _, verdict, told in compare_all(name)}
    assert found and not {sample: what for sample, what in found.items() if what[0] not in (EQUAL, BOTH_REFUSE)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lazy_layer_moves_before_it_has_a_shape(device):
    with MetaTensorMode():
        layer = torch.nn.LazyConv2d(3, 3).to(device)
        assert layer(torch.rand(1, 2, 8, 8, device=device)).shape == (1, 3, 6, 6)
        assert layer.weight.device.type == device and type(layer.weight) is torch.nn.Parameter
