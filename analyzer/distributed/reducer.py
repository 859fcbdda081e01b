"""`DistributedDataParallel`: its reducer is C++ and real; what it asks of other processes and of host memory is not."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.parallel.distributed as ddp
from torch._C import _distributed_c10d as c10d_c

from analyzer.meta.intercept.mode_stack import DirectDispatchMode, without_modes
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import active_state
from analyzer.meta.storage import MetaStorage
from analyzer.meta.tensor import device_of

from .collective import current_collectives
from .world_state import current_world

_EMPTY, _COPY = torch.ops.aten.empty.memory_format, torch.ops.aten.copy_.default


class _RealOnHost(DirectDispatchMode):
    """``Reducer::sync_bucket_indices`` (torch/csrc/distributed/c10d/reducer.cpp) writes the indices of buckets by an
    accessor to a tensor of int32 on the host, broadcasts a copy of it on the device and reads it back: rank 0's are
    taken to be this rank's, and the host's tensor is a real one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        if func is _EMPTY and named.get("dtype") is torch.int32 and (
                named.get("device") or torch.device("cpu")).type == "cpu":
            with without_modes():
                return func(*args, **named)
        if func is _COPY and not all(isinstance(t.untyped_storage(), MetaStorage) for t in args[:2]):
            return args[0]
        with torch._C.DisableTorchFunction():
            return func(*args, **named)


def _make_reducer(original: Any, self: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
    collectives = current_collectives()
    with active_state().meaning(device_of(parameters[0])), collectives.making_buckets():  # where buckets are
        original(self, parameters, *args, **kwargs)
    collectives.add_reducer(self)


def _rebuild_buckets(original: Any, self: Any) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    with active_state().meaning(device), _RealOnHost(), current_collectives().making_buckets():
        return original(self)


def _wait_for_buckets(original: Any, *args: Any, **kwargs: Any) -> Any:
    """At its end a backward pass waits for the futures of all buckets: reducer.cpp, ``finalize_backward``."""
    result = original(*args, **kwargs)
    collectives = current_collectives()
    for group in {str(wrapper.process_group.group_name) for wrapper in collectives.list_reducers()}:
        collectives.wait_for_group(group)
    return result


def _check_hook(original: Any, self: Any, hook: Any) -> None:
    """A hook that compresses to bfloat16 asks for CUDA and NCCL by its name: the simulated device has them."""
    def any_hook(state: Any, bucket: Any) -> Any: ...
    any_hook.__wrapped__ = hook  # type: ignore[attr-defined]  # whose signature is looked at
    original(self, any_hook)


def replacements() -> Iterator[Undo]:
    """What the reducer's construction and its steps ask; each result undoes one replacement."""
    yield answer(ddp, "_verify_param_shape_across_processes", lambda *args, **kwargs: None, where=current_world)
    for owner, name, simulated in (
            (ddp.DistributedDataParallel, "_ddp_init_helper", _make_reducer),
            (ddp.DistributedDataParallel, "_check_comm_hook", _check_hook),
            (c10d_c.Reducer, "_rebuild_buckets", _rebuild_buckets),
            (torch.autograd, "_engine_run_backward", _wait_for_buckets)):
        yield answer(owner, name, simulated, passes_original=True, where=current_world)
