"""Functions of ``torch._C`` that ``torch.cuda`` calls, and that a torch without CUDA lacks, as the simulation answers
them; and the calls of the public names that nothing without a device can answer, each with its reason.
"""
from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.accelerator
import torch.backends.cuda
import torch.cuda.green_contexts
import torch.cuda.memory

from analyzer.errors import InputError
from analyzer.meta.address_space import AddressSpace, MetaStorage, new_storage
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer, made_once, replace, supply
from analyzer.meta.state import active_state

from .sdp_choice import simulated_capability
from .stream import SimulatedGraph, device_index, is_simulated, make_pool_handle, simulated_class, simulated_cuda
from .workspaces.library import cublas_workspace_bytes, cublaslt_workspace_bytes, take_workspaces

_SENSOR = "it reads a sensor of a device at work, and there is none"
_STATISTICS = "the allocator of pinned memory of the host is not simulated"
_OWN_ALLOCATOR = "functions of a C library cannot give memory to a device that is not there"
_GREEN = "a share of a device's multiprocessors is not simulated; profile for a device that has as many"

#: by the module that has it: calls that are refused, and why
REFUSED: dict[str, dict[str, str]] = {
    "torch.cuda": {
        **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate", "memory_usage"), _SENSOR)},
    "torch.cuda.memory": {
        **dict.fromkeys(("host_memory_stats", "host_memory_stats_as_nested_dict", "reset_peak_host_memory_stats",
                         "reset_accumulated_host_memory_stats"), _STATISTICS),
        **dict.fromkeys(("CUDAPluggableAllocator.__init__", "change_current_allocator"), _OWN_ALLOCATOR)},
    "torch.cuda.green_contexts": {
        f"GreenContext.{name}": _GREEN for name in ("create", "set_context", "pop_context", "Stream")},
}


#: of the library that PyTorch is built with: .ci/docker/ci_commit_pins/nccl.txt (commit 0baa077)
NCCL_VERSION = (2, 29, 3)


_CUDA = 1  # c10/core/DeviceType.h
_MOST_PLANS = 4096  # CUFFT_DEFAULT_CACHE_SIZE in aten/src/ATen/native/cuda/CuFFTPlanCache.h


# What `torch.cuda.tunable` keeps: by the function that sets it the one that tells it, and its default
# (aten/src/ATen/cuda/tunable/Tunable.h; None: the rotating buffer is as large as the L2 cache).
_TUNING: dict[str, tuple[str, Any]] = {
    "_cuda_tunableop_enable": ("_cuda_tunableop_is_enabled", False),
    "_cuda_tunableop_tuning_enable": ("_cuda_tunableop_tuning_is_enabled", True),
    "_cuda_record_untuned_enable": ("_cuda_record_untuned_is_enabled", False),
    **{f"_cuda_tunableop_set_{name}": (f"_cuda_tunableop_get_{name}", default) for name, default in (
        ("max_tuning_duration", 30), ("max_tuning_iterations", 100), ("filename", "tunableop_results.csv"),
        ("rotating_buffer_size", None))}}


class _BindingState(threading.local):
    sync_debug_mode = 0
    most_plans = _MOST_PLANS
    tuning: Mapping[str, Any] = MappingProxyType({})  #: what a script set, by the function


_local = _BindingState()
_raw: WeakKeyDictionary[AddressSpace, dict[int, MetaStorage]] = WeakKeyDictionary()  # by address: of no tensor


def reset() -> None:
    _local.sync_debug_mode, _local.most_plans, _local.tuning = 0, _MOST_PLANS, MappingProxyType({})


def _tune(name: str, value: Any, *_: Any) -> None:
    _local.tuning = {**_local.tuning, name: value}
    if value and name == "_cuda_tunableop_enable":
        active_state().assume("TunableOp chooses kernels by measuring them: times are those of the default kernels")


def _tuned(name: str, default: Any) -> Any:
    value = _local.tuning.get(name, default)
    if not name.endswith("buffer_size"):
        return value
    # it is set in MB and told in kB (torch/cuda/tunable.py)
    return torch.cuda.get_device_properties().L2_cache_size >> 10 if value is None or value < 0 else value << 10


class _Error(int):
    success = 0


class _Runtime:
    """``torch.cuda.cudart()``: the functions that torch/csrc/cuda/shared/cudart.cpp binds. Each gives success."""

    cudaError = _Error

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:  # noqa: N802
        return torch.cuda.mem_get_info(device)

    @staticmethod
    def cudaGetErrorString(error: int) -> str:  # noqa: N802
        return f"error {error}"

    @staticmethod
    def _succeed(*args: Any, **kwargs: Any) -> int:
        return 0

    cudaProfilerStart = cudaProfilerStop = cudaHostRegister = cudaHostUnregister = _succeed
    cudaStreamCreate = cudaStreamDestroy = _succeed


def _refuse(name: str, reason: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        state = active_state()
        if reason is _SENSOR and state.options.unknown_value == "placeholder":
            state.assume(f"{name}() was taken as {state.placeholder}: {reason}")
            return state.placeholder
        raise InputError(f"{name}(): {reason}. Leave the call out of what is profiled")
    return call


def _refusing(module: str, path: str, reason: str) -> Iterator[Undo]:
    place, _, name = path.rpartition(".")
    known = sys.modules[module]
    for owner in (getattr(known, place, None),) if place else dict.fromkeys((known, torch.cuda)):
        if hasattr(owner, name):  # versions of torch differ
            yield answer(owner, name, _refuse(f"torch.cuda.{path.removesuffix('.__init__')}", reason),
                         where=simulated_cuda)


def _memory_stats(device: int) -> dict[str, Any]:
    state = active_state()
    state.asks_memory = True
    allocator = state.space.allocator(device_index(device))
    found = allocator.count()
    if allocator.stats.is_partial:
        state.assume("torch.cuda.memory_stats(): numbers of allocations, what was allocated and freed so far, and "
                     "peaks of the small and the large pool are counted from its first call on")
    return found


def _accelerator_stats(device: int) -> dict[str, Any]:
    """_accelerator_getDeviceStats in torch/csrc/DeviceAccelerator.cpp."""
    found = _memory_stats(device)
    return {name: value for name, value in found.items()
            if name not in ("reserved_bytes_by_private_pools", "num_oom_rejections")}


def _allocate(size: int, stream: int) -> int:
    active_state().asks_memory = True  # its address tells where memory is free
    space, index = active_state().space, device_index()
    number, before = space.stream_number(index, stream), space.current_stream(index)
    space.set_stream(number)
    try:
        with without_modes():
            storage = new_storage(size, torch.device("cuda", index), space)
    finally:
        space.set_stream(before)
    _raw.setdefault(space, {})[storage.data_ptr()] = storage
    return storage.data_ptr()


def _delete(address: int) -> None:
    if _raw.get(active_state().space, {}).pop(address, None) is None:
        raise InputError(f"torch.cuda.caching_allocator_delete({address}): no live memory of "
                         "torch.cuda.caching_allocator_alloc has this address")


def _enable(value: bool) -> None:
    if not value:
        raise InputError("torch.cuda.caching_allocator_enable(False): memory that every tensor takes from the device "
                         "itself is not simulated; leave the caching allocator on")


def _set_sync_debug_mode(mode: int) -> None:
    _local.sync_debug_mode = mode
    if mode:
        active_state().assume("torch.cuda.set_sync_debug_mode(): calls that wait for the device are not reported")


def _blas_handle() -> int:
    """As getCurrentCUDABlasHandle in ``aten/src/ATen/cuda/CublasHandlePool.cpp``: with its workspace."""
    take_workspaces(active_state(), torch.device("cuda", device_index()), ("cublas",))
    return make_pool_handle()[1]


def _external_stream(pointer: int, device: Any = None) -> Any:
    return torch.cuda.ExternalStream(pointer, device)


def _architectures() -> list[str]:
    return ["sm_{}{}".format(*simulated_capability())]


def _memory_used(device: Any = None) -> int:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


def _processes(device: Any = None) -> str:
    """In the layout of torch/cuda/memory.py; of this process alone."""
    used = _memory_used(device) / (1024 * 1024)
    return f"GPU:{device_index(device)}\nprocess {os.getpid():>10d} uses {used:>12.3f} MB GPU memory"


def _device_capability(device: Any = None) -> dict[str, Any]:
    """c10/core/DeviceCapability.h: every type, which CUDA devices leave so."""
    device_index(device)
    return {"supported_dtypes": {value for value in vars(torch).values() if isinstance(value, torch.dtype)}}


def _set_workspace_size(size: int) -> None:
    raise InputError(f"torch.backends.cuda.cublas_workspace_size({size}), cublaslt_workspace_size and "
                     "blas_workspace_size: set CUBLAS_WORKSPACE_CONFIG or CUBLASLT_WORKSPACE_SIZE, which are followed")


def _set_most_plans(device: int, most: int) -> None:
    _local.most_plans = most


class _AcceleratorGraph(SimulatedGraph):
    """Answers as ``torch.accelerator.Graph``, which captures what runs in a ``with`` block."""

    def __init__(self, keep_graph: bool = False, *, pool: tuple[int, int] | None = None,
                 capture_error_mode: str = "default") -> None:
        super().__init__(keep_graph)
        self.graph_pool, self.capture_error_mode = pool, capture_error_mode

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        super().capture_begin(self.graph_pool)

    def __enter__(self) -> _AcceleratorGraph:
        self.capture_begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self.capture_end()


def _yes(*args: Any) -> bool:
    return True


def _of(module: str, name: str) -> Callable[..., Any]:
    """What the module answers now, by a name; where there is no such device, it is torch's own function that asks."""
    def call(*args: Any) -> Any:
        if simulated_cuda() is None:
            torch.cuda._lazy_init()  # which raises
        return getattr(sys.modules[module], name)(*args)
    return call


_TORCH_CUDA = {f"_cuda_{bound}": _of("torch.cuda", name) for bound, name in {
    "getDevice": "current_device", "setDevice": "set_device", "emptyCache": "empty_cache",
    "resetPeakMemoryStats": "reset_peak_memory_stats", "canDeviceAccessPeer": "can_device_access_peer",
    "resetAccumulatedMemoryStats": "reset_accumulated_memory_stats", "synchronize": "synchronize",
    "ipc_collect": "ipc_collect", "hostMemoryStats": "host_memory_stats",
    "resetPeakHostMemoryStats": "reset_peak_host_memory_stats",
    "resetAccumulatedHostMemoryStats": "reset_accumulated_host_memory_stats",
    "changeCurrentAllocator": "change_current_allocator"}.items()}


def _stream_data(find: Callable[..., Any]) -> Callable[[int], tuple[int, int, int]]:
    """What ``torch.cuda.Stream`` is made of: torch/csrc/cuda/Module.cpp, THCPModule_getCurrentStream_wrap."""
    def get(index: int) -> tuple[int, int, int]:
        found = find(index)
        return found.stream_id, found.device.index, _CUDA
    return get


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    torch.cuda.set_stream(torch.cuda.Stream(stream_id=stream_id, device_index=device_index))


_TORCH_CUDA["_cuda_setStream"] = _set_stream
_TORCH_CUDA["_cuda_getStreamFromExternal"] = lambda pointer, index: (pointer, index, _CUDA)
_TORCH_CUDA["_cuda_getArchFlags"] = lambda: " ".join(_architectures())
_TORCH_CUDA["_cuda_getCurrentStream"] = _stream_data(_of("torch.cuda", "current_stream"))
_TORCH_CUDA["_cuda_getDefaultStream"] = _stream_data(_of("torch.cuda", "default_stream"))
_TORCH_CUDA["_cuda_memorySnapshot"] = lambda pool=None: {"segments": torch.cuda.memory_snapshot()}
_TORCH_ACCELERATOR = {f"_accelerator_{bound}": _of("torch.accelerator", name) for bound, name in {
    "getAccelerator": "current_accelerator", "getDeviceIndex": "current_device_index",
    "setDeviceIndex": "set_device_index", "getStream": "current_stream", "setStream": "set_stream",
    "synchronizeDevice": "synchronize", "emptyCache": "empty_cache", "getMemoryInfo": "get_memory_info",
    "resetAccumulatedStats": "reset_accumulated_memory_stats", "resetPeakStats": "reset_peak_memory_stats"}.items()}
_BINDINGS: dict[str, Callable[..., Any]] = {
    "_cuda_memoryStats": _memory_stats, "_cuda_getAllocatorBackend": lambda: "native",
    "_cuda_cudaCachingAllocator_raw_alloc": _allocate, "_cuda_cudaCachingAllocator_raw_delete": _delete,
    "_cuda_cudaCachingAllocator_enable": _enable, "_cuda_cudaCachingAllocator_is_enabled": _yes,
    "_cuda_set_sync_debug_mode": _set_sync_debug_mode,
    "_cuda_get_sync_debug_mode": lambda: _local.sync_debug_mode,
    "_cuda_getCurrentBlasHandle": _blas_handle, "_cuda_getCurrentSolverHandle": lambda: make_pool_handle()[1],
    "_cuda_getCublasWorkspaceSize": cublas_workspace_bytes,
    "_cuda_getCublasLtWorkspaceSize": cublaslt_workspace_bytes,
    **dict.fromkeys(("_cuda_setCublasWorkspaceSize", "_cuda_setCublasLtWorkspaceSize"), _set_workspace_size),
    "_nccl_version": lambda: NCCL_VERSION[0] << 32 | NCCL_VERSION[1] << 16 | NCCL_VERSION[2],
    "_nccl_version_suffix": lambda: b"",
    **{name: partial(_tune, name) for name in _TUNING},
    **{told: partial(_tuned, name, default) for name, (told, default) in _TUNING.items()},
    "_cuda_tunableop_set_numerical_check_tolerances": lambda enable, atol, rtol: None,
    "_cuda_tunableop_read_file": os.path.isfile,
    **dict.fromkeys(("_cuda_tunableop_get_results", "_cuda_tunableop_get_validators"), tuple),  # none was measured
    # by names that were imported before the mode began, torch's own functions are called
    **_TORCH_CUDA, **_TORCH_ACCELERATOR,
    "_accelerator_isAllocatorInitialized": lambda: simulated_cuda() is not None,
    "_accelerator_getDeviceStats": _accelerator_stats, "_accelerator_emptyHostCache": lambda: None}


_MISSING = {name: simulated for name, simulated in _BINDINGS.items() if not hasattr(torch._C, name)}


def _supply_missing() -> Undo:
    """Supply all that this build lacks at once: one by one they cost a tenth of what a mode costs to enter."""
    names = vars(torch._C)
    names.update(_MISSING)

    def undo() -> None:
        for name in _MISSING:
            del names[name]
    return undo


def replacements() -> Iterator[Undo]:
    yield _supply_missing()
    yield supply(torch.cuda, "_get_device_properties", _of("torch.cuda", "get_device_properties"))
    yield from _answers()


@made_once
def _answers() -> Iterator[Undo]:
    for name, simulated in _BINDINGS.items():
        if name not in _MISSING:  # also of a build with CUDA: the simulated device is another
            yield answer(torch._C, name, simulated, where=simulated_cuda)
    # of which is_available and device_count are made, also where code has them by a name of its own
    for name, found in (("_is_compiled", _yes), ("_nvml_based_avail", _yes),
                        ("_device_count_nvml", _of("torch.cuda", "device_count"))):
        yield answer(torch.cuda, name, found, where=simulated_cuda)
    yield answer(torch.cuda, "_get_pynvml_handler", _refuse("torch.cuda.utilization, temperature, power_draw", _SENSOR),
                 where=simulated_cuda)
    yield replace(torch.cuda, "_cudart", lambda original: original or _Runtime())
    for owner, name, simulated in (
            (torch.cuda, "device_memory_used", _memory_used),
            (torch.cuda, "get_stream_from_external", _external_stream), (torch.cuda, "get_arch_list", _architectures),
            (torch.cuda, "list_gpu_processes", _processes), (torch.cuda.memory, "list_gpu_processes", _processes),
            (torch.accelerator, "get_device_capability", _device_capability)):
        if hasattr(owner, name):  # versions of torch differ
            yield answer(owner, name, simulated, where=simulated_cuda)
    plans: Any = torch.backends.cuda.cuFFTPlanCache
    for prop, part, simulated in (
            ("size", "getter", _refuse("torch.backends.cuda.cufft_plan_cache.size", "cuFFT's plans are not simulated")),
            ("max_size", "getter", lambda device: _local.most_plans), ("max_size", "setter", _set_most_plans)):
        yield answer(vars(plans)[prop], part, simulated, where=simulated_cuda)
    yield answer(plans, "clear", lambda cache: None, where=simulated_cuda)
    if hasattr(torch.accelerator, "Graph"):  # from torch 2.13 on
        yield replace(torch.accelerator, "Graph",
                      lambda f: simulated_class(f, _AcceleratorGraph, is_simulated))
    for module, names in REFUSED.items():
        for path, reason in names.items():
            yield from _refusing(module, path, reason)
