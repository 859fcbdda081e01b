"""What a program owns that a profile could leave changed: its objects, torch's functions, this process, its files."""
from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from operator import is_
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from analyzer.meta.intercept import patch, replacement
from analyzer.meta.intercept import replacement as interrupt
from analyzer.record import optimizer_step

Fingerprint = dict[str, Any]

_PLAIN = (type(None), bool, int, float, str, bytes, complex)
_DESCRIPTORS = (property, staticmethod, classmethod)
_MOST_PATCHED = (
    "torch", "torch._C", "torch.accelerator", "torch.amp", "torch.autograd", "torch.autograd.graph", "torch.cuda",
    "torch.cuda.amp", "torch.cuda.graphs", "torch.cuda.memory", "torch.cuda.random", "torch.cuda.streams",
    "torch.distributed", "torch.distributed.distributed_c10d", "torch.jit._builtins", "torch.nn.functional",
    "torch.nn.init", "torch.nn.modules.module", "torch.optim", "torch.optim.optimizer", "torch.overrides",
    "torch.random", "torch.utils._foreach_utils", "torch.utils.checkpoint", "torch.utils.data",
    "torch.utils.data.sampler", "concurrent.futures.thread", "random", "subprocess", "threading", "time")


class Same:  # an object, equal to itself alone
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kind = type(self.held)
        return f"<{kind.__module__}.{kind.__qualname__} {getattr(self.held, '__qualname__', '')}>"


def read_owned(owned: dict[str, Any]) -> Fingerprint:
    """Every object that can be reached from what a user holds, by its path: identities, tensors with their data."""
    found: Fingerprint = {}
    seen: set[int] = set()
    waiting = list(owned.items())
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _PLAIN):
            found[path] = value
            continue
        found[path] = Same(value)
        if id(value) in seen or isinstance(value, (types.ModuleType, type)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found |= {f"{path}.{name}": part for name, part in _read_tensor(value)}
            waiting += [(f"{path}.grad", value.grad)] if value.is_leaf else []
        if isinstance(value, dict):
            found[f"{path}[]"] = [Same(key) if not isinstance(key, _PLAIN) else key for key in value]
            waiting += [(f"{path}[{key!r:.60}]", item) for key, item in value.items()]
        elif isinstance(value, (set, frozenset)):
            found[f"{path}[]"] = sorted(map(id, value))
        elif isinstance(value, (list, tuple)):
            found[f"{path}[]"] = len(value)
            waiting += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
        elif isinstance(value, types.FunctionType):
            waiting += [(f"{path}()", cell.cell_contents) for cell in value.__closure__ or () if _is_set(cell)]
        found[f"{path}.class"] = Same(type(value))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            waiting.append((f"{path}.__dict__", attributes))
    return found


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _read_tensor(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    yield "data_ptr", tensor.data_ptr()
    yield "specs", (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
    yield "grad_fn", Same(tensor.grad_fn)
    yield "_version", None if tensor.is_inference() else tensor._version
    yield "_backward_hooks", Same(tensor._backward_hooks)
    yield "hooks", [*(tensor._backward_hooks or {})]
    accumulated = tensor._post_accumulate_grad_hooks if tensor.is_leaf else None
    yield "_post_accumulate_grad_hooks", [*(accumulated or {})]
    if tensor.device.type != "meta" and type(tensor) in (torch.Tensor, nn.Parameter):
        yield "bytes", tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else \
            tensor.item()


def read_process(folder: Path) -> Fingerprint:
    """What belongs to the process and the thread, and the files of a folder with their contents."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    found: Fingerprint = {
        "autocast": (autocast, torch.is_autocast_cache_enabled()), "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(), "anomaly": torch.is_anomaly_enabled(),
        "multithreading": torch.autograd._is_multithreading_enabled() if hasattr(
            torch.autograd, "_is_multithreading_enabled") else None,
        "torch function": torch._C._is_torch_function_enabled(),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "dispatch keys": (str(torch._C._dispatch_tls_local_include_set()),
                          str(torch._C._dispatch_tls_local_exclude_set())),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
                     torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        "cuda": (torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized()),
        "random": (random.getstate(), torch.get_rng_state().numpy().tobytes(),
                   [str(part) for part in numpy.random.get_state()]),
        "collector": (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 0, gc.get_debug(), len(gc.callbacks)),
        "interpreter": (sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), sys.getswitchinterval(),
                        threading.gettrace(), threading.getprofile()),
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook),
        "streams": [(Same(s), getattr(s, "errors", None)) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "signals": {int(n): signal.getsignal(n) for n in signal.valid_signals()},
        "timers": signal.getitimer(signal.ITIMER_REAL), "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "warnings": ([*warnings.filters], Same(warnings.showwarning)),
        "threads": sorted(t.name for t in threading.enumerate()), "environment": dict(os.environ), "cwd": os.getcwd(),
        "arguments": [*sys.argv], "path": (Same(sys.path), [*sys.path]), "meta path": [*map(id, sys.meta_path)],
        "main": Same(sys.modules.get("__main__")), "open files": len(os.listdir("/proc/self/fd")),
        "children": _list_children(), "temporary files": sorted(
            name for name in os.listdir(tempfile.gettempdir()) if name.startswith((".analyzer", "analyzer-"))),
        "files": {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")},
        "lists of torch": [*map(len, _lists_of_torch())], "operators": [str(op.non_fallthrough_keys) for op in [
            *torch._ops._higher_order_ops.values()]][:40],
        "kernels of operators": [[*map(str, op.python_key_table)] for op in torch._ops._higher_order_ops.values()],
        "this package": _read_package(),
    }
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is not None:
        found["process groups"] = (distributed.is_initialized(), len(distributed._world.pg_map),
                                   len(distributed._world.pg_names), distributed._world.group_count)
    return found


def _read_package() -> tuple[int, ...]:
    """What this package counts while something of it runs; what is left over would harm a later run."""
    watch = interrupt._watch
    return (watch.users, watch.holds, len(watch._replaced), len(watch._around), len(interrupt.waiting),
            patch.mode_replacements._users, len(patch.mode_replacements._undo), len(replacement._chains),
            len(optimizer_step._observers))


def _list_children() -> list[str]:  # the processes that this one started and that are there yet, zombies too
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            found += Path(f"/proc/self/task/{task}/children").read_text().split()
        except OSError:
            pass
    return found


def _lists_of_torch() -> Iterator[Any]:
    yield torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    yield optimizer._foreach_supported_types
    yield optimizer._global_optimizer_pre_hooks
    yield optimizer._global_optimizer_post_hooks
    yield torch.utils._foreach_utils._foreach_supported_types
    for name, value in vars(nn.modules.module).items():
        if name.startswith("_global_") and isinstance(value, dict):
            yield value


class Functions:  # the attributes of torch's modules and classes; all of them, or those where most is replaced
    def __init__(self, is_whole: bool) -> None:
        if is_whole:
            modules = [m for n, m in [*sys.modules.items()] if n.partition(".")[0] == "torch" and (
                type(m) is types.ModuleType or isinstance(m, types.ModuleType) and "_ops" not in m.__name__)]
        else:
            modules = [importlib.import_module(name) for name in _MOST_PATCHED if name in sys.modules]
        self.owners = [*modules, *{id(v): v for m in modules for v in [*vars(m).values()] if isinstance(v, type)
                                   and v.__module__.partition(".")[0] in ("torch", m.__name__)}.values()]
        self.names = [[*vars(owner)] for owner in self.owners]
        self.values = [[*vars(owner).values()] for owner in self.owners]

    def list_changed(self) -> list[str]:  # those that are not what they were; what was imported since is not told
        changed: list[str] = []
        for owner, names, values in zip(self.owners, self.names, self.values):
            now = vars(owner)
            if len(now) == len(values) and all(map(is_, now.values(), values)):
                continue
            for name, value in zip(names, values):
                if now.get(name, names) is not value and (callable(value) or isinstance(value, _DESCRIPTORS)):
                    changed.append(f"{getattr(owner, '__name__', owner)}.{name}")
            known = set(names)
            changed += [f"{getattr(owner, '__name__', owner)}.{name} is new" for name in now
                        if name not in known and getattr(now[name], "__module__", "").startswith("analyzer")]
        return changed


def list_changed(before: Fingerprint, after: Fingerprint) -> list[str]:  # what differs, a line each
    changed = []
    for key in {**before, **after}:
        one, other = before.get(key, "nothing"), after.get(key, "nothing")
        if type(one) is not type(other) or one != other:
            changed.append(f"{key}: {_shorten(one, other)}")
    return changed


def _shorten(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        return "; ".join(f"[{key!r:.60}] {_shorten(one.get(key), other.get(key))}" for key in {**one, **other}
                         if one.get(key) != other.get(key))
    if isinstance(one, (tuple, list)) and isinstance(other, type(one)) and len(one) == len(other):
        return "; ".join(f"[{i}] {_shorten(a, b)}" for i, (a, b) in enumerate(zip(one, other)) if a != b)
    return f"{one!r:.90} -> {other!r:.90}"
