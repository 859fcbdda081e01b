"""Drop-ins on models without data: the figures of a CPU, and no time that no device spent."""
import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, profile
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import simulating
from analyzer.tools.runtime import FlopsProfiler, get_model_profile


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)

    def forward(self, x, scale=None):
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y if scale is None else y * scale.item()


def conv():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)), (3, 8)),
    "attention": (Attention, (2, 5, 32)),
    "lstm": (lambda: nn.LSTM(8, 16, 2, batch_first=True), (2, 7, 8)),
    "conv": (conv, (2, 3, 16, 16)),
}


def on(device, name):
    make, shape = MODELS[name]
    with torch.device(device):
        return make(), shape


@pytest.mark.parametrize("name", MODELS)
def test_figures_are_those_of_the_cpu(name):
    model, shape = on("meta", name)
    host, _ = on("cpu", name)
    expected = get_model_profile(host, shape, print_profile=False)
    assert get_model_profile(model, shape, print_profile=False) == expected
    assert get_model_profile(model, args=(torch.ones(shape),), print_profile=False) == expected
    assert {t.device.type for t in model.parameters()} == {"meta"} and model.training


@pytest.mark.parametrize("name", ["attention", "lstm"])
def test_a_training_step_on_meta(name):
    found = {}
    for device in ("meta", "cpu"):
        model, shape = on(device, name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with FlopsProfiler(model, convention="own") as prof:
            out = model(torch.ones(shape, device=device))
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            optimizer.step()
        found[device] = prof
    meta, cpu = (found[device].profile for device in ("meta", "cpu"))
    assert (meta.fwd_flops, meta.bwd_flops, meta.mode, meta.batch_size) == (cpu.fwd_flops, cpu.bwd_flops, "train",
                                                                           cpu.batch_size)
    assert meta.modules.activation_bytes == cpu.modules.activation_bytes > 0
    assert (meta.step_seconds, meta.measured_steps, meta.device) == (None, None, None)
    prof = found["meta"]
    assert prof.get_total_duration() is prof.get_total_functional_duration() is None
    assert prof.get_total_duration(as_string=True) == prof.get_total_functional_duration(as_string=True) == "-"
    assert found["cpu"].get_total_duration() > 0 and cpu.seconds_method.startswith("measured on cpu")


def test_the_report_of_a_model_on_meta_names_no_time(capsys):
    model, shape = on("meta", "mlp")
    get_model_profile(model, shape)
    lines = {line.partition(": ")[0]: line.partition(": ")[2].strip() for line in capsys.readouterr().out.splitlines()}
    assert lines["fwd latency"] == lines["fwd FLOPS per GPU = fwd flops per GPU / fwd latency"] == "-"
    assert lines["fwd MACs per GPU"] == "480 MACs"


def test_values_of_inputs_are_known():
    model, _ = on("meta", "attention")
    args = (torch.ones(2, 5, 32), torch.tensor(2.0))
    assert get_model_profile(model, args=args, print_profile=False) == get_model_profile(
        on("cpu", "attention")[0], args=args, print_profile=False)


def test_a_model_without_parameters_on_meta_was_not_measured():
    with FlopsProfiler(nn.ReLU()) as prof:
        prof.model(torch.ones(3, device="meta"))
    assert prof.profile.seconds_method == "not timed: it ran without data" and prof.profile.fwd_seconds is None


def test_a_prediction_is_that_of_the_roofline():
    with MetaTensorMode(), simulating(find_device("a100")):
        model = nn.Linear(4096, 4096).cuda()
        with FlopsProfiler(model) as prof:
            model(torch.ones(64, 4096, device="cuda"))
        p = prof.profile
    predicted = profile(nn.Linear(4096, 4096), torch.empty(64, 4096), mode="infer", device="a100")
    assert p.fwd_seconds == pytest.approx(predicted.fwd_seconds) and p.step_seconds > 0
    assert p.device == "a100_80gb" and p.measured_steps is None
