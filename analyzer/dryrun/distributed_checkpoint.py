"""`torch.distributed.checkpoint` under a dry run: its own code plans, copies to the host and writes, to no file.
Private torch API.
"""
from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import current
from analyzer.meta.tensor import is_around_tensors

from .late_import import Make

_PACKAGE = "torch.distributed.checkpoint"


def replace_checkpoints() -> Mapping[str, Make]:
    """What to replace in which module."""
    return {f"{_PACKAGE}.filesystem": _write_nowhere, f"{_PACKAGE}.default_planner": _accept_plan,
            f"{_PACKAGE}.state_dict_saver": _save_in_thread, f"{_PACKAGE}._state_dict_stager": _stage_on_host}


def _write_nowhere() -> Iterable[Undo]:
    kind = sys.modules[f"{_PACKAGE}.filesystem"].FileSystem
    yield answer(kind, "create_stream", _create_stream, passes_original=True)
    for name in ("mkdir", "rename", "rm_file"):
        yield answer(kind, name, lambda *args: None)


def _create_stream(original: Any, system: Any, path: Any, mode: str) -> AbstractContextManager[Any]:
    """A file that is gone when it is closed, in place of one to write."""
    if "w" not in mode:
        found: AbstractContextManager[Any] = original(system, path, mode)
        return found
    state = current()
    if state is not None:
        folder = str(path).rpartition("/")[0]
        state.assume(f"torch.distributed.checkpoint to {folder!r} wrote nothing: there is no data")
    return tempfile.TemporaryFile(mode)


def _accept_plan() -> Iterator[Undo]:
    """The plan of all ranks is made of this one's: parts of the others are missing in it."""
    yield answer(sys.modules[f"{_PACKAGE}.default_planner"], "_validate_global_plan", lambda plan, metadata: [])


def _stage_on_host() -> Iterator[Undo]:
    """``StateDictStager``, which copies storages to the host, where it keeps them from one save to the next."""
    yield answer(sys.modules[f"{_PACKAGE}._state_dict_stager"].StateDictStager, "_offload_tensor", _offload)


def _offload(stager: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
    if is_around_tensors(x):
        names, context = x.__tensor_flatten__()
        parts = {name: _offload(stager, part, memo, non_blocking) if isinstance(part := getattr(x, name), torch.Tensor)
                 else part for name in names}
        memo[id(x)] = whole = type(x).__tensor_unflatten__(parts, context, x.size(), x.stride())
        return whole
    staged, storage = stager._cached_storage_mapping, x.untyped_storage()
    if storage not in staged:
        staged[storage] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=stager.pin_memory)
    copied = staged[storage].view(x.dtype).as_strided(x.size(), x.stride(), x.storage_offset())
    memo[id(x)] = copied.copy_(x, non_blocking=non_blocking)
    return copied


def _save_in_thread() -> Iterator[Undo]:
    """A process that uploads would wait for those of other ranks."""
    module = sys.modules[f"{_PACKAGE}.state_dict_saver"]
    in_thread = vars(module)["_ThreadBasedAsyncCheckpointExecutor"]
    yield answer(module, "_ProcessBasedAsyncCheckpointExecutor", lambda: in_thread())
