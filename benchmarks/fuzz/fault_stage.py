"""What is run and stopped: every way to use the package, on small models with hooks, gradients and states of their own.

A `Stage` makes what its user holds once; a run of it gives text, which must be the same text after whatever happened.
"""
from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from analyzer import MetaTensorMode, Profile, ProfileOptions, fits, profile, symbolic_profile, symbolic_trace

Owned = dict[str, Any]


@dataclass(frozen=True)
class Stage:  # a use of the package: ``make`` gives what the user holds, ``run`` uses it, files in the folder
    name: str
    make: Callable[[Path], Owned]
    run: Callable[[Owned, Path], str]
    files: tuple[str, ...] = ()  #: that it writes
    #: what a whole run changes too, since it runs the user's own code as it is: an expression
    changes: str = "^$"
    tells: bool = False  #: whether an answer says what failed, in place of raising it


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Block(nn.Module):  # a block of which a model has several that are alike
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):  # alike blocks, which are run once and replayed
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Settings:  # a plain object that a model holds, with a tensor in it
    def __init__(self) -> None:
        self.scale, self.seen = torch.ones(8), [torch.zeros(1)]


class Hooked(nn.Module):
    """Hooks of every kind, gradients that are there already, tied weights, buffers that change, a cache, a global."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.tied = self.first
        self.count: Any
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.cache: list[Any] = []
        self.settings, self.calls = Settings(), 0
        self.first.register_forward_pre_hook(lambda *_: None)
        self.norm.register_forward_hook(lambda *_: None)
        self.second.register_full_backward_hook(lambda *_: None)
        self.second.weight.register_hook(lambda _: None)
        self.first.weight.register_post_accumulate_grad_hook(lambda _: None)
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.count += 1
        self.cache.append(x)
        self.last = x.mean()
        random.random(), numpy.random.rand()
        doubled: Any = Doubled.apply(self.norm(self.first(x)))  # type: ignore[no-untyped-call]
        x = self.second(doubled) * self.settings.scale
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.utils.checkpoint.checkpoint(self.tied, x + torch.rand_like(x), use_reentrant=False).float()
        return x


def square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


class Slow(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def make_slow(parameters: Any) -> Slow:
    return Slow(parameters, lr=0.1, momentum=0.9)


def own_step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    for part in x.split(2):
        model(part).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def build() -> Stack:
    return Stack()


def tell(found: Profile) -> str:  # every field of a profile but times that were measured
    return re.sub(r'"(object_id|id)": \d+', "", found.to_json())


def _with(model: Callable[[], nn.Module]) -> Callable[[Path], Owned]:
    def make(folder: Path) -> Owned:
        torch.manual_seed(0)
        return {"model": model(), "x": torch.ones(4, 8)}
    return make


def _profile(owned: Owned, folder: Path, **settings: Any) -> str:
    return tell(profile(owned["model"], (owned["x"],), **settings))


def _mode(owned: Owned, folder: Path) -> str:
    with MetaTensorMode() as mode:
        x = torch.rand(64, 8, device="cuda", requires_grad=True)
        model = Stack().cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).sum()
        loss.backward()
        with MetaTensorMode():
            torch.cuda.synchronize()
        return f"{x.grad is not None} {loss.device} {torch.cuda.max_memory_allocated()} {len(mode.state.assumptions)}"


def _symbolic_profile(owned: Owned, folder: Path) -> str:
    gm = symbolic_profile(symbolic_trace(owned["model"], meta_args={"x": owned["x"]}), owned["x"], device="h200")
    return tell(gm.meta["profile"])


def _graph_made(folder: Path) -> Owned:
    torch.manual_seed(0)
    gm = symbolic_trace(Stack(), meta_args={"x": torch.ones(4, 8)})
    symbolic_profile(gm, torch.ones(4, 8), device="h200")
    return {"gm": gm, "x": torch.ones(4, 8), "nodes": [dict(node.meta) for node in gm.graph.nodes]}


def _solve(owned: Owned, folder: Path) -> str:
    from analyzer.tools.solver import solve

    return str(solve(owned["gm"], 0.8, args=(owned["x"],)))


def _measure(owned: Owned, folder: Path) -> str:
    from analyzer.tools.runtime import measure

    found = measure(owned["model"], (owned["x"],), optimizer="adamw", steps=1)
    return f"{found.fwd_flops} {found.bwd_flops} {found.peak_allocated_bytes} {len(found.nodes)}"


def _shard() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Stack(2).cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def _ranks(owned: Owned, folder: Path) -> str:
    from analyzer.parallel import profile_ranks, world

    table = profile_ranks(lambda: nn.parallel.DistributedDataParallel(Stack(2).cuda()),
                          lambda: (torch.rand(4, 8, device="cuda"),), size=4, optimizer="sgd")
    with world(2, rank=1):
        found = profile(_shard, (owned["x"],), optimizer="adamw", device="h100")
    return f"{table}{tell(found)}"


def _generate_made(folder: Path) -> Owned:
    from analyzer.zoo.gpt2 import GPT2

    torch.manual_seed(0)
    return {"model": GPT2(vocabulary=50, positions=32, hidden=16, layers=2, heads=2)}


def _generate(owned: Owned, folder: Path) -> str:
    from analyzer import profile_generate

    found = profile_generate(owned["model"], prompt_tokens=4, new_tokens=3)
    return f"{found.steps}{tell(found.prefill)}"


def _sweep(owned: Owned, folder: Path) -> str:
    from analyzer.tools.sweep import sweep

    result = sweep(build, {"batch": [1, 2], "mode": "infer"}, inputs=["{batch}x8"], workers=0)
    return "".join(str({k: v for k, v in row.items() if k != "profile_seconds"}) for row in result.rows)


_SCRIPT = """
import random, sys
import torch
from torch import nn
from benchmarks.fuzz.fault_stage import Stack

model = Stack(2).cuda()
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(16, 8)), batch_size=4, shuffle=True)
for (x,) in loader:
    loss = model(x.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    random.random(), loss.item()
"""


def _dryrun_made(folder: Path) -> Owned:
    (folder / "train.py").write_text(_SCRIPT)
    return {}


def _dryrun(owned: Owned, folder: Path) -> str:
    from analyzer import dry_run

    random.seed(0), torch.manual_seed(0)
    found = dry_run(folder / "train.py", ["--flag"], steps=2)
    return f"{found.error}{tell(found.profile)}"


def _kept(folder: Path) -> Owned:
    for name in _FILES:
        (folder / name).write_text("good")
    return {"profile": profile(Stack(), (torch.ones(4, 8),), device="h200", options=ProfileOptions(keep_events=True))}


_FILES = ("p.json", "p.html", "trace.json", "snapshot.pickle", "deepspeed.txt", "command.json", "command.html",
          "rows.csv")


def _export(owned: Owned, folder: Path) -> str:
    found = owned["profile"]
    found.to_json(folder / "p.json"), found.to_html(folder / "p.html")
    found.to_chrome_trace(folder / "trace.json"), found.to_memory_snapshot(folder / "snapshot.pickle")
    found.report("deepspeed", output_file=folder / "deepspeed.txt")
    return f"{found.table()}{found.summary()}{found.module_tree()}"


def _command(owned: Owned, folder: Path) -> str:
    from analyzer.cli import main

    text, said = io.StringIO(), io.StringIO()
    target = "benchmarks.fuzz.fault_stage:Stack"
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(said):
        codes = [main(["profile", target, "--input", "4x8", "--json", str(folder / "command.json"), "--html",
                       str(folder / "command.html"), "--optimizer", "adamw"]),
                 main(["profile", target, "--input", "4x8", "--mode", "infer", "--show", "modules", "--export",
                       f"modules={folder / 'rows.csv'}"])]
    return f"{codes}{text.getvalue()}{said.getvalue() if any(codes) else ''}"


STAGES = {stage.name: stage for stage in (
    Stage("profile", _with(Stack), partial(_profile, optimizer="adamw", device="h200")),
    Stage("profile, hooks", _with(Hooked), partial(
        _profile, optimizer=make_slow, loss_fn=square, autocast=torch.bfloat16, device="h200")),
    Stage("profile, own step", _with(Stack), partial(_profile, optimizer="sgd", step=own_step, reuse=False)),
    Stage("profile, inference", _with(Hooked), partial(_profile, mode="infer", eval=True)),
    Stage("profile, factory", lambda folder: {"model": build, "x": torch.ones(4, 8)},
          partial(_profile, mode="infer", device="a100")),
    Stage("mode", lambda folder: {}, _mode),
    Stage("symbolic_trace", _with(Hooked),
          lambda owned, folder: str(symbolic_trace(owned["model"], meta_args={"x": owned["x"]}).graph)),
    Stage("symbolic_profile", _with(Stack), _symbolic_profile),
    Stage("measure", _with(Stack), _measure, changes="_version"),
    Stage("measure, hooks", _with(Hooked), _measure, changes="_version|'(last|calls|cache)'"),
    Stage("solver", _graph_made, _solve),
    Stage("ranks", lambda folder: {"x": torch.ones(4, 8)}, _ranks, tells=True),
    Stage("generation", _generate_made, _generate),
    Stage("sweep", lambda folder: {}, _sweep, tells=True),
    Stage("fits", _with(Stack),
          lambda owned, folder: str(fits(owned["model"], (owned["x"],), devices=["t4"], mode="infer"))),
    Stage("dryrun", _dryrun_made, _dryrun, changes="^random", tells=True),
    Stage("export", _kept, _export, _FILES[:5]),
    Stage("command", _kept, _command, _FILES[5:], tells=True))}
