"""What tracing refuses, in which words; and that torch and the model are afterwards as they were."""
from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.amp import autocast_mode
from torch.utils import checkpoint as checkpointing

from analyzer import symbolic_trace
from analyzer.errors import DataDependentError, InputError, UnsupportedOperatorError

X = torch.ones(3, 4)
META = torch.empty(3, 4, device="meta")
HERE = os.path.basename(__file__)


class Model(nn.Module):
    """Holds tensors in every way; its forward does ``action`` in the middle."""

    def __init__(self, action: Callable[[Model, Tensor], Any] = lambda model, x: x) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.sub = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.plain, self.items = torch.ones(4), [torch.ones(4)]
        self.table = {"a": torch.ones(4), "b": (torch.ones(4), 1)}
        self.cache: dict[str, Any] = {}
        self.action = action

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Any:
        x = self.norm(self.fc(x))
        self.steps += 1
        self.cache["x"] = self.late = x
        self.items.append(x)
        self.extra = nn.Linear(2, 2)
        self.register_buffer("more", torch.zeros(2))
        self.register_forward_hook(lambda *_: None)
        self.eval()
        x.sum().backward()
        random.random()
        numpy.random.rand()
        return self.action(self, self.sub(x))


def describe(model: nn.Module) -> list[Any]:
    """Everything that tracing must leave alone, by identity and by contents."""
    state: list[Any] = []
    for path, module in model.named_modules():
        state.append((path, type(module), id(module), module.training))
        for name, value in vars(module).items():
            state.append((path, name, id(value)))
            if isinstance(value, dict):
                state.append((path, name, [(k, id(v)) for k, v in value.items()]))
            if isinstance(value, (list, set)):
                state.append((path, name, [id(v) for v in value]))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state.append((name, id(tensor), tensor._version, tensor.data_ptr(), tensor.requires_grad, tensor.device,
                      tensor.tolist(), id(tensor.grad)))
    return state


def describe_torch() -> list[Any]:
    holders = (nn.Module, torch.autograd.Function, checkpointing.CheckpointFunction, checkpointing,
               autocast_mode.autocast, torch.jit.ScriptFunction)
    return [*(dict(vars(holder)) for holder in holders), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(), torch.random.get_rng_state().tolist(), random.getstate(),
            numpy.random.get_state()[1].tolist(), torch.cuda.is_available(),
            torch.overrides._len_torch_function_stack(), torch.utils._python_dispatch._len_torch_dispatch_stack()]


class Interrupt(BaseException):
    pass


def fail(error: BaseException) -> Callable[[nn.Module, Tensor], Any]:
    def action(model: nn.Module, x: Tensor) -> Any:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        raise error

    return action


@pytest.mark.parametrize("error", [None, ValueError("of the model's"), Interrupt(), KeyboardInterrupt()])
def test_everything_is_as_it_was(error: BaseException | None) -> None:
    model = Model() if error is None else Model(fail(error))
    model.fc.weight.grad = torch.ones(4, 4)
    model.register_full_backward_hook(lambda *_: None)
    model.fc.register_forward_pre_hook(lambda *_: None)
    before, torch_before = describe(model), describe_torch()
    if error is None:
        symbolic_trace(model, meta_args={"x": X})
    else:
        with pytest.raises(InputError if isinstance(error, Exception) else type(error)):
            symbolic_trace(model, meta_args={"x": X})
    assert describe(model) == before
    assert describe_torch() == torch_before


def test_other_threads_keep_torch() -> None:
    """While one thread traces, another runs modules, custom functions and checkpoints on data."""
    results: list[Any] = []
    other = nn.Linear(4, 4)
    expected = other(X)

    def run() -> None:
        results.append(checkpointing.checkpoint(other, X, use_reentrant=False))

    def action(model: nn.Module, x: Tensor) -> Tensor:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return x

    symbolic_trace(Model(action), meta_args={"x": X})
    torch.testing.assert_close(results[0], expected)


def errors(call: Callable[[], Any], kind: type[Exception] = InputError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": ({"meta_args": {"x": X, "mas": X}},
                     "meta_args['mas']: forward takes no such argument; did you mean 'mask'? It takes x, mask, flag"),
    "unknown constant": ({"meta_args": {"x": X}, "concrete_args": {"zzz": 1}},
                         "concrete_args['zzz']: forward takes no such argument. It takes x, mask, flag"),
    "missing": ({"meta_args": {"mask": X}}, "no value for 'x'; forward takes x, mask, flag. Put tensors into meta_args "
                "and constants into concrete_args"),
    "twice": ({"meta_args": {"x": X},
               "concrete_args": {"x": None}}, "'x' is in meta_args and in concrete_args; give it once"),
    "no tensor": ({"meta_args": {"x": (3, 4)}}, "meta_args['x'] = (3, 4) holds no tensor; give one, for instance "
                  "torch.empty(..., device='meta'), or pass a constant in concrete_args"),
    "no dict": ({"meta_args": [X]}, "meta_args must be a dict from argument names to values, got list"),
}


def test_what_is_no_model_and_no_tuple() -> None:
    assert errors(lambda: symbolic_trace(3, meta_args={})) == "root must be a module or a function, got 3"
    assert errors(lambda: symbolic_trace(lambda *tensors: tensors[0], meta_args={"tensors": X})) == (
        "meta_args['tensors']: forward takes *tensors, so give a tuple, got Tensor")


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str) -> None:
    options, message = ARGUMENTS[case]
    assert errors(lambda: symbolic_trace(Model(), **options)) == message


@pytest.mark.parametrize("x, message", [
    (torch.ones(3, 5), r"\[3, 5\] X \[4, 4\]"),
    (torch.ones(3, 4, dtype=torch.int64), "same dtype, but got float32 and int64"),
    (torch.ones(()), "both arguments to linear need to be at least 1D"),
])
def test_wrong_inputs_name_module_and_line(x: Tensor, message: str) -> None:
    text = errors(lambda: symbolic_trace(Model(), meta_args={"x": x}))
    line = Model.forward.__code__.co_firstlineno + 1
    given = f"{str(x.dtype)[6:]}{list(x.shape)}"
    assert text.startswith(
        f"forward failed in module 'fc' (Linear) at {__file__}:{line}, traced with x={given}: RuntimeError: "), text
    assert re.search(message, text), text


def test_data_is_asked_for() -> None:
    text = errors(lambda: symbolic_trace(Model(lambda model, x: x
                                               if x.sum() > 0 else -x), meta_args={"x": META}), DataDependentError)
    assert HERE in text and "Way out" in text and "While tracing with x=float32[3, 4], in the root module at" in text


def test_unregistered_operator() -> None:
    library = torch.library.Library("analyzer_test_trace", "DEF")
    library.define("shapeless(Tensor x) -> Tensor")
    library.impl("shapeless", lambda x: x + 1, "CPU")
    text = errors(lambda: symbolic_trace(lambda x: torch.ops.analyzer_test_trace.shapeless(x), meta_args={"x": X}),
                  UnsupportedOperatorError)
    assert "register_shape_impl" in text and "analyzer_test_trace" in text


def test_tensor_made_out_of_sight() -> None:
    class Hiding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.norm = x.norm()
            return x

    from analyzer import register_leaf_module

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.hiding = nn.Linear(4, 4), Hiding()

        def forward(self, x: Tensor) -> Tensor:
            return self.hiding(self.fc(x)) / self.hiding.norm

    with register_leaf_module.scope():
        register_leaf_module(Hiding)
        text = errors(lambda: symbolic_trace(Reading(), meta_args={"x": X}))
    assert "a tensor of shape () and dtype torch.float32" in text and "register_non_leaf_module" in text
    assert symbolic_trace(Reading(), meta_args={"x": X})(X).shape == (3, 4)
