"""The memory events and the timeline: replayed, they give what the log says."""
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from analyzer import ProfileOptions, profile
from analyzer.errors import InputError
from analyzer.hardware import find_device
from analyzer.memory.allocator import AllocatorOptions, CachingAllocator
from analyzer.memory.host_memory import HostMemory

MIB = 2**20
#: a host whose times need not be measured
CPU = replace(find_device("h100"), name="a host", kind="cpu")


def replay(events):
    """Peaks of allocated and reserved bytes, what is left, the levels after each event; addresses never overlap."""
    live: dict[int, int] = {}
    allocated = reserved = peak_allocated = peak_reserved = 0
    levels = set()
    for event in events:
        if event.action == "alloc":
            assert all(event.address + event.bytes <= a or a + n <= event.address for a, n in live.items())
            live[event.address] = event.bytes
            allocated += event.bytes
        elif event.action == "free":
            assert live.pop(event.address) == event.bytes
            allocated -= event.bytes
        else:
            reserved += event.bytes if event.action in ("segment_alloc", "segment_map") else -event.bytes
        peak_allocated, peak_reserved = max(peak_allocated, allocated), max(peak_reserved, reserved)
        levels.add((allocated, reserved))
    return peak_allocated, peak_reserved, allocated, levels


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten())


CASES = {"linear": (lambda: nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 8)), (256, 512), {}),
         "checkpointed": (Checkpointed, (1024, 512), {}), "convolutions": (convolutions, (8, 3, 64, 64), {}),
         "autocast": (convolutions, (8, 3, 64, 64), {"autocast": torch.bfloat16}),
         "inference": (convolutions, (8, 3, 64, 64), {"mode": "infer"}),
         "one step": (convolutions, (8, 3, 64, 64), {"options": ProfileOptions(steps=1)}),
         "expandable": (convolutions, (8, 3, 64, 64),
                        {"options": ProfileOptions(allocator=AllocatorOptions(expandable_segments=True))}),
         "on the host": (convolutions, (8, 3, 64, 64), {"device": CPU}),
         "run, not replayed": (convolutions, (8, 3, 64, 64), {"reuse": False}),
         "short of memory": (Checkpointed, (1024, 512), {"options": ProfileOptions(capacity_bytes=140 * MIB)})}


@pytest.mark.parametrize("name", CASES)
def test_events_replay_to_the_peak_and_each_point_says_which_came_before_it_and_when(name):
    model, shape, more = CASES[name]
    more = {"optimizer": None if more.get("mode") == "infer" else "adamw", "device": "h100", **more}
    p = profile(model, args=(torch.empty(shape),), **more)
    assert (p.out_of_memory is not None) == (name == "short of memory")
    peak_allocated, peak_reserved, left, reached = replay(p.memory_events)
    assert peak_allocated == p.peak_allocated_bytes == max(point.allocated_bytes for point in p.timeline)
    if p.peak_reserved_bytes is None:
        assert peak_reserved == 0 and {point.reserved_bytes for point in p.timeline} == {None}
    else:
        assert peak_reserved == p.peak_reserved_bytes == max(point.reserved_bytes for point in p.timeline)
    assert left == p.timeline[-1].allocated_bytes
    if p.out_of_memory is None:
        assert left == list(p.phases.values())[-1].allocated_bytes
    else:
        assert left == p.out_of_memory.allocated_bytes
    assert {point.allocated_bytes for point in p.timeline} <= {allocated for allocated, _ in reached}
    assert [phase for phase in dict.fromkeys(point.phase for point in p.timeline) if phase in p.phases] == [
        phase for phase in p.phases if any(point.phase == phase for point in p.timeline)]
    levels = [(0, 0)]
    for event in p.memory_events:
        grows = 1 if event.action in ("alloc", "segment_alloc", "segment_map") else -1
        levels.append((levels[-1][0] + (0 if "segment" in event.action else grows * event.bytes),
                       levels[-1][1] + (grows * event.bytes if "segment" in event.action else 0)))
    for point in p.timeline:
        assert levels[point.event] == (point.allocated_bytes, point.reserved_bytes or 0)
    events, seconds = [point.event for point in p.timeline], [point.seconds for point in p.timeline]
    assert events == sorted(events) and events[-1] == len(p.memory_events)
    assert seconds == sorted(seconds) and seconds[-1] > 0
    if p.out_of_memory is not None:
        assert p.spans == ()  # the step has no end
        return
    # memory that a call asks for is asked for when the host begins with it
    begun = {round(span.start_seconds * 10**12) for span in p.spans if span.kind == "launch"}
    assert {round(point.seconds * 10**12) for point in p.timeline[:-1] if point.seconds >= 0} <= begun


def test_without_a_known_time_points_have_none():
    p = profile(convolutions, args=(torch.empty(8, 3, 64, 64),), mode="infer", device=None)
    assert p.step_seconds is None and p.spans == () and {point.seconds for point in p.timeline} == {None}
    assert p.timeline[-1].event == len(p.memory_events)


def test_points_of_an_earlier_step_are_before_the_beginning():
    class Once(nn.Module):
        """Needs most in its first step."""
        def __init__(self):
            super().__init__()
            self.linear, self.ran = nn.Linear(64, 64), False

        def forward(self, x):
            wide = x if self.ran else torch.cat([x] * 512)
            self.ran = True
            return self.linear(wide).sum()

    p = profile(Once(), args=(torch.empty(8, 64),), optimizer="sgd", device="h100")
    seconds = [point.seconds for point in p.timeline]
    assert seconds == sorted(seconds) and seconds[0] == pytest.approx(-sum(x.seconds for x in p.first_step.values()))
    assert [point for point in p.timeline if point.seconds == 0] and seconds[-1] > 0


@pytest.mark.parametrize("expandable", [False, True])
def test_every_view_shows_them(expandable):
    p = profile(convolutions, args=(torch.empty(8, 3, 64, 64),), optimizer="adamw",
                options=ProfileOptions(allocator=AllocatorOptions(expandable_segments=expandable)))
    snapshot = p.to_memory_snapshot()
    assert {s["is_expandable"] for s in snapshot["segments"]} == {expandable}
    assert sum(s["total_size"] for s in snapshot["segments"]) == p.phases["zero_grad"].reserved_bytes
    assert sum(s["allocated_size"] for s in snapshot["segments"]) == p.phases["zero_grad"].allocated_bytes
    assert len(snapshot["device_traces"][0]) > len(p.memory_events)
    assert "no memory timeline" not in p.to_html()
    assert any(
        e["ph"] == "C" and e["args"]["allocated"] == p.peak_allocated_bytes for e in p.to_chrome_trace()["traceEvents"])
    assert type(p).from_json(p.to_json()) == p


def test_who_asked_and_for_what():
    p = profile(lambda: nn.Sequential(nn.Linear(512, 2048, bias=False), nn.ReLU()), args=(torch.empty(256, 512), ),
                optimizer="adam")
    blocks = {(e.label, e.category, e.bytes) for e in p.memory_events if e.action == "alloc"}
    weight, hidden = 4 * 512 * 2048, 4 * 256 * 2048
    # what was there before the last step, then what that step made: ReLU's output is saved, its input is not
    assert {("0.weight", "parameter", weight), ("input", "input", 4 * 256 * 512), ("_1", "activation", hidden),
            ("_0", "temporary", hidden), ("cublas workspace, forward thread", "workspace", 32 * MIB),
            ("loss", "loss", 512)} <= blocks
    categories = {
        category: sum(b for _, c, b in blocks if c == category) for category in ("gradient", "optimizer state")}
    assert categories["gradient"] == weight
    assert {e.category for e in p.memory_events if e.action.startswith("segment")} == {""}


def test_without_events_the_snapshot_tells_how_to_get_them():
    p = profile(nn.Linear(8, 8), args=(torch.empty(2, 8),), mode="infer", options=ProfileOptions(keep_events=False))
    assert p.memory_events == p.timeline == ()
    with pytest.raises(InputError, match=r"keep_events=True"):
        p.to_memory_snapshot()


@pytest.mark.parametrize("memory", [CachingAllocator, HostMemory])
@given(acts=st.lists(st.one_of(st.integers(1, 4 * MIB), st.sampled_from(["free", "reset", "lap"])), max_size=40))
def test_peaks_of_a_lap_and_peaks_of_the_user_do_not_disturb_one_another(memory, acts):
    memory = memory()
    blocks, lap, user = [], 0, 0
    for act in acts:
        if act == "free":
            if blocks:
                memory.free(blocks.pop())
        elif act == "reset":
            memory.reset_peaks()
            user = memory.allocated_bytes
        elif act == "lap":
            memory.begin_lap()
            lap = memory.allocated_bytes
        else:
            blocks.append(memory.allocate(act))
        lap, user = max(lap, memory.allocated_bytes), max(user, memory.allocated_bytes)
        assert (memory.lap_peaks()[0], memory.peak_allocated_bytes) == (lap, user)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_holders_add_up_to_the_peak_with_the_workspace_of_what_runs(mode):
    p = profile(convolutions, args=(torch.empty(8, 3, 64, 64),), mode=mode)
    held = {category: sum(h.bytes for h in p.holders if h.category == category) for category in p.peak_by_category}
    assert held == p.peak_by_category and sum(held.values()) == p.peak_allocated_bytes
    assert [h for h in p.holders if h.category == "workspace" and h.label in {node.name for node in p.nodes}]


class Refilled(nn.Module):
    """Discards a tensor's memory and takes it again for the bytes of another one, as Megatron's checkpoints do."""

    def __init__(self, rounds):
        super().__init__()
        self.rounds = rounds

    def forward(self, x):
        for _ in range(self.rounds):
            discarded, again = torch.empty_like(x), torch.empty_like(x)
            discarded.untyped_storage().resize_(0)
            discarded.untyped_storage().resize_(again.untyped_storage().nbytes())
            discarded.untyped_storage().copy_(again.untyped_storage())
            del discarded, again
        return x + 1


@pytest.mark.parametrize("rounds", [1, 4])
def test_storages_that_are_copied_into_each_other_die_with_their_tensors(rounds):
    p = profile(Refilled(rounds), (torch.empty(MIB // 4),), device="h100_sxm")
    assert p.peak_allocated_bytes == 3 * MIB  # the input, and what is discarded with what fills it
