"""Requests for a CUDA device where the machine has none: a profile for the host, a trace on a machine without CUDA."""
import pytest
import torch
from torch import nn

from analyzer import profile, symbolic_trace

X = torch.rand(2, 4)


class Model(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, x):
        self.ask(x)
        return self.layer(x)


#: of each, that a torch without CUDA raises
MADE = {f"torch.cuda.{name}": (lambda x, name=name: getattr(torch.cuda, name)(2, 3)) for name in (
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ShortTensor",
    "CharTensor", "ByteTensor", "BoolTensor")} | {
    "of data": lambda x: torch.cuda.FloatTensor([1.0, 2.0]),
    "a default type": lambda x: torch.set_default_tensor_type(torch.cuda.FloatTensor),
    "a default type by name": lambda x: torch.set_default_tensor_type("torch.cuda.HalfTensor")}
ASKED = {
    "type": lambda x: x.type(torch.cuda.FloatTensor),
    "type by name": lambda x: x.type("torch.cuda.FloatTensor"),
    "cuda": lambda x: x.cuda(), "to": lambda x: x.to("cuda"), "to an index": lambda x: x.to(0),
    "a module": lambda x: nn.Linear(2, 2).cuda(), "a factory": lambda x: torch.ones(2, device="cuda"),
    "a layer": lambda x: nn.Linear(2, 2, device="cuda:0"), "data": lambda x: torch.tensor([1.0], device="cuda"),
    "a generator": lambda x: torch.Generator("cuda"), "like": lambda x: torch.zeros_like(x, device="cuda")}


PINNED = {
    "a tensor": lambda x: torch.rand(3).pin_memory(),
    "a storage": lambda x: torch.rand(3).untyped_storage().pin_memory(),
    "empty": lambda x: torch.empty(3, pin_memory=True), "rand": lambda x: torch.rand(3, pin_memory=True),
    "data": lambda x: torch.tensor([1.0], pin_memory=True),
    "like": lambda x: torch.empty_like(torch.rand(3), pin_memory=True),
    "a batch": lambda x: torch.utils.data._utils.pin_memory.pin_memory([torch.rand(3)])}


@pytest.mark.parametrize("name", PINNED)
def test_memory_is_pinned_for_an_accelerator_alone(name):
    with pytest.raises(RuntimeError, match="No CUDA GPUs are available: memory that is pinned .* simulated is cpu"):
        profile(Model(PINNED[name]), (X,), device="cpu")
    assert profile(Model(PINNED[name]), (X,), mode="infer", device="h100").fwd_macs == 32


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("name", PINNED)
def test_a_trace_on_a_machine_without_an_accelerator_pins_nothing(name):
    with pytest.raises(RuntimeError, match="accelerator"):
        PINNED[name](X)
    with pytest.raises(RuntimeError, match="No CUDA GPUs are available: memory that is pinned"):
        symbolic_trace(Model(PINNED[name]), meta_args={"x": X})


def test_a_trace_says_where_a_device_beyond_the_count_was_asked_for():
    with pytest.raises(RuntimeError, match="(?s)device ordinal: cuda:3 .*While tracing with x=.*, in the root m"):
        symbolic_trace(Model(lambda x: x.to("cuda:3")), meta_args={"x": torch.rand(2, 4, device="meta")})


def test_what_is_not_pinned_says_so_on_the_host():
    seen = []

    def ask(x):
        seen.append(x.is_pinned())
        seen.extend(batch.is_pinned() for batch in torch.utils.data.DataLoader(torch.rand(2, 4), pin_memory=True))

    profile(Model(ask), (X,), mode="infer", device="cpu")
    assert not any(seen) and len(seen) % 3 == 0


@pytest.fixture(autouse=True)
def no_default_left():
    yield
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device().type == "cpu"


@pytest.mark.parametrize("name", [*MADE, *ASKED])
@pytest.mark.filterwarnings("ignore")
def test_the_host_has_no_cuda_device(name):
    with pytest.raises(RuntimeError, match="No CUDA GPUs are available|Cannot get CUDA generator"):
        profile(Model({**MADE, **ASKED}[name]), (X,), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore")
def test_a_trace_on_a_machine_without_one_has_none(name):
    with pytest.raises(TypeError) as of_torch:
        MADE[name](X)
    with pytest.raises(Exception) as of_trace:
        symbolic_trace(Model(MADE[name]), meta_args={"x": X})
    assert str(of_torch.value) in str(of_trace.value)


def test_a_branch_on_the_device_takes_the_other_way():
    def ask(x):
        try:
            return torch.cuda.FloatTensor(2, 3)
        except (RuntimeError, TypeError):
            return torch.FloatTensor(2, 3) @ torch.FloatTensor(3, 5)

    assert profile(Model(ask), (X,), mode="infer", device="cpu").fwd_macs == 2 * 4 * 4 + 2 * 3 * 5
    assert profile(Model(ask), (X,), mode="infer", device="h100").fwd_macs == 2 * 4 * 4


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_default_device_that_is_the_host_is_the_host(device):
    seen = []

    def ask(x):
        torch.set_default_device("cpu")
        try:
            seen.extend(str(made.device) for made in (
                torch.zeros(1), torch.tensor([1.0]), torch.arange(3), nn.Linear(2, 2).weight, torch.rand(2)))
            seen.append(str(torch.get_default_device()))
        finally:
            torch.set_default_device(None)

    profile(Model(ask), (X,), mode="infer", device=device)
    assert set(seen) == {"cpu"}
