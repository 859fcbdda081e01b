"""``torch.cuda`` as the simulation answers it, in threads whose mode is active; all others get torch's own answers."""
from __future__ import annotations

import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from uuid import UUID

import torch
import torch.accelerator
import torch.backends.cuda
import torch.backends.cudnn.rnn
import torch.cuda.memory
import torch.cuda.nvtx
import torch.cuda.profiler
import torch.cuda.random
import torch.mps
import torch.nn.parallel._functions
import torch.nn.parallel.comm
import torch.xpu

from analyzer.errors import InputError
from analyzer.hardware.catalogue import asked, simulated_kind, simulated_memory, simulated_spec
from analyzer.hardware.kernel_time.collective import has_peer_access
from analyzer.memory.allocator import CachingAllocator
from analyzer.meta.intercept.replacement import Undo, answer, made_once, replace, supply
from analyzer.meta.state import active, active_state, current, simulated_machine

from . import binding, stream
from .sdp_choice import CUDNN_VERSION, simulated_capability
from .stream import set_stream, simulated_cuda


class _FacadeState(threading.local):
    def __init__(self) -> None:
        self.streams: dict[int, stream.SimulatedStream] = {}  #: the current one of each device in this thread


_local = _FacadeState()
DeviceProperties = namedtuple("DeviceProperties", (
    "name", "major", "minor", "total_memory", "multi_processor_count", "L2_cache_size", "uuid",
    "max_threads_per_multi_processor", "warp_size", "is_integrated", "is_multi_gpu_board", "gcnArchName",
    "max_threads_per_block", "regs_per_multiprocessor", "shared_memory_per_block", "shared_memory_per_block_optin",
    "shared_memory_per_multiprocessor", "pci_bus_id", "pci_device_id", "pci_domain_id", "clock_rate",
    "memory_clock_rate", "memory_bus_width"), defaults=(
        32, False, False, "", 1024, 65536, 49152, None, None, None, None, None, None, None, None))
"""What ``torch.cuda.get_device_properties`` tells of the simulated device; None is unknown. Threads of a block, its
shared memory, and registers of a multiprocessor are alike from compute capability 7.0 to 12.1 (CUDA C++ Programming
Guide, table "Technical Specifications per Compute Capability").
"""
#: threads that a multiprocessor holds, by compute capability, where it is not 2048 (the same table)
_THREADS_OF_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


def _allocator(device: Any = None) -> CachingAllocator:
    active_state().asks_memory = True
    return active_state().space.allocator(stream.device_index(device))


def _set_device(device: Any) -> None:
    """As `_get_device_index` in torch/_utils.py, no index is refused; a negative one is passed over."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    if index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    _exchange_device(index)


def _current_device() -> int:
    active.is_device_asked = True
    return active.device_index


def _exchange_device(device: int) -> int:
    before = _current_device()
    if device >= 0:
        active.device_index = stream.device_index(device)
    return before


def _check_id(device: Any) -> None:
    """As ``get_device_properties`` in torch/cuda/__init__.py refuses an index."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    if index is not None and not 0 <= index < active_state().device_count:
        raise AssertionError(f"Invalid device id: {device!r} where torch.cuda.device_count() is "
                             f"{active_state().device_count}")


def _total_bytes() -> int | None:
    capacity_bytes = active_state().options.capacity_bytes
    return simulated_memory() if capacity_bytes is None else capacity_bytes


def _name(device: Any = None) -> str:
    """The driver's name for it, which the catalogue keeps in lower case among the aliases."""
    _check_id(device)
    spec = simulated_spec()
    return next((alias.upper().replace("_", " ") for alias in spec.aliases if alias.startswith("nvidia_")), spec.name)


def _properties(device: Any = None) -> DeviceProperties:
    spec, (major, minor) = simulated_spec(), simulated_capability()
    return DeviceProperties(
        _name(device), major, minor, _total_bytes(), spec.multiprocessors, spec.l2_bytes,
        UUID(int=stream.device_index(device)), _THREADS_OF_MULTIPROCESSOR.get((major, minor), 2048))


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    total_bytes = _total_bytes()
    reserved_bytes = _allocator(device).reserved_bytes
    if total_bytes is None:
        active_state().assume(
            f"the memory of {simulated_spec().name!r} is not known: torch.cuda.mem_get_info() answers what is reserved")
        total_bytes = reserved_bytes
    return max(0, total_bytes - reserved_bytes), total_bytes  # a dry run may go on beyond what there is


def _set_memory_fraction(fraction: float, device: int) -> None:
    if _total_bytes() is None:
        raise InputError(f"torch.cuda.set_per_process_memory_fraction({fraction!r}): a share of the memory of "
                         f"{simulated_spec().name!r}, which is not known; profile for a device whose memory is")
    _allocator(device).set_fraction(fraction)


def _is_there() -> bool:
    """Whether the simulated machine has a CUDA device: not where the device is the host itself, or Apple's."""
    return simulated_kind() == "cuda"


def _is_built() -> bool:
    """Torch itself imports names of its binding that a build without CUDA lacks where it hears that it has them."""
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return _is_there() and (not asking.startswith("torch.") or hasattr(torch._C, "_cuda_getDeviceCount"))


def _has_accelerator() -> bool:
    return simulated_kind() != "cpu"


def _accelerator(check_available: bool = False) -> torch.device | None:
    return torch.device(simulated_kind()) if _has_accelerator() else None


def _is_metal() -> bool:
    return simulated_kind() == "mps"


def _lazy_init() -> None:
    """What torch's own functions begin with. Raises RuntimeError as torch does where there is no device."""
    if not _is_there():
        raise RuntimeError(f"No CUDA GPUs are available: the device that is simulated is {simulated_spec().name}")


def _device_count() -> int:
    return active_state().device_count if _is_there() else 0


def _is_bf16_supported(including_emulation: bool = True) -> bool:
    return _is_there() and (simulated_capability() >= (8, 0) or including_emulation)


def _is_acceptable(x: torch.Tensor) -> bool:
    is_on = bool(torch._C._get_cudnn_enabled())
    return is_on and x.device.type == "cuda" and x.dtype in torch.backends.cudnn.CUDNN_TENSOR_DTYPES


def _capability(device: Any = None) -> tuple[int, int]:
    _check_id(device)
    return simulated_capability()


@asked
def _reaches_peers() -> bool:
    return has_peer_access(simulated_spec())


def _can_access_peer(device: Any, peer_device: Any) -> bool:
    """Whether one device reads the other's memory: not where cards reach each other through the host's alone."""
    for one in (device, peer_device):
        _check_id(one)
    return _reaches_peers()


def _give_back_caches() -> None:
    """Of each device: ``emptyCache`` in c10/cuda/CUDACachingAllocator.cpp."""
    active_state().asks_memory = True
    for allocator in (_allocator(), *active_state().space.allocators.values()):
        allocator.empty_cache()


def _snapshot() -> list[dict[str, Any]]:
    active_state().asks_memory = True
    return [segment for index, allocator in sorted(active_state().space.allocators.items())
            for segment in allocator.snapshot(index)]


def _snapshot_all(device: Any = None, **kwargs: Any) -> dict[str, Any]:
    """As ``torch.cuda.memory._snapshot`` without a recorded history: segments and blocks, and no events."""
    count = active_state().device_count
    return {"segments": _snapshot(), "device_traces": [[] for _ in range(count)],
            "allocator_settings": _allocator().options.snapshot(), "external_annotations": []}


def _current_stream(device: Any = None) -> stream.SimulatedStream:
    index = stream.device_index(device)
    return _local.streams.get(index) or _default_stream(index)


def _default_stream(device: Any = None) -> stream.SimulatedStream:
    return stream.SimulatedStream(stream.device_index(device), stream_id=0)


def _set_stream(stream: Any) -> None:  # which may be named
    if stream is not None:
        _exchange_device(stream.device.index)  # THCPModule_setStream in torch/csrc/cuda/Module.cpp
        _local.streams[stream.device.index] = stream
        set_stream(stream)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_nothing = _constant(None)


def _of_allocator(name: str) -> Callable[..., int]:
    return lambda device=None: int(getattr(_allocator(device), name))


_MEMORY: dict[str, Callable[..., Any]] = {
    "memory_allocated": _of_allocator("allocated_bytes"), "memory_reserved": _of_allocator("reserved_bytes"),
    "max_memory_allocated": _of_allocator("peak_allocated_bytes"), "memory_cached": _of_allocator("reserved_bytes"),
    **dict.fromkeys(("max_memory_reserved", "max_memory_cached"), _of_allocator("peak_reserved_bytes")),
    "mem_get_info": _mem_get_info,
    "memory_snapshot": lambda *args, **kwargs: _snapshot(),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
                    lambda device=None: _allocator(device).reset_peaks()),
    "reset_accumulated_memory_stats": lambda device=None: _allocator(device).stats.reset_accumulated(),
    "empty_cache": _give_back_caches, "_record_memory_history": _nothing, "_snapshot": _snapshot_all}
_RANDOM: dict[str, Callable[..., Any]] = {
    "get_rng_state": lambda device=None: stream.random_state(),
    "get_rng_state_all": lambda: [stream.random_state() for _ in range(active_state().device_count)],
    "initial_seed": _constant(0)}
_SEEDS = ("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all", "seed", "seed_all")
#: what any simulated machine answers, and what then only one with a CUDA device does: torch tells others
_MACHINE: dict[str, Callable[..., Any]] = {
    "is_available": _is_there, "is_initialized": _is_there, "device_count": _device_count,
    "is_bf16_supported": _is_bf16_supported, "_lazy_init": _lazy_init}
_DEVICE: dict[str, Callable[..., Any]] = {
    "current_device": _current_device, "set_device": _set_device, "_exchange_device": _exchange_device,
    "_maybe_exchange_device": _exchange_device, "get_device_name": _name, "get_device_capability": _capability,
    "get_device_properties": _properties,
    "can_device_access_peer": _can_access_peer, "current_stream": _current_stream, "default_stream": _default_stream,
    "set_stream": _set_stream, "synchronize": stream.synchronize,
    **dict.fromkeys(("init", "ipc_collect"), _nothing),
}
_ANY_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "is_available": _has_accelerator, "device_count": lambda: _device_count() or int(_has_accelerator()),
    "current_accelerator": _accelerator}
_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "current_device_index": _current_device, "current_device_idx": _current_device,
    "set_device_index": _set_device, "set_device_idx": _set_device, "get_memory_info": _mem_get_info,
    "current_stream": _current_stream, "set_stream": _set_stream, "synchronize": stream.synchronize,
    **{name: _MEMORY[name]
       for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache",
                    "reset_peak_memory_stats", "reset_accumulated_memory_stats")}}
_CUDNN: dict[str, Callable[..., Any]] = {
    "is_available": _is_there, "version": lambda: CUDNN_VERSION if _is_there() else None,
    "is_acceptable": _is_acceptable}
_CUDNN_RNN: dict[str, Callable[..., Any]] = {
    "get_cudnn_mode": {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}.__getitem__}


class _Quiet:
    """Stands in for a library of marks and markers: every function does nothing."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return _nothing if current() is not None else getattr(self._original, name)


def _makes_cuda(device: Any = "cpu", *args: Any, **kwargs: Any) -> bool:
    state = current()
    return state is not None and state.lacks_cuda is None and torch.device(device).type == "cuda"


def _times_cuda(device: Any = "cuda", *args: Any, **kwargs: Any) -> bool:
    return stream.is_simulated() and _makes_cuda("cuda" if device is None else device)


@made_once
def _answers() -> Iterator[Undo]:
    # torch.backends.cudnn is a proxy of the module: what the module's own functions ask stays torch's
    tables: tuple[tuple[Any, dict[str, Callable[..., Any]], Callable[[], object | None]], ...] = (
        (torch.cuda, _MACHINE, simulated_machine), (torch.cuda, {**_DEVICE, **_MEMORY, **_RANDOM}, simulated_cuda),
        (torch.cuda.memory, {name: _MACHINE[name] for name in ("is_initialized", "_lazy_init")}, simulated_machine),
        (torch.cuda.memory, _MEMORY, simulated_cuda), (torch.cuda.random, _RANDOM, simulated_cuda),
        *((owner, dict.fromkeys(_SEEDS, _nothing), current) for owner in (torch.cuda, torch.cuda.random)),
        (torch.accelerator, _ANY_ACCELERATOR, simulated_machine), (torch.accelerator, _ACCELERATOR, simulated_cuda),
        (torch.backends.cuda, {"is_built": _is_built, "is_flash_attention_available": _is_there}, simulated_machine),
        (torch.backends.cudnn, _CUDNN, simulated_machine), (torch.backends.cudnn.rnn, _CUDNN_RNN, current),
        (torch.backends.mps, {"is_available": _is_metal, "is_built": _is_metal}, simulated_machine),
        (torch.mps, {"is_available": _is_metal}, simulated_machine),
        (torch.xpu, {"is_available": _constant(False), "device_count": _constant(0)}, simulated_machine))
    for owner, table, where in tables:
        for name, simulated in table.items():
            if hasattr(owner, name):  # versions of torch differ
                yield answer(owner, name, simulated, where=where)
    for owner, name, kind, applies in (
            *((owner, name, kind, stream.is_simulated) for owner in (torch.cuda, torch.cuda.streams)
              for name, kind in (("Stream", stream.SimulatedStream), ("Event", stream.SimulatedEvent))),
            (torch, "Stream", stream.SimulatedStream, _times_cuda),
            (torch, "Event", stream.SimulatedDeviceEvent, _times_cuda),
            (torch, "Generator", stream.SimulatedGenerator, _makes_cuda)):
        yield replace(owner, name, partial(stream.simulated_class, simulated=kind, applies=applies))
    yield replace(torch.cuda, "default_generators", stream.DefaultGenerators)
    yield replace(torch.cuda.nvtx, "_nvtx", _Quiet)
    for name in ("start", "stop"):
        yield answer(torch.cuda.profiler, name, _nothing)
    # which libraries with kernels of their own ask for when they are imported
    yield answer(torch._C, "_get_accelerator", lambda: torch.device(simulated_kind()), where=simulated_machine)
    yield answer(torch.accelerator, "device_index", lambda index: torch.cuda.device(index), where=simulated_cuda)


def replacements() -> Iterator[Undo]:
    yield from _answers()
    yield supply(torch._C, "_cuda_setMemoryFraction", _set_memory_fraction)
    yield supply(torch._C, "_cuda_getMemoryFraction", lambda device: _allocator(device).memory_fraction)
    yield supply(torch._C, "_cuda_getCurrentRawStream", lambda index: _current_stream(index).cuda_stream)
    yield _forget


def _forget() -> None:
    """Streams and devices that were set belong to the mode that ends."""
    active.device_index, active.is_device_asked = 0, False
    binding.reset()
    _local.streams.clear()
