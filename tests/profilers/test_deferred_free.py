"""Memory that `record_stream` holds back: between free at once and free when the host knows that it may be."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from analyzer import Profile, ProfileOptions, profile

MIB = 1 << 20


def run(between, *, keeps=None, **options):
    """Four times 32 MiB of the default stream are used on a side stream and freed, then ``between(side, event, x)``."""
    class Model(nn.Module):
        def forward(self, x):
            side = torch.cuda.Stream()
            for _ in range(4):
                event = torch.cuda.Event()
                block = torch.empty(32 * MIB, dtype=torch.uint8, device=x.device)
                if keeps == "event before":
                    event.record(side)
                block.record_stream(torch.cuda.current_stream() if keeps == "own stream" else side)
                del block
                between(side, event, x)
            return x + 1

    return profile(Model(), (torch.empty(8),), device="h100", mode="infer", options=ProfileOptions(steps=1, **options))


def nothing(side, event, x): ...


def wait_for_side(side, event, x):
    side.synchronize()


def wait_for_all(side, event, x):
    torch.cuda.synchronize()


def wait_for_event(side, event, x):
    if not event.number:
        event.record(side)
    event.synchronize()


def read_behind_side(side, event, x):
    torch.cuda.current_stream().wait_stream(side)
    x.cpu()


def read_beside_side(side, event, x):
    x.cpu()


def empty_cache(side, event, x):
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("between", "keeps", "blocks"), [
    (nothing, None, 4), (wait_for_side, None, 1), (wait_for_all, None, 1), (wait_for_event, None, 1),
    (wait_for_event, "event before", 2),  # each is after the block before was freed
    (read_behind_side, None, 1), (read_beside_side, None, 4), (empty_cache, None, 1)])
def test_blocks_are_held_until_the_host_has_waited_for_the_stream(between, keeps, blocks):
    p = run(between, keeps=keeps)
    low, high = p.peak_reserved_bytes_range
    assert low == p.peak_reserved_bytes == 34 * MIB  # 2 MiB for small tensors
    assert high == (2 + 32 * blocks) * MIB
    assert any(text.startswith("record_stream: 4 blocks") and f"up to {high:,} bytes are reserved" in text
               for text in p.assumptions)


def test_no_more_is_reserved_than_there_is():
    assert run(nothing, capacity_bytes=80 * MIB).peak_reserved_bytes_range == (34 * MIB, 80 * MIB)


def test_memory_used_on_its_own_stream_alone_is_not_held_back():
    p = run(nothing, keeps="own stream")
    assert p.peak_reserved_bytes_range is None and not any("record_stream" in text for text in p.assumptions)


@pytest.mark.usefixtures("replaying_torch")
def test_the_end_of_a_step_is_waited_for():
    class Model(nn.Module):
        def forward(self, x):
            block = torch.empty(32 * MIB, dtype=torch.uint8, device=x.device)
            block.record_stream(torch.cuda.Stream())
            return x + 1

    p = profile(Model(), (torch.empty(8),), device="h100", mode="infer", options=ProfileOptions(steps=3))
    assert p.peak_reserved_bytes_range == (34 * MIB, 34 * MIB)
    assert [row.reason for row in p.replay if row.kind == "step"] == [
        "it uses streams or events, or waits for the device"]
    assert Profile.from_json(p.to_json()).peak_reserved_bytes_range == p.peak_reserved_bytes_range
