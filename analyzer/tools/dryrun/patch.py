"""What a dry run replaces besides the mode: threads, launchers, and what would need data."""
from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
import torch.profiler
import torch.utils.benchmark
import torch.utils.data.dataset
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from analyzer.cuda.kernels.product import answer_for_managed_memory
from analyzer.cuda.sdp_choice import simulated_capability
from analyzer.distributed.world_state import current_world, joined
from analyzer.hardware import simulated_spec, simulating
from analyzer.meta.address_space import MetaStorage, find_storage
from analyzer.meta.function.mode import constant
from analyzer.meta.intercept.mode_stack import without_modes
from analyzer.meta.intercept.replacement import Undo, answer, answer_each, replaced_once_imported
from analyzer.meta.state import MetaState, current
from analyzer.meta.tensor import device_of
from analyzer.meta.value.known_value import Deferred, small_enough
from analyzer.on_use import load
from analyzer.zoo.torchvision_ops import simulate_detection_ops

from .change import AS_IT_IS, ScriptChange
from .checkpoint import SAVES, Everywhere, read_headers_alone, write_nowhere
from .hub import Repositories, stand_in_for_names
from .image_data import stand_in_for_pictures
from .launch import LAUNCHES, choose_device, run_one_process
from .package import stand_in_packages
from .saved_file import SavedFiles, assume
from .tokenizer import stand_in_for_encodings
from .whole import list_blocks

#: Classes that time what runs, with the method that begins to.
TIMERS: tuple[tuple[Any, str], ...] = ((torch.utils.benchmark.Timer, "__init__"), (torch.profiler.profile, "start"))

# torchao asks which GPU there is, and whether torch was built with CUDA: the simulated one is enough for both.
_LEAST = {"is_sm_at_least_89": (8, 9), "is_sm_at_least_90": (9, 0), "is_sm_at_least_100": (10, 0)}

#: What to answer instead of functions of modules, by their places in these.
CAPABILITIES: dict[str, dict[str, Callable[..., Any]]] = {"torchao.utils": {
    **{name: partial(lambda least: simulated_capability() >= least, least) for name, least in _LEAST.items()},
    "is_sm_version": lambda major, minor: simulated_capability() == (major, minor)}}

# Threads that a script starts run under the mode too: weights are loaded, and texts generated, in threads. What the
# books of the simulated memory are told comes from one thread at a time.

TURN_SECONDS = 1.0
"""How long who hands a task to a pool waits for it: tasks run in turn, so that each run of a program makes its tensors
in the same order. A task that takes longer, since it waits for another, is left to itself.
"""


class _Thread(threading.local):
    starts_worker = False  #: of a pool, whose tasks enter the mode, each for itself: a worker can outlive the mode
    real_depth = 0         #: blocks in which torch runs on data


_thread = _Thread()


def _joining(state: MetaState, function: Callable[..., Any]) -> Callable[..., Any]:
    spec, world = simulated_spec(), current_world()
    state.space.share()

    def run(*args: Any, **kwargs: Any) -> Any:
        with state.join(state), simulating(spec), joined(world):
            return function(*args, **kwargs)

    return run


def _start_thread(original: Any, thread: threading.Thread) -> None:
    state = current()
    if state is not None and not _thread.starts_worker:
        thread.run = _joining(state, thread.run)  # type: ignore[method-assign]
    original(thread)


def _submit(original: Any, pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any,
            **kwargs: Any) -> Future[Any]:
    state = current()
    assert state is not None
    before, _thread.starts_worker = _thread.starts_worker, True
    try:
        future: Future[Any] = original(pool, _joining(state, function), *args, **kwargs)
    finally:
        _thread.starts_worker = before
    wait([future], TURN_SECONDS)
    return future


_CLIENT = "trl.generation.vllm_client"  # of a server that is not asked

_WORKER_SETTINGS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout", "worker_init_fn")


@contextmanager
def scripted(until: ExitStack, change: ScriptChange = AS_IT_IS, *, allows_download: bool = False,
             whole_steps: int | None = None) -> Iterator[None]:
    """A block in which a script runs without data; ``until`` is left when nothing is asked of its run any more."""
    with ExitStack() as undo:
        undo.enter_context(stand_in_packages())
        files = SavedFiles()
        repositories = Repositories(files)
        undo.callback(repositories.close)
        everywhere = Everywhere()
        undo.callback(everywhere.put_back)
        for owner, name, instead in _INSTEAD:
            undo.callback(answer(owner, name, instead, passes_original=True,
                                 where=lambda: None if _thread.real_depth else current()))
        for one in chain(run_one_process(until), files.replacements(), change.replacements()):
            # each is noted before the next is made
            undo.callback(one)
        made_once_imported: dict[str, Callable[[], Iterable[Undo]]] = {
            **({} if allows_download else {
                **stand_in_for_names(repositories, everywhere), **stand_in_for_pictures(), **stand_in_for_encodings()}),
            "bitsandbytes.functional": answer_for_managed_memory, **simulate_detection_ops(),
            "torch.distributed.checkpoint.filesystem": partial(write_nowhere, files),
            "transformers.utils.import_utils": lambda: load("analyzer.tools.dryrun.flash_attn:tell_transformers")(),
            "transformers.modeling_flash_attention_utils":
                lambda: load("analyzer.tools.dryrun.flash_attn:forget_functions")(),
            _CLIENT: lambda: answer_each(_CLIENT, load("analyzer.tools.dryrun.engine_server:ANSWERS")),
            **{module: partial(answer_each, module, answers)
               for module, answers in {**CAPABILITIES, **LAUNCHES, **SAVES}.items()}}
        for module, name_blocks in list_blocks(whole_steps, everywhere).items():
            made_once_imported[module] = partial(_make_all, name_blocks, made_once_imported.get(module, tuple))
        with everywhere.in_one_walk():
            read_headers_alone(files, everywhere)
            undo.enter_context(replaced_once_imported(made_once_imported))
        yield


def _make_all(*makers: Callable[[], Iterable[Undo]]) -> Iterator[Undo]:
    for make in makers:
        yield from make()


@contextmanager
def _for_real() -> Iterator[None]:
    """Run torch as if there were neither mode nor dry run: on data."""
    _thread.real_depth += 1
    try:
        with without_modes():
            yield
    finally:
        _thread.real_depth -= 1


def _load_in_this_process(original: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    bound = inspect.signature(original).bind(loader, *args, **kwargs).arguments
    if bound.get("num_workers", 0) > 0:
        assume(f"a DataLoader's {bound['num_workers']} workers were not started: it loads in the script's own process")
        bound["num_workers"] = 0
        for name in _WORKER_SETTINGS:
            bound.pop(name, None)
    original(**{k: v for k, v in bound.items() if k != "self"}, self=loader)


#: begins what is assumed where a loader gave nothing
EMPTY_LOADER = "a DataLoader gave no batch"


def _next_batch(original: Any, batches: Any) -> Any:
    try:
        return original(batches)
    except StopIteration:
        if not batches._num_yielded:
            data = batches._dataset
            size = f" of {len(data)} samples" if hasattr(type(data), "__len__") else ""
            assume(f"{EMPTY_LOADER}: its {type(data).__name__}{size} makes less than one, so what the script does for "
                   "a batch was not run")
        raise


def _draw_for_real(original: Any, source: Any) -> Iterator[int]:
    """The order of samples, drawn as ever, as it needs no data but its own; there may be more than memory holds."""
    order = original(source)
    while True:
        with _for_real():
            drawn = list(islice(order, 32))  # RandomSampler with replacement draws so many at once
        if not drawn:
            return
        yield from drawn


def _draw_in_turn(original: Any, source: Any) -> Iterator[int]:
    assume("WeightedRandomSampler: samples are taken in turn, as the weights have no data")
    return iter([i % len(source.weights) for i in range(source.num_samples)])


def _permute_indices(original: Any, n: int, **kwargs: Any) -> Any:
    with _for_real():
        order = original(n, **kwargs).tolist()
    return SimpleNamespace(tolist=lambda: order)


def _permute(original: Any, n: int, *args: Any, **kwargs: Any) -> Any:
    """A permutation is often an index: one that can be followed has values."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype") or torch.int64
    if args or kwargs.get("out") is not None or kwargs.get("requires_grad") or not small_enough(n, dtype):
        return original(n, *args, **kwargs)
    with _for_real():
        order = original(n, dtype=dtype)
    state = current()
    assert state is not None
    made = constant(state, order, torch.device("cpu"))
    return made if device is None else made.to(device)


def _draw_integers(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A row of integers on the host is often where samples begin."""
    made = original(*args, **kwargs)
    if made.dim() > 1 or device_of(made).type != "cpu" or made.requires_grad or kwargs.get("out") is not None or (
            not small_enough(made.numel(), made.dtype)):
        return made
    with _for_real():
        value = original(*args, **{k: v for k, v in kwargs.items() if k in ("low", "high", "size", "dtype")})
    if isinstance(storage := find_storage(made), MetaStorage):
        storage.known = Deferred(value)
    return made


def _time_the_host(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    assume(f"{name} told the time that Python takes without data, not the device's")
    return original(*args, **kwargs)


def _watch_the_host(original: Any, watcher: Any, *args: Any, **kwargs: Any) -> None:
    """PyTorch's profiler without the device, of which there is none: for each operator that it could not time there it
    would write a warning of many lines.
    """
    bound = inspect.signature(original).bind(watcher, *args, **kwargs)
    bound.arguments.update(use_device=None, use_cpu=True)
    bound.arguments.pop("use_cuda", None)
    original(*bound.args, **bound.kwargs)


def _enter_block(original: Any, block: Any) -> Any:
    """A block that the script gives a name, with PyTorch's profiler or without; torch names its own, too."""
    recorder = _find_recorder()
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("analyzer", "contextlib"):
        frame = frame.f_back
    if recorder is not None and frame.f_globals.get("__name__", "").partition(".")[0] != "torch":
        block.__dict__["is_heard"] = recorder.enter_block(block.name)
    return original(block)


def _leave_block(original: Any, block: Any, *error: Any) -> Any:
    recorder = _find_recorder()
    if recorder is not None and block.__dict__.pop("is_heard", False):
        recorder.leave_block()
    return original(block, *error)


def _find_recorder() -> Any:
    recorder = getattr(current(), "recorder", None)
    return recorder if recorder is not None and hasattr(recorder, "enter_block") else None


def _tell(told: bool, original: Any, x: Any, **named: Any) -> Any:
    """Unknown data is taken as finite, as the scalars are that stand for it."""
    if named or not isinstance(x, torch.Tensor) or x.layout is not torch.strided or not small_enough(
            x.numel(), torch.bool):
        return original(x, **named)
    state = current()
    assert state is not None
    state.assume("unknown values were taken as finite")
    with _for_real():
        value = torch.full(tuple(x.shape), told)
    return constant(state, value, device_of(x))


#: What stands in the place of which function, which it is given first, in the threads whose mode is active.
_INSTEAD: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (threading.Thread, "start", _start_thread), (ThreadPoolExecutor, "submit", _submit),
    (DataLoader, "__init__", _load_in_this_process), (_BaseDataLoaderIter, "__next__", _next_batch),
    (sampler.RandomSampler, "__iter__", _draw_for_real), (sampler.SubsetRandomSampler, "__iter__", _draw_for_real),
    (sampler.WeightedRandomSampler, "__iter__", _draw_in_turn),
    (torch.utils.data.dataset, "randperm", _permute_indices), (torch, "randperm", _permute),
    (torch, "randint", _draw_integers), (torch.autograd.profiler.profile, "__init__", _watch_the_host),
    *((DeviceMesh, name, choose_device) for name in ("_setup_world_group_and_device",) if hasattr(DeviceMesh, name)),
    (torch.profiler.record_function, "__enter__", _enter_block),
    (torch.profiler.record_function, "__exit__", _leave_block),
    *((timer, name, partial(_time_the_host, f"{timer.__module__}.{timer.__name__}")) for timer, name in TIMERS),
    *((owner, name, partial(_tell, name == "isfinite")) for owner in (torch, torch.Tensor)
      for name in ("isnan", "isinf", "isposinf", "isneginf", "isfinite")))
