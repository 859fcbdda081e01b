"""CUDA graphs of compiled functions: what is captured, and the pool that they share."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from analyzer import Profile, ProfileOptions, dry_run, profile


class Net(nn.Module):
    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.writes, self.layers = writes, nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            x.add_(1)
        out: torch.Tensor = self.layers(x)
        return out


def are_captured(p: Profile) -> list[bool]:
    assert p.compiled is not None
    return [info.cuda_graphs for info in p.compiled]


def profile_net(model: Any, **options: Any) -> Profile:
    return profile(model, (torch.rand(512, 256),), device="h100", **{
        "optimizer": None if options.get("mode") == "infer" else "sgd", **options})


def test_each_half_is_launched_as_one_and_says_so() -> None:
    p = profile_net(torch.compile(Net(), mode="reduce-overhead"))
    assert are_captured(p) == [True]
    plain = profile_net(torch.compile(Net()))
    assert are_captured(plain) == [False]
    assert p.kernel_seconds == pytest.approx(plain.kernel_seconds, rel=0.1)


PARAMETERS = 4 * (2 * 256 * 1024 + 1024 + 256)
ROWS = 512 * 256 * 4  #: the bytes of the input, of the result, and of the loss's gradient for it


def test_a_replay_reserves_its_pool_and_allocates_nothing() -> None:
    """What is outside of the graphs alone: parameters, the input, the loss; the gradients of it and of the result."""
    plain, p = profile_net(torch.compile(Net())), profile_net(torch.compile(Net(), mode="reduce-overhead"))
    assert p.phases["forward"].allocated_bytes == PARAMETERS + ROWS + 512
    assert p.phases["backward"].allocated_bytes == PARAMETERS + ROWS + 512
    assert p.phases["backward"].peak_allocated_bytes == PARAMETERS + 2 * ROWS + 2 * 512
    assert p.phases["optimizer"].reserved_bytes == p.peak_reserved_bytes  # the pool is kept
    told = [any("is reserved, not allocated" in line for line in one.assumptions) for one in (p, plain)]
    assert told == [True, False]


def test_the_first_step_warms_up_with_what_it_allocates_in_the_pool_and_the_peak_adds_up() -> None:
    plain, p = profile_net(torch.compile(Net())), profile_net(torch.compile(Net(), mode="reduce-overhead"))
    assert p.first_step["backward"].allocated_bytes == PARAMETERS + ROWS + 512 + PARAMETERS  # gradients
    assert p.peak_allocated_bytes == p.first_step["backward"].peak_allocated_bytes == sum(p.peak_by_category.values())
    # when a graph has run, the workspaces of cuBLAS and cuBLASLt, 32 and 1 MiB, are given back
    assert plain.first_step["forward"].allocated_bytes is not None
    assert p.first_step["forward"].allocated_bytes == plain.first_step["forward"].allocated_bytes - 33 * 2 ** 20


def test_a_replayed_graph_is_run_in_each_step(replaying_torch: None) -> None:
    p, other = (profile_net(torch.compile(Net(), mode="reduce-overhead"), reuse=reuse) for reuse in (True, False))
    assert p.phases == other.phases and p.first_step == other.first_step and p.replay is not None
    assert [row.reason for row in p.replay if row.kind == "step"] == [
        "it captures CUDA graphs, and a step that replays them is another than the one before"]


class Layer(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        return out


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(nn.Linear(256, 256), nn.GELU()) for _ in range(3))
        for layer in self.layers:
            layer.compile(mode="reduce-overhead")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_an_earlier_graph_left_in_the_pool_is_read_where_it_is() -> None:
    """The first layer's input, and the gradient for the last one's result, are copied to where the graphs have them."""
    p = profile_net(Chain())
    assert [row.calls for row in p.operators if "foreach_copy" in row.operator] == [1, 1]


def test_later_steps_lie_where_the_first_did() -> None:
    first, third = [profile_net(torch.compile(Net(), mode="reduce-overhead"), options=ProfileOptions(steps=steps))
                    for steps in (1, 3)]
    assert first.peak_reserved_bytes == third.peak_reserved_bytes


def test_options_name_it_too_and_the_backend_of_that_name_captures() -> None:
    for wrapped in (torch.compile(Net(), options={"triton.cudagraphs": True}),
                    torch.compile(Net(), backend="cudagraphs")):
        p = profile_net(wrapped)
        assert are_captured(p) == [True]


def test_a_graph_that_writes_to_what_it_is_given_runs_kernel_by_kernel() -> None:
    p = profile_net(torch.compile(Net(writes=True), mode="reduce-overhead"), mode="infer")
    assert are_captured(p) == [False]
    assert any("it writes to 1 of the tensors" in line for line in p.assumptions)


def test_devices_without_cuda_have_none() -> None:
    p = profile(torch.compile(Net(), mode="reduce-overhead"), (torch.rand(4, 256),), device="xeon_8480", mode="infer")
    assert are_captured(p) == [False]


SERVES = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
net.cuda().requires_grad_(False)
run = torch.compile(net, mode="reduce-overhead")
x = torch.rand(512, 256, device="cuda")
for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = run(x)
    print("on top:", torch.cuda.max_memory_allocated() - before)
"""


def test_a_script_that_serves_replays_from_the_second_call_on(tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Warming up, a call allocates the hidden layer and more than its result; a replay nothing."""
    path = tmp_path / "serve.py"
    path.write_text(SERVES)
    assert dry_run(path, device="h100").error is None
    first, *others = [int(line.partition(": ")[2]) for line in capsys.readouterr().out.splitlines() if "on top" in line]
    assert first >= 4 * ROWS + ROWS and others == [0, 0]


BESIDE = """
import torch
net = torch.nn.Linear(256, 256).cuda().requires_grad_(False)
run = torch.compile(torch.nn.Linear(256, 256).cuda().requires_grad_(False), mode="reduce-overhead")
x = torch.rand(512, 256, device="cuda")
for _ in range(3):
    net(x)
    eager = torch.cuda.memory_allocated()
    run(x)
    print("given back:", (eager - torch.cuda.memory_allocated()) // 2 ** 20)
"""


def test_what_warms_up_or_is_captured_gives_back_the_workspaces_of_what_runs_beside_it(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of cuBLAS and cuBLASLt, 32 and 1 MiB: ``clear_cublas_manager`` of torch/_inductor/cudagraph_trees.py."""
    path = tmp_path / "beside.py"
    path.write_text(BESIDE)
    assert dry_run(path, device="h100").error is None
    lines = [line for line in capsys.readouterr().out.splitlines() if "given back" in line]
    assert lines == ["given back: 33", "given back: 33", "given back: 0"]
