import dataclasses

import torch
from torch import nn

from analyzer.hardware import DeviceSpec, PeakRates
from analyzer.profilers.kernel_time.call import default_time, signature_time

CARD = DeviceSpec("card", memory_bandwidth=1e12, flops_per_second=PeakRates(fp32=10e12, bf16=100e12),
                  compute_capability=(8, 0))


def test_views_launch_nothing_and_others_move_their_bytes(log_signatures):
    x = torch.empty(4096, 4096, device="meta")
    times = {str(s.op): default_time(s, CARD) for s in log_signatures(lambda: torch.roll(x, 1).t().reshape(-1))}
    assert times["aten.t.default"].kernels == 0
    assert 2 * 4096**2 * 4 / 1e12 < times["aten.roll.default"].seconds < 1.4 * 2 * 4096**2 * 4 / 1e12


def test_products_without_a_rule_take_their_arithmetic(log_signatures):
    x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    (signature,) = [s for s in log_signatures(lambda: nn.functional.linear(x, x)) if "mm" in str(s.op)]
    assert default_time(signature, CARD).bound == "arithmetic"


def test_a_measured_device_tells_what_products_reach(log_signatures):
    x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
    (signature,) = [s for s in log_signatures(lambda: nn.functional.linear(x, x)) if "mm" in str(s.op)]
    measured = dataclasses.replace(CARD, calibration={"default": {"product_fraction": 1.0}})
    assert default_time(signature, measured).seconds == 2 * 4096**3 / 100e12 < default_time(signature, CARD).seconds


def test_what_is_known_of_cuda_alone_takes_its_traffic_elsewhere(log_signatures):
    x, weight = (torch.empty(8, 64, n, n, device="meta") for n in (56, 3))
    (signature,) = [s for s in log_signatures(lambda: nn.functional.conv2d(x, weight)) if "conv" in str(s.op)]
    host = DeviceSpec("host", kind="cpu", memory_bandwidth=10e9, flops_per_second=PeakRates(fp32=100e9))
    assert signature_time(signature, host) == default_time(signature, host) is not None
    assert signature_time(signature, DeviceSpec("host", kind="cpu")) is None
