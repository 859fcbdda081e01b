"""``torchinfo.summary``: the table of torchinfo to the character, of a model that is run without data."""
from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from analyzer.api.argument import set_training
from analyzer.errors import InputError, is_count
from analyzer.output import drawing_plainly
from analyzer.report.compat.torchinfo_format import (
    ColumnSettings,
    FormattingOptions,
    RowSettings,
    Statistics,
    Units,
    Verbosity,
)
from analyzer.tools.runtime.measure import input_device

from .forward import observe_forward
from .torchinfo_layer import LayerInfo, LayerList

__all__ = ["ColumnSettings", "FormattingOptions", "LayerInfo", "Mode", "ModelStatistics", "RowSettings", "Units",
           "Verbosity", "clear_cached_forward_pass", "summary"]


class Mode(str, Enum):
    """Names of training and evaluation."""

    TRAIN = "train"
    EVAL = "eval"


class _InputTypeError(InputError, TypeError):
    """An input size of a type that torchinfo refuses with a TypeError."""


class _TwoInputsError(InputError, RuntimeError):
    """Two inputs, which torchinfo refuses with a RuntimeError."""


class ModelStatistics(Statistics):
    """What `summary` found; its text is the table. Sizes are bytes."""

    def __init__(self, summary_list: list[LayerInfo], input_size: Any, total_input_size: int,
                 formatting: FormattingOptions) -> None:
        leaves = [layer for layer in summary_list if layer.is_leaf_layer]
        counted = [layer for layer in summary_list if not layer.is_recursive]
        super().__init__(
            summary_list, input_size, formatting, total_input_size,
            # each output of a layer with parameters, and its gradient
            sum(2 * layer.output_bytes for layer in leaves if layer.num_params > 0),
            sum(max(0, layer.num_params if layer.is_leaf_layer else layer.leftover_params()) for layer in counted),
            sum(max(0, layer.trainable_params if layer.is_leaf_layer else layer.leftover_trainable_params())
                for layer in counted),
            sum(layer.param_bytes for layer in counted if layer.is_leaf_layer), sum(layer.macs for layer in leaves))


_NEED_INPUT = (ColumnSettings.INPUT_SIZE, ColumnSettings.OUTPUT_SIZE, ColumnSettings.MULT_ADDS)
_cached: dict[str, list[LayerInfo]] = {}


def summary(model: torch.nn.Module, input_size: Any = None, input_data: Any = None, batch_dim: int | None = None,
            cache_forward_pass: bool | None = None, col_names: Iterable[str] | None = None, col_width: int = 25,
            depth: int = 3, device: torch.device | str | None = None, dtypes: Sequence[torch.dtype] | None = None,
            mode: str | None = None, row_settings: Iterable[str] | None = None, verbose: int | None = None,
            **kwargs: Any) -> ModelStatistics:
    """Print torchinfo's table of a forward pass, and give what is in it.

    The arguments are torchinfo's. ``device`` (``"meta"``, or one that is not there) moves nothing: the model runs
    without data where it is. ``verbose=2`` shows each parameter. Raises InputError (a ValueError) for arguments that
    cannot be used, and whatever the model itself raises.

    >>> stats = summary(torch.nn.Sequential(torch.nn.Linear(4, 2)), input_size=(3, 4), device="meta", verbose=0)
    >>> stats.total_params, stats.total_mult_adds, stats.formatting.max_depth, stats.summary_list[1].output_size
    (10, 30, 3, [3, 2])
    """
    given = input_data is not None or input_size is not None
    usual = (ColumnSettings.OUTPUT_SIZE, ColumnSettings.NUM_PARAMS) if given else (ColumnSettings.NUM_PARAMS, )
    columns = usual if col_names is None else tuple(_find(ColumnSettings, name, "col_names") for name in col_names)
    rows = {_find(RowSettings, name, "row_settings") for name in (
        (RowSettings.DEPTH, ) if row_settings is None else row_settings)}
    training = _find(Mode, mode or Mode.EVAL, "mode") is Mode.TRAIN
    verbose = (0 if hasattr(sys, "ps1") else 1) if verbose is None else int(verbose)
    _check(model, input_size, input_data, columns, col_width, verbose)
    if device is not None:
        torch.device(device)  # which says what is wrong with it
    name = type(model).__name__
    args, call_kwargs = _make_inputs(model, input_size, input_data, batch_dim, dtypes)
    if cache_forward_pass and name in _cached:
        layers = _cached[name]
    elif given:
        with set_training(model, training), torch.no_grad():
            layers = observe_forward(lambda: LayerList(model, batch_dim), model, args,
                                     {**call_kwargs, **kwargs}).list_run()
        if cache_forward_pass:
            _cached[name] = layers
    else:
        layers = LayerList(model).list_all()
    tensors = [t for t in pytree.tree_leaves((args, call_kwargs)) if isinstance(t, (torch.Tensor, numpy.ndarray))]
    found = ModelStatistics(layers, _list_sizes(input_size, input_data), sum(t.nbytes for t in tensors),
                            FormattingOptions(depth, verbose, columns, col_width, rows))
    if verbose > Verbosity.QUIET:
        with drawing_plainly():
            print(found)
    return found


def clear_cached_forward_pass() -> None:
    """Forget the runs that ``cache_forward_pass`` kept."""
    _cached.clear()


def _check(model: Any, input_size: Any, input_data: Any, columns: Sequence[ColumnSettings], col_width: int,
           verbose: int) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"summary({type(model).__name__}): must be a torch.nn.Module")
    if input_data is not None and input_size is not None:
        raise _TwoInputsError("summary(input_size=..., input_data=...): give one of them")
    missing = [column.value for column in _NEED_INPUT if column in columns]
    if missing and input_data is None and input_size is None:
        raise InputError(f"summary(col_names=...): {', '.join(missing)} need input_size or input_data")
    if verbose not in (0, 1, 2) or not is_count(col_width, 1):
        raise InputError(
            f"summary(verbose={verbose!r}, col_width={col_width!r}): verbose is 0, 1 or 2, a width at least 1")


def _make_inputs(model: torch.nn.Module, input_size: Any, input_data: Any, batch_dim: int | None,
                 dtypes: Sequence[torch.dtype] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call the model with, on its device. Raises InputError for sizes that are none."""
    device = input_device(model)
    if input_data is not None:
        data = input_data  # what its values say is of use to a model without data too
        if device.type != "meta":
            data = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), data)
        if isinstance(data, Mapping):
            return (), dict(data)
        return tuple(data) if isinstance(data, (list, tuple)) else (data,), {}
    if input_size is None:
        return (), {}
    is_sequence = isinstance(input_size, (list, tuple))
    if not is_sequence or not input_size or any(size <= 0 for size in pytree.tree_leaves(input_size)):
        raise (InputError if is_sequence else _InputTypeError)(
            f"summary(input_size={input_size!r}): must be a size above 0 in each dimension, or a sequence of such "
            "sizes")
    sizes = [input_size] if isinstance(input_size[0], int) else list(input_size)
    kinds = [_find_dtype(kind) for kind in dtypes or [torch.float32] * len(sizes)]
    if len(kinds) != len(sizes):
        raise InputError(f"summary(dtypes={dtypes!r}): {len(sizes)} inputs need as many dtypes")
    tensors = [torch.rand(*size, device=device) for size in sizes]
    if batch_dim is not None:
        tensors = [t.unsqueeze(batch_dim) for t in tensors]
    return tuple(t.to(kind) for t, kind in zip(tensors, kinds)), {}


def _find_dtype(kind: Any) -> torch.dtype:
    """Of a dtype, or an older name of one: ``torch.LongTensor``, or that as text."""
    found = kind
    if isinstance(kind, str):
        try:
            found = operator.attrgetter(kind.removeprefix("torch."))(torch)
        except AttributeError:
            found = None
    found = getattr(found, "dtype", found)
    if not isinstance(found, torch.dtype):
        raise InputError(f"summary(dtypes=...): {kind!r} is no dtype; give one such as torch.int64")
    return found


def _find(names: Any, name: Any, argument: str) -> Any:
    try:
        return names(getattr(name, "value", name))
    except ValueError:
        raise InputError(f"summary({argument}=...): {name!r} must be one of "
                         f"{', '.join(repr(member.value) for member in names)}") from None


def _list_sizes(input_size: Any, input_data: Any) -> Any:
    if input_data is not None:
        return pytree.tree_map_only((torch.Tensor, numpy.ndarray), lambda t: torch.Size(t.shape), dict(
            input_data) if isinstance(input_data, Mapping) else input_data)
    if input_size is None:
        return []
    return [tuple(input_size)] if isinstance(input_size[0], int) else list(input_size)
