"""Quantization-aware training and calibration: observers and fake quantization are nodes that keep their own state."""
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

from analyzer import symbolic_trace

pytestmark = pytest.mark.filterwarnings("ignore")


class Convnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv = quantization.QuantStub(), nn.Conv2d(3, 8, 3)
        self.norm, self.relu = nn.BatchNorm2d(8), nn.ReLU()
        self.fc, self.dequant = nn.Linear(8, 4), quantization.DeQuantStub()

    def forward(self, input: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(self.quant(input))))
        return self.dequant(self.fc(x.mean((2, 3))))


def prepared(qconfig: Any) -> nn.Module:
    model = Convnet()
    model.qconfig = qconfig
    return quantization.prepare_qat(quantization.fuse_modules_qat(model, [["conv", "norm", "relu"]]))


OLD = quantization.QConfig(activation=quantization.FakeQuantize, weight=quantization.default_weight_fake_quant)


@pytest.mark.parametrize("make", [
    *(lambda kind=kind: nn.Sequential(nn.Identity(), kind()) for kind in (
        quantization.FakeQuantize, quantization.FusedMovingAvgObsFakeQuantize, quantization.MinMaxObserver,
        quantization.MovingAverageMinMaxObserver, quantization.HistogramObserver,
        quantization.PerChannelMinMaxObserver)),
    lambda: prepared(OLD), lambda: prepared(quantization.get_default_qat_qconfig("fbgemm")),
])
def test_observers_see_the_data_of_each_call(make: Any) -> None:
    torch.manual_seed(0)
    model = make().train()
    gm = symbolic_trace(traced := copy.deepcopy(model), meta_args={"input": torch.rand(2, 3, 8, 8)})
    for i in range(3):
        x = torch.rand(2, 3, 8, 8) * (i + 1) - i
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
        torch.testing.assert_close(traced.state_dict(), model.state_dict(), rtol=0, atol=0)
