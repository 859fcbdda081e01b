"""What a run costs: hand-derived amounts, what is assumed, and what cannot be asked."""
from dataclasses import replace

import pytest
import torch

from analyzer import profile
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.report.run_cost import find_step_work
from analyzer.results.run_cost import RunCost

STEP = Profile(name="Llama", mode="train", device="h100", batch_size=8, tokens=8 * 2048, world_size=1,
               data_parallel_size=1, model_parallel_size=1, step_seconds=0.5, step_seconds_range=(0.4, 0.6))


def test_a_run_on_one_device():
    cost = STEP.cost_of(tokens=16_384_000, price=2.5)  # 1,000 steps of 0.5 s
    assert (cost.steps, cost.devices, cost.tokens, cost.samples) == (1000, 1, 16_384_000, None)
    assert cost.hours == cost.device_hours == pytest.approx(500 / 3600)
    assert cost.dollars == pytest.approx(2.5 * 500 / 3600)
    assert cost.kwh == pytest.approx(find_device("h100").power_watts * 500 / 3600 / 1000)
    assert cost.hours_range == pytest.approx((400 / 3600, 600 / 3600))
    assert cost.dollars_range == pytest.approx((2.5 * 400 / 3600, 2.5 * 600 / 3600))
    assert cost.kwh_range == pytest.approx((cost.kwh * 0.8, cost.kwh * 1.2))


def test_a_step_that_is_not_full_counts_whole():
    assert [STEP.cost_of(samples=n).steps for n in (1, 8, 9, 17)] == [1, 1, 2, 3]


def test_more_devices_take_fewer_steps_and_as_many_device_hours():
    one, eight = (STEP.cost_of(tokens=2e12, price=2, gpus=n) for n in (1, 8))
    assert (one.steps, eight.steps) == (122_070_313, 15_258_790)  # 2e12 / 16,384 and / 131,072, rounded up
    assert eight.device_hours == pytest.approx(one.device_hours) and eight.hours == pytest.approx(one.hours / 8)
    assert any("8 devices step as fast as 1" in line for line in eight.assumptions)
    assert not any("as fast as" in line for line in one.assumptions)


def test_a_sharded_model_is_copied_by_whole_copies():
    sharded = replace(STEP, world_size=4, data_parallel_size=2, model_parallel_size=2)
    assert sharded.cost_of(samples=160).devices == 4 and sharded.cost_of(samples=160).steps == 10  # 8 x 2 a step
    assert sharded.cost_of(samples=160, gpus=10).steps == 4                                        # 8 x 5 a step
    with pytest.raises(InputError, match=r"gpus=3.*takes 2 devices"):
        sharded.cost_of(samples=160, gpus=3)
    unknown = replace(STEP, world_size=4, data_parallel_size=None, model_parallel_size=None).cost_of(samples=160)
    assert (unknown.steps, unknown.hours, unknown.dollars) == (None, None, None)
    assert "how many copies of the model there are is not known" in unknown.assumptions


def test_power():
    given = STEP.cost_of(samples=8 * 7200, gpus=2, power=500)  # 3,600 steps of 0.5 s: half an hour of two devices
    assert given.kwh == pytest.approx(0.5) and any("500 W for each device-hour, as given" in a for a in
                                                   given.assumptions)
    limit = STEP.cost_of(samples=8)
    assert any("power limit of 700 W" in line and "without hosts, network and cooling" in line
               for line in limit.assumptions)
    for device in (None, "somebody's own card"):
        unknown = replace(STEP, device=device).cost_of(samples=8)
        assert unknown.kwh is None and unknown.hours and "kWh are not known" in unknown.assumptions[-1]


def test_unknown_time():
    cost = replace(STEP, step_seconds=None, step_seconds_range=None).cost_of(samples=80, price=2)
    assert (cost.steps, cost.hours, cost.dollars, cost.kwh, cost.hours_range) == (10, None, None, None, None)
    assert "how long a step takes is not known" in cost.assumptions
    assert "0" not in [word for line in str(cost).splitlines()[3:5] for word in line.split()]


def test_the_text_says_whose_time_it_is():
    assert "a step takes 500.00 ms, predicted for h100" in STEP.cost_of(samples=8).assumptions
    measured = replace(STEP, measured_steps=3, device="cpu").cost_of(samples=8)
    assert "a step takes 500.00 ms, measured" in measured.assumptions


@pytest.mark.parametrize(("asked", "words"), [
    ({}, r"tokens=None, samples=None\): give one"), ({"tokens": 1, "samples": 1}, "give one of them"),
    ({"tokens": 0}, "tokens=0.*above 0"), ({"tokens": -2e12}, "above 0"), ({"samples": 1.5}, "samples=1.5.*whole"),
    ({"tokens": float("nan")}, "tokens=nan"), ({"tokens": "many"}, "tokens='many'"), ({"tokens": True}, "tokens=True"),
    ({"samples": 8, "price": -1}, "price=-1.*not negative"), ({"samples": 8, "power": -700}, "power=-700"),
    ({"samples": 8, "gpus": 0}, "gpus=0"), ({"samples": 8, "gpus": 2.5}, "gpus=2.5"),
])
def test_what_cannot_be_asked(asked, words):
    with pytest.raises(InputError, match=words):
        STEP.cost_of(**asked)


def test_tokens_of_a_model_without_tokens():
    with pytest.raises(InputError, match=r"tokens=1e\+09\): Llama is given no tokens.*samples=.*takes 8"):
        replace(STEP, tokens=None).cost_of(tokens=1e9)
    with pytest.raises(InputError, match=r"samples=8\): how many samples a step of Llama takes is not known"):
        replace(STEP, batch_size=None).cost_of(samples=8)


def test_an_unknown_price_is_no_row():
    assert "dollars" not in str(STEP.cost_of(samples=8)) and "dollars" in str(STEP.cost_of(samples=8, price=0))
    assert STEP.cost_of(samples=8, price=0).dollars == 0 and RunCost(steps=1, devices=1).dollars is None


def test_energy_is_of_what_a_step_does():
    """A product of 4,096^3 multiply-adds at an H200's 67 TFLOP/s of float32 takes its limit; a pointwise kernel moves
    its bytes, and its device has no products to know of.
    """
    x = torch.empty(4096, 4096, device="meta")
    product = profile(torch.nn.Linear(4096, 4096, bias=False), (x,), mode="infer", device="h200")
    work = find_step_work(product, find_device("h200"))
    assert work.product_seconds == pytest.approx(2 * 4096**3 / 67e12)
    assert work.traffic_seconds == pytest.approx(3 * 4096**2 * 4 / 4.8e12)
    assert product.energy.joules == pytest.approx(product.energy.watts * product.step_seconds)
    moved = profile(torch.nn.ReLU(), (x,), mode="infer", device="h200")
    assert 0.2 * 700 < moved.energy.watts < product.energy.watts <= 700
    assert replace(moved, phases={"forward": replace(moved.phases["forward"], read_bytes=None)}).energy is None
