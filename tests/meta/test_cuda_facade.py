"""``torch.cuda`` under the mode: answers from the simulation, and torch's own as soon as the mode is left."""
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from analyzer import MetaTensorMode, profile, symbolic_profile, symbolic_trace
from analyzer.hardware import find_device
from analyzer.hardware.catalogue import simulating
from analyzer.meta.state import MetaOptions

MIB = 1 << 20


def test_the_claimed_device_is_there_and_has_its_properties(mode):
    assert torch.cuda.is_available() and torch.cuda.is_initialized()
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert (torch.cuda.get_device_name(), torch.cuda.get_device_capability()) == ("NVIDIA H200", (9, 0))
    properties = torch.cuda.get_device_properties("cuda:0")
    spec = find_device("h200")
    assert (properties.major, properties.minor, properties.total_memory, properties.multi_processor_count) == (
        9, 0, spec.memory_bytes, spec.multiprocessors)
    assert torch.cuda.is_bf16_supported() and torch.backends.cudnn.version() == 91900
    with simulating(dataclasses.replace(find_device("t4"), name="t4", aliases=())):
        assert (torch.cuda.get_device_name(), torch.cuda.get_device_capability()) == ("t4", (7, 5))
        assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)
    with MetaTensorMode(MetaOptions(capacity_bytes=100 * MIB)):
        assert torch.cuda.mem_get_info() == (100 * MIB, 100 * MIB)


def test_properties_that_are_not_known_are_none(mode):
    found = torch.cuda.get_device_properties(0)
    assert str(found.uuid) == "00000000-0000-0000-0000-000000000000" and found.pci_bus_id is None
    assert (found.max_threads_per_multi_processor, found.max_threads_per_block) == (2048, 1024)
    with simulating(find_device("l4")):
        assert torch.cuda.get_device_properties(0).max_threads_per_multi_processor == 1536


def test_a_share_of_the_memory_is_a_limit():
    with MetaTensorMode():
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        half = find_device("h200").memory_bytes // 2
        kept = torch.empty(half - 64 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=f"{half:,}"):
            torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
        for wrong, error in ((2.0, ValueError), (1, TypeError)):  # as torch.cuda.memory refuses them
            with pytest.raises(error):
                torch.cuda.set_per_process_memory_fraction(wrong)
        del kept


def test_a_pool_has_segments_of_its_own(mode):
    pool, x = torch.cuda.MemPool(), torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    with torch.cuda.use_mem_pool(pool):
        y = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    z = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == 40 * MIB  # x and z share a segment of 20 MiB
    assert [(s["total_size"], s["allocated_size"]) for s in pool.snapshot()] == [(20 * MIB, 3 * MIB)]
    del y
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 40 * MIB  # a pool that lives keeps its segments
    del pool
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 20 * MIB and len({x.data_ptr(), z.data_ptr()}) == 2


def test_a_profile_counts_what_is_in_a_pool():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(512, 512)

        def forward(self, x):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                return self.layer(x).relu()

    x = torch.empty(1024, 512)
    found, run = (profile(Pooled(), x, device="h100", reuse=reuse) for reuse in (True, False))
    outside = profile(nn.Sequential(nn.Linear(512, 512), nn.ReLU()), x, device="h100")
    assert found == run
    assert found.peak_allocated_bytes == outside.peak_allocated_bytes
    assert found.peak_reserved_bytes > outside.peak_reserved_bytes


def test_a_stream_of_another_library_is_the_one_that_its_pointer_names(mode):
    side = torch.cuda.Stream()
    assert torch.cuda.ExternalStream(side.cuda_stream) == side
    assert isinstance(torch.cuda.ExternalStream(side.cuda_stream), torch.cuda.Stream)


def test_snapshots_have_the_segments(mode, tmp_path):
    x = torch.empty(100, device="cuda")
    torch.cuda.memory._record_memory_history(max_entries=100)
    found = torch.cuda.memory._snapshot()
    assert [s["address"] for s in found["segments"]] == [x.data_ptr()] and found["device_traces"] == [[]]
    assert found["allocator_settings"]["max_split_size"] == -1
    assert found["allocator_settings"]["roundup_power2_divisions"] == {str(1 << i): 0 for i in range(16)}
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes()) == found


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_default_device_needs_no_index(mode, device):
    try:
        torch.set_default_device(device)
        assert torch.get_default_device() == torch.device("cuda:0") == nn.Linear(2, 2).weight.device
    finally:
        torch.set_default_device(None)
    with torch.device(device):
        assert torch.zeros(2).device == torch.device("cuda:0")


def test_memory_is_that_of_the_simulated_allocator(mode):
    assert torch.cuda.memory_allocated() == 0
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    y = torch.empty(100, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 3 * MIB + 512
    assert torch.cuda.memory_reserved() == 20 * MIB + 2 * MIB  # kLargeBuffer for 1 to 10 MiB, kSmallBuffer below 1 MiB
    del x
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (512, 3 * MIB + 512)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 512
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()) == (2 * MIB, 22 * MIB)
    stats = torch.cuda.memory_stats()
    assert (stats["allocated_bytes.all.current"], stats["requested_bytes.all.current"]) == (512, 100)
    assert stats["reserved_bytes.all.peak"] == 22 * MIB
    free, total = torch.cuda.mem_get_info()
    assert (total, total - free) == (find_device("h200").memory_bytes, 2 * MIB)
    assert "Allocated memory" in torch.cuda.memory_summary()
    assert torch.cuda.memory.memory_allocated() == torch.cuda.memory_allocated(torch.device("cuda:0")) == 512
    assert [s["total_size"] for s in torch.cuda.memory_snapshot()] == [2 * MIB]
    del y


def test_streams_have_pools_of_their_own_and_events_a_placeholder(mode):
    side = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x = torch.empty(100, device="cuda")
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side != torch.cuda.default_stream()
        start.record()
        y = torch.empty(100, device="cuda")
        end.record()
    side.synchronize(), side.wait_stream(torch.cuda.current_stream()), end.synchronize(), torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.memory_reserved() == 2 * 2 * MIB  # one segment per stream
    assert (start.elapsed_time(end), end.query(), side.query()) == (1.0, True, True)
    assert any("elapsed_time" in text for text in mode.state.assumptions)
    assert isinstance(side, torch.cuda.Stream) and isinstance(start, torch.cuda.Event)
    del x, y


def test_devices_can_be_selected_and_are_put_back(mode):
    with MetaTensorMode(MetaOptions(devices=2)), torch.cuda.device(1):
        assert torch.cuda.current_device() == 1 and torch.empty(
            1, device="cuda").device.index == torch.empty(1).cuda().device.index == 1
    with torch.cuda.device_of(torch.empty(1, device="cuda")):
        assert torch.cuda.current_device() == 0
    torch.cuda.set_device(torch.device("cuda:0"))
    assert torch.cuda.current_device() == 0
    side = torch.cuda.Stream()
    torch.cuda.set_stream(stream=side)
    assert torch.cuda.current_stream() == side
    with torch.cuda.nvtx.range("step"):  # marks and markers do nothing
        torch.cuda.nvtx.mark("here")
    torch.cuda.profiler.start()


def test_random_state_has_no_data_and_the_hosts_generator_stays_as_it_is(mode):
    before = torch.random.default_generator.initial_seed()
    torch.cuda.manual_seed(5)
    torch.cuda.manual_seed_all(5)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    assert state.shape == (16,) and state.device.type == "cpu"
    assert torch.random.default_generator.initial_seed() == before
    generator = torch.Generator(device="cuda").manual_seed(0)
    assert generator.device == torch.device("cuda", 0) and isinstance(generator, torch.Generator)
    assert torch.rand(3, device="cuda", generator=generator).device.type == "cuda"
    assert torch.Generator().device.type == "cpu"
    default = torch.cuda.default_generators[torch.cuda.current_device()]  # whose state model parallel code keeps
    assert default.set_state(default.get_state()).device == torch.device("cuda", 0)
    assert [one.device for one in torch.cuda.default_generators[:2]] == [torch.device("cuda", 0)]
    with pytest.raises(IndexError, match=r"default_generators\[1\]: there are 1 devices"):
        torch.cuda.default_generators[1]


def test_the_accelerator_api_answers_alike(mode):
    x = torch.empty(1000, device="cuda")
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 1
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() == 4096
    del x


@pytest.mark.parametrize(("device", "found"), [
    ("cpu", (False, 0, False, None, False, False)), ("h200", (True, 1, True, torch.device("cuda"), True, True))])
def test_a_simulated_host_has_no_accelerator(mode, device, found):
    with simulating(find_device(device)):
        assert found == (torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.is_available(),
                         torch.accelerator.current_accelerator(), torch.backends.cudnn.is_available(),
                         torch.cuda.is_bf16_supported())


def test_without_a_device_what_needs_one_raises_as_in_torch(mode):
    with simulating(find_device("m2_max")):
        assert torch.accelerator.current_accelerator() == torch.device("mps") and torch.accelerator.device_count() == 1
        assert torch.backends.mps.is_available() and not torch.cuda.is_available()
    assert not torch.backends.mps.is_available()
    with simulating(find_device("cpu")):
        torch.cuda.manual_seed_all(0)
        assert torch.cuda.memory_allocated() == 0
        for ask in (torch.cuda.get_device_name, torch.cuda.current_device, torch.cuda.get_device_properties):
            with pytest.raises((RuntimeError, AssertionError)):
                ask()


class Asking(nn.Module):
    """A model that multiplies by a number which tells what it was answered about the machine."""

    def forward(self, x):
        found = [torch.cuda.is_available(), torch.cuda.device_count(), torch.accelerator.is_available(),
                 torch.backends.cudnn.is_available(), torch.cuda.is_bf16_supported(), torch.cuda.is_initialized(),
                 torch.accelerator.current_accelerator() is not None]
        if found[0]:
            found.append("H200" in torch.cuda.get_device_name())
        return x * sum(found)


def test_a_trace_on_the_host_answers_as_this_machine_does():
    net, x = Asking(), torch.ones(2)
    with MetaTensorMode():
        claimed = torch.ones(2, device="cuda")
        within = symbolic_trace(net, meta_args={"x": torch.ones(2)})  # asks the machine around it
    graphs = {"host": symbolic_trace(net, meta_args={"x": x}),
              "nowhere": symbolic_trace(net, meta_args={"x": x.to("meta")}),
              "claimed": symbolic_trace(net, meta_args={"x": claimed}), "within": within}
    here = net(x)[0].item()
    assert {name: gm(x)[0].item() for name, gm in graphs.items()} == {
        "host": here, "nowhere": here, "claimed": 8, "within": 8}


class Branching(nn.Module):
    """A model with another layer on a machine with a GPU, or with one of that name."""

    def __init__(self, name=""):
        super().__init__()
        self.layer, self.name = nn.Linear(4, 4, bias=False), name

    def forward(self, x):
        x = self.layer(x)
        return self.layer(x) if torch.cuda.is_available() and self.name in torch.cuda.get_device_name() else x


@pytest.mark.parametrize(("name", "device", "calls"), [
    ("", "h200", 2), ("", "cpu", 1), ("H100", "h100_sxm", 2), ("H100", "h200", 1)])
def test_a_profile_answers_for_its_device(name, device, calls):
    p = profile(Branching(name), (torch.ones(1, 4),), device=device, mode="infer")
    assert p.fwd_macs == 16 * calls


@pytest.mark.parametrize(("device", "features"), [("h200", 90), ("t4", 75), ("cpu", 1)])
def test_what_builds_a_model_is_answered_for_the_profile_s_device(device, features):
    def build():
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 1)
        return nn.Linear(1, 10 * major + minor, bias=False)

    assert profile(build, (torch.ones(1, 1),), device=device, mode="infer").params == features


def test_a_symbolic_profile_on_the_host_answers_as_this_machine_does():
    class Leaf(Branching):
        pass

    x = torch.ones(1, 4)
    gm = symbolic_trace(nn.Sequential(Leaf()), meta_args={"input": x})
    macs = sum(node.meta["info"].fwd_macs for node in symbolic_profile(gm, x, mode="infer").graph.nodes)
    assert macs == 16 * (1 + torch.cuda.is_available())
