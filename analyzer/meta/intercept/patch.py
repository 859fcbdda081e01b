"""What must be replaced in torch while a mode is active anywhere, put back in reverse when the last one ends. The
replacements act only in threads whose mode is active; other threads get torch's own behaviour.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.jit._builtins
import torch.nn.functional
import torch.nn.init
import torch.optim
import torch.overrides
import torch.utils._foreach_utils

from analyzer.meta.active_mode import mode_in_force
from analyzer.meta.simulated_device import devices, gate_keys
from analyzer.meta.state import current
from analyzer.meta.storage import MetaStorage
from analyzer.meta.tensor import META, MetaTensor, device_of

from . import compiled_function, higher_order
from .replacement import SharedReplacements, Undo, replace

_PLAIN = (torch.Tensor, torch.nn.Parameter, MetaTensor)


def _overrides(values: Any) -> bool:
    """Whether a value's class overrides torch functions; the mode does not count: a real device has none."""
    if not torch._C._is_torch_function_enabled():
        return False
    for v in values:
        kind = type(v)
        if kind not in _PLAIN:
            override = getattr(kind, "__torch_function__", None)
            if override is not None and override is not torch._C._disabled_torch_function_impl:
                return True
    return False


def _replacements() -> Iterator[Undo]:
    for owner in (torch.nn.functional, torch.overrides):
        yield replace(owner, "has_torch_function",
                      lambda f: _in_place_of(f, lambda values: f(values) if current() is None else _overrides(values)))
        yield replace(owner, "has_torch_function_unary",
                      lambda f: _in_place_of(f, lambda v: f(v) if current() is None else _overrides((v, ))))
        yield replace(owner, "has_torch_function_variadic",
                      lambda f: _in_place_of(f, lambda *vs: f(*vs) if current() is None else _overrides(vs)))
    yield replace(torch.jit._builtins, "_find_builtin",
                  lambda f: lambda function: f(getattr(function, "in_place_of", function)))
    # Optimizers and clip_grad_norm_ take the foreach path for these types only; plain CUDA parameters do.
    for module in (sys.modules["torch.optim.optimizer"], torch.utils._foreach_utils):  # torch.optim deletes the name
        types = module._foreach_supported_types
        types.append(MetaTensor)
        yield lambda types=types: types.remove(MetaTensor)  # type: ignore[misc]
    yield replace(torch._C, "_group_tensors_by_device_and_dtype", _group_by_device)
    yield replace(torch.nn.init, "_no_grad_trunc_normal_", _fill_normal)
    yield replace(torch.autograd, "_engine_run_backward", _with_mode)
    yield replace(torch.Tensor, "_make_wrapper_subclass", _on_meta)
    yield replace(MetaTensor, "__torch_function__", lambda f: torch._C._disabled_torch_function_impl)
    yield replace(sys, "unraisablehook", _note_failure)
    yield from higher_order.replacements(gate_keys())
    yield from compiled_function.replacements()
    for device in devices:
        yield from device.replacements()


def _in_place_of(original: Any, function: Any) -> Any:
    """``function``, which TorchScript is to compile as ``original``."""
    function.in_place_of = original
    return function


def _fill_normal(original: Any) -> Any:
    """Torch redraws values until none is outside the bounds, which needs data; without any, it draws once."""
    def trunc_normal(tensor: torch.Tensor, mean: float, std: float, a: float, b: float,
                     generator: Any = None) -> torch.Tensor:
        if current() is None:
            return original(tensor, mean, std, a, b, generator)  # type: ignore[no-any-return]
        with torch.no_grad():
            return tensor.normal_(mean, std)
    return trunc_normal


def _with_mode(original: Any) -> Any:
    """A backward pass runs under the modes it starts under; torch takes the function mode off in ``backward``."""
    def run(*args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return original(*args, **kwargs)
        with mode_in_force():
            return original(*args, **kwargs)
    return run


def _note_failure(original: Any) -> Any:
    """Python prints what a finaliser raises, and goes on."""
    def hook(unraisable: Any) -> None:
        state = current()
        if state is None or unraisable.object is not MetaStorage.__del__:
            original(unraisable)
        elif state.failure is None:
            state.failure = (unraisable.exc_value or unraisable.exc_type()).with_traceback(None)
    return hook


def _real_device(device: torch.device) -> torch.device:
    return device if device.type in ("cpu", "meta") else META


def _on_meta(original: Any) -> Any:
    """A tensor around tensors is where they are: autograd ends the process for an accelerator that is not there."""
    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            args = tuple(_real_device(a) if isinstance(a, torch.device) else a for a in args)
            if kwargs.get("device") is not None:
                kwargs["device"] = _real_device(torch.device(kwargs["device"]))
        return original(cls, *args, **kwargs)
    return staticmethod(make)


def _group_by_device(original: Any) -> Any:
    def group(tensorlistlist: Any, with_indices: bool = False) -> Any:
        if current() is None:
            return original(tensorlistlist, with_indices)
        members: dict[Any, list[int]] = {}
        with torch._C.DisableTorchFunction():
            # as torch/csrc/utils/tensor_list... : the first list decides, the others follow its order
            for i, first in enumerate(tensorlistlist[0]):
                members.setdefault((device_of(first), first.dtype), []).append(i)
        return {key: ([[source[i] for i in indices] if source else [] for source in tensorlistlist],
                      indices if with_indices else []) for key, indices in members.items()}
    return group


mode_replacements = SharedReplacements(_replacements)
