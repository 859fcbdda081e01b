"""Tensors of a function that is traced: where they lie; and tensors around tensors (`DTensor`, quantized ones), of
which a graph has the parts, as AOTAutograd takes them apart: torch/_functorch/_aot_autograd/subclass_utils.py.

Private torch API: which of them Python code holds, and what autograd is told of them, as hooks on what it saves.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

from analyzer.meta.address_space import AddressSpace, MetaStorage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.spec import spec_of

Tensor = torch.Tensor
Hooks = list[tuple[Any, Any]]
Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]  #: storage, offset, shape, strides, dtype
Rebuild = Callable[[Iterator[Tensor]], Tensor]  #: takes its parts from an iterator, and makes a tensor around them


class GraphBreak(Exception):
    """The function cannot be one graph."""


def specs_of(result: Any) -> Any:
    """An operator's result with a spec in place of each tensor."""
    if isinstance(result, Tensor):
        if result.layout is not torch.strided:
            raise GraphBreak(f"a tensor of layout {result.layout}")
        return spec_of(result)
    return type(result)(map(specs_of, result)) if isinstance(result, (list, tuple)) else result


def place_of(tensor: Tensor) -> Place:
    """What tells a tensor's elements from others: its storage, and which part of it is read how."""
    storage: Any = tensor.untyped_storage()
    return storage.number, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype


def space_of(tensor: Tensor) -> AddressSpace | None:
    """The memory in which a plain tensor is."""
    return getattr(tensor.untyped_storage(), "space", None)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a part of a storage of the mode, and nothing more."""
    return (tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            and isinstance(tensor.untyped_storage(), MetaStorage))


def exchange(one: Tensor, other: Tensor) -> None:
    """Two Python objects change the C++ tensors behind them: what holds an object finds the other tensor there."""
    torch._C._swap_tensor_impl(one, other)


def is_held(tensor: Tensor) -> bool:
    """Whether anything in Python refers to ``tensor`` beside one variable of the caller. To be asked without modes."""
    held = sys.getrefcount(tensor) - 3  # the caller's, the parameter, what getrefcount is given
    return held > (_reference_of_cpp() if tensor._use_count() > 1 else 0)  # type: ignore[attr-defined]


@functools.cache
def _reference_of_cpp() -> int:
    """How many references to its Python object a tensor has for being held in C++ too, which changed in torch 2.10."""
    with without_modes(), torch.enable_grad():
        tensor = torch.ones(1, requires_grad=True).clone()
        before = sys.getrefcount(tensor)
        saved = tensor.sin()
        found = sys.getrefcount(tensor) - before
        del saved
    return found


def is_unrecorded(tensor: Tensor) -> bool:
    """Whether a tensor is a view that was made where no gradients are recorded. It has no history, and asking for one
    raises where it was written since (``handle_view_on_rebase`` in ``torch/csrc/autograd/variable.cpp``).
    """
    return tensor._is_view() and torch._C._autograd._get_creation_meta(tensor) in _WITHOUT_HISTORY


_WITHOUT_HISTORY = (torch._C._autograd.CreationMeta.NO_GRAD_MODE, torch._C._autograd.CreationMeta.INFERENCE_MODE)


def take_saved_tensor_hooks() -> Hooks:
    """Take off the hooks on tensors that autograd saves (of checkpoints, offloading); the outermost is the first."""
    found: Hooks = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        found.insert(0, hooks)
    return found


def put_saved_tensor_hooks(hooks: Hooks) -> None:
    """Put hooks on, the outermost first."""
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def replay_views(is_on: bool) -> bool:
    """Whether autograd replayed views before this call; from it on it does if ``is_on``: gradients of a view that was
    written go through the view again then, as of AOTAutograd's functional tensors, and not through ``as_strided``
    (``CopySlices::apply_impl`` of torch/csrc/autograd/functions/tensor.cpp).
    """
    with torch._C.DisableTorchFunction():
        before = torch._C._is_view_replay_enabled()
        torch._C._set_view_replay_enabled(is_on)
    return before


def is_in_transform() -> bool:
    """Whether a transform of ``torch.func`` runs (vmap, grad), whose tensors are wrapped."""
    return bool(torch._C._functorch.get_dynamic_layer_stack_depth())


# ---- tensors around tensors


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is one around others that torch's compiler takes apart."""
    return hasattr(type(tensor), "__tensor_flatten__")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside, in order; a plain one itself. One that a collective writes is waited for."""
    if not is_wrapped(tensor):
        return [tensor]
    if hasattr(tensor, "trigger_wait"):
        return parts_of(tensor.trigger_wait())
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names if isinstance(inner := getattr(tensor, name), Tensor) for part in parts_of(inner)]


def rebuild_like(tensor: Tensor) -> Rebuild:
    """What makes such a tensor of other parts, that no gradient is asked of."""
    if hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()
    if not is_wrapped(tensor):
        return next
    tensor = tensor.detach()
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(tensor, name) for name in names}
    makers = {name: rebuild_like(value) for name, value in inner.items() if isinstance(value, Tensor)}
    others = {name: None if name in makers else value for name, value in inner.items()}  # keeps no tensor
    cls: Any = type(tensor)
    size, stride = tensor.size(), tensor.stride()

    def rebuild(parts: Iterator[Tensor]) -> Tensor:
        held = {name: makers[name](parts) if name in makers else value for name, value in others.items()}
        found: Tensor = cls.__tensor_unflatten__(held, context, size, stride)
        return found

    return rebuild


def tangent_like(result: Tensor) -> Tensor:
    """What stands for the gradient of a result in the backward graph, laid out as AOTAutograd guesses that it will be:
    as the result is, or in the memory format that is most like it (``guess_tangent_strides_as_outputs`` of
    ``torch/_functorch/config.py``, which older versions of torch have off).
    """
    expected = MemoryFormatMeta.from_tensor(result)
    if is_wrapped(result) or expected is None:
        return torch.empty_like(result)
    if expected.memory_format is not None:
        return torch.empty_like(result, memory_format=expected.memory_format)
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)


def coerce_like(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """What lays a tangent out as ``tensor`` is, for which the backward graph was made."""
    if not is_wrapped(tensor):  # coerce_to_expected_memory_format in torch/_functorch/_aot_autograd/runtime_wrappers.py
        stride = tensor.stride()
        return lambda tangent: tangent if tangent.stride() == stride else torch.empty_strided(
            tangent.shape, stride, dtype=tangent.dtype, device=tangent.device).copy_(tangent)
    if not hasattr(tensor, "__coerce_same_metadata_as_tangent__"):
        return lambda tangent: tangent
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return lambda tangent: tangent.__coerce_same_metadata_as_tangent__(context)  # type: ignore[attr-defined]


@dataclass
class GraphShape:
    """How a graph's results, tangents and gradients are put together from what its two halves give and take."""

    results: list[tuple[int, Rebuild]]                  #: of how many parts each is
    tangents: list[Callable[[Tensor], Tensor]]          #: what lays out the gradient of each result that has one
    gradients: list[tuple[list[int], Rebuild] | None]   #: the primals that each input has as parts; None: it gets none

    def join_results(self, parts: Sequence[Any]) -> list[Any]:
        """The results of the forward half's first outputs."""
        taken, found = iter(parts), []
        for count, make in self.results:
            own = list(islice(taken, count))
            found.append(make(iter(own)) if all(isinstance(part, Tensor) for part in own) else None)
        return found

    def split_tangents(self, tangents: Sequence[Tensor]) -> list[Tensor]:
        """What the backward half is given of the results' gradients."""
        return [part for coerce, tangent in zip(self.tangents, tangents) for part in parts_of(coerce(tangent))]

    def join_gradients(self, parts: Sequence[Any]) -> list[Any]:
        """The gradients of the inputs, of what the backward half gives for each primal."""
        return [None if one is None or any(parts[i] is None for i in one[0]) else one[1](iter([
            parts[i] for i in one[0]])) for one in self.gradients]
