"""``flex_attention`` compiled into one kernel: what it takes and gives, as an operator each of its passes.

Source: the lowerings in ``torch/_inductor/kernel/flex/flex_attention.py``. The kernel holds tiles of scores alone.
"""
from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention.flex_attention import noop_mask
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from analyzer.meta.intercept.mode_stack import modes_taken_off
from analyzer.meta.state import active_state, current, set_state
from analyzer.meta.tensor import MetaTensor

Tensor = torch.Tensor

_library = torch.library.Library("analyzer", "FRAGMENT")
_library.define("flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] others, int? visited) "
                "-> (Tensor, Tensor, Tensor)")
_library.define("flex_attention_backward(Tensor query, Tensor key, Tensor value, Tensor logsumexp, Tensor delta, "
                "Tensor gradient, Tensor[] others, int? visited) -> (Tensor, Tensor, Tensor)")
# as the kernels are called: what is not the first result (of the second pass, not the key's gradient) is made before
_library.define("flex_attention.into(Tensor query, Tensor key, Tensor value, Tensor[] others, int? visited, "
                "Tensor(a!) logsumexp, Tensor(b!) maxima) -> Tensor")
_library.define("flex_attention_backward.into(Tensor query, Tensor key, Tensor value, Tensor logsumexp, Tensor delta, "
                "Tensor gradient, Tensor[] others, int? visited, Tensor(a!) for_query, Tensor(b!) for_value) -> Tensor")
FLEX_ATTENTION, FLEX_ATTENTION_BACKWARD = torch.ops.analyzer.flex_attention, torch.ops.analyzer.flex_attention_backward


def attend_compiled(query: Tensor, key: Tensor, value: Tensor, block_mask: tuple[Any, ...],
                    captured: tuple[Tensor, ...]) -> Any:
    """Output, logarithms of the sums of exponentials, and maxima of scores."""
    return FLEX_ATTENTION(query, key, value, [*_tensors_of(block_mask), *captured],
                          _count_visited(block_mask, query, key))


def attend_compiled_backward(query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                             gradient: Tensor | None, for_logsumexp: Tensor | None,
                             block_mask: tuple[Any, ...],
                             captured: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. What is summed beforehand is the compiler's to fuse."""
    gradient = torch.zeros_like(out) if gradient is None else gradient
    delta = (out * gradient).sum(-1).to(torch.float32)
    if for_logsumexp is not None:
        delta = delta - for_logsumexp * 1.4426950408889634  # of base 2
    found: list[Tensor] = list(FLEX_ATTENTION_BACKWARD(
        query, key, value, logsumexp, delta.contiguous(), gradient,
        [*_tensors_of(block_mask), *captured], _count_visited(block_mask, query, key)))
    if key.shape[0] != query.shape[0]:
        found[1:] = [one.sum(0, keepdim=True) for one in found[1:]]
    return found[0], found[1], found[2]


def sum_of_gradients(buffer: Tensor) -> Tensor:
    """The gradient of a tensor that the score function reads: the kernel adds to zeros of float32."""
    return torch.zeros_like(buffer, dtype=torch.float32).to(buffer.dtype)


def list_captured(function: Any) -> list[Tensor]:
    """The tensors that a function of scores finds in its closure, in its globals or as attributes of what is there."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    around = [cell.cell_contents for cell in function.__closure__ or ()]
    around += [function.__globals__[name] for name in code.co_names if name in function.__globals__]
    found = [value for value in tree_leaves(around) if isinstance(value, Tensor)]
    for value in tree_leaves(around):
        if isinstance(value, torch.nn.Module):
            found += [part for name in code.co_names if isinstance(part := getattr(value, name, None), Tensor)]
        elif isinstance(value, FunctionType) and value is not function:
            found += list_captured(value)
    return list({id(tensor): tensor for tensor in found}.values())


def _tensors_of(block_mask: tuple[Any, ...]) -> list[Tensor]:
    """Which blocks each row and each column has; the graph hands both to both passes."""
    return [one for one in block_mask[2:10] if isinstance(one, Tensor)]


def _new_like(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """``infer_dense_strides``: contiguous in the order in which the strides of ``tensor`` grow, the last first."""
    strides, stride = [0] * len(sizes), 1
    for dim in sorted(reversed(range(len(sizes))), key=lambda d: (d + 1 < len(sizes), tensor.stride(d))):
        strides[dim], stride = stride, stride * sizes[dim]
    return tensor.new_empty_strided(tuple(sizes), strides)


def _make_results(query: Tensor, key: Tensor, value: Tensor, others: list[Tensor],
                  visited: int | None) -> tuple[Tensor, Tensor, Tensor]:
    out = _new_like(query, (*query.shape[:3], value.shape[3]))
    return out, query.new_empty(query.shape[:3], dtype=torch.float32), query.new_empty(
        query.shape[:3], dtype=torch.float32)


def _make_gradients(query: Tensor, key: Tensor, value: Tensor, logsumexp: Tensor, delta: Tensor, gradient: Tensor,
                    others: list[Tensor], visited: int | None) -> tuple[Tensor, Tensor, Tensor]:
    batch = query.shape[0]
    return (_new_like(query, query.shape), _new_like(key, (batch, *key.shape[1:])),
            _new_like(value, (batch, *value.shape[1:])))


_library.impl("flex_attention", _make_results, "Meta")
_library.impl("flex_attention_backward", _make_gradients, "Meta")
_library.impl("flex_attention.into", lambda *args: _make_results(*args[:-2])[0], "Meta")
_library.impl("flex_attention_backward.into", lambda *args: _make_gradients(*args[:-2])[1], "Meta")

_MOST_PAIRS = 2 ** 31  #: of which a mask is asked, some seconds
_OF_DATA = "that depends on data"
_visited: WeakKeyDictionary[Any, dict[Any, int | str]] = WeakKeyDictionary()


def _count_visited(block_mask: tuple[Any, ...], query: Tensor, key: Tensor) -> int | None:
    """Pairs of queries and keys in the blocks that the mask does not hide whole, over all heads; None where that is
    unknown.
    """
    *_, rows, columns, mask_mod = block_mask
    heads, sizes = (int(block_mask[2].shape[0]), int(block_mask[2].shape[1])), (query.shape[2], key.shape[2])
    known = _visited.setdefault(mask_mod, {})
    place = heads, sizes, rows, columns
    if place not in known:
        known[place] = _ask_mask(mask_mod, *place)
    pairs = known[place]
    if isinstance(pairs, str):
        active_state().assume(f"flex_attention: a block mask {pairs} hides nothing")
        return None
    return pairs * (query.shape[0] * query.shape[1] // (heads[0] * heads[1]))


class _ReadsData(Exception):
    """A call fails for a tensor that has no data."""


class _TellingData(TorchFunctionMode):
    """A mode in which such a call is told from one that fails for another reason."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if any(isinstance(t, Tensor) and _has_no_data(t) for t in tree_leaves((args, kwargs))):
                raise _ReadsData from error
            raise


def _has_no_data(tensor: Tensor) -> bool:
    return isinstance(tensor, MetaTensor) or tensor.is_meta


def _ask_mask(mask_mod: Any, heads: tuple[int, int], sizes: tuple[int, int], rows: int, columns: int) -> int | str:
    """How many pairs of a query and a key are in blocks that are seen, in all of ``heads``; else what such masks are
    of which that is unknown.
    """
    queries, keys = sizes
    rows, columns = min(rows, queries), min(columns, keys)
    if mask_mod is noop_mask:
        return heads[0] * heads[1] * queries * keys
    if heads[0] * heads[1] * queries * keys > _MOST_PAIRS:
        return f"of more than {_MOST_PAIRS:,} pairs of a query and a key, too many to ask it,"
    # as torch's ``create_mask`` asks it
    ask = torch.vmap(torch.vmap(mask_mod, (None, None, None, 0)), (None, None, 0, None))
    state, found = current(), 0
    set_state(None)
    try:
        with modes_taken_off(), torch.no_grad(), _TellingData():
            widths = torch.full((-(-keys // columns),), columns)
            widths[-1] = keys - columns * (len(widths) - 1)
            for batch, head in torch.cartesian_prod(torch.arange(heads[0]), torch.arange(heads[1])):
                for tile in torch.arange(queries).split(rows):
                    seen = ask(batch, head, tile, torch.arange(keys))
                    if _has_no_data(seen):
                        return _OF_DATA
                    seen = torch.nn.functional.pad(seen.any(0), (0, columns * len(widths) - keys))
                    found += len(tile) * int(widths[seen.view(-1, columns).any(1)].sum())
    except _ReadsData:
        return _OF_DATA
    finally:
        set_state(state)
    return found
