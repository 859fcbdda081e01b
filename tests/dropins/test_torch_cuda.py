"""`estimate_memory` by the names of the request for it, held to sums by hand and to `analyzer.profile`."""
import copy

import pytest
import torch
from torch import nn

import analyzer
from analyzer.dropins.torch_cuda import estimate_memory
from analyzer.errors import InputError, UnknownDeviceError

WEIGHTS = 2 * 1024 * 4096 + 4096 + 1024  # elements of the two layers


def perceptron():
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))


X = torch.empty(512, 1024, device="meta")


def test_the_script_of_the_request_runs():
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    estimate = estimate_memory(model, torch.rand(512, 1024), optimizer=optimizer)
    assert isinstance(estimate.total_mb, float) and estimate.fits() is True
    assert estimate.params_mb == 4 * WEIGHTS / 1e6
    # two states of each parameter, each in blocks of 512 bytes, which all of these fill
    assert estimate.optimizer_mb == 2 * estimate.params_mb
    assert estimate.activations_mb == 2 * 512 * 4096 * 4 / 1e6  # what goes into GELU and what comes out of it
    with pytest.raises(InputError, match=r"device=0: this machine has 0 CUDA devices; name a model of device, such as "
                                         r"'h100' \(`analyzer devices` lists them\), or give a size, such as '24GiB'"):
        estimate.fits(device=0)
    assert str(estimate) == (f"Sequential on h200: {estimate.total_bytes / 2**20:.2f} MiB (parameters 32.02 MiB, "
                             "optimizer states 64.04 MiB, activations 16.00 MiB)")


def test_a_gpu_of_the_machine_is_asked_for_by_its_number(monkeypatch):
    names = ["NVIDIA A100-SXM4-80GB", "Tesla T4"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: names[index])
    estimate = estimate_memory(perceptron(), X)
    assert estimate.device == "a100_80gb"
    for device, name in ((0, "a100_80gb"), ("cuda", "a100_80gb"), (1, "t4"), (torch.device("cuda", 1), "t4")):
        assert estimate.verdict(device).device == name and estimate.fits(device=device) is True
    for device in (2, -1, "cuda:2"):
        with pytest.raises(InputError, match="this machine has 2 CUDA devices"):
            estimate.fits(device)


@pytest.mark.parametrize("name", ["cuda:x", "nothing", True])
def test_what_names_no_device_is_refused(name):
    with pytest.raises((UnknownDeviceError, InputError), match=f"{name!r}"):
        estimate_memory(perceptron(), X, device="a100").fits(name)


def test_parts_add_up_to_the_total_which_is_what_a_profile_needs():
    estimate = estimate_memory(perceptron(), X, "adamw", device="a100")
    found = analyzer.profile(perceptron(), X, optimizer="adamw", device="a100")
    assert estimate.total_bytes == found.fits().needed_bytes == round(sum(estimate.breakdown_mb.values()) * 1e6)
    assert estimate.total_mb == estimate.total_bytes / 1e6
    assert (estimate.peak_allocated_mb, estimate.peak_reserved_mb) == (
        found.peak_allocated_bytes / 1e6, found.peak_reserved_bytes / 1e6)
    parts = estimate.breakdown_mb
    assert (parts["parameter"], parts["gradient"]) == (estimate.params_mb, estimate.params_mb)
    assert list(parts)[-2:] == ["reserved, not allocated", "outside of the allocator"]


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_another_device_is_estimated_with_its_own_kernels():
    x = torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    estimate = estimate_memory(Attention(), x, device="h100")
    for name in ("t4", "h100"):
        assert estimate.verdict(name) == analyzer.profile(Attention(), x, device=name).verdict
    assert estimate.verdict("t4").needed_bytes != estimate.verdict("h100").needed_bytes
    # a size is the estimate's own device with so much memory
    needed = estimate.total_bytes
    assert [estimate.fits(size) for size in (str(needed), f"{needed - 1}B", "64MiB")] == [True, False, False]
    assert estimate.verdict("64MiB").capacity_bytes == 64 << 20


def groups(model):
    first, _, last = model
    return [{"params": [last.bias, last.weight], "lr": 1e-3}, {"params": [first.weight], "weight_decay": 0.1}]


@pytest.mark.parametrize("make, states", [
    (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 0),
    (lambda model: torch.optim.SGD(groups(model), lr=0.1, momentum=0.9), WEIGHTS - 4096),
    (lambda model: torch.optim.AdamW(groups(model), lr=0.1), 2 * (WEIGHTS - 4096)),
    (lambda model: torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True), 3 * WEIGHTS),
    (lambda model: torch.optim.AdamW, 2 * WEIGHTS), (lambda model: "momentum", WEIGHTS)])
def test_an_optimizer_of_the_model_is_taken_as_it_is_made(make, states):
    model = perceptron()
    optimizer = make(model)
    before = copy.deepcopy(optimizer.state_dict()) if isinstance(optimizer, torch.optim.Optimizer) else None
    held = [tensor.data_ptr() for tensor in model.parameters()]
    assert estimate_memory(model, X, optimizer).optimizer_mb == 4 * states / 1e6
    assert held == [tensor.data_ptr() for tensor in model.parameters()]
    if before is not None:
        assert optimizer.state_dict() == before and not optimizer.state


def test_frozen_parameters_have_no_states():
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters())
    model[0].requires_grad_(False)
    assert estimate_memory(model, X, optimizer).optimizer_mb == 2 * 4 * (4096 * 1024 + 1024) / 1e6


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(InputError) as error:
        estimate_memory(perceptron(), X, torch.optim.Adam(perceptron().parameters()))
    assert str(error.value) == ("optimizer=Adam(...): 4 of its parameters are not among those of the model to be "
                                "trained; make it of model.parameters(), or give its class")


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)

    def forward(self, ids, scale=None):
        return self.embed(ids) if scale is None else self.embed(ids) * scale


def test_inputs_are_one_tensor_positions_or_keywords():
    ids, scale = torch.zeros(4, 8, dtype=torch.long), torch.ones(1)
    model = Named().eval()
    made = [estimate_memory(model, given, device="a100") for given in (
        ids, (ids,), [ids], {"ids": ids}, (ids, scale), {"scale": scale, "ids": ids})]
    assert [len(one.profile.inputs) for one in made] == [1, 1, 1, 1, 2, 2]
    assert len({one.total_bytes for one in made[:4]}) == len({one.total_bytes for one in made[4:]}) == 1


def test_a_model_in_evaluation_mode_is_estimated_without_gradients():
    model = Named()
    modes = [estimate_memory(model.train(flag), torch.zeros(4, 8, dtype=torch.long), **more).profile.mode
             for flag, more in ((True, {}), (False, {}), (False, {"optimizer": "sgd"}), (True, {"mode": "infer"}))]
    assert modes == ["train", "infer", "train", "infer"]
    estimate = estimate_memory(model.eval(), torch.zeros(4, 8, dtype=torch.long))
    assert estimate.activations_mb == 4 * 8 * 64 * 4 / 1e6  # the output alone


def test_a_model_that_was_never_made_has_an_estimate():
    estimate = estimate_memory(lambda: nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(100))),
                               torch.empty(1, 8192, device="meta"), "adam", device="h100")
    assert estimate.params_mb == 100 * 4 * (8192**2 + 8192) / 1e6 and not estimate.fits()
    assert estimate.fits("mi300x") is True
