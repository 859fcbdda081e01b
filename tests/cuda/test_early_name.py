"""Functions and classes of torch under names that a program imported before the run answer as torch's own names do."""
import sys
from types import ModuleType

import pytest
import torch
from torch import FloatTensor
from torch.backends.cudnn import is_available as has_cudnn
from torch.cuda import (
    CUDAGraph,
    Event,
    MemPool,
    Stream,
    graph_pool_handle,
    is_current_stream_capturing,
    is_initialized,
    set_device,
)
from torch.cuda import FloatTensor as CudaFloatTensor

from analyzer import MetaTensorMode, profile

NAMES = ("FloatTensor", "has_cudnn", "Event", "Stream", "is_initialized", "CudaFloatTensor", "CUDAGraph", "MemPool",
         "graph_pool_handle", "is_current_stream_capturing")


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
    assert told_on("h100", lambda x: (is_current_stream_capturing(), graph_pool_handle() != graph_pool_handle(),
                                      type(CUDAGraph()) is type(torch.cuda.CUDAGraph()),
                                      type(MemPool()) is type(torch.cuda.MemPool()))) == (False, True, True, True)


def test_a_device_is_set_on_a_machine_without_one_as_there():
    for call in (lambda x: set_device(0), lambda x: torch.cuda.set_device(0)):
        with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
            told_on("cpu", call)


@pytest.mark.parametrize("device", [torch.device("cuda"), "cuda", None])
def test_a_device_is_set_by_its_index(device):
    """`_get_device_index` of torch/_utils.py: a frequent mistake, which fails on a GPU."""
    with pytest.raises(ValueError, match="Expected a torch.device with a specified index or an integer"):
        told_on("h100", lambda x: set_device(device))
    assert told_on("h100", lambda x: (set_device(0), set_device("cuda:0"), set_device(-1))) == (None, None, None)


def test_what_a_program_assigns_to_an_early_name_stays():
    names = {"first": Event, "second": Stream, "third": Event}
    program = ModuleType("program")
    vars(program).update(names)
    sys.modules["program"] = program
    try:
        with MetaTensorMode():
            assert program.first is program.third is torch.cuda.Event is not names["first"]
            program.first = 5
            del program.second
    finally:
        del sys.modules["program"]
    assert (program.first, hasattr(program, "second"), program.third) == (5, False, Event)
