"""Functions and classes of torch under names that a program imported before the run answer as torch's own names do."""
import pytest
import torch
from torch import FloatTensor
from torch.backends.cudnn import is_available as has_cudnn
from torch.cuda import Event, Stream, is_initialized, set_device
from torch.cuda import FloatTensor as CudaFloatTensor

from analyzer import profile

NAMES = ("FloatTensor", "has_cudnn", "Event", "Stream", "is_initialized", "CudaFloatTensor")


def told_on(device, ask):
    told = []

    class Asks(torch.nn.Module):
        def forward(self, x):
            told.append(ask(x))
            return x * 2

    profile(Asks(), torch.rand(2, 3), device=device, mode="infer")
    return told[0]


@pytest.mark.parametrize("ask, on_gpu, on_host", [
    (lambda x: is_initialized(), True, False),
    (lambda x: has_cudnn(), True, False),
    (lambda x: isinstance(x, FloatTensor), False, True),
    (lambda x: isinstance(x, CudaFloatTensor), True, False)])
def test_questions_by_early_names_are_answered_for_the_models_device(ask, on_gpu, on_host):
    before = [globals()[name] for name in NAMES]
    assert (told_on("h100", ask), told_on("cpu", ask)) == (on_gpu, on_host)
    assert all(globals()[name] is one for name, one in zip(NAMES, before))
    assert not is_initialized()


def test_classes_by_early_names_make_what_those_of_the_simulation_make():
    def make(x):
        event = Event()
        event.record()
        return isinstance(Stream(), torch.cuda.Stream), CudaFloatTensor(2, 3).device.type, event.query()

    assert told_on("h100", make) == (True, "cuda", True)


def test_a_device_is_set_on_a_machine_without_one_as_there():
    for call in (lambda x: set_device(0), lambda x: torch.cuda.set_device(0)):
        with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
            told_on("cpu", call)
