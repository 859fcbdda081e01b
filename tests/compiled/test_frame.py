"""Graphs that break in functions which others call: how many run is what Dynamo says of the same code.

Assertions stay as they are written: PYTEST_DONT_REWRITE.
"""
from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analyzer import profile

Code = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """Its forward pass is a function of it."""

    def __init__(self, code: Code, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.code, self.inner = code, inner
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def plain(model: Any, x: Tensor) -> Tensor:
    return model.layers[1](model.layers[0](x))  # type: ignore[no-any-return]


def broken(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x).relu()
    torch._dynamo.graph_break()
    return model.layers[1](x)  # type: ignore[no-any-return]


def twice(model: Any, x: Tensor) -> Tensor:
    return broken(model, broken(model, x).relu()).relu()


def around(model: Any, x: Tensor) -> Tensor:
    return model.layers[1](model.inner(model.layers[0](x))).relu()  # type: ignore[no-any-return]


def breaks_in_loop(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x).relu()
        print(end="")
    return x.sum()


def calls_in_loop(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    for _ in range(3):
        x = model.inner(x)
    return model.layers[1](x)  # type: ignore[no-any-return]


def behind_a_break(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x).relu()
    print(end="")
    x = x.exp()
    for layer in model.layers:
        x = layer(x).relu()
        print(end="")
    return x


def tries(model: Any, x: Tensor) -> Tensor:
    try:
        x = broken(model, x)
    finally:
        x = x * 2
    return x


def without_gradient(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = model.layers[0](x)
        torch._dynamo.graph_break()
        y = model.layers[1](y)
    return model.layers[2](x) + y  # type: ignore[no-any-return]


def drops_layers(model: Any, x: Tensor) -> Tensor:
    """As OPT and Whisper do in training."""
    for layer in model.layers:
        if torch.rand([]) < 0:
            continue
        x = layer(x).relu()
    return x


def asserts(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    assert torch.isfinite(x).all(), "not finite"
    return model.layers[1](x)  # type: ignore[no-any-return]


def raises(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    if torch.isnan(x).any():
        raise ValueError("not a number")
    return model.layers[1](x)  # type: ignore[no-any-return]


def logs(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    logging.getLogger("nobody").debug("here")
    return model.layers[1](x)  # type: ignore[no-any-return]


def looks_at_the_clock(model: Any, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    time.time()
    return model.layers[1](x)  # type: ignore[no-any-return]


CASES: dict[str, tuple[Code, Code | None, int]] = {  # and how many graphs run
    "in the function itself": (broken, None, 2), "in a function called twice": (twice, None, 6),
    "in a module": (around, broken, 4), "in a module's module": (around, twice, 8),
    "in a loop": (breaks_in_loop, None, 0), "in what a loop calls": (calls_in_loop, broken, 6),
    "in a loop behind another": (behind_a_break, None, 1), "in a try block": (tries, None, 2),
    "in no_grad": (without_gradient, None, 2), "dropped layers": (drops_layers, None, 0),
    "an assertion": (asserts, None, 1), "a check that raises": (raises, None, 2), "a logger": (logs, None, 2),
    "a clock": (looks_at_the_clock, None, 2),
    "no break": (around, plain, 1)}


def build(name: str) -> nn.Module:
    code, inner, _ = CASES[name]
    return Model(code, None if inner is None else Model(inner))


def count_by_dynamo(model: nn.Module, wrap: Callable[..., Any] = torch.compile) -> int:
    """How many graphs run in a call of what ``wrap`` makes of a model and a backend."""
    ran: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append(1)
            return graph.forward(*args)
        return run

    torch._dynamo.reset()
    compiled = wrap(model, backend=count)
    compiled(torch.rand(2, 8))
    ran.clear()
    compiled(torch.rand(2, 8))
    torch._dynamo.reset()
    return len(ran)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="try blocks are not told before Python 3.11")
def test_as_many_graphs_run_as_dynamo_makes(name: str) -> None:
    assert count_by_dynamo(build(name)) == CASES[name][2]
    p = profile(torch.compile(build(name)), torch.rand(2, 8), device="h100", loss_fn=torch.sum)
    assert p.compiled is not None and [row.graphs for row in p.compiled] == [CASES[name][2]]


def test_a_module_that_is_kept_from_the_compiler_has_no_graph_where_its_caller_has_none() -> None:
    def calls_behind_a_break(model: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = model.inner(x) if x.sum() > -1 else x
        return x

    inner = Model(plain)
    inner.forward = torch.compiler.disable(inner.forward)  # type: ignore[method-assign]
    model = Model(calls_behind_a_break, inner)
    assert count_by_dynamo(model) == 0
    p = profile(torch.compile(model), torch.rand(2, 8), device="h100", loss_fn=torch.sum)
    assert p.compiled is not None and [row.graphs for row in p.compiled] == [0]


def profile_loop(**options: Any) -> Any:
    return profile(torch.compile(Model(calls_in_loop, Model(broken))), torch.rand(2, 8), device="h100",
                   loss_fn=torch.sum, optimizer="adamw", **options)


def test_a_frame_that_runs_as_written_is_told_with_the_line_and_the_reason() -> None:
    p = profile_loop()
    reasons = [entry.reason for entry in p.compiled[0].breaks]
    assert reasons[0].startswith("calls_in_loop runs as it is written, since a graph breaks in a loop at ")
    assert reasons[0].endswith(": torch._dynamo.graph_break()") and "test_frame.py:" in reasons[0]
    assert reasons[1:] == ["torch._dynamo.graph_break()"]


def test_the_first_step_is_right_and_replays_as_it_runs() -> None:
    p, other = profile_loop(), profile_loop(reuse=False)
    assert p.phases == other.phases and p.first_step == other.first_step and p.compiled == other.compiled
    assert p.first_step["forward"].kernels == p.phases["forward"].kernels


def test_state_that_forward_keeps_is_as_if_the_run_had_not_begun_again() -> None:
    def counts(model: Any, x: Tensor) -> Tensor:
        model.count = getattr(model, "count", 0) + 1
        return around(model, x)

    model = Model(counts, Model(broken))
    seen: list[Any] = []

    def loss(y: Tensor) -> Tensor:
        seen.append(model.count)
        return y.sum()

    profile(torch.compile(model), torch.rand(2, 8), device="h100", reuse=False, loss_fn=loss)
    assert seen[-2:] == [1, 2] and not hasattr(model, "count")


def test_a_break_in_a_function_that_it_calls_is_an_error_with_fullgraph() -> None:
    with pytest.raises(Exception, match="compiles no function whose graph breaks"):
        profile(torch.compile(Model(around, Model(broken)), fullgraph=True), torch.rand(2, 8), device="h100")


@pytest.mark.parametrize("parts, whole", [((False,), False), ((True, True), False), ((True, True), True)])
def test_forwards_of_torch_are_compiled_where_torch_compile_is_around_them_alone(parts: tuple[bool, ...],
                                                                                 whole: bool) -> None:
    """As many graphs as Dynamo makes of a sequence of modules that have a forward of the file's own, or of torch's."""
    def build() -> nn.Module:
        return nn.Sequential(*[Model(plain) if is_own else nn.Linear(8, 8) for is_own in parts])

    def compiled(module: nn.Module, backend: Any = "inductor") -> Any:
        if whole:
            return torch.compile(module, backend=backend)
        module.compile(backend=backend)
        return module

    count = count_by_dynamo(build(), compiled)
    p = profile(compiled(build()), torch.rand(2, 8), device="h100")
    assert p.compiled is not None and [row.graphs for row in p.compiled] == [count] == [1 if whole else sum(parts)]
    told = [b.reason for row in p.compiled for b in row.breaks]
    assert ["Dynamo skips Sequential.forward" in reason for reason in told] == ([] if whole else [True])


def test_a_forward_that_is_compiled_by_itself_is_one_row() -> None:
    model = Model(plain)
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    model.compile()
    p = profile(model, torch.rand(4, 8), device="h100")
    assert p.compiled is not None and [(row.graphs, row.breaks) for row in p.compiled] == [(1, ())]
