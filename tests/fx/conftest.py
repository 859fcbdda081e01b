"""Traced modules are held to the modules they were traced from, on real tensors."""
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from analyzer import symbolic_trace
from analyzer.fx import GraphModule
from analyzer.meta.structure import tensors_of


def run(called: nn.Module, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Outputs, gradients and buffers after one forward and backward pass of ``called``, which shares its tensors with
    ``owner``.
    """
    before = {name: (buffer, buffer.clone()) for name, buffer in owner.named_buffers()}
    args, kwargs = copy.deepcopy((args, kwargs))
    owner.zero_grad()
    torch.manual_seed(0)
    output = called(*args, **kwargs)
    outputs = list(tensors_of(output))
    loss = sum((o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).reshape(o.shape)).sum() for o in outputs
               if o.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    result = {"output": output, "input gradients": [t.grad for t in tensors_of((args, kwargs))],
              "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in owner.named_parameters()},
              "buffers": {name: buffer.clone() for name, buffer in owner.named_buffers()}}
    with torch.no_grad():
        for name, (buffer, contents) in before.items():
            buffer.data = contents
            path, _, last = name.rpartition(".")
            setattr(owner.get_submodule(path), last, buffer)  # a forward that assigns has put another tensor there
    owner.zero_grad()
    return result


def assert_equal(got: Any, expected: Any, place: str) -> None:
    """Equal structure, types and contents."""
    assert type(got) is type(expected), place
    if isinstance(expected, torch.Tensor):
        assert got.requires_grad == expected.requires_grad, place
        torch.testing.assert_close(got, expected, msg=lambda m: f"{place}: {m}")
    elif isinstance(expected, dict):
        assert list(got) == list(expected), place
        for key in expected:
            assert_equal(got[key], expected[key], f"{place}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), place
        for i, (g, e) in enumerate(zip(got, expected)):
            assert_equal(g, e, f"{place}[{i}]")
    elif hasattr(expected, "__dict__") and not isinstance(
            expected, (type, nn.Module)) and type(expected).__module__ != "builtins":
        assert_equal(vars(got), vars(expected), f"{place}.__dict__")
    else:
        assert got == expected or got is expected, place


def pickle_again(gm: GraphModule) -> GraphModule:
    return pickle.loads(pickle.dumps(gm))


def save_and_load(gm: GraphModule) -> GraphModule:
    file = io.BytesIO()
    torch.save(gm, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.fixture(params=[copy.deepcopy, copy.copy, pickle_again, save_and_load], ids=lambda f: f.__name__)
def duplicate(request: pytest.FixtureRequest) -> Callable[[GraphModule], GraphModule]:
    """Each way to copy a graph module."""
    return request.param


@pytest.fixture
def traced_like() -> Callable[..., GraphModule]:
    """Trace a module; the graph module gives the same outputs, gradients and buffers, also on other data of the same
    shapes.
    """

    def check(model: nn.Module, meta_args: dict[str, Any], *, call: tuple[Any, dict[str, Any]] | None = None,
              other: dict[str, Any] | None = None, **options: Any) -> GraphModule:
        gm = symbolic_trace(model, meta_args=meta_args, **options)
        gm.graph.lint()
        assert gm.training == model.training
        for inputs in (meta_args, other):
            if inputs is None:
                continue
            args, kwargs = call or ((), inputs)
            got, expected = run(gm, model, args, kwargs), run(model, model, args, kwargs)
            for name in expected:
                assert_equal(got[name], expected[name], name)
        return gm

    return check
