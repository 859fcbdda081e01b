"""Checkpoints under a dry run: of safetensors and of `torch.distributed.checkpoint`."""
from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from analyzer.cuda.stream import simulated_class
from analyzer.distributed.world_state import current_world
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import current
from analyzer.meta.tensor import is_around_tensors
from analyzer.saved_format import decode_json

from .saved_file import SavedFiles, assume, stage

_FRAMEWORKS = ("pt", "torch", "pytorch")
# The dtypes of safetensors/src/tensor.rs (Dtype), where this version of torch has them.
_DTYPES = {
    name: getattr(torch, dtype) for name, dtype in (
        pair.split(":") for pair in "F64:float64 F32:float32 F16:float16 BF16:bfloat16 I64:int64 I32:int32 I16:int16 "
        "I8:int8 U64:uint64 U32:uint32 U16:uint16 U8:uint8 BOOL:bool F8_E4M3:float8_e4m3fn F8_E5M2:float8_e5m2 "
        "F8_E4M3FNUZ:float8_e4m3fnuz F8_E5M2FNUZ:float8_e5m2fnuz F8_E8M0:float8_e8m0fnu C64:complex64".split())
    if hasattr(torch, dtype)}
_LONGEST_HEADER = 100_000_000  # safetensors/src/tensor.rs, MAX_HEADER_SIZE


class HeaderOnly:
    """Answers as ``safetensors.safe_open``, with tensors without data: nothing behind the header is read, or need be
    there. Raises SafetensorError for a file that does not begin with a header.
    """

    files = SavedFiles()  #: of the dry run

    def __init__(self, filename: Any, framework: str, device: Any = "cpu", **_: Any) -> None:
        saved = self.files.find(filename)
        self._entries = dict(saved if isinstance(saved, dict) else _read_header(filename, saved))
        self._metadata: dict[str, str] | None = self._entries.pop("__metadata__", None)
        self._device = device
        assume("checkpoints of safetensors were read for names, shapes and dtypes alone")

    def __enter__(self) -> HeaderOnly:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def keys(self) -> list[str]:
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        return sorted(self._entries, key=lambda name: (self._entries[name]["data_offsets"], name))

    def metadata(self) -> dict[str, str] | None:
        return self._metadata

    def get_slice(self, name: str) -> HeaderSlice:
        from safetensors import SafetensorError

        if name not in self._entries:
            raise SafetensorError(f"File does not contain tensor {name}")
        entry = self._entries[name]
        return HeaderSlice(tuple(entry["shape"]), entry["dtype"], self._device)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.offset_keys()}


class HeaderSlice:
    """Answers as what ``safe_open.get_slice`` gives."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: Any) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        with without_modes():
            shape = torch.empty(self._shape, device="meta")[index].shape
        return torch.empty(shape, dtype=_DTYPES[self._dtype], device=self._device)


def _read_header(filename: Any, saved: bytes | None) -> dict[str, Any]:
    """Of a file, or of what the script ``saved`` as one."""
    from safetensors import SafetensorError

    with open(filename, "rb") if saved is None else io.BytesIO(saved) as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 0 < length <= _LONGEST_HEADER else b""
    try:
        header = decode_json(text)
    except ValueError as error:
        raise SafetensorError(f"Error while deserializing header: {filename} does not begin with one") from error
    if not isinstance(header, dict):
        raise SafetensorError(f"Error while deserializing header: that of {filename} is no table of tensors")
    return header


def read_headers_alone(files: SavedFiles, everywhere: Everywhere) -> None:
    """Replace what reads and writes checkpoints of safetensors, where that is installed."""
    if importlib.util.find_spec("safetensors") is None:
        return
    import safetensors.torch

    opened = safetensors.safe_open
    header_only = type("HeaderOnly", (HeaderOnly,), {"files": files})
    everywhere.replace({
        opened: simulated_class(opened, header_only, lambda filename, framework, *_, **__: (
            current() is not None and framework in _FRAMEWORKS)),
        **{original: _writing_nothing(original, original.__name__, files)
           for original in (safetensors.torch.save_file, safetensors.torch.save_model)},
        safetensors.torch.save: _without_data(safetensors.torch.save)})


def _writing_nothing(original: Any, name: str, files: SavedFiles) -> Any:
    def save(value: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return original(value, filename, *args, **kwargs)
        assume(f"safetensors.torch.{name} to {str(filename)!r} wrote nothing: there is no data")
        tensors = value.state_dict() if isinstance(value, torch.nn.Module) else value
        with torch.profiler.record_function("save"):  # the phase of a script's cycle
            # _flatten_as_ptr in safetensors/torch.py holds what it copies of all tensors until the file is written
            stage([t.nbytes for t in tensors.values() if t.device.type != "cpu"], at_once=True)
        files.keep(filename, make_header(tensors, kwargs.get("metadata", args[0] if args else None)))

    return save


def _without_data(original: Any) -> Any:
    """As ``safetensors.torch.save``, which reads data at its address: the header alone."""
    def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
        if current() is None:
            return original(tensors, metadata)  # type: ignore[no-any-return]
        assume("safetensors.torch.save gave what tensors are, and no data")
        header = json.dumps({k: v for k, v in make_header(tensors, metadata).items() if v is not None}).encode()
        header += b" " * (-len(header) % 8)  # as safetensors/src/tensor.rs, prepare
        return len(header).to_bytes(8, "little") + header

    return save


def make_header(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None) -> dict[str, Any]:
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    ends = [0, *itertools.accumulate(t.nbytes for t in tensors.values())]
    return {"__metadata__": metadata, **{
        key: {"dtype": codes[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
        for (key, t), start, end in zip(tensors.items(), ends, ends[1:])}}


class Everywhere:
    """What stands in the place of functions and classes in all modules that have them, also by names of their own.

    A walk through the modules of a process with transformers takes 0.04 s: all are put back in one.
    """

    def __init__(self) -> None:
        self._originals: dict[Any, Any] = {}
        self._waiting: dict[Any, Any] | None = None

    @contextmanager
    def in_one_walk(self) -> Iterator[None]:
        """A block of which the end replaces what it asks for."""
        waiting: dict[Any, Any] = {}
        self._waiting = waiting
        yield
        self._waiting = None
        self.replace(waiting)

    def replace(self, instead: Mapping[Any, Any]) -> None:
        """Put others in the place of the keys of ``instead``, also in modules that import them until they are back."""
        if self._waiting is not None:
            self._waiting |= instead
            return
        self._originals |= {new: old for old, new in instead.items()}
        _exchange(instead)

    def put_back(self) -> None:
        _exchange(self._originals)


def _exchange(instead: Mapping[Any, Any]) -> None:
    known = {id(old): new for old, new in instead.items()}  # not by the values' own equality
    for module in list(sys.modules.values()) if known else ():
        if isinstance(module, ModuleType):
            names = vars(module)
            for name, value in list(names.items()):
                if id(value) in known:
                    names[name] = known[id(value)]
                elif type(value) is partial and id(value.func) in known:  # as timm has huggingface_hub's
                    names[name] = partial(known[id(value.func)], *value.args, **value.keywords)


# `torch.distributed.checkpoint` under a dry run: its own code plans, copies to the host and writes what tensors are, to
# files that are kept in memory. Private torch API.

_PACKAGE = "torch.distributed.checkpoint"


def write_nowhere(files: SavedFiles) -> Iterator[Undo]:
    """Let its files be among ``files``, where they are found again, and nothing on the disk be made or removed."""
    system = sys.modules[f"{_PACKAGE}.filesystem"]
    kind = system.FileSystem
    yield answer(system.FileSystemReader, "read_data", _read_data, passes_original=True)
    yield answer(sys.modules[f"{_PACKAGE}.utils"]._DistWrapper, "__init__", _coordinate, passes_original=True,
                 where=current_world)

    def create_stream(original: Any, system: Any, path: Any, mode: str) -> AbstractContextManager[Any]:
        if "w" in mode:
            return _writing(files, path, "w+b" if "b" in mode else "w+")
        content = files.find(path)
        if not isinstance(content, bytes):
            return original(system, path, mode)  # type: ignore[no-any-return]
        return io.BytesIO(content) if "b" in mode else io.StringIO(content.decode())

    yield answer(kind, "create_stream", create_stream, passes_original=True)
    yield answer(kind, "mkdir", lambda system, path: files.make_folder(path))
    yield answer(kind, "rename", lambda system, path, new_path: files.move(path, new_path))
    yield answer(kind, "rm_file", lambda system, path: files.forget(path))


@contextmanager
def _writing(files: SavedFiles, path: Any, mode: str) -> Iterator[Any]:
    """A file of the system's, whose descriptor may be asked for, that is kept and gone when it is closed."""
    assume(f"torch.distributed.checkpoint to {str(path).rpartition('/')[0]!r} wrote nothing: there is no data")
    with tempfile.TemporaryFile(mode) as stream, os.fdopen(os.dup(stream.fileno()), "rb") as written:
        yield stream
        stream.close()  # which its writer may have done
        written.seek(0)
        files.keep(path, written.read())


def _offload(stager: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
    """``StateDictStager`` copies storages to the host, where it keeps them from one save to the next."""
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


def _coordinate(original: Any, wrapper: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
    """The rank that runs makes the plan of all ranks itself: the coordinator, which would send it, does not run."""
    original(wrapper, group, use_dist, sys.modules["torch.distributed"].get_rank(group) if use_dist else
             coordinator_rank)


def _leave_shards(plans: list[Any], save_to_lowest_rank: bool = False) -> list[Any]:
    """What ``dedup_save_plans`` leaves to each rank: in these plans, copies of one rank's, shards look like the same
    ones, and are others of the same tensors; numbers and the like, which one rank writes, this one does.
    """
    original, world = sys.modules[f"{_PACKAGE}._dedup_save_plans"].dedup_save_plans, current_world()
    rank = 0 if world is None else world.rank

    def is_kept(at: int, item: Any, left: Any) -> bool:
        if item.tensor_data is None:
            return at == rank
        return item in left.items or item.tensor_data.chunk.sizes != item.tensor_data.size

    return [replace(plan, items=[item for item in plan.items if is_kept(at, item, left)])
            for at, (plan, left) in enumerate(zip(plans, original(plans, save_to_lowest_rank)))]


def _name_shards(plan: Any, metadata: Any) -> list[str]:
    """Nothing is wrong with a plan of which shards of other ranks are missing; those of this one are named once."""
    for stored in metadata.state_dict_metadata.values():
        if hasattr(stored, "chunks"):
            stored.chunks = [chunk for at, chunk in enumerate(stored.chunks) if chunk not in stored.chunks[:at]]
    return []


def _read_data(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    """What another rank of a job has written is not there, and would be the contents of what it is read to."""
    if current_world() is None:
        return original(reader, plan, planner)
    there = [item for item in plan.items if item.storage_index in reader.storage_data]
    for item in plan.items:
        if item not in there:
            planner.commit_tensor(item, planner.resolve_tensor(item).detach())
    return original(reader, replace(plan, items=there), planner)


def _upload_in_thread() -> Any:
    """In place of a process that uploads, which would wait for those of other ranks; without a group there is none."""
    sys.modules["torch.distributed"].get_rank()  # torch's error, where ``_ProcessGroupInitInfo`` asks for it
    return vars(sys.modules[f"{_PACKAGE}.state_dict_saver"])["_ThreadBasedAsyncCheckpointExecutor"]()


#: What to answer instead of functions of modules, by their places in these.
SAVES: dict[str, dict[str, Callable[..., Any]]] = {
    # the plan of all ranks is made of this one's
    f"{_PACKAGE}.default_planner": {"_validate_global_plan": _name_shards, "dedup_save_plans": _leave_shards},
    f"{_PACKAGE}._state_dict_stager": {"StateDictStager._offload_tensor": _offload},
    f"{_PACKAGE}.state_dict_saver": {"_ProcessBasedAsyncCheckpointExecutor": _upload_in_thread}}
