"""Programs by torch.export and modules of TorchScript, where a module is wanted: figures are those of the module."""
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from analyzer import Profile, ProfileOptions, profile, symbolic_profile, symbolic_trace
from analyzer.errors import InputError
from analyzer.zoo.target import load_target
from tests.small_model import Calls

X = torch.arange(32.0).view(4, 8) / 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.b(torch.relu(self.norm(self.a(x)))), 0.5, self.training)


def figures(p: Profile) -> tuple[Any, ...]:
    return p.fwd_flops, p.bwd_flops, p.params, p.param_bytes, p.optimizer_bytes, p.peak_allocated_bytes


class Masked(nn.Module):
    """Makes a tensor where its input is: a program keeps the device of the machine that it was exported on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (torch.arange(x.shape[0], device=x.device) < 2)[:, None]


def test_a_program_that_was_exported_on_the_host_is_profiled_for_a_gpu() -> None:
    program = torch.export.export(Masked(), (X,))
    found, module = (profile(model, (X,), mode="infer", device="h100") for model in (program, Masked()))
    assert (found.fwd_flops, found.peak_allocated_bytes) == (module.fwd_flops, module.peak_allocated_bytes)
    assert "a program that was exported on cpu runs as one that was exported on cuda" in found.assumptions
    on_host = profile(program, (X,), mode="infer", device="cpu")  # which finds it as it was
    assert not any("exported on" in line for line in on_host.assumptions) and on_host.fwd_flops == found.fwd_flops


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("form", ["exported", "scripted", "jit.trace", "exported by a factory"])
def test_a_profile_has_the_figures_of_the_module(form: str, training: bool, mode: str) -> None:
    model = Net().train(training)
    made: Any = {"exported": lambda: torch.export.export(model, (X,)), "scripted": lambda: torch.jit.script(model),
                 "jit.trace": lambda: torch.jit.trace(model, X, check_trace=False)}[form.partition(" by ")[0]]()
    for _ in range(0 if "exported" in form else 3):  # TorchScript has optimized it before
        made(X)
    settings: dict[str, Any] = dict(args=(X,), mode=mode, device="h100", options=ProfileOptions(steps=3))
    given = (lambda: made) if "factory" in form else made
    for reuse in (True, False):
        found = profile(given, reuse=reuse, **settings)
        assert figures(found) == figures(profile(model, reuse=reuse, **settings))
    assert any("runs as it was exported" in a for a in found.assumptions) == (form == "exported")


@pytest.mark.parametrize("training", [False, True])
def test_an_exported_program_is_traced_as_its_module(training: bool) -> None:
    program = torch.export.export(Net().train(training), (X,))
    gm = symbolic_trace(program, meta_args={"x": X})
    torch.manual_seed(0)
    expected = program.module()(X)
    torch.manual_seed(0)
    assert torch.equal(gm(X), expected)
    of_trace = symbolic_profile(gm, X).meta["profile"]
    of_program = symbolic_profile(program, X).meta["profile"]
    assert of_trace.fwd_flops == of_program.fwd_flops > 0 and of_trace.bwd_flops == of_program.bwd_flops > 0
    assert profile(program, args=(X,), mode="infer", eval=True).params == 8 * 16 + 16 + 32 + 16 * 4 + 4


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, X, check_trace=False)])
def test_a_root_of_torchscript_is_refused_and_a_submodule_is_a_node(make: Any) -> None:
    scripted = make(Net().eval())
    with pytest.raises(InputError, match="TorchScript has no Python code to trace. Trace the module that it was made"):
        symbolic_trace(scripted, meta_args={"x": X})
    gm = symbolic_trace(nn.Sequential(scripted), meta_args={"input": X})
    assert torch.equal(gm(X), scripted(X))


def test_a_program_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text("import torch\nprogram = torch.export.export(torch.nn.Linear(8, 2), "
                                     "(torch.ones(4, 8),))\ndef make():\n    return program.module()\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("program", "make"):
        model = load_target(f"{tmp_path / 'net.py'}:{name}").build().train()
        assert profile(model, args=(X,), mode="infer", device="cpu").fwd_flops == 2 * 4 * 8 * 2


@pytest.mark.parametrize("make", [
    lambda: torch.export.export(Net(), (X,)), lambda: torch.export.export(Net(), (X,)).module(),
    lambda: make_fx(Net())(X), lambda: torch.jit.trace(Net().train(), X, check_trace=False)],
    ids=["export", "module", "make_fx", "jit.trace"])
def test_a_factory_may_make_a_graph_by_torch(make: Any) -> None:
    outside, state = make(), torch.get_rng_state()
    found = profile(make, X, device="h100")
    assert figures(found) == figures(profile(outside, X, device="h100")) and found.params == 8 * 16 + 16 + 32 + 68
    assert torch.equal(torch.get_rng_state(), state)


def linearized(trace: Any) -> nn.Module:
    return Calls(lambda m, x: trace(lambda z: torch.tanh(m.a(z)), x), a=nn.Linear(8, 8))


@pytest.mark.parametrize("trace", [lambda f, x: torch.func.linearize(f, x)[1](x), lambda f, x: make_fx(f)(x)(x)])
@pytest.mark.parametrize("run", [
    lambda model: profile(model, X), lambda model: profile(model, X, reuse=False, mode="infer"),
    lambda model: symbolic_trace(model, meta_args={"x": X})], ids=["profile", "not reused", "trace"])
def test_a_graph_made_in_forward_is_refused(trace: Any, run: Any) -> None:
    assert trace(torch.sin, X).shape == X.shape  # torch's own are as they were, also after the refusals
    with pytest.raises(InputError, match=r"graph of its own .*test_exported_program.py:\d+. Call torch.func.jvp"):
        run(linearized(trace))
    assert trace(torch.sin, X).shape == X.shape
    p = profile(linearized(lambda f, x: torch.func.jvp(f, (x,), (x,))[1]), X, mode="infer")
    assert p.fwd_macs == 3 * 4 * 8 * 8  # of the value, and what torch runs of the tangents of input and weight
