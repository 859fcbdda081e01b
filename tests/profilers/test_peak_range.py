"""Ranges of peaks: `record_stream` holds memory back, and workspaces of cuDNN are in no source."""
import json

import pytest
import torch
from torch import nn

from analyzer import Profile, ProfileOptions, profile
from tests.call import Call

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


def wait_for_event(side, event, x):
    if not event.number:
        event.record(side)
    event.synchronize()


@pytest.mark.parametrize(("between", "keeps", "blocks"), [
    (nothing, None, 4), (lambda side, *_: side.synchronize(), None, 1), (lambda *_: torch.cuda.synchronize(), None, 1),
    (wait_for_event, None, 1), (wait_for_event, "event before", 2),  # each is after the block before was freed
    (lambda side, _, x: (torch.cuda.current_stream().wait_stream(side), x.cpu()), None, 1),
    (lambda side, _, x: x.cpu(), None, 4), (lambda *_: torch.cuda.empty_cache(), None, 1)])
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
    def forward(m, x):
        block = torch.empty(32 * MIB, dtype=torch.uint8, device=x.device)
        block.record_stream(torch.cuda.Stream())
        return x + 1

    p = profile(Call(forward), (torch.empty(8),), device="h100", mode="infer", options=ProfileOptions(steps=3))
    assert p.peak_reserved_bytes_range == (34 * MIB, 34 * MIB)
    assert [row.reason for row in p.replay if row.kind == "step"] == [
        "it uses streams or events, or waits for the device"]
    assert Profile.from_json(p.to_json()).peak_reserved_bytes_range == p.peak_reserved_bytes_range


# How much of the peaks rests on workspaces of cuDNN that are in no source: said, ranged, saved.

BLOCK = 512


def run_convolution(model: nn.Module, *shape: int, device: str = "h200", **options: object) -> Profile:
    return profile(model.to(torch.bfloat16), (torch.empty(shape, dtype=torch.bfloat16, device="meta"),), mode="infer",
                   device=device, **options)


def blocks(*sizes: int) -> int:
    """Bytes of blocks for so many elements of 2 bytes each."""
    return sum([-(-2 * n // BLOCK) * BLOCK for n in sizes])


N = 64
X, W = N * 64 * 56 * 56, 64 * 64 * 9  # elements of input (and output) and weights: 24.5 MiB and 72 KiB


def test_a_peak_rests_on_the_copies() -> None:
    p = run_convolution(nn.Conv2d(64, 64, 3, padding=1, bias=False), N, 64, 56, 56)
    held = blocks(X, X, W)
    copies = 50 * MIB  # 49.07 MiB, of a segment of which less than 1 MiB is left: it is given whole
    assert p.peak_allocated_bytes == held + copies
    assert p.peak_allocated_bytes_range == (held, held + copies)
    assert p.peak_reserved_bytes_range is not None
    low, high = p.peak_reserved_bytes_range
    # a segment for small blocks, one of 26 MiB each for input and output, one for the copies
    assert (low, high, p.peak_reserved_bytes) == (54 * MIB, 104 * MIB, 104 * MIB)
    assert p.assumptions == (
        "cuDNN: workspaces of convolutions and recurrent layers are in no source and inferred from measured steps. "
        f"{copies:,} bytes of peak_allocated_bytes rest on them, {50 * MIB:,} of peak_reserved_bytes",)


def test_a_workspace_that_is_taken_to_be_none_may_be_some() -> None:
    p = run_convolution(nn.Conv2d(64, 64, 1, bias=False), N, 64, 56, 56)
    assert p.peak_allocated_bytes is not None and p.assumptions == ()
    assert p.peak_allocated_bytes_range == (p.peak_allocated_bytes, p.peak_allocated_bytes + blocks(2 * X))


def test_partial_sums_of_the_weight_gradient_count() -> None:
    x = torch.empty(8, 64, 56, 56, dtype=torch.bfloat16, device="meta")
    p = profile(nn.Conv2d(64, 64, 3, padding=1, bias=False).to(torch.bfloat16), (x,), mode="train", device="h200")
    assert p.peak_allocated_bytes is not None and p.peak_allocated_bytes_range is not None
    tile, (low, high) = 128 * 128 * 4, p.peak_allocated_bytes_range
    assert p.peak_allocated_bytes - low > 5 * 26 * tile  # 5 tiles on 132 multiprocessors: 130 partial ones, and 5 flags
    assert high - p.peak_allocated_bytes == 2 * tile - BLOCK


@pytest.mark.parametrize(("model", "shape", "device"), [
    pytest.param(nn.Linear(64, 64), (8, 64), "h200", id="no convolution"),
    pytest.param(nn.Conv2d(64, 64, 3, groups=64), (8, 64, 56, 56), "h200", id="depthwise: PyTorch's own kernel"),
    pytest.param(nn.Conv2d(64, 64, 3), (8, 64, 56, 56), "v100_sxm2_16gb", id="no tensor cores for bfloat16"),
    pytest.param(nn.Conv2d(64, 64, 3), (8, 64, 56, 56), "cpu", id="no cuDNN"),
])
def test_nothing_is_said_where_nothing_is_inferred(model: nn.Module, shape: tuple[int, ...], device: str) -> None:
    p = run_convolution(model, *shape, device=device)
    assert (p.peak_allocated_bytes_range, p.peak_reserved_bytes_range, p.assumptions) == (None, None, ())


def test_placement_that_cannot_be_repeated_has_no_range() -> None:
    def step(model: nn.Module, optimizer: object, x: torch.Tensor) -> None:
        y = model(x)
        torch.cuda.empty_cache()  # the copies' segment goes, and another one comes with the gradient
        y.sum().backward()

    model = nn.Conv2d(64, 64, 3, padding=1, bias=False).to(torch.bfloat16)
    p = profile(model, (torch.empty(N, 64, 56, 56, dtype=torch.bfloat16, device="meta"),), step=step, device="h200")
    assert p.peak_allocated_bytes_range is not None and p.peak_reserved_bytes_range is None
    assert p.assumptions[-1].endswith("of peak_reserved_bytes an unknown part")


def test_replayed_blocks_have_the_range_of_run_ones() -> None:
    """The events of a replay are those of a run, so that what is asked again is the same."""
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
                               for _ in range(9)))

    x = torch.empty(8, 16, 64, 64, device="meta")
    one, other = (profile(build, (x,), optimizer="sgd", device="h200", reuse=reuse) for reuse in (True, False))
    assert one.peak_allocated_bytes_range == other.peak_allocated_bytes_range is not None
    assert one.peak_reserved_bytes_range == other.peak_reserved_bytes_range is not None
    assert one.assumptions == other.assumptions


def test_ranges_are_shown_and_saved() -> None:
    p = run_convolution(nn.Conv2d(64, 64, 3, padding=1, bias=False), N, 64, 56, 56)
    said = "99.07 MiB (49.07 to 99.07) allocated, 104.00 MiB (54.00 to 104.00) reserved"
    assert f"peak memory: {said}" in repr(p) and said in p.screen() and "104.00 MiB (54.00 to 104.00)" in p.summary()
    text = p.to_json()
    assert Profile.from_json(text).peak_allocated_bytes_range == p.peak_allocated_bytes_range
    data = {**json.loads(text), "version": 8}  # of which it was unknown
    del data["peak_allocated_bytes_range"]
    data["memory_events"] = [event[:5] for event in data["memory_events"]]  # and the device, what was asked for
    data["timeline"] = [point[:-1] for point in data["timeline"]]  # and what runs
    older = Profile.from_json(json.dumps(data))
    assert older.peak_allocated_bytes_range is None and older.peak_allocated_bytes == p.peak_allocated_bytes


@pytest.mark.parametrize(("function", "timed"), [
    # the input, the result, and what empties the cache
    (lambda x: torch.compile(lambda a: a * 2)(x), (4 + 4 + 256) * MIB),
    # the input, a copy of it, and what empties the cache; the second kernel copies as much, beside the result
    (lambda x: torch.compile(lambda a: a.mul_(2))(x), (4 + 4 + 256) * MIB),
    (lambda x: [torch.compile(lambda a: a.mul_(2))(x), torch.compile(lambda a, b: b.add_(a))(x, x.clone())],
     (4 + 4 + 4 + 256) * MIB),
    # tiles of two inputs have several shapes, those of one have one
    (lambda x: torch.compile(lambda a, b: a + b.t())(x, x.clone()), (4 + 4 + 4 + 256) * MIB),
    (lambda x: torch.compile(lambda a: a.t().contiguous())(x), None),
    # a sum has one way to run; and what is timed while a step needs more later
    (lambda x: torch.compile(lambda a: a.sum(-1))(x), None),
    (lambda x: [torch.compile(lambda a: a * 2)(x), torch.empty(300 * MIB, dtype=torch.uint8, device=x.device)], None)])
def test_kernels_are_timed_where_they_are_made(function, timed):
    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    p = profile(Model(), (torch.empty(1024, 1024),), device="h100", mode="infer", options=ProfileOptions(steps=1))
    between = None if timed is None else (p.peak_allocated_bytes, timed)
    assert p.peak_allocated_bytes_range == between
    assert any("times them on copies" in text for text in p.assumptions) is (timed is not None)
