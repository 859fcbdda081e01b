"""Several devices in one process: what torch.cuda says of each, and what it refuses."""
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import simulating
from analyzer.meta.state import MetaOptions
from analyzer.record.options import ProfileOptions

MIB = 1 << 20


def test_there_are_as_many_as_are_asked_for() -> None:
    with MetaTensorMode(MetaOptions(devices=3)):
        assert torch.cuda.device_count() == torch.accelerator.device_count() == len(torch.cuda.default_generators) == 3
        assert [torch.cuda.get_device_name(i) for i in range(3)] == ["NVIDIA H200"] * 3
        assert len(torch.cuda.get_rng_state_all()) == 3 and torch.cuda.can_device_access_peer(0, 2)
    for devices in (0, -1, True, 65, "2"):
        with pytest.raises(InputError, match="must be how many devices the process has, 1 to 64"):
            MetaOptions(devices=devices)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_device_is_named_in_any_of_torchs_ways(name: Any) -> None:
    with MetaTensorMode(MetaOptions(devices=2)):
        assert torch.device(1) == torch.device("cuda:1")
        made = [torch.rand(2, device=name), torch.rand(2).to(name), torch.rand(2).cuda(name),
                torch.tensor([1], device=name), nn.Linear(2, 2, device=name).weight, nn.Linear(2, 2).to(name).weight,
                nn.Linear(2, 2).cuda(name).weight]
        with torch.cuda.device(name):
            made += [torch.rand(2, device="cuda"), torch.rand(2).cuda(), nn.Linear(2, 2).cuda().weight]
            assert torch.cuda.current_device() == torch.cuda.current_stream().device_index == 1
        assert {x.device for x in made} == {torch.device("cuda:1")} and {x.get_device() for x in made} == {1}
        assert torch.rand(2, device="cuda").device.index == torch.cuda.current_device() == 0
        torch.cuda.set_device(name)
        assert torch.rand(2).cuda().device.index == torch.accelerator.current_device_index() == 1


BEYOND: dict[str, Callable[[], Any]] = {
    "a factory": lambda: torch.rand(2, device="cuda:1"), "a number": lambda: torch.zeros(1, device=1),
    "data": lambda: torch.tensor([1.0], device="cuda:7"), "to": lambda: torch.rand(2).to(1),
    "cuda": lambda: torch.rand(2).cuda(1), "new": lambda: torch.rand(2, device="cuda").new_zeros(1, device="cuda:1"),
    "like": lambda: torch.zeros_like(torch.rand(2), device="cuda:2"),
    "module": lambda: nn.Linear(2, 2, device="cuda:1"), "module.cuda": lambda: nn.Linear(2, 2).cuda(1),
    "module.to": lambda: nn.Linear(2, 2).to(torch.device("cuda", 1)),
    "set_device": lambda: torch.cuda.set_device(1), "a block": lambda: torch.cuda.device(1).__enter__(),
    "accelerator": lambda: torch.accelerator.set_device_index(1), "free memory": lambda: torch.cuda.mem_get_info(1),
    "allocated": lambda: torch.cuda.memory_allocated(1), "a stream": lambda: torch.cuda.Stream(1),
    "synchronize": lambda: torch.cuda.synchronize("cuda:1"), "the current stream": lambda: torch.cuda.current_stream(3),
    "a generator": lambda: torch.Generator(device="cuda:1")}


@pytest.mark.parametrize("name", BEYOND)
def test_an_index_beyond_them_raises_what_cuda_raises(name: str) -> None:
    with MetaTensorMode(), pytest.raises(torch.AcceleratorError, match=(
            r"^CUDA error: invalid device ordinal: cuda:\d where torch.cuda.device_count\(\) is 1. .*--devices N")):
        BEYOND[name]()


def test_properties_of_a_device_that_is_not_there_are_refused_as_torch_refuses_them() -> None:
    for name in ("get_device_properties", "get_device_name", "get_device_capability"):
        with MetaTensorMode(MetaOptions(devices=2)), pytest.raises(AssertionError, match="Invalid device id: 2 where"):
            getattr(torch.cuda, name)(2)


def test_each_has_its_own_memory() -> None:
    with MetaTensorMode(MetaOptions(devices=3)), simulating(find_device("l4")):
        total = find_device("l4").memory_bytes
        x = torch.empty(3 * MIB, dtype=torch.uint8, device=1)   # a segment of 20 MiB
        y = torch.empty(100, dtype=torch.uint8, device="cuda:2")  # one of 2 MiB
        assert [torch.cuda.memory_allocated(i) for i in range(3)] == [0, 3 * MIB, 512]
        assert [torch.cuda.memory_reserved(i) for i in range(3)] == [0, 20 * MIB, 2 * MIB]
        assert [torch.cuda.mem_get_info(i) for i in range(3)] == [(total, total), (total - 20 * MIB, total),
                                                                 (total - 2 * MIB, total)]
        del x
        assert (torch.cuda.memory_allocated(1), torch.cuda.max_memory_allocated("cuda:1")) == (0, 3 * MIB)
        with torch.cuda.device(1):
            torch.cuda.reset_peak_memory_stats()
            assert torch.cuda.max_memory_allocated() == 0
        assert torch.cuda.max_memory_allocated(2) == 512
        assert [(s["device"], s["total_size"]) for s in torch.cuda.memory_snapshot()] == [(1, 20 * MIB), (2, 2 * MIB)]
        torch.cuda.empty_cache()  # of all of them
        assert [torch.cuda.memory_reserved(i) for i in range(3)] == [0, 0, 2 * MIB]
        del y


def test_memory_runs_out_on_one_and_the_error_says_which() -> None:
    with MetaTensorMode(ProfileOptions(devices=2, capacity_bytes=20 * MIB)):
        kept = torch.empty(15 * MIB, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(torch.cuda.OutOfMemoryError, match=(
                "CUDA out of memory. Tried to allocate 31,457,280 bytes on cuda:1, ")):
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:1")
        del kept


def test_streams_are_those_of_their_device() -> None:
    with MetaTensorMode(MetaOptions(devices=2)):
        side = torch.cuda.Stream(1)
        assert (side.device, side.stream_id) == (torch.device("cuda:1"), torch.cuda.Stream(0).stream_id)  # 32 each
        before = torch.cuda.current_stream(0), torch.cuda.current_stream(1)
        with torch.cuda.stream(side):  # which selects its device too, for as long as the block lasts
            assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == side
            assert torch.cuda.current_stream(0) == before[0]
            x, y = torch.empty(2 * MIB, device="cuda:1"), torch.empty(2 * MIB, device="cuda:0")
        assert torch.cuda.current_device() == 0
        assert (torch.cuda.current_stream(0), torch.cuda.current_stream(1)) == before
        address = x.data_ptr(), y.data_ptr()
        del x, y  # what was freed is used again on its own stream alone
        assert (torch.empty(2 * MIB, device="cuda:1").data_ptr() == address[0],
                torch.empty(2 * MIB, device="cuda:0").data_ptr() == address[1]) == (False, True)


def test_lists_of_tensors_are_grouped_by_device() -> None:
    with MetaTensorMode(MetaOptions(devices=2)):
        model = nn.ModuleList([nn.Linear(4, 4, device=i % 2) for i in range(4)])
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as one norm for each device, the second copied
        assert total.device == torch.device("cuda:0")
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        assert all(optimizer.state[p]["exp_avg"].device == p.device for p in model.parameters())
