"""`summary`: the interface of torchinfo, answered by a profile measured on the model's device."""
from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from analyzer.api.argument import copy_without_data, set_training
from analyzer.api.session import Session
from analyzer.errors import InputError
from analyzer.output import drawing_plainly
from analyzer.record.options import ProfileOptions
from analyzer.report.compat.torchinfo import Layer, describe_training, list_layers, torchinfo_table
from analyzer.report.module_row import first_shape, name_module
from analyzer.results.profile import Profile

from .clock import choose_clock
from .measure import input_device, make_profile, run_steps
from .recorder import RuntimeRecorder, device_of

NEED_INPUT = ("input_size", "output_size", "mult_adds")
_cached: dict[str, Profile] = {}


class Mode(str, Enum):
    """Names of training and evaluation."""

    TRAIN = "train"
    EVAL = "eval"


class RowSettings(str, Enum):
    """Names of what rows show."""

    DEPTH = "depth"
    VAR_NAMES = "var_names"
    ASCII_ONLY = "ascii_only"
    HIDE_RECURSIVE_LAYERS = "hide_recursive_layers"


class ColumnSettings(str, Enum):
    """Names of columns."""

    KERNEL_SIZE = "kernel_size"
    INPUT_SIZE = "input_size"
    OUTPUT_SIZE = "output_size"
    NUM_PARAMS = "num_params"
    PARAMS_PERCENT = "params_percent"
    MULT_ADDS = "mult_adds"
    TRAINABLE = "trainable"


@dataclass(frozen=True)
class LayerInfo:
    """One row: a run of a module, under torchinfo's names."""

    class_name: str
    var_name: str
    depth: int
    depth_index: int
    is_leaf_layer: bool
    is_recursive: bool
    executed: bool
    input_size: list[int]
    output_size: list[int]
    kernel_size: list[int] | None
    num_params: int
    trainable_params: int
    param_bytes: int
    output_bytes: int
    macs: int
    trainable: str


class ModelStatistics:
    """What `summary` found. ``profile`` is all of it; its text is the table."""

    def __init__(self, profile: Profile, input_size: Any, options: dict[str, Any]) -> None:
        assert profile.modules is not None
        self.profile, self.input_size, self._options = profile, input_size, options
        self.summary_list = [_describe(layer) for layer in list_layers(profile, profile.modules, "torchinfo")]
        self.total_params, self.trainable_params = profile.modules.params or 0, profile.modules.trainable_params or 0
        self.total_param_bytes = profile.param_bytes or 0
        self.total_mult_adds = sum(layer.macs for layer in self.summary_list if layer.is_leaf_layer)
        # each output of a layer with parameters, and its gradient
        self.total_output_bytes = 2 * sum(layer.output_bytes
                                          for layer in self.summary_list if layer.is_leaf_layer and layer.num_params)
        self.total_input = sum(tensor.nbytes for tensor in profile.inputs.values())

    def __repr__(self) -> str:
        return torchinfo_table(self.profile, mult_adds="torchinfo", **self._options)

    @staticmethod
    def to_megabytes(num: int) -> float:
        """Bytes as MB, of 10^6."""
        return num / 1e6


def summary(model: torch.nn.Module, input_size: Any = None, input_data: Any = None, batch_dim: int | None = None,
            cache_forward_pass: bool | None = None, col_names: Iterable[str] | None = None, col_width: int = 25,
            depth: int = 3, device: torch.device | str | None = None, dtypes: Sequence[torch.dtype] | None = None,
            mode: str | None = None, row_settings: Iterable[str] | None = None, verbose: int | None = None,
            **kwargs: Any) -> ModelStatistics:
    """Run ``model`` once without gradients and print the table of torchinfo, whose arguments these are.

    ``input_size`` is a size or several, of tensors of random numbers of the ``dtypes`` (float32); with
    ``batch_dim`` a dimension of 1 is put in there. ``input_data`` is a tensor, a sequence of arguments or a mapping
    of keyword arguments. Without either nothing is run and parameters alone are shown. ``col_names`` may also name
    ``output_bytes`` and ``fwd_seconds``. ``cache_forward_pass`` keeps the run for the next call with a model of
    that class. ``kwargs`` go to the model. Mult-adds are counted as torchinfo does (see `torchinfo_table`). A model
    is moved only where ``device`` says so; with ``device="meta"`` a copy without data is run. Training flags are as
    they were afterwards. Raises InputError (a ValueError) for arguments that cannot be used, and whatever the model
    itself raises.

    >>> stats = summary(torch.nn.Sequential(torch.nn.Linear(4, 2)), input_size=(3, 4), verbose=0)
    >>> stats.total_params, stats.total_mult_adds, stats.summary_list[1].output_size
    (10, 30, [3, 2])
    """
    given = input_data is not None or input_size is not None
    usual = ("output_size", "num_params") if given else ("num_params", )
    columns = usual if col_names is None else tuple(map(_plain, col_names))
    if input_data is not None and input_size is not None:
        raise InputError("summary(input_size=..., input_data=...): give one of them")
    missing = [name for name in NEED_INPUT if name in columns]
    if missing and not given:
        raise InputError(f"summary(col_names={columns!r}): {', '.join(missing)} need input_size or input_data")
    verbose = (0 if hasattr(sys, "ps1") else 1) if verbose is None else int(verbose)
    options = {"col_names": columns, "col_width": col_width, "depth": depth, "verbose": verbose,
               "row_settings": tuple(map(_plain, row_settings or ("depth", )))}
    training = {"train": True, "eval": False, None: False}.get(mode if mode is None else _plain(mode))
    if training is None:
        raise InputError(f"summary(mode={mode!r}): must be 'train' or 'eval'")
    if device is not None and torch.device(device).type == "meta":
        model = copy_without_data(model)
    elif device is not None:
        model.to(device)
    args, call_kwargs = make_inputs(model, input_size, input_data, batch_dim, dtypes)
    name = type(model).__name__
    profile = _cached.get(name) if cache_forward_pass else None
    if profile is None:
        if given:
            with set_training(model, training):
                session = Session(None, ProfileOptions(steps=1, keep_events=False), mode="infer")
                profile = run_steps(session, model, args, {**call_kwargs, **kwargs}, range(1), "own")
        else:  # nothing is run
            recorder = RuntimeRecorder(model, choose_clock(device_of(model)), whole=True)
            profile = make_profile(recorder, [0], "own", mode="infer")
        if cache_forward_pass:
            _cached[name] = profile
    sizes = [list(t.shape) for t in pytree.tree_leaves((args, call_kwargs)) if isinstance(t, torch.Tensor)]
    found = ModelStatistics(profile, sizes, options)
    if verbose:
        with drawing_plainly():
            print(found)
    return found


def clear_cached_forward_pass() -> None:
    """Forget the runs that ``cache_forward_pass`` kept."""
    _cached.clear()


def make_inputs(model: torch.nn.Module, input_size: Any, input_data: Any, batch_dim: int | None,
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
    is_list = isinstance(input_size, (list, tuple)) and len(input_size) > 0
    if not is_list or any(size <= 0 for size in pytree.tree_leaves(input_size)):
        raise InputError(f"summary(input_size={input_size!r}): must be a size above 0 in each dimension, or a sequence "
                         "of such sizes")
    sizes = [input_size] if isinstance(input_size[0], int) else list(input_size)
    kinds = list(dtypes or [torch.float32] * len(sizes))
    if len(kinds) != len(sizes):
        raise InputError(f"summary(dtypes={dtypes!r}): {len(sizes)} inputs need as many dtypes")
    tensors = [torch.rand(*size, device=device) for size in sizes]
    if batch_dim is not None:
        tensors = [t.unsqueeze(batch_dim) for t in tensors]
    return tuple(t.to(kind) for t, kind in zip(tensors, kinds)), {}


def _plain(name: str) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def _describe(layer: Layer) -> LayerInfo:
    module = layer.module
    inputs, outputs = ((), ()) if layer.call is None else (layer.call.inputs, layer.call.outputs)
    return LayerInfo(
        class_name=module.type, var_name=name_module(layer.place), depth=layer.place.depth, depth_index=layer.index,
        is_leaf_layer=layer.is_leaf, is_recursive=layer.is_recursive, executed=bool(outputs or inputs),
        input_size=first_shape(inputs) or [], output_size=first_shape(outputs) or [],
        kernel_size=None if module.kernel_size is None else list(module.kernel_size), num_params=module.params or 0,
        trainable_params=module.trainable_params or 0, param_bytes=module.param_bytes or 0,
        output_bytes=outputs[0].nbytes if outputs else 0, macs=layer.macs or 0, trainable=describe_training(module))
