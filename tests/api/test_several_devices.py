"""A step of a model whose layers lie on several devices of one process: each one's memory, copies, time, verdict."""
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzer import MetaTensorMode, Profile, ProfileOptions, fits, profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.meta.state import MetaOptions
from analyzer.parallel import world
from analyzer.results.world import CopyInfo

KIB, MIB = 1 << 10, 1 << 20
WIDTH, ROWS = 256, 64
WEIGHT, ACTIVATION = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH  # 256 and 64 KiB
CUBLAS = (2 * 4096 + 8 * 16) * KIB  # of an L4, by device, for the thread of forward and that of backward


class Chain(nn.Module):
    """As many layers on each device as ``layers`` says."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]).to(i)
                                    for i, count in enumerate(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for i, part in enumerate(self.parts):
            x = part(x.to(f"cuda:{i}"))
        return x


def run(*layers: int, **settings: Any) -> Profile:
    return profile(lambda: Chain(*layers), torch.rand(ROWS, WIDTH), **{
        "device": "l4", "devices": len(layers), "optimizer": "sgd", **settings})


def test_each_device_has_its_own_memory() -> None:
    p = run(1, 3)
    first, second = p.devices
    assert (first.name, second.name, p.fullest_device, p.model_parallel_size) == ("cuda:0", "cuda:1", "cuda:1", 2)
    assert (first.param_bytes, second.param_bytes, p.param_bytes) == (WEIGHT, 3 * WEIGHT, 4 * WEIGHT)
    # after the step, whose gradients are gone: weights, the input, a workspace for each direction
    assert first.allocated_bytes == WEIGHT + ACTIVATION + 2 * CUBLAS
    assert second.allocated_bytes == 3 * WEIGHT + 2 * CUBLAS
    # the most is held when the last gradient is made: that of what was copied is made after it
    assert (second.peak_by_category["gradient"], second.peak_phase) == (3 * WEIGHT, "backward")
    assert second.peak_by_category["workspace"] == 2 * CUBLAS and second.peak_by_category["parameter"] == 3 * WEIGHT
    for row in p.devices:
        assert sum(row.peak_by_category.values()) == row.peak_allocated_bytes <= row.peak_reserved_bytes
    # what the profile says of memory is of the fullest device
    assert (p.peak_allocated_bytes, p.peak_reserved_bytes, p.peak_by_category) == (
        second.peak_allocated_bytes, second.peak_reserved_bytes, second.peak_by_category)
    assert max(point.allocated_bytes for point in p.timeline) == p.peak_allocated_bytes
    assert sum(holder.bytes for holder in p.holders) == p.peak_allocated_bytes
    assert {event.device for event in p.memory_events} == {0, 1}


def test_inference_holds_what_runs() -> None:
    p = run(2, 1, 1, mode="infer", optimizer=None)
    # on the first device the input and two activations at once, on the others what was copied and what is computed
    assert [row.peak_allocated_bytes - CUBLAS for row in p.devices] == [
        2 * WEIGHT + 3 * ACTIVATION, WEIGHT + 2 * ACTIVATION, WEIGHT + 2 * ACTIVATION]
    assert p.fullest_device == "cuda:0" and [row.optimizer_bytes for row in p.devices] == [0, 0, 0]


def test_optimizer_states_are_where_their_parameters_are() -> None:
    p = run(1, 3, optimizer="adamw")
    assert [row.optimizer_bytes for row in p.devices] == [2 * WEIGHT, 6 * WEIGHT] and p.optimizer_bytes == 8 * WEIGHT


def test_copies_have_bytes_and_time() -> None:
    p = run(1, 1, 1)
    assert [(row.source, row.target, row.phase, row.copies, row.bytes) for row in p.copies] == [
        ("cuda:0", "cuda:1", "forward", 1, ACTIVATION), ("cuda:1", "cuda:0", "backward", 1, ACTIVATION),
        ("cuda:1", "cuda:2", "forward", 1, ACTIVATION), ("cuda:2", "cuda:1", "backward", 1, ACTIVATION)]
    # an L4 has PCI Express 4.0 alone: 32 GB/s, of which 0.8 are reached, and 2.5 us until a copy begins
    assert [row.seconds for row in p.copies] == [pytest.approx(2.5e-6 + ACTIVATION / 25.6e9, rel=1e-4)] * 4
    assert all(row.is_between_devices for row in p.copies)
    assert not CopyInfo("cpu", "cuda:1", "forward", 1, 4).is_between_devices


def test_a_copy_waits_for_both_devices_and_is_waited_for() -> None:
    p = run(1, 1, mode="infer", optimizer=None)
    kernels = [span for span in p.spans if span.lane != "host"]
    assert [(span.lane, span.kind) for span in kernels] == [
        ("compute cuda:0", "kernel"), ("compute cuda:0", "copy"), ("compute cuda:1", "kernel")]
    for before, after in zip(kernels, kernels[1:]):
        assert after.start_seconds >= before.end_seconds
    assert [row.kernel_seconds for row in p.devices] == [pytest.approx(sum(
        span.seconds for span in kernels if span.lane.endswith(row.name))) for row in p.devices]


class Branches(nn.Module):
    """Two products that wait for nothing of each other."""

    def __init__(self, *devices: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4096, 4096, bias=False).to(i) for i in devices])

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [part(given) for part, given in zip(self.parts, (x, y))]


@pytest.mark.parametrize(("devices", "overlap"), [((0, 1), True), ((1, 1), False)])
def test_kernels_of_two_devices_run_beside_each_other(devices: tuple[int, ...], overlap: bool) -> None:
    with MetaTensorMode(MetaOptions(devices=2)):
        args = tuple(torch.rand(8192, 4096, device=i) for i in devices)
    p = profile(lambda: Branches(*devices), args, mode="infer", device="a100", devices=2)
    assert [tensor.device for tensor in p.inputs.values()] == [f"cuda:{i}" for i in devices]
    assert p.step_seconds is not None and p.kernel_seconds is not None
    assert (p.step_seconds < 0.6 * p.kernel_seconds) == overlap


def test_the_step_fits_where_all_devices_do() -> None:
    p = run(1, 3)
    verdict = p.verdict
    assert verdict is not None and verdict.fits and (verdict.place, verdict.count) == ("cuda:1", 2)
    assert str(verdict).startswith("fits on 2 x l4: ") and "needed on cuda:1, " in str(verdict)
    assert p.fits("t4").place == "cuda:1" and p.fits("t4").needed_bytes > (p.devices[0].peak_reserved_bytes or 0)
    table = fits(lambda: Chain(1, 3), torch.rand(ROWS, WIDTH), devices=["t4", "l4"], options=ProfileOptions(devices=2))
    assert [(row.device, row.fits, row.count) for row in table] == [("t4", True, 2), ("l4", True, 2)]


def test_memory_runs_out_on_the_last_device() -> None:
    p = run(1, 1, 24, options=ProfileOptions(capacity_bytes=28 * MIB))
    assert p.out_of_memory is not None and p.out_of_memory.phase == "backward" and p.fullest_device == "cuda:2"
    verdict = p.verdict
    assert verdict is not None and verdict.place == "cuda:2" and verdict.is_out_of_memory
    assert "28.00 MiB on cuda:2" in p.screen()
    whole = run(1, 1, 24, options=ProfileOptions(capacity_bytes=64 * MIB))
    assert whole.out_of_memory is None and whole.fullest_device == "cuda:2"


def test_reports_have_a_row_for_each() -> None:
    p = run(1, 3)
    for text in (p.screen(), p.screen(80), p.summary(), p.report("devices")):
        rows = [line.split() for line in text.splitlines()]
        assert [row[0] for row in rows if row[-1:] == ["yes"]] == ["cuda:0", "cuda:1"]
    assert len(p.screen().splitlines()) <= 40 and len(run(*[1] * 9).screen().splitlines()) <= 40
    assert "copied from device to device: 128.00 KiB in 2, " in p.screen() and "on 2 x l4" in p.screen()
    page = p.to_html()
    assert "<th scope=\"row\">cuda:1</th>" in page and "Memory over the step on cuda:1" in page
    again = Profile.from_json(p.to_json())
    assert again == p and again.screen() == p.screen()
    snapshot = p.to_memory_snapshot()
    assert [sum(s["total_size"] for s in snapshot["segments"] if s["device"] == i) for i in (0, 1)] == [
        row.reserved_bytes for row in p.devices]
    assert [sum(s["allocated_size"] for s in snapshot["segments"] if s["device"] == i) for i in (0, 1)] == [
        row.allocated_bytes for row in p.devices]
    assert len(snapshot["device_traces"]) == 2


def test_one_device_has_no_rows() -> None:
    p = run(2)
    assert (p.devices, p.copies, p.fullest_device, p.verdict.place, p.verdict.count) == ((), (), None, None, 1)
    assert p.report("devices") == "The process has one device, l4." and {e.device for e in p.memory_events} == {0}


def test_a_step_of_the_caller_sees_the_same_memory() -> None:
    seen: list[list[int]] = []

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())])

    p = run(1, 3, step=step)
    assert seen[-1] == [row.peak_allocated_bytes for row in p.devices]


def test_weights_that_are_tied_across_devices_are_copied_for_use() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, WIDTH, device="cuda:0")
            self.body = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda:1")

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.body(self.embed(ids).to("cuda:1"))
            return nn.functional.linear(hidden, self.embed.weight.to("cuda:1"))

    p = profile(Tied, torch.zeros(ROWS, dtype=torch.long), device="l4", devices=2)
    table = 4 * 1000 * WIDTH
    assert [row.param_bytes for row in p.devices] == [table, WEIGHT]
    assert {(row.source, row.target, row.phase): row.bytes for row in p.copies} == {
        ("cuda:0", "cuda:1", "forward"): ACTIVATION + table, ("cuda:1", "cuda:0", "backward"): ACTIVATION + table}


def test_a_checkpoint_across_devices_runs_again_where_it_ran() -> None:
    class Checkpointed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    p = profile(lambda: Checkpointed(2, 2), torch.rand(ROWS, WIDTH), device="l4", devices=2)
    plain = run(2, 2, optimizer=None)
    assert p.recompute_flops == 3 * 2 * ROWS * WIDTH**2  # the last product's result is not needed again
    assert sum(row.copies for row in p.copies) == sum(row.copies for row in plain.copies) + 1


def test_streams_of_two_devices() -> None:
    class Piped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False, device=i) for i in (0, 1)])
            self.side = [torch.cuda.Stream(i) for i in (0, 1)]

        def forward(self, x: Tensor) -> Tensor:
            with torch.cuda.stream(self.side[0]):
                y = self.parts[0](x)
            self.side[1].wait_stream(self.side[0])
            with torch.cuda.stream(self.side[0]), torch.cuda.stream(self.side[1]):
                z = self.parts[1](y.to("cuda:1"))
            torch.cuda.synchronize(1)
            return z

    p = profile(Piped, torch.rand(ROWS, WIDTH), mode="infer", device="l4", devices=2)
    lanes = [span.lane for span in p.spans if span.lane != "host"]
    assert lanes == ["stream 1 cuda:0", "stream 1 cuda:0", "stream 2 cuda:1"] or len({*lanes}) == 2
    assert not any(lane.startswith("compute") for lane in lanes)


def test_graphs_lie_on_devices_as_their_modules_do() -> None:
    with MetaTensorMode(MetaOptions(devices=2)):
        model = Chain(1, 2)
    gm = symbolic_profile(symbolic_trace(model, meta_args={"x": torch.rand(ROWS, WIDTH)}), torch.rand(ROWS, WIDTH),
                          device="l4")
    p = gm.meta["profile"]
    assert [row.param_bytes for row in p.devices] == [WEIGHT, 2 * WEIGHT]
    assert [row.bytes for row in p.copies] == [ACTIVATION, ACTIVATION]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="invalid device ordinal: cuda:1 where torch.cuda.device_count.. is 1"):
        run(1, 1, devices=1)
    with pytest.raises(InputError, match="devices=2: the host, cpu, is one device"):
        profile(nn.Linear(2, 2), torch.rand(2, 2), device="cpu", devices=2)
    with world(2), pytest.raises(InputError, match="devices=2: is for one process that has them all, and this is ra"):
        profile(lambda: nn.Linear(2, 2), torch.rand(2, 2), devices=2)
    with MetaTensorMode(MetaOptions(devices=2)):
        model = Chain(1, 1)
    with pytest.raises(InputError, match="invalid device ordinal: cuda:1"):
        profile(model, torch.rand(ROWS, WIDTH))
    assert len(profile(model, torch.rand(ROWS, WIDTH), devices=2, mode="infer").devices) == 2


def test_tensors_of_two_devices_do_not_meet() -> None:
    class Mixed(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](x))  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match="same device, but found at least two devices, cuda:"):
        profile(lambda: Mixed(1, 1), torch.rand(ROWS, WIDTH), devices=2)
